"""Write shardings into loop nests: split serial leaves into digits and bind the mesh digits."""

from __future__ import annotations

from dataclasses import replace

from meshfuse.expr import const, const_value, is_const
from meshfuse.facts.sharding import Digit, Digits, Sharding
from meshfuse.ir.axes import AxisKind, AxisName, TensorName
from meshfuse.ir.fusion import TensorDef
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.program import Program, fresh_name
from meshfuse.ir.rewrite import add_tensor, fresh_axes, fresh_tensor_name
from meshfuse.ir.schedule import Schedule, Split


def is_free_leaf(program: Program, tensor: TensorName, axis: AxisName) -> bool:
    """Whether `axis` stands in the loop nest itself and nothing is bound to it."""
    schedule = program.schedule(tensor)
    return axis in schedule.leaves and axis not in schedule.bindings


def shard_leaf(program: Program, tensor: TensorName, axis: AxisName, digits: Digits) -> Program:
    """Split free leaf `axis` into one leaf per digit and bind the mesh digits.

    a0{n} with [2@x, n/2]  ->  split(a0 -> a1{2}, a2{n/2}), a1 bound to x
    a0{5} with [8@x]       ->  split(a0 -> a1{8}, a2{1}), a1 bound to x
    """
    (only, *others), extent = digits, program.all_axes(tensor)[axis].extent
    if not others and only.owner is not None and is_const(extent) and extent is not only.extent:
        digits = (only, Digit(const(1)))  # normal form leaves out what is 1
    program, steps, leaves = split_into(program, axis, digits)
    schedule = program.schedule(tensor)
    position = schedule.leaves.index(axis)
    owned = {leaf: digit.owner for leaf, digit in zip(leaves, digits, strict=True) if digit.owner}
    return program.with_schedule(
        tensor,
        replace(
            schedule,
            leaves=(*schedule.leaves[:position], *leaves, *schedule.leaves[position + 1 :]),
            steps=(*schedule.steps, *steps),
            bindings={**schedule.bindings, **owned},
        ),
    )


def split_into(
    program: Program, axis: AxisName, digits: Digits
) -> tuple[Program, tuple[Split, ...], tuple[AxisName, ...]]:
    """The splits that make one axis per digit, and those axes in order of the digits.

    Digits peel off the end where the extent is a number above 0, the outer end first: a block split
    has the number of ranks as its factor, whatever the size of the axis.
    """
    steps: list[Split] = []
    above: list[AxisName] = []
    below: list[AxisName] = []
    rest = digits
    while len(rest) > 1:
        program, outer = fresh_name(program, "a")
        program, inner = fresh_name(program, "a")
        peel_outer = (const_value(rest[0].extent) or 0) > 0 or not is_const(rest[-1].extent)
        factor = rest[0].extent if peel_outer else rest[-1].extent
        made = Split(axis, AxisName(outer), AxisName(inner), factor, inner_split=not peel_outer)
        steps.append(made)
        if peel_outer:
            above.append(made.outer)
            axis, rest = made.inner, rest[1:]
        else:
            below.insert(0, made.inner)
            axis, rest = made.outer, rest[:-1]
    return program, tuple(steps), (*above, axis, *below)


def new_sharded_tensor(
    program: Program, like: TensorName, sharding: Sharding
) -> tuple[Program, TensorName]:
    """A tensor that nothing defines yet, like `like` in type and tensor axes, placed as `sharding`.

    Each mesh axis that it is partial over is an axis of kind partial, after the tensor axes.
    """
    axes = [(axis.kind, axis.extent) for axis in program.tensor(like).tensor_axes]
    mesh = sharding.mesh
    waiting = (
        () if mesh is None else tuple((owner, mesh.axis_size(owner)) for owner in sharding.partial)
    )
    program, logical = fresh_axes(program, axes)
    program, partial = fresh_axes(program, [(AxisKind.partial, const(size)) for _, size in waiting])
    definition = TensorDef(program.tensor(like).dtype, (*logical, *partial))
    bindings = {axis.name: owner for axis, (owner, _) in zip(partial, waiting, strict=True)}
    return place_tensor(program, definition, sharding, bindings)


def place_tensor(
    program: Program,
    definition: TensorDef,
    sharding: Sharding,
    bindings: dict[AxisName, ParallelType],
) -> tuple[Program, TensorName]:
    """Enter a tensor under a fresh name: tensor axes as in `sharding`, others bound as given."""
    program, name = fresh_tensor_name(program)
    leaves = tuple(axis.name for axis in definition.logical)
    schedule = Schedule(leaves, bindings=bindings, mesh=sharding.mesh)
    program = add_tensor(program, name, definition, schedule)
    for axis, digits in zip(definition.tensor_axes, sharding.axes, strict=True):
        if any(digit.owner for digit in digits):
            program = shard_leaf(program, name, axis.name, digits)
    return program, name
