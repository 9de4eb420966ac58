"""What tests of host loops share: definitions with stream leaves, and the programs they become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from meshfuse import FusionDefinition, ParallelType, TensorView
from meshfuse.host.check import check_host_program
from meshfuse.host.nodes import (
    ForLoop,
    HostProgram,
    Node,
    Record,
    WaitEvent,
    all_nodes,
    nodes_in_row,
)
from meshfuse.host.parser import parse_host_program
from meshfuse.host.printer import print_host_program
from meshfuse.ir.parser import parse_program
from meshfuse.multidevice import DeviceMesh
from meshfuse.pipeline import compile
from meshfuse.runtime.arguments import signature_of

STREAM = ParallelType.stream
Definition = Callable[[FusionDefinition], None]


def chunks(tensor: TensorView, axis: int, count: int) -> None:
    """Loop axis `axis` in `count` chunks."""
    tensor.outer_split(axis, count)
    tensor.axis(axis).parallelize(STREAM)


def dense(fd: FusionDefinition, *shape: int) -> TensorView:
    return fd.define_tensor(list(shape), contiguity=True)


def define(build: Definition) -> FusionDefinition:
    with FusionDefinition() as fd:
        build(fd)
    return fd


def host_program(
    fd: FusionDefinition, inputs: Sequence[torch.Tensor], *, kernels: bool = True
) -> HostProgram:
    """The program of one call, sound and the same when it is read back."""
    program = parse_program(repr(fd.fusion))
    host = compile(program, signature_of(inputs), kernels=kernels).host
    assert check_host_program(host) == ()
    assert parse_host_program(print_host_program(host)) == host
    return host


def loops(host: HostProgram) -> list[ForLoop]:
    """The loops over chunks, with what is done in them on whatever stream."""
    found = [node for node in all_nodes(host.body) if isinstance(node, ForLoop)]
    bodies = [tuple(n for n in nodes_in_row(loop.body) if not _is_mark(n)) for loop in found]
    return [
        replace(loop, body=body) for loop, body in zip(found, bodies, strict=True) if body != ()
    ]


def _is_mark(node: Node) -> bool:
    return isinstance(node, Record | WaitEvent)


def gathered_rows(
    ranks: int, count: int, rows: int = 2, *, activated: bool = False
) -> FusionDefinition:
    """`count` times a block of rows for each rank, which are gathered chunk by chunk and multiplied
    by [4, 5]; all want the whole product. An activation may follow."""
    mesh = DeviceMesh(range(ranks))
    with FusionDefinition() as fd:
        a, b = dense(fd, count, ranks, rows, 4), dense(fd, 4, 5)
        c = fd.ops.matmul(a, b)
        if activated:
            c = fd.ops.relu(c)
        for tensor in (a, b, c):
            tensor.set_device_mesh(mesh)
        a.axis(1).parallelize(mesh.axis(0))
        c.axis(0).parallelize(STREAM)
        fd.add_output(c)
    return fd
