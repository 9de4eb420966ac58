"""A result of which only a view is placed: made where that is, or moved there, what is cheaper."""

from __future__ import annotations

import pytest

from meshfuse import FusionDefinition
from sharded_runs import Cuts, Posted, X, Y, integers, mesh_of, place, posted, run, without_kernels

ROWS, COLUMNS = 4, 12


@pytest.mark.parametrize(
    ("inner", "cuts", "moved"),
    [
        # All of it everywhere: if much is summed, the result is gathered, and else the operands.
        (64, {}, [("all_gather", X, 4 * 2 * 6), ("all_gather", Y, 4 * 2 * 12)]),
        (1, {}, [("all_gather", Y, 4 * 2), ("all_gather", X, 4 * 6)]),
        # In blocks as it is made.
        (3, {0: X, 2: Y}, []),
    ],
    ids=["long", "short", "there"],
)
def test_product_of_rows_and_columns(inner: int, cuts: Cuts, moved: list[Posted]) -> None:
    mesh = mesh_of(2, 2)
    with FusionDefinition() as fd:
        a = fd.define_tensor([ROWS, inner], contiguity=True)
        b = fd.define_tensor([inner, COLUMNS], contiguity=True)
        place(mesh, {0: Y}, a)
        place(mesh, {1: X}, b)
        turned = fd.ops.permute(fd.ops.matmul(a, b), [1, 0])
        view = fd.ops.broadcast(turned, [False, True, False])
        place(mesh, cuts, view)
        fd.add_output(view)
    data = [integers(ROWS, inner), integers(inner, COLUMNS)]
    with without_kernels():
        run(fd, data, [(data[0] @ data[1]).T[:, None]])
    assert sorted(map(str, posted(fd))) == sorted(map(str, moved))


@pytest.mark.parametrize("behind", [False, True], ids=["as_made", "behind_views"])
def test_terms_are_scattered_to_where_the_view_is(behind: bool) -> None:
    """Rows over y, the sum over x, the result's columns over x."""
    mesh = mesh_of(2, 2)
    with FusionDefinition() as fd:
        a = fd.define_tensor([ROWS, 8], contiguity=True)
        b = fd.define_tensor([8, COLUMNS], contiguity=True)
        place(mesh, {0: Y, 1: X}, a)
        place(mesh, {0: X}, b)
        made = fd.ops.matmul(a, b)
        view = fd.ops.permute(made, [1, 0])
        if behind:
            place(mesh, {0: X, 1: Y}, view)
        else:
            place(mesh, {0: Y, 1: X}, made)
        fd.add_output(view)
    data = [integers(ROWS, 8), integers(8, COLUMNS)]
    with without_kernels():
        run(fd, data, [(data[0] @ data[1]).T])
    assert posted(fd) == [("reduce_scatter", X, 4 * (ROWS // 2) * COLUMNS)]
