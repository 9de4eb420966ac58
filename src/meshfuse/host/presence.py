"""What of a host program a rank does: one text for all, but not all ranks are on every mesh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from meshfuse.host.nodes import (
    Communicate,
    Evaluate,
    ForLoop,
    Free,
    HostProgram,
    Node,
    OnStream,
    Record,
    Wait,
    WaitEvent,
)
from meshfuse.host.uses import names_defined, names_needed
from meshfuse.ir.axes import TensorName
from meshfuse.ir.rewrite import read_names

NodeHere = tuple[Node | None, tuple[TensorName, ...]]
"""What a rank does of a node, and the tensors made there that are empty on it."""


def nodes_here(program: HostProgram, body: Sequence[Node], rank: int) -> Iterator[NodeHere]:
    """What the rank does of each node, if anything, with the tensors that are made there and that
    it has no part of.

    A loop is there as a whole, and so is what is on a worker stream: their bodies are looked at by
    themselves. Ranks take part in a communication, and wait for it, that have a part of its source
    or of its result.
    """
    posted = {node.number: node for node in body if isinstance(node, Communicate)}

    def is_here(names: Iterable[str]) -> bool:
        buffers = (program.buffers.get(TensorName(name)) for name in names)
        return all(buffer is None or buffer.is_on(rank) for buffer in buffers)

    for node in body:
        if isinstance(node, ForLoop | OnStream | Free | Record | WaitEvent):
            yield node, ()
            continue
        elsewhere = tuple(TensorName(n) for n in names_defined(node) if not is_here([n]))
        match node:
            case Evaluate():
                kept = tuple(e for e in node.body if is_here([*read_names(e), *e.outs]))
                if node.into is not None and not is_here([node.into]):
                    kept = ()
                yield (replace(node, body=kept) if kept else None), elsewhere
            case Communicate():
                yield (node if takes_part(program, node, rank) else None), elsewhere
            case Wait(number):
                awaited = posted.get(number)
                is_mine = awaited is None or takes_part(program, awaited, rank)
                yield (node if is_mine else None), ()
            case _:
                touched = (*names_needed(node), *names_defined(node))
                yield (node if is_here(touched) else None), elsewhere


def takes_part(program: HostProgram, node: Communicate, rank: int) -> bool:
    """Whether the rank has a part of what is communicated, before or after."""
    return any(program.buffers[name].is_on(rank) for name in (node.src, node.out))


def is_outside(program: HostProgram, rank: int) -> bool:
    """Whether `rank` is in none of the program's meshes: it holds and does nothing."""
    meshes = program.meshes
    return bool(meshes) and all(rank not in mesh.places for mesh in meshes)
