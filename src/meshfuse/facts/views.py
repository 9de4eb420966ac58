"""Which tensors can be views of others: the same memory under other axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from meshfuse.facts.axis_map import axis_pairs
from meshfuse.facts.facts import facts_of
from meshfuse.facts.layout import Layout, layout_of
from meshfuse.ir.axes import AxisKind, AxisName, IterDomain, TensorName
from meshfuse.ir.ops import Broadcast, Expr, Permute, Reshape, Squeeze
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Merge, Split, Step

VIEWS: Final = (Broadcast, Permute, Reshape, Squeeze)
View = Broadcast | Permute | Reshape | Squeeze
"""The same elements under other axes."""

Memory = list[tuple[AxisName, bool | None]]
"""Axes that are not broadcast, slowest first, each with its contiguity flag."""


def view_layout(program: Program, expr: View) -> Layout | None:
    """The layout of the result as a view of the operand; None if it cannot be one.

    Axes merge where they follow one another in memory without a gap.
    """
    axes, target = program.tensor(expr.src).tensor_axes, program.tensor(expr.out).maybe_root
    places = axis_pairs(expr, program)[0]
    layout = layout_of(program, expr.src)
    memory: Memory = []
    for axis, flag in zip(layout.order, layout.contiguity, strict=True):
        place = places[axis]
        if axes[axis].kind is AxisKind.broadcast:
            continue
        if place is None:
            return None  # squeezed, as a run finds it to be 1
        memory.append((target[place].name, flag))
    for step in program.tensor(expr.out).root_steps:
        stepped = _after(step, memory)
        if stepped is None:
            return None
        memory = stepped
    return _as_layout(memory, program.tensor(expr.out).tensor_axes)


def _after(step: Step, memory: Memory) -> Memory | None:
    names = [name for name, _ in memory]
    match step:
        case Split(source, outer, inner):
            place = names.index(source)
            flag = memory[place][1]
            parts: Memory = [(outer, None if flag is None else True), (inner, flag)]
            return [*memory[:place], *parts, *memory[place + 1 :]]
        case Merge(outer, inner, merged):
            place = names.index(outer)
            if names[place + 1 : place + 2] != [inner] or memory[place][1] is not True:
                return None
            return [*memory[:place], (merged, memory[place + 1][1]), *memory[place + 2 :]]
        case _:
            return None


def _as_layout(memory: Memory, axes: Sequence[IterDomain]) -> Layout:
    """Broadcast axes stand where they keep the order of the axes, else in front."""
    places = {axis.name: place for place, axis in enumerate(axes)}
    order = [places[name] for name, _ in memory]
    broadcast = [place for place in range(len(axes)) if place not in order]
    flags = dict(zip(order, (flag for _, flag in memory), strict=True))
    whole = sorted([*broadcast, *order]) if order == sorted(order) else [*broadcast, *order]
    return Layout(tuple(whole), tuple(flags.get(place) for place in whole))


def is_in_place(program: Program, expr: Expr) -> bool:
    """Whether the result of `expr` lies in memory as a view of its operand would."""
    if not isinstance(expr, VIEWS):
        return False
    view, axes = view_layout(program, expr), program.tensor(expr.out).tensor_axes
    if view is None:
        return False
    promised = layout_of(program, expr.out)
    pairs = zip(_solid(view, axes), _solid(promised, axes), strict=True)
    return all(have[0] == want[0] and want[1] in (False, have[1]) for have, want in pairs)


def _solid(layout: Layout, axes: Sequence[IterDomain]) -> list[tuple[int, bool | None]]:
    pairs = zip(layout.order, layout.contiguity, strict=True)
    return [(axis, flag) for axis, flag in pairs if axes[axis].kind is not AxisKind.broadcast]


def chains_from_inputs(program: Program) -> dict[TensorName, tuple[View, ...]]:
    """For each returned tensor that views alone lead to from an input: these, from the input on."""
    definitions, inputs = facts_of(program).definitions, program.fusion.inputs
    chains: dict[TensorName, tuple[View, ...]] = {}
    for output in program.fusion.outputs:
        chain: list[View] = []
        tensor = output.tensor
        while isinstance(expr := definitions.get(tensor), VIEWS):
            chain.insert(0, expr)
            tensor = expr.src
        if chain and tensor in inputs and output.alias is None:
            chains[output.tensor] = tuple(chain)
    return chains


def views_of_inputs(program: Program) -> frozenset[TensorName]:
    """Returned tensors that are views of inputs, and those on the way to them, for membership."""
    chains = chains_from_inputs(program).values()
    return frozenset(
        expr.out
        for chain in chains
        if all(is_in_place(program, expr) for expr in chain)
        for expr in chain
    )
