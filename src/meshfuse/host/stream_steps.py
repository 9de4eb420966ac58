"""Worker streams bound to a rank: what runs on which, marks and the waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import final

from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr
from meshfuse.host.actions import Action, Bound, Sizes, Step, Traced, take
from meshfuse.host.events import CALLER, AwaitMark, Mark, SwitchStream
from meshfuse.host.nodes import Record, WaitEvent
from meshfuse.host.steps import Binding, bind_step


@final
@frozen_dataclass
class OnStreamStep(Step):
    """`extents`: the number of the stream, then those of the body."""

    body: tuple[Step, ...]
    extents: tuple[IntExpr, ...]
    traced: Traced | None = None

    @staticmethod
    def of(stream: IntExpr, body: Sequence[Step]) -> OnStreamStep:
        """Bound steps on a stream."""
        extents = (stream, *(extent for step in body for extent in step.extents))
        return OnStreamStep(tuple(body), extents)

    def bind(self, sizes: Sizes) -> Action:
        raise InvariantError("what is on a stream is no single action; expand it")

    def expand(self, sizes: Sizes) -> Iterator[Bound]:
        values = iter(sizes.values)
        stream = next(values)
        yield Bound.telling(SwitchStream(stream), stream)
        for step in self.body:
            there = Sizes(take(values, step), sizes.symbols, sizes.iteration)
            for found in step.expand(there):
                yield replace(found, stream=stream)
        yield Bound.telling(SwitchStream(CALLER), stream)


@final
@frozen_dataclass
class EventStep(Step):
    """A mark, or the wait for one. `extents`: its instance."""

    event: int
    is_awaited: bool
    extents: tuple[IntExpr, ...]
    traced: Traced | None = None

    def bind(self, sizes: Sizes) -> Action:
        told = self._told(sizes)
        return lambda slots: told

    def expand(self, sizes: Sizes) -> Iterator[Bound]:
        yield Bound.telling(self._told(sizes))

    def _told(self, sizes: Sizes) -> Mark | AwaitMark:
        (instance,) = sizes.values
        mark = Mark(self.event, instance)
        return AwaitMark(mark) if self.is_awaited else mark


@bind_step.register
def _(node: Record, binding: Binding) -> Step:
    return EventStep(node.event, False, (node.instance,))


@bind_step.register
def _(node: WaitEvent, binding: Binding) -> Step:
    return EventStep(node.event, True, (node.instance,))
