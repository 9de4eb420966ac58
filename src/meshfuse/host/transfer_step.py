"""Fetches and deliveries bound to a rank: steps that post them and put the result in its slot."""

from __future__ import annotations

from dataclasses import replace
from typing import final

from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.transfers import BoundTransfer
from meshfuse.expr import IntExpr
from meshfuse.host.events import Post
from meshfuse.host.nodes import Communicate, HostBuffer
from meshfuse.host.plan import Action, Sizes, Slots, Step, Traced


@final
@frozen_dataclass
class TransferStep(Step):
    """`stride`: by how many numbers iterations are apart."""

    transfer: BoundTransfer
    src: int
    out: int
    traced: Traced | None
    extents: tuple[IntExpr, ...]
    stride: int

    def bind(self, sizes: Sizes) -> Action:
        src, out = self.src, self.out
        number = self.transfer.number + sizes.iteration * self.stride
        transfer = replace(self.transfer.at(sizes.symbols), number=number)

        def post(slots: Slots) -> Post:
            request = transfer.request(slots[src])
            slots[out] = request.out
            return Post(request)

        return post


def bind_transfer(node: Communicate, out: HostBuffer, rank: int) -> BoundTransfer:
    """What `rank` asks for, to get `out`."""
    if node.owner is None or node.mesh_axis is None:
        raise InvariantError(f"{node.collective.value} of {node.src} has no owner")
    return BoundTransfer(
        node.number,
        node.collective.value,
        rank,
        node.mesh,
        node.mesh_axis,
        out.name,
        out.shape,
        out.memory_order,
        node.owner,
        node.cause,
    )
