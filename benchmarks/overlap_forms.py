"""How meshfuse is told to overlap, and which form it has chosen: all that depends on its API."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from meshfuse import FusionDefinition
from meshfuse.cache import FusionCache
from meshfuse.expr import const_value
from meshfuse.host.nodes import Communicate, ForLoop, Node, all_nodes
from meshfuse.multidevice import Overlap

CHUNKS = (2, 4, 8)
PIECES = (1, 2)
"""Of each rank's block, where it is fetched from its owner or delivered to it."""
PLAIN = "plain"


def explicit_forms() -> dict[str, Overlap]:
    """What `overlap=` takes beside "auto" and "off", by name."""
    forms = {f"chunks({count})": Overlap.chunks(count) for count in CHUNKS}
    return {**forms, **{f"peers({pieces})": Overlap.peers(pieces) for pieces in PIECES}}


def execute(fd: FusionDefinition, inputs: Iterable[torch.Tensor], form: Any) -> list[torch.Tensor]:
    """One call in a form: "auto", "off", or one of `explicit_forms`."""
    return fd.execute(inputs, overlap=form)


def forget_choices() -> None:
    """ "auto" is to find out anew what is best, as on another machine."""
    os.environ["MESHFUSE_CACHE_DIR"] = ""
    FusionCache.instance().reset()


def chosen_form(fd: FusionDefinition) -> str:
    """What the latest call did, as its host program shows: how each communication is divided."""
    return ", ".join(_names_of(fd.fec.host_program().body)) or PLAIN


def _names_of(body: Iterable[Node]) -> list[str]:
    """Of the loops that communicate: the counts of a loop and of those in it are one name, but for
    one that only some iterations of another have."""
    return [name for name in map(_name_of, body) if name]


def _name_of(node: Node) -> str:
    if not isinstance(node, ForLoop):
        return ""
    loops: list[ForLoop] = [node, *(n for n in all_nodes(node.body) if isinstance(n, ForLoop))]
    kinds = {n.collective.value for n in all_nodes(node.body) if isinstance(n, Communicate)}
    if not kinds:
        return ""
    known = [loop.count for loop in loops if const_value(loop.count) is not None]
    counts = " x ".join(map(str, known))
    return f"peers[{counts}]" if kinds & {"fetch", "deliver"} else f"chunks[{counts}]"


def local(outputs: Sequence[Any]) -> list[torch.Tensor]:
    """Results as plain tensors: what this rank has of them."""
    return [getattr(output, "local", output) for output in outputs]
