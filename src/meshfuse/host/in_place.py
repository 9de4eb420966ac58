"""All-reduces into the memory of their source, where that is the program's own and over with.

evaluate() { T3 = mat_mul(T0, T1) }             evaluate() { T3 = mat_mul(T0, T1) }
T2 = allocate(global, 32)                 ->    T2 = communicate(all_reduce, T3, .., in_place=true)
T2 = communicate(all_reduce, T3, ..)

A result that is a chunk of a buffer keeps its place there: the source is made in it.

evaluate() { T3_j0 = mat_mul(T0_j0, T1) }       T3_j0 = chunk(T2, 0, 4*j0)
T2_j0 = chunk(T2, 0, 4*j0)                ->    evaluate(into=T3_j0) { T3_j0 = mat_mul(..) }
T2_j0 = communicate(all_reduce, T3_j0, ..)      T2_j0 = communicate(.., in_place=true)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

from meshfuse.host.nodes import (
    Allocate,
    Chunk,
    Collective,
    Communicate,
    Evaluate,
    ForLoop,
    HostBuffer,
    Node,
)
from meshfuse.host.uses import MAY_SHARE, WRITERS, names_defined, names_needed, views_made
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.ops import Linear, MatMul, Pointwise, Reduction, Set
from meshfuse.ir.ops_indexing import IndexSelect, TakeAlongAxis

_OWN: Final = (IndexSelect, Linear, MatMul, Pointwise, Reduction, Set, TakeAlongAxis)
"""Expressions whose result torch makes in memory of its own. So do others, whose results are rarely
reduced across ranks."""

Name = TensorName | ScalarName


def with_reductions_in_place(
    body: Sequence[Node], buffers: Mapping[TensorName, HostBuffer], kept: Collection[Name]
) -> list[Node]:
    """The body, in loops as outside, with each all-reduce in place that may be.

    Its source is made in the same body and lies in memory as its result does. Nothing reads it, or
    what shares its memory, behind the post, and no other communication does while it is under way.
    None of these are in `kept`: inputs, outputs and scalars. Where posts stand is as it was: none
    waits for a reader.
    """
    work = _Rewriting(buffers, kept)
    last = {name: place for place, node in enumerate(body) for name in names_needed(node)}
    for place, node in enumerate(body):
        match node:
            case ForLoop(body=inside):
                placed = with_reductions_in_place(inside, buffers, kept)
                work.add(replace(node, body=tuple(placed)))
            case Communicate(src=src) if work.may_overwrite(node):
                is_last = all(last.get(name, place) <= place for name in work.sharing(src))
                work.add(work.make_room(node) if is_last else node)
            case _:
                work.add(node)
    return work.placed


@final
@dataclass(slots=True, eq=False, repr=False)
class _Rewriting:
    """The nodes so far; who makes each name, which names share memory, and what is sent."""

    buffers: Mapping[TensorName, HostBuffer]
    kept: Collection[Name]
    placed: list[Node] = field(default_factory=list[Node])
    makers: dict[Name, Node] = field(default_factory=dict[Name, Node])
    together: dict[Name, set[Name]] = field(default_factory=dict[Name, set[Name]])
    sent: set[Name] = field(default_factory=set[Name])

    def add(self, node: Node) -> None:
        self.placed.append(node)
        self.makers.update(dict.fromkeys(names_defined(node), node))
        for view, source in views_made(node):
            self.together[view] = self.together.setdefault(source, {source})
            self.together[view].add(view)
        if isinstance(node, Communicate) and not node.in_place:
            self.sent.add(node.src)

    def sharing(self, name: TensorName) -> Collection[Name]:
        return self.together.get(name, {name})

    def may_overwrite(self, node: Communicate) -> bool:
        """Whether the source is memory that the result could be, for all that stands before."""
        if node.collective is not Collective.all_reduce or node.packed:
            return False
        names = self.sharing(node.src)
        is_free = self.sent.isdisjoint(names) and not any(name in self.kept for name in names)
        return is_free and self.is_own(node.src) and self._lies_like_result(node)

    def is_own(self, name: TensorName) -> bool:
        """Whether all memory of a name was made in this body, for it or for what it is a view
        of."""
        match self.makers.get(name):
            case Allocate():
                return True
            case Communicate() as node if node.in_place:
                return self.is_own(node.src)
            case Evaluate(None, body):
                expr = next(expr for expr in body if name in expr.outs)
                return isinstance(expr, _OWN) or (
                    isinstance(expr, MAY_SHARE) and self.is_own(expr.src)
                )
            case _:
                return False

    def _lies_like_result(self, node: Communicate) -> bool:
        return self.buffers[node.src].lies_like(self.buffers[node.out])

    def make_room(self, node: Communicate) -> Communicate:
        """The post in place, if what has been placed can do without memory of the result's own."""
        match self.placed[-1]:
            case Allocate(node.out):
                self.placed.pop()
            case Chunk(node.out) as chunk if self._move_into(node.src, chunk):
                pass
            case _:
                return node
        return replace(node, in_place=True)

    def _move_into(self, name: TensorName, chunk: Chunk) -> bool:
        """Let `name` be made in a chunk, which stands last, if it can be."""
        maker = self.makers[name]
        place = next(k for k, node in enumerate(self.placed) if node is maker)
        if any(chunk.src in names_defined(node) for node in self.placed[place:]):
            return False
        match maker:
            case Allocate():
                before, behind = [], []
            case Evaluate(None, (*others, expr)) if isinstance(expr, WRITERS):
                if expr.outs != (name,):
                    return False
                before = [Evaluate(body=tuple(others))] if others else []
                behind = [Evaluate(name, (expr,))]
            case _:
                return False
        self.placed[place:] = [
            *before,
            replace(chunk, out=name),
            *behind,
            *self.placed[place + 1 : -1],
        ]
        return True
