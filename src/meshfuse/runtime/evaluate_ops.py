"""Run expressions one by one through torch.

On the tensors of one rank this is what an Evaluate node does. On whole tensors it is the meaning of
a program (`evaluate_program`), which tests compare everything else with: there a communication
changes nothing, since it only moves what all ranks together hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import singledispatch
from typing import final

import torch
from torch.nn import functional

from meshfuse.base.dtypes import DataType, Scalar, compute_dtype
from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.trace import Trace
from meshfuse.expr import IntExpr, Symbol, const
from meshfuse.expr import evaluate as evaluate_int
from meshfuse.facts.digits import is_whole
from meshfuse.facts.holdings import held
from meshfuse.facts.sharding import Digit, Sharding
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.comm import Communication
from meshfuse.ir.infer import dtypes_after_promotion, promoted_dtype, values_of
from meshfuse.ir.ops import (
    Broadcast,
    Cast,
    Expand,
    Expr,
    Linear,
    Literal,
    MatMul,
    Operand,
    Permute,
    Pointwise,
    Reduction,
    Reshape,
    Set,
    Squeeze,
    Welford,
)
from meshfuse.ir.pointwise import SCALAR_FUNCTIONS, ResultRule
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import read_names
from meshfuse.ir.rfactor import is_part
from meshfuse.ir.terms import Terms
from meshfuse.runtime.contractions import batched_linear
from meshfuse.runtime.evaluate_parts import combine_moments, evaluate_part
from meshfuse.runtime.torch_functions import TORCH_FUNCTIONS
from meshfuse.runtime.torch_types import held_torch_dtype, item_of, to_torch_dtype

Value = torch.Tensor | Scalar

CPU = torch.device("cpu")


@final
@frozen_dataclass
class Placed:
    """How a tensor is sharded, and its global sizes, in the program's symbols."""

    sharding: Sharding
    extents: tuple[IntExpr, ...]


@final
@frozen_dataclass
class Environment:
    """What a running program knows by name.

    `dtypes` has the type of every tensor and scalar, `shapes` the sizes of every tensor on this
    rank, in the program's symbols. `values` grows as expressions run, and so do `sizes`, the values
    of the symbols, integer scalars among them. With a `trace`, executors record what they do.
    `placed` has the tensors that lie on a mesh; the program runs as `rank`. What is made of no
    tensor is made on `device`.
    """

    dtypes: Mapping[TensorName | ScalarName, DataType]
    shapes: Mapping[TensorName, tuple[IntExpr, ...]]
    sizes: dict[str, int]
    values: dict[TensorName | ScalarName, Value]
    trace: Trace | None = None
    placed: Mapping[TensorName, Placed] = field(default_factory=dict[TensorName, Placed])
    rank: int = 0
    device: torch.device = CPU

    def held(self, tensor: TensorName, axis: int) -> tuple[range, ...] | None:
        """The global indices of a tensor axis that the rank has a part of: those that its local
        part has in this order. None where it has the whole axis.
        """
        placed = self.placed.get(tensor)
        mesh = None if placed is None else placed.sharding.mesh
        if placed is None or mesh is None:
            return None
        if is_whole(placed.sharding.axes[axis]):
            return None
        if self.rank not in mesh.ids:
            return ()
        digits = tuple(
            Digit(const(evaluate_int(digit.extent, self.sizes)), digit.owner)
            for digit in placed.sharding.axes[axis]
        )
        places = {
            digit.owner: mesh.coordinate(self.rank, digit.owner) or 0
            for digit in digits
            if digit.owner is not None
        }
        return held(digits, evaluate_int(placed.extents[axis], self.sizes), places)

    def tensor(self, name: TensorName) -> torch.Tensor:
        value = self.values[name]
        if not isinstance(value, torch.Tensor):
            raise InvariantError(f"{name} is no tensor but the scalar {value!r}")
        return value

    def scalar(self, operand: Operand) -> Scalar:
        """The value of an operand that is no tensor."""
        match operand:
            case Literal():
                return operand.value
            case IntExpr():
                return evaluate_int(operand, self.sizes)
            case name:
                value = self.values[name]
        if isinstance(value, torch.Tensor):
            raise InvariantError(f"{name} is no scalar but a tensor")
        return value

    def whole_sizes(self, tensor: TensorName) -> list[int]:
        """The global sizes of a tensor."""
        placed = self.placed.get(tensor)
        extents = self.shapes[tensor] if placed is None else placed.extents
        return [evaluate_int(extent, self.sizes) for extent in extents]

    def define(self, name: TensorName | ScalarName, value: Value) -> None:
        """Bind a result; an integer is a size, too."""
        self.values[name] = value
        if isinstance(value, int):
            self.sizes[name] = value


