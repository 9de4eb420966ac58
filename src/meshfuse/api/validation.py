"""Whether outputs are what they should be, as closely as their element types and sums allow."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import singledispatch
from typing import Any

import torch

from meshfuse.api.fusion_view import FusionView
from meshfuse.base.dtypes import REDUCED_FLOATS, DataType, is_floating
from meshfuse.base.errors import UserAssertionError, UserError
from meshfuse.dist.communicator import Communicator
from meshfuse.expr import IntExpr, evaluate
from meshfuse.host.sizes import size_symbols
from meshfuse.ir.axes import AxisKind, TensorName
from meshfuse.ir.ops import Expr, Linear, MatMul, Reduction, Welford
from meshfuse.ir.ops_random import RandomSource
from meshfuse.ir.program import Program
from meshfuse.runtime.arguments import (
    Argument,
    check_arguments,
    expected_inputs,
    flatten_inputs,
)
from meshfuse.runtime.evaluate_ops import evaluate_program

Tolerance = tuple[float, float]
"""(absolute, relative)"""

# Reduced elements -> absolute tolerance, for values between -2 and 2.
_SIZES = tuple(4 << k for k in range(20))
_FLOAT_TOLERANCES = (
    1.68222e-6, 2.23704e-6, 2.95788e-6, 4.4778e-6, 6.75395e-6, 8.57934e-6, 1.30594e-5, 2.19122e-5,
    3.3451e-5, 5.78476e-5, 1.08292e-4, 1.2207e-4, 1.36882e-4, 2.48561e-4, 4.07594e-4, 5.00901e-4,
    9.23019e-4, 1.56909e-3, 2.23107e-3, 3.43043e-3,
)  # fmt: skip
_HALF_TOLERANCES = (
    0.00390625, 0.0078125, 0.0078125, 0.0155334, 0.0156269, 0.0312042, 0.0312548, 0.0619979,
    0.0625103, 0.124686, 0.12501, 0.24945, 0.250049, 0.498946, 0.500071, 0.985087,
    1.00006, 1.99234, 2.00032, 3.99073,
)  # fmt: skip
_BFLOAT16_FACTOR = 10.0


def get_val_tolerances(fusion: FusionView, args: Iterable[object]) -> list[Tolerance]:
    """(absolute, relative) for each visible output, given the arguments of a call.

    They grow with the number of elements that are reduced behind an output, all reductions in a row
    multiplied. Integers and bool are exact: (0, 0).
    """
    program = fusion.recording.program
    return _tolerances(program, _bind(program, args))


def validate_with_auto_inferred_outputs(
    fusion: FusionView, outputs: Sequence[torch.Tensor], args: Iterable[object]
) -> None:
    """Compare outputs with the program evaluated op by op on the arguments, NaN being NaN.

    Raises UserError for outputs that differ, and for a program on a mesh: one rank's arguments do
    not say what its outputs are.
    """
    program = fusion.recording.program
    bound = _bind(program, args)
    _check(outputs, reference_outputs(program, bound), _tolerances(program, bound), UserError, True)


def draws_undone(fusion: FusionView) -> AbstractContextManager[None]:
    """What a call draws in here, whoever evaluates the program afterwards draws again."""
    if not any(isinstance(e, RandomSource) for e in fusion.recording.program.fusion.exprs):
        return nullcontext()
    return torch.random.fork_rng(range(torch.cuda.device_count()))


def validate_against(
    fusion: FusionView,
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
    args: Iterable[object],
) -> None:
    """Compare outputs with given ones, NaN being equal to nothing; UserAssertionError if they
    differ."""
    tolerances = get_val_tolerances(fusion, args)
    _check(outputs, references, tolerances, UserAssertionError, False)


def reference_outputs(program: Program, args: Sequence[Argument]) -> list[torch.Tensor]:
    """The visible outputs, evaluated op by op. UserError for a program on a mesh."""
    for tensor, schedule in program.schedules.items():
        if schedule.mesh is not None:
            raise UserError(
                f"validate: {tensor} lies on {schedule.mesh}, and one rank's inputs do not say "
                "what its outputs are; pass reference_outputs"
            )
    values = evaluate_program(program, args)
    outputs = program.fusion.outputs
    return [v for v, output in zip(values, outputs, strict=True) if output.alias is None]


def _bind(program: Program, args: Iterable[object]) -> list[Argument]:
    rank = Communicator.instance().rank()
    return check_arguments(expected_inputs(program), flatten_inputs(args), rank=rank)[0]


def _check(
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
    tolerances: Sequence[Tolerance],
    error: type[Exception],
    equal_nan: bool,
) -> None:
    if len(outputs) != len(references):
        raise error(f"validate: {len(references)} outputs were expected, there are {len(outputs)}")
    for k, (out, want) in enumerate(zip(outputs, references, strict=True)):
        absolute, relative = tolerances[k]
        if out.shape != want.shape:
            raise error(
                f"validate: output {k} has shape {list(out.shape)}, expected {list(want.shape)}"
            )
        if out.dtype.is_floating_point:
            near = torch.allclose(
                out, want.to(out.dtype), rtol=relative, atol=absolute, equal_nan=equal_nan
            )
        else:
            near = torch.equal(out, want)
        if not near:
            raise error(
                f"validate: output {k} differs by up to {_distance(out, want):.6g}; accepted are "
                f"{absolute:.6g} absolute and {relative:.6g} relative"
            )


def _distance(out: torch.Tensor, want: torch.Tensor) -> float:
    difference = (out.double() - want.double()).abs()
    return float(difference.max()) if difference.numel() else 0.0


# Tolerances.


def _tolerances(program: Program, args: Sequence[Argument]) -> list[Tolerance]:
    sizes = _sizes_of(program, args)
    reduced: dict[str, int] = {}
    for expr in program.fusion.exprs:
        behind = max(
            (reduced.get(name, 1) for name in expr.ins if isinstance(name, str)), default=1
        )
        count = behind * math.prod(evaluate(extent, sizes) for extent in reduced_by(expr, program))
        reduced.update(dict.fromkeys(expr.outs, count))
    return [
        tolerance(program.tensor(output.tensor).dtype, reduced.get(output.tensor, 1))
        for output in program.fusion.outputs
        if output.alias is None
    ]


def _sizes_of(program: Program, args: Sequence[Argument]) -> Mapping[str, int]:
    """The values of the sizes' symbols: global ones, if all ranks hold as much as this one."""
    values = dict(zip(program.fusion.inputs, args, strict=True))
    sizes: dict[str, int] = {n: value for n, value in values.items() if isinstance(value, int)}
    for size in size_symbols(program):
        value = values[size.tensor]
        if isinstance(value, torch.Tensor):
            sizes[size.symbol] = value.shape[size.axis] * size.factor
    return sizes


