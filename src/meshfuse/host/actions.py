"""The actions of a plan: what a node does for one set of sizes, and what is known of it before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.trace import Work
from meshfuse.expr import IntExpr
from meshfuse.host.events import CALLER, Asked, Event, GiveBackSlot, SwitchStream

Slots = list[Any]
"""The values of one call by slot: tensors, scalars, and None before and after their life."""

Action = Callable[[Slots], Event | None]
"""Does what a node says, or tells the driver what it must do next."""


@final
@frozen_dataclass
class Sizes:
    """`values`: of a step's extents, in order. `symbols`: of all that the program's sizes name.

    `iteration`: how many of the loops that the step is in came before; 0 outside of loops.
    """

    values: tuple[int, ...]
    symbols: Mapping[str, int]
    iteration: int = 0


@final
@frozen_dataclass
class Traced:
    """What a trace says of a step: its work, and the slots that it reads and writes.

    `posts`: the work goes on after the step, until its wait.
    """

    work: Work
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    posts: bool = False


class Step(ABC):
    """Abstract: one node, bound to slots, rank and device."""

    __slots__ = ()
    extents: tuple[IntExpr, ...]
    traced: Traced | None

    @property
    def is_idle(self) -> bool:
        """Whether the device has nothing to do for it."""
        return False

    @abstractmethod
    def bind(self, sizes: Sizes) -> Action:
        """The step for one set of sizes."""

    def expand(self, sizes: Sizes) -> Iterator[Bound]:
        """All actions of the step: one, but for a loop."""
        yield Bound(self.bind(sizes), self.traced, is_idle=self.is_idle)


@final
@frozen_dataclass
class Bound:
    """An action, and what a trace says of it. `tells`: what it always tells the driver; `asks`:
    what it asks of the communicator. None of both: it does something itself. `stream`: where it
    runs. `is_idle`: what it does leaves its stream as it is. `makes`: the slot for which it makes
    memory, if that is all it does. `is_letting_go`: it empties slots, and does no more."""

    action: Action
    traced: Traced | None = None
    tells: Event | None = None
    stream: int = CALLER
    asks: Asked | None = None
    is_idle: bool = False
    makes: int | None = None
    is_letting_go: bool = False

    @staticmethod
    def asking(asked: Asked, traced: Traced | None) -> Bound:
        """The action that asks the communicator for something."""
        return Bound(asked.act, traced, asks=asked, is_idle=isinstance(asked, GiveBackSlot))

    @staticmethod
    def telling(event: Event, stream: int = CALLER) -> Bound:
        """The action that does nothing but tell the driver."""
        is_idle = isinstance(event, SwitchStream)
        return Bound(lambda slots: event, None, event, stream, is_idle=is_idle)

    @property
    def posts(self) -> bool:
        return self.traced is not None and self.traced.posts


def take(values: Iterator[int], step: Step) -> tuple[int, ...]:
    """The values of a step's extents, which come next."""
    return tuple(islice(values, len(step.extents)))
