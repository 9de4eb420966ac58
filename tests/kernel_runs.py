"""Run a program as one kernel, and compare with the same program run op by op through torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from meshfuse.base.dtypes import Scalar
from meshfuse.expr import Symbol, evaluate
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.program import Program
from meshfuse.ir.verify import verify
from meshfuse.kernel.buffers import stride_name
from meshfuse.kernel.localize import Localized, localize
from meshfuse.kernel.lower import lower
from meshfuse.kernel.nodes import BufferName, Kernel
from meshfuse.kernel.parser import parse_kernel
from meshfuse.kernel.printer import print_kernel
from meshfuse.kernel.verify import verify_kernel
from meshfuse.runtime.evaluate_kernel import evaluate_kernel
from meshfuse.runtime.evaluate_ops import evaluate_program
from meshfuse.runtime.torch_types import to_torch_dtype
from meshfuse.schedulers.registry import accepts, schedule

Input = torch.Tensor | Scalar


def scheduled(program: Program, scheduler: str | None = None) -> Program:
    """The localized program, scheduled by whoever takes it or by `scheduler`."""
    name = scheduler or accepts(program)
    assert isinstance(name, str), "\n".join(map(str, name))
    local, _ = schedule(localize(program).program, name)
    verify(local)
    return local


def checked_kernel(program: Program) -> Kernel:
    """The kernel of a localized program, verified, and equal to what its text parses to."""
    kernel = lower(program, "k")
    verify_kernel(kernel)
    assert parse_kernel(print_kernel(kernel)) == kernel
    return kernel


def run_kernel(
    kernel: Kernel, localized: Localized, program: Program, inputs: Sequence[Input]
) -> list[torch.Tensor]:
    """The outputs that `kernel` computes; each starts as a pattern that no result may keep."""
    given = dict(zip(program.fusion.inputs, inputs, strict=True))
    sizes = _sizes(program, given)
    sizes |= {name: evaluate(extent, sizes) for name, extent in localized.sizes.items()}
    outputs: dict[TensorName, torch.Tensor] = {}
    for output in program.fusion.outputs:
        definition = localized.program.tensor(output.tensor)
        shape = [evaluate(axis.extent, sizes) for axis in definition.tensor_axes]
        dtype = to_torch_dtype(definition.dtype)
        outputs[output.tensor] = torch.full(shape, 77, dtype=torch.int64).to(dtype)
    tensors = {str(name): value for name, value in {**given, **outputs}.items()}
    buffers = {
        b.name: tensor
        for b in kernel.buffers
        if isinstance(tensor := tensors[b.name], torch.Tensor)
    }
    for buffer in kernel.buffers:
        for position, stride in enumerate(buffers[buffer.name].stride()):
            sizes[stride_name(TensorName(buffer.name), position)] = stride
    _check_layouts(kernel, buffers, sizes)
    scalars = {
        scalar.name: value
        for scalar in kernel.scalars
        if not isinstance(value := given[ScalarName(scalar.name)], torch.Tensor)
    }
    evaluate_kernel(kernel, buffers, scalars, {name: sizes[name] for name in kernel.sizes})
    return [outputs[output.tensor] for output in program.fusion.outputs]


def _check_layouts(
    kernel: Kernel, buffers: Mapping[BufferName, torch.Tensor], sizes: Mapping[str, int]
) -> None:
    """The strides that a kernel believes in are those of its tensors, where they matter."""
    for buffer in kernel.buffers:
        tensor = buffers[buffer.name]
        assert [evaluate(e, sizes) for e in buffer.shape] == list(tensor.shape)
        if tensor.numel() == 0:
            continue
        for extent, stride, real in zip(tensor.shape, buffer.strides, tensor.stride(), strict=True):
            assert extent == 1 or evaluate(stride, sizes) == real, (buffer, tensor.stride())


def _sizes(program: Program, given: Mapping[TensorName | ScalarName, Input]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            axes = program.tensor(TensorName(name)).tensor_axes
            for axis, size in zip(axes, value.shape, strict=True):
                if isinstance(axis.extent, Symbol):
                    sizes[axis.extent.name] = size
    return sizes


def check_by_value(
    program: Program,
    inputs: Sequence[Input],
    scheduler: str | None = None,
    *,
    unscheduled: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
) -> Kernel:
    """Compare a program's kernel with torch on `inputs`, and return the kernel."""
    localized = localize(program)
    local = localized.program if unscheduled else scheduled(program, scheduler)
    kernel = checked_kernel(local)
    results = run_kernel(kernel, localized, program, inputs)
    expected = evaluate_program(program, inputs)
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=rtol, atol=atol, equal_nan=True)
    return kernel
