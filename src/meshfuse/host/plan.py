"""A loaded host program: steps with slots for names, and for each set of sizes a flat plan.

A value lives in a slot of a list; a step knows its slots by number. When sizes are seen for the
first time, one generated function evaluates every extent of the program, and each step becomes an
Action, a closure over constants alone: that is a Plan, and later calls with those sizes run it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

import torch

from meshfuse.base.bounded import BoundedTable
from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import Unsupported, UserError
from meshfuse.base.trace import Work
from meshfuse.dist.agreement import CommunicationSequence
from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.expr import IntExpr, free_symbols, is_const
from meshfuse.expr.generate import compile_expressions
from meshfuse.host.nodes import (
    Communicate,
    Demand,
    Divides,
    Equals,
    Evaluate,
    HostProgram,
    NotNegative,
)
from meshfuse.host.printer import print_node
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.ops import Expr
from meshfuse.runtime.arguments import Argument
from meshfuse.runtime.evaluate_ops import Environment, run_expressions

MOST_PLANS = 256
"""Plans that an executable keeps."""

Slots = list[Any]
"""The values of one call by slot: tensors, scalars, and None before and after their life."""


@final
@dataclass(frozen=True, slots=True)
class Post:
    """Start this collective."""

    request: CollectiveRequest


@final
@dataclass(frozen=True, slots=True)
class AwaitWork:
    """Go on when the collective of this number is complete."""

    number: int


Event = Post | AwaitWork

Action = Callable[[Slots], Event | None]
"""Does what a node says, or tells the driver what it must do next."""


@final
@dataclass(frozen=True, slots=True)
class Sizes:
    """`values`: of a step's extents, in order. `symbols`: of all that the program's sizes name."""

    values: tuple[int, ...]
    symbols: Mapping[str, int]


@final
@dataclass(frozen=True, slots=True)
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

    @abstractmethod
    def bind(self, sizes: Sizes) -> Action:
        """The step for one set of sizes."""


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of an executable, in order, for one set of sizes."""

    actions: tuple[Action, ...]


@final
@dataclass(frozen=True, slots=True)
class Names:
    """The slot, type and shape of every name of a program; inputs have the first slots."""

    slots: Mapping[TensorName | ScalarName, int]
    dtypes: Mapping[TensorName | ScalarName, DataType]
    shapes: Mapping[TensorName, tuple[IntExpr, ...]]


@final
class Executable:
    """A host program ready to run on one rank. Safe to use from several threads.

    `is_outside`: the rank is in none of the program's meshes, it holds and does nothing.
    `prologue`: the arithmetic on scalars that sizes depend on. `symbols`: what sizes name.
    `evaluates`: operations run through torch. `sizes_are_scalars`: sizes depend on the values of
    scalars, too. `communications`: how many collectives this rank posts; `sequence` are those of
    all ranks, None for a rank that exchanges nothing with others.
    """

    __slots__ = (
        "_evaluate",
        "_names",
        "_plans",
        "_prologue",
        "_scalars",
        "_symbols",
        "_tensors",
        "communications",
        "evaluates",
        "is_outside",
        "outputs",
        "program",
        "rank",
        "sequence",
        "sizes_are_scalars",
        "steps",
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
    ) -> None:
        self.program = program
        self.rank = rank
        self.is_outside = is_outside
        self.steps = tuple(steps)
        self.outputs = tuple(names.slots[o.buffer] for o in program.outputs if o.alias is None)
        self._names = names
        self._prologue = tuple(prologue)
        self._symbols = tuple(symbols)
        self._tensors = tuple(i for i, n in enumerate(program.inputs) if n in program.buffers)
        self._scalars = tuple(
            (name, names.slots[ScalarName(name)]) for name in symbols if name in program.scalars
        )
        self.evaluates = any(isinstance(node, Evaluate) for node in program.body)
        self.sizes_are_scalars = bool(self._scalars)
        self.communications = sum(
            step.traced is not None and step.traced.posts for step in self.steps
        )
        self.sequence = _sequence_of(program, rank)
        self._evaluate = compile_expressions(_expressions(program, steps), self._symbols)
        self._plans: BoundedTable[tuple[object, ...], Plan] = BoundedTable(MOST_PLANS)

    def start(self, inputs: Sequence[Argument]) -> tuple[Plan, Slots]:
        """The plan for these inputs, and the slots that it begins with.

        Raises UserError for sizes that disagree, Unsupported for a size that the ranks of a mesh
        cannot share in equal blocks.
        """
        slots: Slots = [*inputs, *[None] * (len(self._names.slots) - len(inputs))]
        if self._prologue:
            self._run_prologue(slots)
        key = tuple([slots[i].shape for i in self._tensors])
        if self._scalars:
            key += tuple([slots[i] for _, i in self._scalars])
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make_plan(slots)
            self._plans.put(key, plan)
        return plan, slots

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

    def _make_plan(self, slots: Slots) -> Plan:
        symbols: dict[str, int] = {name: slots[i] for name, i in self._scalars}
        for size in self.program.symbols:
            shape = slots[self._names.slots[size.tensor]].shape
            symbols[size.symbol] = shape[size.axis] * size.factor
        values = iter(self._evaluate_sizes(symbols))
        for demand in self.program.demands:
            _check_demand(demand, tuple(islice(values, len(demand.extents))))
        for position in self._tensors:
            wanted = tuple(islice(values, slots[position].ndim))
            _check_shape(self.program, position, slots[position].shape, wanted, symbols)
        return Plan(
            tuple(
                step.bind(Sizes(tuple(islice(values, len(step.extents))), symbols))
                for step in self.steps
            )
        )


