"""Loops bound to a rank: for a set of sizes the actions of all iterations, in a row; chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final

from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, free_symbols
from meshfuse.expr.generate import compile_expressions
from meshfuse.host.actions import Action, Bound, Sizes, Slots, Step, Traced, take
from meshfuse.host.nodes import Chunk, Clear
from meshfuse.host.steps import Binding, bind_step


@final
@frozen_dataclass
class LoopStep(Step):
    """`extents`: the count, then symbols that the steps of the body need.

    `evaluate` gives their extents for values of `names`, the index the last of them.
    """

    index: str
    body: tuple[Step, ...]
    names: tuple[str, ...]
    evaluate: Callable[..., Sequence[int]]
    extents: tuple[IntExpr, ...]
    traced: Traced | None = None

    @staticmethod
    def of(index: str, count: IntExpr, body: Sequence[Step]) -> LoopStep:
        """The loop over bound steps."""
        inner = [extent for step in body for extent in step.extents]
        found = {name.name: name for extent in inner for name in free_symbols(extent)}
        found.pop(index, None)
        needed = tuple(found.values())
        names = (*found, index)
        evaluate = compile_expressions(inner, names)
        return LoopStep(index, tuple(body), names, evaluate, (count, *needed))

    def bind(self, sizes: Sizes) -> Action:
        raise InvariantError("a loop is no single action; expand it")

    def expand(self, sizes: Sizes) -> Iterator[Bound]:
        count, *values = sizes.values
        outer = tuple(values)
        for k in range(count):
            found = iter(self.evaluate(*outer, k))
            symbols = {**sizes.symbols, self.index: k}
            iteration = sizes.iteration * count + k
            for step in self.body:
                yield from step.expand(Sizes(take(found, step), symbols, iteration))


@final
@frozen_dataclass
class ChunkStep(Step):
    """`extents`: where the chunk begins, how long it is, and of how many blocks it has pieces.
    `is_apart`: each chunk of the source has memory of its own, for peers to read."""

    out: int
    src: int
    axis: int
    extents: tuple[IntExpr, ...]
    is_apart: bool = False
    traced: Traced | None = None

    @property
    def is_idle(self) -> bool:
        return True

    def bind(self, sizes: Sizes) -> Action:
        out, src, axis = self.out, self.src, self.axis
        start, length, *pieces = sizes.values

        def view(slots: Slots) -> None:
            whole = slots[src]
            slots[out] = whole.narrow(axis, min(start, whole.shape[axis]), length)

        def view_of_pieces(slots: Slots) -> None:
            whole = slots[src]
            apart = whole.shape[axis] // pieces[0]
            blocks = whole.unflatten(axis, (pieces[0], apart))
            slots[out] = blocks.narrow(axis + 1, min(start, apart), length)

        def pick(slots: Slots) -> None:
            slots[out] = slots[src][start // length]

        if self.is_apart:
            return pick
        return view_of_pieces if pieces else view


@bind_step.register
def _(node: Chunk, binding: Binding) -> Step:
    out, src = binding.slots([node.out, node.src])
    length = binding.program.buffers[node.out].shape[node.cut_axis]
    pieces = () if node.pieces is None else (node.pieces,)
    source = binding.shared.get(node.src)
    is_apart = source is not None and source.pieces is not None
    return ChunkStep(out, src, node.axis, (node.start, length, *pieces), is_apart)


@final
@frozen_dataclass
class ClearStep(Step):
    slot: int
    extents: tuple[IntExpr, ...] = ()
    traced: Traced | None = None

    def bind(self, sizes: Sizes) -> Action:
        slot = self.slot

        def clear(slots: Slots) -> None:
            slots[slot].zero_()

        return clear


@bind_step.register
def _(node: Clear, binding: Binding) -> Step:
    (slot,) = binding.slots([node.buffer])
    return ClearStep(slot)
