"""Programs that become one kernel, for tests of kernels and schedulers."""

from __future__ import annotations

from collections.abc import Sequence

from meshfuse.base.dtypes import DataType
from meshfuse.ir import build
from meshfuse.ir.axes import TensorName
from meshfuse.ir.program import Program
from meshfuse.passes.concretize import concretize
from program_recorder import Recorder


def finished(recorder: Recorder) -> Program:
    """The recorded program with sizes that meet made equal."""
    program, _ = concretize(recorder.program)
    return program


def bias_and_relu(shape: Sequence[int] = (-1, -1), dtype: DataType = DataType.Float) -> Program:
    """relu(x + bias), in the type of x."""
    r = Recorder()
    x, bias = r.input(shape, dtype), r.input(shape[-1:], dtype)
    y = r.pointwise("relu", r.pointwise("add", x, bias))
    r.output(r.add(build.cast, y, dtype))
    return finished(r)


def reduced(
    function: str,
    shape: Sequence[int],
    dims: Sequence[int],
    dtype: DataType = DataType.Float,
    keepdim: bool = False,
) -> Program:
    """A reduction of an input."""
    r = Recorder()
    r.output(r.add(build.reduction, function, r.input(shape, dtype), dims, keepdim))
    return finished(r)


def layer_norm(
    shape: Sequence[int] = (-1, -1),
    dims: Sequence[int] = (1,),
    dtype: DataType = DataType.Float,
) -> Program:
    """(x - mean) * rsqrt(variance + eps) * weight, and the mean."""
    r = Recorder()
    x, weight = r.input(shape, dtype), r.input(shape[-1:])
    variance, mean = _var_mean(r, x, dims)
    scale = r.pointwise("rsqrt", r.pointwise("add", variance, build.literal(1e-5)))
    y = r.pointwise("mul", r.pointwise("mul", r.pointwise("sub", x, mean), scale), weight)
    r.output(r.add(build.cast, y, dtype), mean)
    return finished(r)


def _var_mean(r: Recorder, x: TensorName, dims: Sequence[int]) -> tuple[TensorName, TensorName]:
    r.program, variance, mean = build.var_mean(r.program, x, dims, correction=0, keepdim=True)
    return variance, mean


def softmax(shape: Sequence[int], dim: int, dtype: DataType = DataType.Float) -> Program:
    """exp(x - max) / sum(exp(x - max)): a reduction that waits for another."""
    r = Recorder()
    x = r.input(shape, dtype)
    largest = r.add(build.reduction, "max", x, [dim], True)
    powers = r.pointwise("exp", r.pointwise("sub", x, largest))
    total = r.add(build.reduction, "sum", powers, [dim], True)
    r.output(r.add(build.cast, r.pointwise("div", powers, total), dtype))
    return finished(r)
