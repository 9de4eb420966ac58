"""Write shardings into loop nests: split serial leaves into digits and bind the mesh digits."""

from __future__ import annotations

from dataclasses import replace

from meshfuse.expr import IntExpr, const, is_const, mul
from meshfuse.facts.digits import Digit, Digits, Sharding, remaining_digit
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
    digits = covering(digits, program.all_axes(tensor)[axis].extent)
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


def covering(digits: Digits, extent: IntExpr) -> Digits:
    """The digits with the local one of 1 that normal form leaves out, where splits need it.

    [8@x] over 5  ->  [8@x, 1]     [4@x] over 4 is the axis itself
    """
    covered = mul(*(digit.extent for digit in digits))
    if any(digit.owner is None for digit in digits) or not is_const(extent) or covered is extent:
        return digits
    return (*digits, Digit(const(1)))


def split_into(
    program: Program, axis: AxisName, digits: Digits
) -> tuple[Program, tuple[Split, ...], tuple[AxisName, ...]]:
    """The splits that make one axis per digit, and those axes in order of the digits.

    One local digit is what remains, as in normal form: those above it are peeled off the outer end,
    those below it off the inner one. So a block split has the number of ranks as its factor,
    whatever the size of the axis, and mesh digits have their extents where they do not divide it.
    """
    place = remaining_digit(digits)
    remains = len(digits) - 1 if place is None else place
    steps: list[Split] = []
    above: list[AxisName] = []
    below: list[AxisName] = []
    for digit in digits[:remains]:
        program, made = _fresh_split(program, axis, digit.extent, inner_split=False)
        steps.append(made)
        above.append(made.outer)
        axis = made.inner
    for digit in reversed(digits[remains + 1 :]):
        program, made = _fresh_split(program, axis, digit.extent, inner_split=True)
        steps.append(made)
        below.insert(0, made.inner)
        axis = made.outer
    return program, tuple(steps), (*above, axis, *below)


def _fresh_split(
    program: Program, axis: AxisName, factor: IntExpr, *, inner_split: bool
) -> tuple[Program, Split]:
    program, outer = fresh_name(program, "a")
    program, inner = fresh_name(program, "a")
    return program, Split(axis, AxisName(outer), AxisName(inner), factor, inner_split)


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
