"""Loops that place nothing are forgotten; loops of a kernel are not."""

from __future__ import annotations

import pytest

from loop_nests import bind, nest, total
from meshfuse.base.errors import UserError
from meshfuse.ir import transforms
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.passes.forget_loops import forget_loops

X = TensorName("T0")
PAIR = make_mesh([0, 1])


def test_loops_that_bind_nothing_go() -> None:
    program, y = total(4, 12, dims=[1])
    program = transforms.split(transforms.reorder(program, y, {1: 0}), y, 0, 3)
    program = transforms.set_inline_depth(program, X, 1)
    program, notes = forget_loops(program)
    assert (nest(program, X), nest(program, y)) == (["i4", "i12"], ["i4", "r12"])
    assert program.schedule(X).inline_depth == 0
    assert [note.subject for note in notes] == [X, y]
    assert forget_loops(program) == (program, ())


@pytest.mark.parametrize("parallel_type", [ParallelType.mesh_x, ParallelType.stream])
def test_loops_that_place_something_stay(parallel_type: ParallelType) -> None:
    program, _ = total(4, 12, dims=[1])
    program = transforms.set_device_mesh(program, X, PAIR)
    program = transforms.split(program, X, 0, 2, inner_split=False)
    program = bind(transforms.split(program, X, 1, 1), X, 0, parallel_type)
    assert forget_loops(program) == (program, ())


@pytest.mark.parametrize("parallel_type", [ParallelType.grid_x, ParallelType.vectorize])
def test_loops_of_a_kernel_are_an_error(parallel_type: ParallelType) -> None:
    program, y = total(4, 12, dims=[1])
    with pytest.raises(
        UserError, match=rf"a2:i\{{4\}} of T1 is bound to {parallel_type}, but exec"
    ):
        forget_loops(bind(program, y, 0, parallel_type))
