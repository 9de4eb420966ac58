"""A loop bound to a rank: for a set of sizes it is the actions of all its iterations, in a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, free_symbols
from meshfuse.expr.generate import compile_expressions
from meshfuse.host.plan import Action, Bound, Sizes, Step, Traced, take


@final
@frozen_dataclass
class LoopStep(Step):
    """`extents`: the count, then symbols that the steps of the body need.

    `evaluate` gives their extents for values of `names`, the index the last of them.
    """

    index: str
    body: tuple[Step, ...]
    names: tuple[str, ...]
    evaluate: Any
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

    @property
    def posts(self) -> int:
        """Communications of one iteration."""
        return sum(step.posts for step in self.body)

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
