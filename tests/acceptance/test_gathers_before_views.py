"""A tensor that is needed whole as it is, transposed and reshaped is gathered once, then viewed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch

from meshfuse import FusionDefinition, TensorView
from sharded_runs import X, integers, mesh_of, place, posted, run, without_kernels

COLUMNS = 6


class View(NamedTuple):
    """A view of [1, rows, COLUMNS], whose axis `rows` has the rows."""

    define: Callable[[FusionDefinition, TensorView], TensorView]
    compute: Callable[[torch.Tensor], torch.Tensor]
    rows: int


VIEWS = {
    "permute": View(lambda fd, x: fd.ops.permute(x, [2, 0, 1]), lambda x: x.permute(2, 0, 1), 2),
    "squeeze": View(lambda fd, x: fd.ops.squeeze(x, [0]), lambda x: x[0], 0),
    "broadcast": View(
        lambda fd, x: fd.ops.broadcast(x, [False, False, True, False]), lambda x: x[:, :, None], 1
    ),
    "reshape": View(lambda fd, x: fd.ops.reshape(x, [-1, 2]), lambda x: x.reshape(-1, 2), 0),
    "several": View(
        lambda fd, x: fd.ops.permute(fd.ops.squeeze(x, [0]), [1, 0]), lambda x: x[0].T, 1
    ),
}


@pytest.mark.parametrize("rows", [8, 7], ids=["even", "uneven"])
@pytest.mark.parametrize("view_first", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_one_gather_for_all_that_need_it(name: str, view_first: bool, rows: int) -> None:
    """Sums along the rows, of a tensor and of a view of it. The view's blocks are an output."""
    view, mesh = VIEWS[name], mesh_of(2)
    with FusionDefinition() as fd:
        x = fd.define_tensor([1, rows, COLUMNS], contiguity=True)
        place(mesh, {1: X}, x)
        doubled = x * 2.0
        viewed = view.define(fd, doubled)
        pairs = [(doubled, 1), (viewed, view.rows)]
        sums = [fd.ops.cumsum(*pair) for pair in (pairs[::-1] if view_first else pairs)]
        place(mesh, {}, *sums)
        for output in (*sums, viewed):
            fd.add_output(output)
    data = integers(1, rows, COLUMNS)
    seen = view.compute(data * 2)
    wanted = [(data * 2).cumsum(1), seen.cumsum(view.rows)]
    with nullcontext() if (name, rows) == ("several", 7) else without_kernels():
        run(fd, [data], [*(wanted[::-1] if view_first else wanted), seen])
    assert posted(fd) == [("all_gather", X, 4 * 4 * COLUMNS)]


def test_a_view_that_nothing_reads_any_more_is_not_computed() -> None:
    mesh = mesh_of(2)
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, COLUMNS], contiguity=True)
        place(mesh, {0: X}, x)
        turned = fd.ops.permute(x, [1, 0])
        sums = [fd.ops.cumsum(x, 0), fd.ops.cumsum(turned, 1)]
        place(mesh, {}, *sums)
        for output in sums:
            fd.add_output(output)
    data = integers(4, COLUMNS)
    run(fd, [data], [data.cumsum(0), data.T.cumsum(1)])
    assert fd.explain().partition("-- communications --")[0].count("permute(") == 1
    assert posted(fd) == [("all_gather", X, 4 * 2 * COLUMNS)]


def test_what_only_a_view_needs_is_gathered_behind_it() -> None:
    """Nothing else could use the tensor that the view is of."""
    mesh = mesh_of(2)
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, COLUMNS], contiguity=True)
        place(mesh, {0: X}, x)
        total = fd.ops.cumsum(fd.ops.permute(fd.ops.relu(x), [1, 0]), 1)
        place(mesh, {}, total)
        fd.add_output(total)
    data = integers(4, COLUMNS)
    run(fd, [data], [data.relu().T.cumsum(1)])
    assert posted(fd) == [("all_gather", X, 4 * 2 * COLUMNS)]
    assert "why   T2 is needed whole by" in fd.explain()
