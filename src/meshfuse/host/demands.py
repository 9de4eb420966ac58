"""What a program demands of the sizes of a call, and what it says of those that are not so."""

from __future__ import annotations

from collections.abc import Sequence

from meshfuse.base.errors import Unsupported, UserError
from meshfuse.expr import IntExpr, is_const
from meshfuse.facts.sharding import describe
from meshfuse.host.nodes import HostProgram
from meshfuse.host.symbols import (
    Covers,
    Demand,
    Divides,
    Equals,
    NotNegative,
)
from meshfuse.ir.axes import TensorName


def check_demand(program: HostProgram, demand: Demand, found: Sequence[int]) -> None:
    """Refuse a call whose sizes, the values of the demand's extents, are not as the program needs
    them. Raises UserError, and Unsupported for what does not divide."""
    match demand:
        case Divides(divisor, extent, tensor) if found[0] % divisor:
            raise Unsupported(
                f"execute: {_placed(program, tensor)} is reshaped along a sharded axis of global "
                f"size {found[0]} ({extent}), of which ranks must hold whole pieces: the size must "
                f"be a multiple of {divisor}, or what is reshaped be copied onto the mesh "
                "unsharded by fd.ops.set first"
            )
        case Covers(most, extent, tensor) if found[0] > most:
            raise UserError(
                f"execute: {_placed(program, tensor)} has a sharded axis of global size {found[0]} "
                f"({extent}), but its ranks hold blocks of {most} elements in all"
            )
        case Equals(extent, other, tensor, elements=True) if found[0] != found[1]:
            raise UserError(
                f"execute: {tensor} is to have {_sized(extent, found[0])} elements, but what it is "
                f"reshaped from has {_sized(other, found[1])}"
            )
        case Equals(extent, other, tensor) if found[0] != found[1]:
            raise UserError(
                f"execute: on an axis of {tensor} meet the sizes {_sized(extent, found[0])} and "
                f"{_sized(other, found[1])}, which must be equal"
            )
        case NotNegative(extent, tensor) if found[0] < 0:
            raise UserError(
                f"execute: an axis of {tensor} has size {found[0]} ({extent}); a size is 0 or more"
            )
        case _:
            return


def _placed(program: HostProgram, tensor: TensorName) -> str:
    """A tensor with its sharding; without one if it exists inside a kernel only."""
    buffer = program.buffers.get(tensor)
    sharding = None if buffer is None else buffer.sharding
    return tensor if sharding is None else f"{tensor}, {describe(sharding)},"


def _sized(size: IntExpr, found: int) -> str:
    return str(found) if is_const(size) else f"{found} ({size})"