def _sequence_of(program: HostProgram, rank: int) -> CommunicationSequence | None:
    posts = [node for node in program.body if isinstance(node, Communicate)]
    moving = [node for node in posts if node.mesh.axis_size(node.mesh_axis) > 1]
    team = {member for node in moving for member in node.mesh.ids}
    if rank not in team:
        return None
    return CommunicationSequence.of(tuple(team), [print_node(node) for node in moving])


def _expressions(program: HostProgram, steps: Sequence[Step]) -> list[IntExpr]:
    """All that a plan evaluates: demands, the inputs' sizes, what the steps need, in that order."""
    found = [extent for demand in program.demands for extent in demand.extents]
    for name in program.inputs:
        if name in program.buffers:
            found += program.buffers[TensorName(name)].shape
    for step in steps:
        found += step.extents
    return found


def _check_demand(demand: Demand, found: Sequence[int]) -> None:
    match demand:
        case Divides(divisor, extent, tensor) if found[0] % divisor:
            raise Unsupported(
                f"execute: {tensor} has a sharded axis of global size {found[0]} ({extent}), which "
                f"{divisor} ranks cannot share in equal blocks; the size must be a multiple of "
                f"{divisor}"
            )
        case Equals(extent, other, tensor, elements=True) if found[0] != found[1]:
            raise UserError(
                f"execute: {tensor} is to have {_sized(extent, found[0])} elements, but what it is "
                f"reshaped from has {_sized(other, found[1])}"
            )
        case Equals(extent, other, tensor) if found[0] != found[1]:
            raise UserError(
                f"execute: on an axis of {tensor} meet the sizes {_sized(extent, found[0])} and "
                f"{_sized(other, found[1])}, which must be equal"
            )
        case NotNegative(extent, tensor) if found[0] < 0:
            raise UserError(
                f"execute: an axis of {tensor} has size {found[0]} ({extent}); a size is 0 or more"
            )
        case _:
            return


def _sized(size: IntExpr, found: int) -> str:
    return str(found) if is_const(size) else f"{found} ({size})"


def _check_shape(
    program: HostProgram,
    position: int,
    shape: torch.Size,
    wanted: Sequence[int],
    symbols: Mapping[str, int],
) -> None:
    name = TensorName(program.inputs[position])
    for axis, extent in enumerate(program.buffers[name].shape):
        if shape[axis] == wanted[axis]:
            continue
        origins = ", ".join(
            f"{s.symbol} is {symbols[s.symbol]} by axis {s.axis} of {s.tensor}"
            for s in program.symbols
            if any(s.symbol == symbol.name for symbol in free_symbols(extent))
        )
        raise UserError(
            f"Expected input {position}, {name}, to be of size {wanted[axis]} on axis {axis}, "
            f"but got a tensor of shape {list(shape)}" + (f" ({origins})" if origins else "")
        )