def run_expressions(exprs: Iterable[Expr], env: Environment) -> None:
    """Evaluate expressions in order and bind their results in `env.values`."""
    for expr in exprs:
        for name, value in zip(expr.outs, evaluate(expr, env), strict=True):
            env.define(name, value)


def evaluate_program(program: Program, inputs: Sequence[Value]) -> list[torch.Tensor]:
    """The outputs of a program run op by op on one device, on whole tensors.

    `inputs` are in the program's order and are not written to. Returns one tensor per output,
    aliased ones included.
    """
    fusion = program.fusion
    values = dict(zip(fusion.inputs, inputs, strict=True))
    shapes = {
        name: tuple(axis.extent for axis in definition.tensor_axes)
        for name, definition in fusion.tensors.items()
    }
    dtypes: dict[TensorName | ScalarName, DataType] = {
        **{name: definition.dtype for name, definition in fusion.tensors.items()},
        **{name: definition.dtype for name, definition in fusion.scalars.items()},
    }
    sizes = _sizes_of_inputs(shapes, values)
    tensors = (value for value in values.values() if isinstance(value, torch.Tensor))
    device = next((tensor.device for tensor in tensors if tensor.dim() > 0), CPU)
    env = Environment(dtypes, shapes, sizes, values, device=device)
    with torch.no_grad():
        for expr in fusion.exprs:
            if is_part(program, expr):
                operands = {TensorName(x): env.tensor(TensorName(x)) for x in read_names(expr)}
                results = evaluate_part(program, expr, operands, env.sizes, REDUCTIONS)
                env.values.update(zip(expr.outs, results, strict=True))
            else:
                run_expressions([expr], env)
    return [env.tensor(output.tensor) for output in fusion.outputs]


def _sizes_of_inputs(
    shapes: Mapping[TensorName, tuple[IntExpr, ...]],
    values: Mapping[TensorName | ScalarName, Value],
) -> dict[str, int]:
    sizes = {str(name): value for name, value in values.items() if isinstance(value, int)}
    for name, shape in shapes.items():
        value = values.get(name)
        if isinstance(value, torch.Tensor):
            for extent, size in zip(shape, value.shape, strict=True):
                if isinstance(extent, Symbol):
                    sizes.setdefault(extent.name, size)
    return sizes


@singledispatch
def evaluate(expr: Expr, env: Environment) -> tuple[Value, ...]:
    """The values of the expression's outputs, in order, from those of its operands."""
    raise InvariantError(f"{type(expr).__name__} has no evaluation")


# Element by element.


@evaluate.register
def _(expr: Pointwise, env: Environment) -> tuple[Value, ...]:
    out_dtype = env.dtypes[expr.out]
    compute = computing_dtype(expr, env)
    args = [convert(arg, compute, env) for arg in expr.args]
    if SCALAR_FUNCTIONS[expr.function].rule is ResultRule.select:
        args[0] = convert(expr.args[0], DataType.Bool, env)
    result = TORCH_FUNCTIONS[expr.function](*args).to(to_torch_dtype(out_dtype))
    return (result if expr.out in env.shapes else item_of(result),)


def computing_dtype(expr: Pointwise, env: Environment) -> DataType:
    """The type the operands are converted to. Bool computes as an integer, as it does in C."""

    def lookup(name: TensorName | ScalarName) -> tuple[DataType, bool]:
        return env.dtypes[name], name in env.shapes

    promoted = promoted_dtype(values_of(expr.function, expr.args), lookup)
    dtype, _ = dtypes_after_promotion(expr.function, promoted)
    if SCALAR_FUNCTIONS[expr.function].rule is ResultRule.select:
        return dtype
    return DataType.Int if dtype is DataType.Bool else compute_dtype(dtype)


def convert(arg: Operand, dtype: DataType, env: Environment) -> torch.Tensor:
    """An operand in the type of the computation; scalars become tensors without axes."""
    target = to_torch_dtype(dtype)
    if isinstance(arg, Literal):
        own = torch.tensor(arg.value, dtype=to_torch_dtype(arg.dtype))
    elif isinstance(arg, IntExpr):
        own = torch.tensor(evaluate_int(arg, env.sizes), dtype=torch.int64)
    else:
        value = env.values[arg]
        if isinstance(value, torch.Tensor):
            return value.to(target)
        own = torch.tensor(value, dtype=to_torch_dtype(env.dtypes[arg]))
    return own.to(target)


@evaluate.register
def _(expr: Cast, env: Environment) -> tuple[Value, ...]:
    return (env.tensor(expr.src).to(to_torch_dtype(env.dtypes[expr.out])),)


@evaluate.register
def _(expr: Set, env: Environment) -> tuple[Value, ...]:
    return (env.tensor(expr.src).clone(),)


@evaluate.register
def _(expr: Communication, env: Environment) -> tuple[Value, ...]:
    return (env.tensor(expr.src),)


