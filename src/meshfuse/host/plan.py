"""A loaded host program: steps with slots for names, and for each set of sizes a flat plan.

A value lives in a slot of a list; a step knows its slots by number. When sizes are seen for the
first time, one generated function evaluates every extent of the program, and each step becomes an
Action, a closure over constants alone: that is a Plan, and later calls with those sizes run it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from itertools import islice
from typing import Any, final

import torch

from meshfuse.base.bounded import BoundedTable
from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import Unsupported, UserError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.agreement import Agreement
from meshfuse.expr import IntExpr, evaluate, free_symbols
from meshfuse.expr.generate import compile_expressions
from meshfuse.facts.sharding import describe
from meshfuse.host.actions import Action, Bound, Sizes, Slots, Step, Traced, take
from meshfuse.host.demands import check_demand
from meshfuse.host.events import (
    CALLER,
    AwaitWork,
    Event,
    GiveBackSlot,
    PostCollective,
    PostTransfer,
    SwitchStream,
)
from meshfuse.host.nodes import (
    Evaluate,
    HostBuffer,
    HostProgram,
    all_nodes,
)
from meshfuse.host.sequences import sequences_of
from meshfuse.host.stream_order import StreamOrder, without_known_marks
from meshfuse.host.symbols import Demand, SizeOf
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.ops import Expr
from meshfuse.runtime.arguments import Argument
from meshfuse.runtime.evaluate_ops import Environment, Placed, run_expressions
from meshfuse.runtime.random import RandomState

MOST_PLANS = 256
"""Plans that an executable keeps."""

CPU = torch.device("cpu")


@final
@frozen_dataclass
class Plan:
    """The steps of an executable, in order, for one set of sizes; loops in all their iterations.

    `bound` has the actions with all that is known of them, `traced` what a trace says of each.
    `communications`: how many this rank posts. `results` has the global shape of each output, or of
    the input that it updates; all zeros where a rank cannot know it, as it has no part.
    `agreements`: on what the ranks meet for. `order`: how the actions lie on streams, None if all
    are the caller's; `takes_turns`: they are queues that the calling thread serves. `direct` has
    the plan as direct.py runs it, once there is one.
    """

    bound: tuple[Bound, ...]
    actions: tuple[Action, ...]
    traced: tuple[Traced | None, ...] = ()
    results: tuple[tuple[int, ...], ...] = ()
    agreements: tuple[Agreement, ...] = ()
    communications: int = 0
    order: StreamOrder | None = None
    takes_turns: bool = False
    direct: list[Any] = field(default_factory=list[Any])

    @property
    def fetches(self) -> bool:
        """Whether ranks read what lies at their peers."""
        asked = (found.asks for found in self.bound)
        return any(isinstance(a, PostTransfer) and a.transfer.is_fetch for a in asked)

    @property
    def meetings(self) -> int:
        """How often peers count on the rank: it communicates, or lets go of what they read."""
        given_back = sum(isinstance(found.asks, GiveBackSlot) for found in self.bound)
        return self.communications + given_back


@final
@frozen_dataclass
class Names:
    """The slot, type and shape of every name of a program; inputs have the first slots.

    `placed` has those that lie on a mesh.
    """

    slots: Mapping[TensorName | ScalarName, int]
    dtypes: Mapping[TensorName | ScalarName, DataType]
    shapes: Mapping[TensorName, tuple[IntExpr, ...]]
    placed: Mapping[TensorName, Placed] = field(default_factory=dict[TensorName, Placed])


@final
@frozen_dataclass
class Drawing:
    """What a call draws: `draws` times of the generator of `device`, on all ranks of `team` alike.

    Seed and offset go into two slots.
    """

    seed: int
    offset: int
    draws: int
    team: tuple[int, ...]
    device: torch.device

    def bind(self, slots: Slots, random: RandomState) -> None:
        slots[self.seed], slots[self.offset] = random.seed, random.offset


@final
class Executable:
    """A host program ready to run on one rank. Safe to use from several threads.

    `is_outside`: the rank is in none of the program's meshes, it holds and does nothing.
    `prologue`: the arithmetic on scalars that sizes depend on. `symbols`: what its sizes name.
    `evaluates`: operations run through torch. `sizes_are_scalars`: sizes depend on the values of
    scalars, too. `sequences` are what it must agree on with other ranks. `drawing`: of random
    numbers. `device`: where it runs. `vacant`: the slots behind the inputs, before anything is run.
    """

    __slots__ = (
        "_coordinates",
        "_demands",
        "_evaluate",
        "_names",
        "_origins",
        "_plans",
        "_prologue",
        "_scalars",
        "_symbols",
        "_tensors",
        "device",
        "drawing",
        "evaluates",
        "is_outside",
        "outputs",
        "program",
        "rank",
        "sequences",
        "sizes_are_scalars",
        "steps",
        "vacant",
    )

    def __init__(
        self,
        program: HostProgram,
        rank: int,
        is_outside: bool,
        names: Names,
        prologue: Sequence[Expr],
        steps: Sequence[Step],
        symbols: Sequence[str],
        drawing: Drawing | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.program = program
        self.device = device
        self.drawing = drawing
        self.rank = rank
        self.is_outside = is_outside
        self.steps = tuple(steps)
        self.outputs = tuple(names.slots[o.buffer] for o in program.outputs if o.alias is None)
        self._names = names
        self.vacant = [None] * (len(names.slots) - len(program.inputs))
        self._prologue = tuple(prologue)
        self._symbols = tuple(symbols)
        self._tensors = tuple(i for i, n in enumerate(program.inputs) if n in program.buffers)
        self._origins = _origins_on(program, rank)
        self._coordinates: dict[str, int] = {
            entry.symbol: entry.of(rank) for entry in program.coordinates
        }
        known = {*symbols, *self._origins, *self._coordinates, *program.scalars}
        self._demands = tuple(d for d in program.demands if _names_only(d.extents, known))
        expressions = _expressions(self._demands, self._inputs_here(), steps)
        self._symbols = tuple(dict.fromkeys(s.name for e in expressions for s in free_symbols(e)))
        self._symbols = tuple(dict.fromkeys((*symbols, *self._symbols)))
        self._scalars = tuple(
            (name, names.slots[ScalarName(name)])
            for name in self._symbols
            if name in program.scalars
        )
        self.evaluates = any(isinstance(node, Evaluate) for node in all_nodes(program.body))
        self.sizes_are_scalars = bool(self._scalars)
        drawing_team = () if drawing is None else drawing.team
        self.sequences = sequences_of(program, rank, self._origins, drawing_team)
        self._evaluate = compile_expressions(expressions, self._symbols)
        self._plans: BoundedTable[tuple[object, ...], Plan] = BoundedTable(MOST_PLANS)

    def _inputs_here(self) -> list[HostBuffer]:
        buffers = self.program.buffers
        found = [buffers[TensorName(self.program.inputs[i])] for i in self._tensors]
        return [buffer for buffer in found if buffer.is_on(self.rank)]

    def start(
        self, inputs: Sequence[Argument], given: Mapping[str, int] | None = None
    ) -> tuple[Plan, Slots]:
        """The plan for these inputs, and the slots that it begins with.

        `given`: global sizes that the caller knows, by symbol. Raises UserError for sizes that
        disagree, Unsupported for a size that nothing says on this rank.
        """
        slots = self.slots(inputs)
        if self._prologue:
            self._run_prologue(slots)
        key = tuple([slots[i].shape for i in self._tensors])
        if self._scalars:
            key += tuple([slots[i] for _, i in self._scalars])
        if given:
            key += tuple(given.items())
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make_plan(slots, given or {})
            self._plans.put(key, plan)
        return plan, slots

    def plans(self) -> list[Plan]:
        """Those of the sizes seen so far."""
        return self._plans.values()

    def slots(self, inputs: Sequence[Argument]) -> Slots:
        """The slots of a call, before anything has run."""
        return [*inputs, *self.vacant]

    def only_plan(
        self, inputs: Sequence[Argument], given: Mapping[str, int] | None = None
    ) -> Plan | None:
        """The plan for inputs of these shapes, if it is one whatever the numbers among them."""
        if self.is_outside or self._prologue or self._scalars:
            return None
        return self.start(inputs, given)[0]

    def sizes_of_inputs(self, inputs: Sequence[Argument]) -> dict[str, tuple[SizeOf, int]]:
        """The global sizes that this rank's inputs say, if blocks are equal, and where."""
        found: dict[str, tuple[SizeOf, int]] = {}
        for name, size in self._origins.items():
            tensor = inputs[self._names.slots[size.tensor]]
            assert isinstance(tensor, torch.Tensor)
            found[name] = (size, tensor.shape[size.axis] * size.factor)
        return found

    def result_shapes(
        self, inputs: Sequence[Argument], given: Mapping[str, int] | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """`Plan.results` of a call with these inputs. Raises as `start`."""
        if not self.is_outside:
            return self.start(inputs, given)[0].results
        return _result_shapes(self.program, given or {})  # no input of this rank says more

    def sizes(
        self, inputs: Sequence[Argument], given: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """What every symbol stands for in a call with these inputs, this rank's coordinates among
        them. Raises as `start`."""
        slots = self.slots(inputs)
        if self._prologue:
            self._run_prologue(slots)
        return self._bind_symbols(slots, given or {})

    def _run_prologue(self, slots: Slots) -> None:
        names = self._names
        values = {name: slots[i] for name, i in names.slots.items() if slots[i] is not None}
        sizes: dict[str, int] = {name: v for name, v in values.items() if isinstance(v, int)}
        env = Environment(names.dtypes, names.shapes, sizes, values)
        run_expressions(self._prologue, env)
        for expr in self._prologue:
            for out in expr.outs:
                slots[names.slots[out]] = env.values[out]

    def _evaluate_sizes(self, symbols: Mapping[str, int]) -> Sequence[int]:
        try:
            return self._evaluate(*[symbols[name] for name in self._symbols])
        except ZeroDivisionError:
            given = ", ".join(f"{name} = {symbols[name]}" for name in self._symbols)
            raise UserError(
                f"execute: with {given} a size is divided by zero; the size that -1 stands for is "
                "not determined where another size is 0"
            ) from None

    def _make_plan(self, slots: Slots, given: Mapping[str, int]) -> Plan:
        symbols = self._bind_symbols(slots, given)
        values = iter(self._evaluate_sizes(symbols))
        for demand in self._demands:
            check_demand(self.program, demand, tuple(islice(values, len(demand.extents))))
        for buffer in self._inputs_here():
            wanted = tuple(islice(values, len(buffer.shape)))
            self._check_shape(buffer, slots[self._names.slots[buffer.name]].shape, wanted, symbols)
        bound = _awaited_at_once(
            without_known_marks(
                found
                for step in self.steps
                for found in step.expand(Sizes(take(values, step), symbols))
            )
        )
        if self.device.type == "cuda":
            bound = without_known_marks(map(_on_callers_stream, bound))
        communications, order = sum(found.posts for found in bound), StreamOrder.of(bound)
        return Plan(
            tuple(bound),
            tuple(found.action for found in bound),
            tuple(found.traced for found in bound),
            _result_shapes(self.program, symbols),
            tuple(sequence.at(symbols) for sequence in self.sequences),
            communications,
            order,
            order is not None and communications > 0 and self.device.type != "cuda",
        )

    def _bind_symbols(self, slots: Slots, given: Mapping[str, int]) -> dict[str, int]:
        symbols: dict[str, int] = {name: slots[i] for name, i in self._scalars}
        symbols.update(self._coordinates)
        found = self.sizes_of_inputs(slots[: len(self.program.inputs)])
        symbols.update((name, size) for name, (_, size) in found.items())
        symbols.update(given)
        for name in self._symbols:
            if name not in symbols:
                raise Unsupported(
                    f"execute: rank {self.rank} needs the size {name}, but no input that it has a "
                    "part of says it; pass execute(inputs, global_sizes={k: shape}) with the "
                    f"global shape of an input k that has an axis of size {name}, or define that "
                    "axis with its size"
                )
        return symbols

    def _check_shape(
        self,
        buffer: HostBuffer,
        shape: torch.Size,
        wanted: Sequence[int],
        symbols: Mapping[str, int],
    ) -> None:
        """UserError for an input that is not the part that this rank holds."""
        if tuple(shape) == tuple(wanted):
            return
        axis = next(k for k, size in enumerate(wanted) if shape[k] != size)
        origins = ", ".join(
            f"{name} is {symbols[name]} by axis {self._origins[name].axis} of "
            f"{self._origins[name].tensor}"
            for name in (found.name for found in free_symbols(buffer.extents[axis]))
            if name in self._origins
        )
        position = self.program.inputs.index(buffer.name)
        place = ""
        if buffer.whole and buffer.sharding is not None:
            whole = evaluate(buffer.whole[axis], symbols)
            place = (
                f"; rank {self.rank} holds {list(wanted)} of it, sharded as "
                f"{describe(buffer.sharding)}, and the global size of that axis is {whole}: where "
                "it does not divide, pass global_sizes"
            )
        raise UserError(
            f"Expected input {position}, {buffer.name}, to be of size {wanted[axis]} on axis "
            f"{axis}, but got a tensor of shape {list(shape)}"
            + (f" ({origins})" if origins else "")
            + place
        )


def _awaited_at_once(bound: Sequence[Bound]) -> list[Bound]:
    """Collectives that are awaited before anything else is done need no stream of their own."""
    following = [*(found.tells for found in bound), None][1:]
    return [_taking_the_stream(found, told) for found, told in zip(bound, following, strict=True)]


def _taking_the_stream(found: Bound, following: Event | None) -> Bound:
    match found.asks:
        case PostCollective(sized) if found.stream == CALLER:
            if following == AwaitWork(sized.number):
                asked = replace(found.asks, collective=replace(sized, at_once=True))
                return Bound.asking(asked, found.traced)
        case _:
            pass
    return found


def _on_callers_stream(found: Bound) -> Bound:
    """The first worker stream of a GPU is the caller's own: the fewer streams there are, the fewer
    marks the host has to make."""
    if found.tells == SwitchStream(0):
        return Bound.telling(SwitchStream(CALLER))
    return replace(found, stream=CALLER) if found.stream == 0 else found


def _origins_on(program: HostProgram, rank: int) -> dict[str, SizeOf]:
    """Where this rank reads each size: of an input that it has a part of."""
    found: dict[str, SizeOf] = {}
    for size in program.symbols:
        if program.buffers[size.tensor].is_on(rank):
            known = found.get(size.symbol)
            if known is None or known.factor > size.factor == 1:
                found[size.symbol] = size
    return found


def _result_shapes(program: HostProgram, symbols: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    """The global shape of each output; zeros for one that `symbols` do not say."""
    buffers = [program.buffers[output.alias or output.buffer] for output in program.outputs]
    return tuple(
        tuple(evaluate(extent, symbols) for extent in buffer.extents)
        if _names_only(buffer.extents, symbols)
        else (0,) * len(buffer.shape)
        for buffer in buffers
    )


def _names_only(extents: Iterable[IntExpr], known: Collection[str]) -> bool:
    return all(found.name in known for extent in extents for found in free_symbols(extent))


def _expressions(
    demands: Iterable[Demand],
    inputs: Iterable[HostBuffer],
    steps: Iterable[Step],
) -> list[IntExpr]:
    """All that a plan evaluates, in order."""
    found = [extent for demand in demands for extent in demand.extents]
    found += [extent for buffer in inputs for extent in buffer.shape]
    found += [extent for step in steps for extent in step.extents]
    return found
