"""Layouts by tensor axes or by loops, and kinds of memory."""

from __future__ import annotations

import pytest

from loop_nests import bind, one, total
from meshfuse.base.errors import UserError
from meshfuse.ir import build, transforms
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import MemoryType
from meshfuse.ir.verify import verify

X = ParallelType.mesh_x
PAIR = make_mesh([0, 1])


def laid_out(program: Program, tensor: TensorName) -> tuple[str, list[bool | None]]:
    verify(program)
    allocation = program.schedule(tensor).allocation
    assert allocation is not None
    extents = {axis.name: str(axis.extent) for axis in program.tensor(tensor).tensor_axes}
    return " ".join(extents[axis] for axis in allocation.order), list(allocation.contiguity)


def test_an_allocation_order() -> None:
    program, x = one(2, 1, 3)
    a, b, c = program.schedule(x).leaves
    laid = transforms.set_allocation_domain(program, x, [c, a, b], True)
    assert laid_out(laid, x) == ("3 2 1", [True, True, None])
    laid = transforms.set_allocation_domain(program, x, [c, b, a], [True, None, False])
    assert laid_out(laid, x) == ("3 1 2", [True, None, False])


def test_an_expanded_axis_has_no_flag() -> None:
    program, x = build.define_tensor(Program(), [2, 3], contiguity=[None, True])
    a, b = program.schedule(x).leaves
    laid = transforms.set_allocation_domain(program, x, [b, a], False)
    assert laid_out(laid, x) == ("3 2", [False, None])
    with pytest.raises(UserError, match=r"flag of axis a0:i\{2\} must be None: it is broadcast or"):
        transforms.set_allocation_domain(program, x, [b, a], [False, False])


def test_leaves_stand_for_the_axes_that_they_are_the_local_part_of() -> None:
    program, y = total(2, 4, 6, dims=[0])
    program = transforms.set_device_mesh(program, y, PAIR)
    program = transforms.split(program, y, 2, 2, inner_split=False)
    program = bind(bind(program, y, 2, X), y, 0, X)
    program = transforms.reorder(program, y, {2: 0, 3: 1})
    leaves = program.schedule(y).leaves
    laid = transforms.set_allocation_domain(program, y, leaves, True)
    assert laid_out(laid, y) == ("6 4", [True, True])
    laid = transforms.set_allocation_domain(program, y, leaves, [True, False, None, True])
    assert laid_out(laid, y) == ("6 4", [False, True])


def test_errors_of_allocations() -> None:
    program, x = one(4, 1)
    a, b = program.schedule(x).leaves
    split = transforms.split(program, x, 0, 2)
    for subject, order, contiguity, message in (
        (
            program,
            [a],
            True,
            r"set_allocation_domain\(T0, \[a0\], .*axis a1:b\{1\} of T0 is missing",
        ),
        (program, [a, b, a], True, r"axis a0:i\{4\} stands twice"),
        (
            program,
            [a, "a9"],
            True,
            r"a9 is no axis of T0; its loop axes are \[a0:i\{4\}, a1:b\{1\}",
        ),
        (program, [a, b], [True], "got 1 contiguity flags for 2 axes"),
        (program, [a, b], [True, True], r"flag of axis a1:b\{1\} must be None: it is broadcast"),
        (program, [a, b], [None, None], r"flag of axis a0:i\{4\} must be True or False"),
        (split, ["a2", b], True, r"a0:i\{4\} was split, and its part a3:i\{2\} is missing"),
        (split, ["a3", "a2", b], True, r"a3:i\{2\} is only a part of a0:i\{4\}; it must follow"),
        (split, ["a2", "a3", b], [False, True, None], "there is no gap between them, so the outer"),
        (split, [b, "a0", "a2", "a3"], True, r"axis a0:i\{4\} stands twice"),
    ):
        with pytest.raises(UserError, match=message):
            transforms.set_allocation_domain(subject, x, order, contiguity)


# Memory order from loops.


def test_memory_order_is_that_of_the_loops() -> None:
    program, x = one(4, 6, 3)
    program = transforms.set_device_mesh(program, x, PAIR)
    program = transforms.split(program, x, 1, 2, inner_split=False)
    program = bind(program, x, 1, X)
    program = transforms.reorder(program, x, {1: 0, 3: 1})
    assert laid_out(transforms.set_allocation_as_loop(program, x), x) == ("3 4 6", [True] * 3)


def test_parts_side_by_side_are_an_axis() -> None:
    program, x = one(4, 6)
    program = transforms.split(program, x, 0, 2)
    assert laid_out(transforms.set_allocation_as_loop(program, x), x) == ("4 6", [True, True])
    turned = transforms.reorder(program, x, {2: 0})
    assert laid_out(transforms.set_allocation_as_loop(turned, x), x) == ("6 4", [True, True])
    swizzled = transforms.swizzle1d(turned, x, 0, X)
    assert laid_out(transforms.set_allocation_as_loop(swizzled, x), x) == ("6 4", [True, True])
    merged = transforms.merge(transforms.reorder(one(4, 6)[0], x, {1: 0}), x, 0, 1)
    assert laid_out(transforms.set_allocation_as_loop(merged, x), x) == ("6 4", [True, True])


def test_parts_that_stand_apart_are_no_layout() -> None:
    program, x = one(4, 6)
    program = transforms.reorder(transforms.split(program, x, 0, 2), x, {1: 2})
    with pytest.raises(
        UserError,
        match=r"a3:i\{2\} is only a part of a0:i\{4\}; it must follow the other part, a2:i\{2\}",
    ):
        transforms.set_allocation_as_loop(program, x)


def test_a_whole_axis_on_the_mesh_has_a_place_in_memory() -> None:
    program, x = one(2, 6)
    program = bind(transforms.set_device_mesh(program, x, PAIR), x, 0, X)
    assert laid_out(transforms.set_allocation_as_loop(program, x), x) == ("2 6", [True, True])


def test_memory_types() -> None:
    program, y = total(4, 6, dims=[0])
    program, between = build.pointwise(program, "neg", [y])
    for tensor, which in ((TensorName("T0"), "an input"), (y, "an output")):
        for memory in (MemoryType.local, MemoryType.shared, MemoryType.tensor):
            with pytest.raises(UserError, match=f"{tensor} is {which} of the program; it"):
                transforms.set_memory_type(program, tensor, memory)
        changed = transforms.set_memory_type(program, tensor, MemoryType.symmetric)
        assert changed.schedule(tensor).memory is MemoryType.symmetric
    changed = transforms.set_memory_type(program, TensorName(between), MemoryType.shared)
    assert changed.schedule(TensorName(between)).memory is MemoryType.shared
