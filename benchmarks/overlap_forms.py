"""How meshfuse is told to overlap, and which form it has chosen: all that depends on its API."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from ranks import Job

from meshfuse import FusionDefinition, multidevice
from meshfuse.host.nodes import Communicate, ForLoop, all_nodes

CHUNKS = (2, 4, 8)
PLAIN = "plain"


def explicit_forms() -> dict[str, object]:
    """What `overlap=` takes beside "auto" and "off", by name; empty if this meshfuse has none."""
    overlap = getattr(multidevice, "Overlap", None)
    if overlap is None or not understands_overlap():
        return {}
    forms = {f"chunks({count})": overlap.chunks(count) for count in CHUNKS}
    return {**forms, "peers": overlap.peers()}


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
    nodes = all_nodes(fd.fec.host_program().body)
    names = [_name_of(loop) for loop in nodes if isinstance(loop, ForLoop)]
    return ", ".join(name for name in names if name) or PLAIN


def _name_of(loop: ForLoop) -> str:
    inside = [node for node in all_nodes(loop.body) if isinstance(node, Communicate)]
    kinds = {node.collective.value for node in inside}
    if not kinds:
        return ""
    return f"peers({loop.count})" if kinds & {"fetch", "deliver"} else f"chunks({loop.count})"


def local(outputs: Sequence[Any]) -> list[torch.Tensor]:
    """Results as plain tensors: what this rank has of them."""
    return [getattr(output, "local", output) for output in outputs]
