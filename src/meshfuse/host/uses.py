"""Which buffers a node of the host program touches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from meshfuse.host.nodes import (
    Allocate,
    Chunk,
    Clear,
    Communicate,
    Evaluate,
    ForLoop,
    Free,
    KernelName,
    Launch,
    Node,
    OnStream,
    Pick,
    Record,
    View,
    Wait,
    WaitEvent,
)
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.ops import (
    Broadcast,
    Cast,
    Expand,
    Expr,
    Linear,
    MatMul,
    Permute,
    Pointwise,
    Reduction,
    Reshape,
    Set,
    Squeeze,
)
from meshfuse.ir.terms import Terms
from meshfuse.kernel.nodes import Kernel

MAY_SHARE: Final = (Broadcast, Cast, Expand, Permute, Reshape, Squeeze, Terms)
"""Expressions whose result torch may make as a view of the operand."""

WRITERS: Final = (Cast, Linear, MatMul, Pointwise, Reduction, Set)
"""Expressions that torch computes into memory that exists."""


def names_defined(node: Node) -> tuple[TensorName | ScalarName, ...]:
    """The buffers and scalars that exist after the node and did not before."""
    match node:
        case Allocate(buffer):
            return (buffer,)
        case View(out) | Chunk(out):
            return (out,)
        case Evaluate(into, body):
            names = tuple(name for expr in body for name in expr.outs)
            return names if into is None else names[: -len(body[-1].outs)]
        case Communicate(out):
            return (out,) if node.makes_result else ()
        case Launch() | Wait() | Free() | Pick() | Clear():
            return ()
        case ForLoop() | OnStream() | Record() | WaitEvent():
            return ()


def names_written(
    node: Node, kernels: Mapping[KernelName, Kernel]
) -> tuple[TensorName | ScalarName, ...]:
    """What the node gives a value, in buffers that exist or that it makes.

    A collective writes its result until its Wait.
    """
    match node:
        case Launch(kernel, buffers):
            flags = [buffer.written for buffer in kernels[kernel].buffers]
            return tuple(name for name, out in zip(buffers, flags, strict=True) if out)
        case Communicate(out, _, src) if node.in_place:
            return (out, src)
        case Communicate(out) | Pick(out):
            return (out,)
        case Evaluate(into) if into is not None:
            return (into,)
        case Clear(buffer):
            return (buffer,)
        case ForLoop(body=body) | OnStream(body=body):
            return _written_in(body, kernels)
        case _:
            return names_defined(node)


def _written_in(
    body: Sequence[Node], kernels: Mapping[KernelName, Kernel]
) -> tuple[TensorName | ScalarName, ...]:
    """What nodes in a row write of what exists outside, be it by views of that."""
    roots: dict[TensorName | ScalarName, TensorName | ScalarName] = {}
    inside: set[TensorName | ScalarName] = set()
    found: dict[TensorName | ScalarName, None] = {}
    for node in body:
        made = names_defined(node)
        for name in names_written(node, kernels):
            root = roots.get(name, name)
            if name not in made and root not in inside:
                found[root] = None
        views = dict(views_made(node))
        roots.update((out, roots.get(src, src)) for out, src in views.items())
        inside.update(name for name in made if name not in views)
    return tuple(found)


def views_made(node: Node) -> tuple[tuple[TensorName, TensorName], ...]:
    """Results that share the memory of what they are made of, or may, each with that.

    Not what is fetched and delivered, though it may be the rank's own: nothing is written to it.
    """
    match node:
        case Communicate(out, _, src) if node.in_place:
            return ((out, src),)
        case View(out, src) | Chunk(out, src):
            return ((out, src),)
        case Evaluate(into, body):
            return tuple(
                (expr.out, expr.src)
                for expr in body
                if isinstance(expr, MAY_SHARE) and expr.out != into
            )
        case _:
            return ()


def names_needed(node: Node) -> tuple[TensorName | ScalarName, ...]:
    """The buffers and scalars that must exist before the node, each once."""
    match node:
        case Allocate() | Wait() | Record() | WaitEvent():
            return ()
        case Free(buffers):
            return buffers
        case View(_, src) | Chunk(_, src):
            return (src,)
        case Clear(buffer):
            return (buffer,)
        case ForLoop(body=body) | OnStream(body=body):
            return _needed_by(body)
        case Launch(_, buffers, scalars):
            return tuple(dict.fromkeys((*buffers, *scalars)))
        case Communicate(out, _, src):
            total = () if node.into is None else (node.into,)
            return (src, *total) if node.makes_result else (src, out)
        case Pick(out, src):
            return (src, out)
        case Evaluate(into, body):
            return tuple(dict.fromkeys((*_names_read(body), *(() if into is None else (into,)))))


def _needed_by(body: Sequence[Node]) -> tuple[TensorName | ScalarName, ...]:
    """What nodes in a row need that none of them defines."""
    found: dict[TensorName | ScalarName, None] = {}
    inside: set[TensorName | ScalarName] = set()
    for node in body:
        found.update(dict.fromkeys(n for n in names_needed(node) if n not in inside))
        inside.update(names_defined(node))
    return tuple(found)


def _names_read(body: Sequence[Expr]) -> Iterator[TensorName | ScalarName]:
    """What the expressions read that none before them defines."""
    defined: set[TensorName | ScalarName] = set()
    for expr in body:
        yield from (name for name in expr.ins if isinstance(name, str) and name not in defined)
        defined.update(expr.outs)
