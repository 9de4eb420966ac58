"""A kernel as its caller sees it, before anyone has scheduled it."""

from __future__ import annotations

from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.program import Program
from meshfuse.kernel.buffers import buffer_of
from meshfuse.kernel.nodes import Kernel, ScalarParameter, ValueName


def outline(program: Program, name: str) -> Kernel:
    """The arguments of the kernel that a segment becomes, with global shapes, and no body."""
    fusion = program.fusion
    read = [TensorName(given) for given in fusion.inputs if given in fusion.tensors]
    scalars = [ScalarName(given) for given in fusion.inputs if given in fusion.scalars]
    return Kernel(
        name,
        buffers=(
            *(buffer_of(program, tensor, written=False) for tensor in read),
            *(buffer_of(program, output.tensor, written=True) for output in fusion.outputs),
        ),
        scalars=tuple(ScalarParameter(ValueName(s), fusion.scalars[s].dtype) for s in scalars),
        sizes=(),
        grid=(),
        tiles=(),
        body=(),
    )
