"""Random legal schedules: kernels of all shapes that must compute what the program says.

A reference tensor that runs over all axes is cut and ordered at will, kept loops outside reduced
ones, and everything else follows it. Before that reductions may be taken apart, and copies put
anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import assume
from hypothesis import strategies as st

from kernel_programs import finished
from meshfuse.base.errors import UserError
from meshfuse.ir import transforms
from meshfuse.ir.axes import AxisKind, AxisName, TensorName
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.ops import Reduction
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import step_sources, steps_above
from meshfuse.schedulers.iteration_space import iteration_space
from meshfuse.schedulers.propagation import inline_most, parallelize_like, transform_like
from random_programs import Draw, Growing, programs

GRIDS = (ParallelType.grid_x, ParallelType.grid_y, ParallelType.grid_z)
LANES = (ParallelType.vectorize, ParallelType.unroll, ParallelType.block_x)
FACTORS = (1, 2, 3, 4, 5, 8)


@dataclass(frozen=True)
class ScheduledExample:
    """A program, the same one scheduled, and inputs."""

    program: Program
    scheduled: Program
    inputs: Sequence[torch.Tensor]


@st.composite
def scheduled_programs(draw: Draw) -> ScheduledExample:
    g: Growing = draw(programs(reducing=draw(st.booleans())))
    program = finished(g.recorder)
    assume(all(output.tensor not in program.fusion.inputs for output in program.fusion.outputs))
    scheduled = draw_copies(draw, program)
    scheduled, parts = draw_parts(draw, scheduled)
    reference = draw(st.sampled_from([g.full[-1], *parts]))
    scheduled = draw_loops(draw, scheduled, reference, parts)
    scheduled = draw_copies(draw, scheduled)
    if draw(st.booleans()):
        scheduled = inline_most(scheduled)
    return ScheduledExample(program, scheduled, g.inputs)


def draw_copies(draw: Draw, program: Program) -> Program:
    """A copy before or after some tensor, or none."""
    for _ in range(draw(st.integers(0, 2))):
        tensor = draw(st.sampled_from(sorted(program.fusion.tensors)))
        verb = draw(st.sampled_from((transforms.cache_after, transforms.cache_before)))
        try:
            program, _ = verb(program, tensor)
        except UserError:  # an input has nothing before it, an output nothing after
            continue
    return program


# Reductions taken apart.


def draw_parts(draw: Draw, program: Program) -> tuple[Program, dict[TensorName, TensorName]]:
    """Some reductions in two parts: inner one -> outer one."""
    parts: dict[TensorName, TensorName] = {}
    reductions = [expr for expr in program.fusion.exprs if isinstance(expr, Reduction)]
    for expr in reductions:
        if draw(st.booleans()):
            program, part = take_apart(draw, program, expr.out)
            parts[part] = expr.out
    return program, parts


def take_apart(draw: Draw, program: Program, tensor: TensorName) -> tuple[Program, TensorName]:
    for _ in range(draw(st.integers(1, 2))):
        axis = draw(st.sampled_from(reduced_loops(program, tensor)))
        factor, inner = draw(st.sampled_from(FACTORS)), draw(st.booleans())
        program = transforms.split(program, tensor, axis, factor, inner)
    axes = reduced_loops(program, tensor)
    count = draw(st.integers(1, len(axes) - 1))
    program, (part,) = transforms.rfactor(program, tensor, draw(st.permutations(axes))[:count])
    return program, part


def reduced_loops(program: Program, tensor: TensorName) -> list[int]:
    domains = enumerate(program.leaf_domains(tensor))
    return [place for place, axis in domains if axis.kind is AxisKind.reduction]


# Loops.


def draw_loops(
    draw: Draw, program: Program, reference: TensorName, parts: dict[TensorName, TensorName]
) -> Program:
    """Cut, order and bind the loops of `reference`, and let all other tensors follow.

    What reduces parts runs over them as they are made.
    """
    for _ in range(draw(st.integers(0, 3))):
        program = draw_cut(draw, program, reference)
    kept, reduced = grouped(program, reference)
    kept, reduced = list(draw(st.permutations(kept))), list(draw(st.permutations(reduced)))
    program = transforms.set_loop_domain(program, reference, [*kept, *reduced])
    if (kept or reduced) and draw(st.booleans()):
        program = draw_lanes(draw, program, reference)
    kept, _ = grouped(program, reference)
    bindings = program.schedule(reference).bindings
    serial = [leaf for leaf in kept if leaf not in bindings]
    count = draw(st.integers(0, min(len(serial), 2)))
    for leaf, parallel_type in zip(serial[:count], draw(st.permutations(GRIDS)), strict=False):
        program = transforms.parallelize(program, reference, leaf, parallel_type)
    others = [name for name in program.fusion.tensors if name not in parts.values()]
    program = transform_like(program, reference, others)
    program = parallelize_like(program, reference)
    for part, whole in parts.items():
        program = transform_like(program, part, [whole])
        program = parallelize_like(program, part, -1, [whole])
    return program


def draw_cut(draw: Draw, program: Program, reference: TensorName) -> Program:
    """A split of some loop, or a merge of two of a group."""
    leaves = program.schedule(reference).leaves
    if not leaves:
        return program
    kinds = {axis.name: axis.kind for axis in program.leaf_domains(reference)}
    groups = [
        [leaf for leaf in group if kinds[leaf] is kind]
        for group in grouped(program, reference)
        for kind in AxisKind
    ]
    pairs = [group for group in groups if len(group) > 1]
    if pairs and draw(st.booleans()):
        outer, inner = draw(st.permutations(draw(st.sampled_from(pairs))))[:2]
        return transforms.merge(program, reference, leaves.index(outer), leaves.index(inner))
    place = draw(st.integers(0, len(leaves) - 1))
    factor, inner = draw(st.sampled_from(FACTORS)), draw(st.booleans())
    return transforms.split(program, reference, place, factor, inner)


def draw_lanes(draw: Draw, program: Program, reference: TensorName) -> Program:
    """Lanes of some loop, innermost; perhaps of two neighbouring kinds."""
    place = draw(st.integers(0, len(program.schedule(reference).leaves) - 1))
    program = transforms.split(program, reference, place, draw(st.sampled_from((2, 4, 8, 16))))
    program = transforms.reorder(program, reference, {place + 1: -1})
    if draw(st.booleans()):
        program = transforms.split(program, reference, -1, 2)
        leaf = program.schedule(reference).leaves[-2]
        kind = draw(st.sampled_from(LANES))
        program = transforms.parallelize(program, reference, leaf, kind)
    leaf = program.schedule(reference).leaves[-1]
    return transforms.parallelize(program, reference, leaf, draw(st.sampled_from(LANES)))


def grouped(program: Program, reference: TensorName) -> tuple[list[AxisName], list[AxisName]]:
    """The loops of `reference` over axes that all reductions keep, and those over others."""
    space, definition = iteration_space(program), program.tensor(reference)
    reduced = {
        space.axis_of[axis.name]
        for expr in program.fusion.exprs
        if isinstance(expr, Reduction)
        for axis in (*program.tensor(expr.out).maybe_root, *program.tensor(expr.out).logical)
        if axis.kind is AxisKind.reduction
    }
    crossing = {
        axis.name
        for axis in (*definition.root, *definition.logical)
        if space.axis_of.get(axis.name) in reduced
    }
    schedule = program.schedule(reference)

    def crosses(leaf: AxisName) -> bool:
        above = steps_above((*definition.root_steps, *schedule.steps), [leaf])
        sources = {leaf, *(source for step in above for source in step_sources(step))}
        return bool(crossing & sources)

    return (
        [leaf for leaf in schedule.leaves if not crosses(leaf)],
        [leaf for leaf in schedule.leaves if crosses(leaf)],
    )