# Views.


@evaluate.register
def _(expr: Broadcast, env: Environment) -> tuple[Value, ...]:
    result = env.tensor(expr.src)
    for dim, inserted in enumerate(expr.inserted):
        if inserted:
            result = result.unsqueeze(dim)
    return (result,)


@evaluate.register
def _(expr: Expand, env: Environment) -> tuple[Value, ...]:
    sizes = [evaluate_int(extent, env.sizes) for extent in env.shapes[expr.out]]
    return (env.tensor(expr.src).expand(sizes),)


@evaluate.register
def _(expr: Terms, env: Environment) -> tuple[Value, ...]:
    sizes = [evaluate_int(extent, env.sizes) for extent in env.shapes[expr.out]]
    return (env.tensor(expr.src).unsqueeze(-1).expand(sizes),)


@evaluate.register
def _(expr: Permute, env: Environment) -> tuple[Value, ...]:
    return (env.tensor(expr.src).permute(expr.dims),)


@evaluate.register
def _(expr: Squeeze, env: Environment) -> tuple[Value, ...]:
    return (env.tensor(expr.src).squeeze(expr.dims),)


@evaluate.register
def _(expr: Reshape, env: Environment) -> tuple[Value, ...]:
    """A view where the strides of the operand allow one."""
    sizes = [evaluate_int(extent, env.sizes) for extent in env.shapes[expr.out]]
    return (env.tensor(expr.src).reshape(sizes),)


# Reductions.


@evaluate.register
def _(expr: Reduction, env: Environment) -> tuple[Value, ...]:
    src = env.tensor(expr.src)
    out_dtype = to_torch_dtype(env.dtypes[expr.out])
    result = REDUCTIONS[expr.function](src, expr.axes) if expr.axes else src.clone()
    return (result.to(out_dtype),)


def accumulation_type(dtype: torch.dtype) -> torch.dtype:
    """Integers and bool accumulate in int64, floats of 16 bits in float32."""
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float32 if dtype.itemsize < 4 else dtype


def _sum(src: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    return src.sum(axes, dtype=accumulation_type(src.dtype))


def _prod(src: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    for axis in sorted(axes, reverse=True):
        src = src.prod(axis, dtype=accumulation_type(src.dtype))
    return src


def _max(src: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    return src.amax(axes) if _has_elements(src, axes) else _limits(src, axes, lowest=True)


def _min(src: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    return src.amin(axes) if _has_elements(src, axes) else _limits(src, axes, lowest=False)


def _has_elements(src: torch.Tensor, axes: tuple[int, ...]) -> bool:
    return all(src.shape[axis] for axis in axes)


def _limits(src: torch.Tensor, axes: tuple[int, ...], *, lowest: bool) -> torch.Tensor:
    """The end of the type's range in place of what is reduced."""
    kept = [size for axis, size in enumerate(src.shape) if axis not in axes]
    if src.dtype.is_floating_point:
        return src.new_full(kept, -math.inf if lowest else math.inf)
    if src.dtype == torch.bool:
        return src.new_full(kept, not lowest)
    limits = torch.iinfo(src.dtype)
    return src.new_full(kept, limits.min if lowest else limits.max)


REDUCTIONS: dict[str, Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]] = {
    "sum": _sum,
    "prod": _prod,
    "max": _max,
    "min": _min,
}


@evaluate.register
def _(expr: Welford, env: Environment) -> tuple[Value, ...]:
    held = held_torch_dtype(env.dtypes[expr.mean])
    src = env.tensor(expr.src).to(held)
    if expr.src_m2 is not None and expr.src_count is not None:
        parts = (src, env.tensor(expr.src_m2), env.tensor(expr.src_count))
        return combine_moments(parts, expr.axes)
    number = math.prod(src.shape[axis] for axis in expr.axes)
    mean = src.sum(expr.axes, keepdim=True) / number
    m2 = (src - mean).square().sum(expr.axes)
    count = torch.full(m2.shape, number, dtype=torch.int64, device=src.device)
    results = (mean.squeeze(expr.axes), m2, count)
    outs = zip(results, expr.outs, strict=True)
    return tuple(result.to(to_torch_dtype(env.dtypes[out])) for result, out in outs)


# Contractions: in the element type of the operands, as torch does them.


@evaluate.register
def _(expr: MatMul, env: Environment) -> tuple[Value, ...]:
    return (torch.matmul(env.tensor(expr.a), env.tensor(expr.b)),)


@evaluate.register
def _(expr: Linear, env: Environment) -> tuple[Value, ...]:
    src, weight = env.tensor(expr.src), env.tensor(expr.weight)
    bias = None if expr.bias is None else env.tensor(expr.bias)
    if weight.dim() == 2:
        return (functional.linear(src, weight, bias),)
    return (batched_linear(src, weight, bias),)