def tolerance(dtype: DataType, reduced: int) -> Tolerance:
    """For values of one type with `reduced` elements behind each; 1 is no reduction."""
    if not is_floating(dtype):
        return 0.0, 0.0
    is_reduced_float = dtype in REDUCED_FLOATS
    table = _HALF_TOLERANCES if is_reduced_float else _FLOAT_TOLERANCES
    if reduced <= 1:
        return table[0], table[1]
    position = bisect_left(_SIZES, reduced) + 1
    absolute = table[position] if position < len(table) else 2 * table[-1]
    if dtype is DataType.BFloat16:
        absolute *= _BFLOAT16_FACTOR
    return absolute, absolute / 100


@singledispatch
def reduced_by(expr: Expr, program: Program) -> tuple[IntExpr, ...]:
    """The global extents of the axes that an expression adds up, or reduces otherwise."""
    return ()


@reduced_by.register
def _(expr: Reduction | Welford, program: Program) -> tuple[IntExpr, ...]:
    axes = program.tensor(expr.src).tensor_axes
    return tuple(axes[axis].extent for axis in expr.axes)


@reduced_by.register
def _(expr: MatMul | Linear, program: Program) -> tuple[IntExpr, ...]:
    axes = program.tensor(TensorName(expr.outs[0])).logical
    return tuple(axis.extent for axis in axes if axis.kind is AxisKind.reduction)


def check_outputs(
    fusion: FusionView,
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor] | None,
    inputs: Sequence[Any],
) -> None:
    """Compare with references, or without any with the program evaluated op by op."""
    if references is None:
        validate_with_auto_inferred_outputs(fusion, outputs, inputs)
    else:
        validate_against(fusion, outputs, references, inputs)


def copies_of(inputs: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Copies of the tensors among `inputs`, which a call may write to, and `inputs` as a list."""
    given = list(inputs)
    return [v.clone() if isinstance(v, torch.Tensor) else v for v in given], given
