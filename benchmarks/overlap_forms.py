"""How meshfuse is told to overlap, and which form it has chosen: all that depends on its API."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from ranks import Job

from meshfuse import FusionDefinition, multidevice
from meshfuse.host.nodes import Communicate, ForLoop, Node, all_nodes

CHUNKS = (2, 4, 8)
PIECES = (1, 2)
"""Of each rank's block, where it is fetched from its owner or delivered to it."""
PLAIN = "plain"


def explicit_forms() -> dict[str, object]:
    """What `overlap=` takes beside "auto" and "off", by name; empty if this meshfuse has none."""
    overlap = getattr(multidevice, "Overlap", None)
    if overlap is None or not understands_overlap():
        return {}
    forms = {f"chunks({count})": overlap.chunks(count) for count in CHUNKS}
    return {**forms, **{f"peers({pieces})": overlap.peers(pieces) for pieces in PIECES}}


def understands_overlap() -> bool:
    return "overlap" in inspect.signature(FusionDefinition.execute).parameters


def tell_if_missing(job: Job) -> None:
    if not understands_overlap():
        job.say("NOTICE: execute() takes no overlap= here; meshfuse runs everything plain")
    elif not explicit_forms():
        job.say("NOTICE: multidevice.Overlap is not here; explicit forms are left out")


def execute(
    fd: FusionDefinition, inputs: Iterable[torch.Tensor], form: object
) -> list[torch.Tensor]:
    """One call in a form: "auto", "off", or one of `explicit_forms`."""
    if understands_overlap():
        return fd.execute(inputs, overlap=form)  # pyright: ignore[reportCallIssue]
    return fd.execute(inputs)


def chosen_form(fd: FusionDefinition) -> str:
    """What the latest call did, as its host program shows: how each communication is divided."""
    return ", ".join(_names_of(fd.fec.host_program().body)) or PLAIN


def _names_of(body: Iterable[Node]) -> list[str]:
    """Of the loops that communicate: the counts of a loop and of those in it are one name."""
    return [name for name in map(_name_of, body) if name]


def _name_of(node: Node) -> str:
    if not isinstance(node, ForLoop):
        return ""
    loops: list[ForLoop] = [node, *(n for n in all_nodes(node.body) if isinstance(n, ForLoop))]
    kinds = {n.collective.value for n in all_nodes(node.body) if isinstance(n, Communicate)}
    if not kinds:
        return ""
    counts = " x ".join(str(loop.count) for loop in loops)
    return f"peers[{counts}]" if kinds & {"fetch", "deliver"} else f"chunks[{counts}]"


def local(outputs: Sequence[Any]) -> list[torch.Tensor]:
    """Results as plain tensors: what this rank has of them."""
    return [getattr(output, "local", output) for output in outputs]
