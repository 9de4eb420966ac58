"""Stride patterns of a call, as allocations of inputs: more promises for kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Allocation
from meshfuse.runtime.arguments import Signature, TensorSignature


def refine_layouts(
    program: Program, inputs: Sequence[TensorName | ScalarName], signature: Signature
) -> Program:
    """Give those of `inputs` that `program` reads the layout that the signature has for them.

    A declared layout says less than the strides of a call: axes of any stride, for example. For
    kernels only (law 9): what ranks exchange may not depend on strides.
    """
    for name, argument in zip(inputs, signature.arguments, strict=True):
        if name in program.fusion.tensors and isinstance(argument, TensorSignature):
            tensor = TensorName(name)
            axes = program.tensor(tensor).tensor_axes
            if len(argument.order) != len(axes):
                continue  # A tensor of other ranks and no axes: what stands for it here has one.
            order = tuple(axes[dim].name for dim in argument.order)
            schedule = replace(
                program.schedule(tensor), allocation=Allocation(order, argument.contiguity)
            )
            program = program.with_schedule(tensor, schedule)
    return program
