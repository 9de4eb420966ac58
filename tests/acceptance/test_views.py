"""Outputs that are other views of inputs share their memory; the rest is copied, with a note."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from kernel_paths import PATHS
from meshfuse import FusionDefinition, TensorView
from meshfuse.multidevice import DeviceMesh, simulate
from sharded_cases import block, integers

Build = Callable[[FusionDefinition, TensorView], TensorView | Sequence[TensorView]]


def define(build: Build, data: torch.Tensor, *, static: bool = True) -> FusionDefinition:
    with FusionDefinition() as fd:
        outputs = build(fd, fd.from_pytorch(data, static_sizes=static))
        for output in outputs if isinstance(outputs, Sequence) else (outputs,):
            fd.add_output(output)
    return fd


VIEWS: list[tuple[Build, Callable[[torch.Tensor], torch.Tensor]]] = [
    (lambda fd, x: fd.ops.permute(x, [1, 0]), lambda x: x.permute(1, 0)),
    (lambda fd, x: fd.ops.reshape(x, [4, 2, 3]), lambda x: x.reshape(4, 2, 3)),
    (lambda fd, x: fd.ops.broadcast(x, [False, True, False]), lambda x: x[:, None]),
    (
        lambda fd, x: fd.ops.permute(fd.ops.reshape(x, [4, 2, 3]), [2, 0, 1]),
        lambda x: x.reshape(4, 2, 3).permute(2, 0, 1),
    ),
    (
        lambda fd, x: fd.ops.squeeze(fd.ops.broadcast(x, [True, False, False]), [0]),
        lambda x: x,
    ),
    (
        lambda fd, x: fd.ops.reshape(fd.ops.permute(x, [1, 0]), [2, 3, 4]),
        lambda x: x.permute(1, 0).reshape(2, 3, 4),
    ),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize(("build", "reference"), VIEWS)
def test_a_view_shares_memory(
    build: Build, reference: Callable[[torch.Tensor], torch.Tensor], gaps: bool, path: str
) -> None:
    data = torch.randn(4, 12)[:, :6] if gaps else torch.randn(4, 6)
    [result] = PATHS[path](define(build, data), [data])
    assert torch.equal(result, reference(data))
    assert result.data_ptr() == data.data_ptr()
    assert result.stride() == reference(data).stride()


@pytest.mark.parametrize("path", PATHS)
def test_axes_that_merge_over_gaps_are_copied(path: str) -> None:
    data = torch.randn(4, 12)[:, :6]
    [result] = PATHS[path](define(lambda fd, x: fd.ops.reshape(x, [24]), data), [data])
    assert torch.equal(result, data.reshape(24))
    assert result.is_contiguous()


def test_a_copy_is_noted() -> None:
    data = torch.randn(4, 6)
    fd = define(lambda fd, x: fd.ops.reshape(fd.ops.permute(x, [1, 0]), [24]), data)
    [result] = fd.execute([data])
    assert torch.equal(result, data.t().reshape(24))
    assert result.data_ptr() != data.data_ptr()
    assert "no view of T0: axes that T2 merges are not known to be contiguous" in fd.explain()


@pytest.mark.parametrize("path", PATHS)
def test_a_view_is_read_by_kernels_too(path: str) -> None:
    data = torch.randn(4, 12)[:, :6]

    def build(fd: FusionDefinition, x: TensorView) -> Sequence[TensorView]:
        turned = fd.ops.permute(x, [1, 0])
        return turned, fd.ops.sum(turned, [0]), turned + 1.0

    view, total, more = PATHS[path](define(build, data, static=False), [data])
    assert view.data_ptr() == data.data_ptr()
    torch.testing.assert_close(total, data.sum(1))
    assert torch.equal(more, data.t() + 1)
    assert more.is_contiguous()


@pytest.mark.parametrize("path", PATHS)
def test_a_view_of_an_input_that_is_updated_keeps_the_old_value(path: str) -> None:
    data = torch.randn(4, 6)
    old = data.clone()
    with FusionDefinition() as fd:
        x = fd.from_pytorch(data)
        fd.add_output(fd.ops.permute(x, [1, 0]))
        fd.add_output(x + 1.0, x)
    [result] = PATHS[path](fd, [data])
    assert torch.equal(result, old.t())
    assert torch.equal(data, old + 1)


def test_views_of_shards() -> None:
    mesh = DeviceMesh(range(2))
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 6], contiguity=True)
        fd.add_output(fd.ops.permute(fd.ops.reshape(x, [4, 2, 3]), [1, 0, 2]))
        block(mesh, x, 0)
    data = integers(4, 6)
    shards = [shard.clone() for shard in data.chunk(2)]
    results = simulate(fd, [[shard] for shard in shards], per_rank=True)
    for rank, [result] in enumerate(results):
        assert torch.equal(
            result.as_subclass(torch.Tensor), shards[rank].reshape(2, 2, 3).permute(1, 0, 2)
        )
        assert result.data_ptr() == shards[rank].data_ptr()


def test_a_reshape_between_contractions_moves_nothing() -> None:
    """[b, s, e] -> linear -> [b, s, h, k] -> matmul with [h, k, k]: two products and a view."""
    x, w, v = torch.randn(2, 3, 8), torch.randn(12, 8), torch.randn(2, 3, 4, 5)
    with FusionDefinition() as fd:
        product = fd.ops.linear(fd.from_pytorch(x), fd.from_pytorch(w))
        rows = fd.ops.reshape(product, [2, 3, 3, 4])
        fd.add_output(fd.ops.matmul(rows, fd.from_pytorch(v)))
    [result] = fd.execute([x, w, v])
    torch.testing.assert_close(result, (x @ w.t()).reshape(2, 3, 3, 4) @ v)
    assert not fd.fec.host_program().kernels


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("static", [True, False])
def test_a_kernel_reads_a_view_of_an_expanded_input(path: str, static: bool) -> None:
    """It counts on the stride of 0, so that the view must stay one."""
    data = integers(5, 3).unsqueeze(-1).expand(5, 3, 4)
    with FusionDefinition() as fd:
        x = fd.from_pytorch(data, static_sizes=static)
        view = fd.ops.broadcast(x, [True, False, False, False])
        fd.add_output(fd.ops.mul(view, x))
        fd.add_output(view)
    product, seen = PATHS[path](fd, [data])
    assert torch.equal(product, (data * data)[None])
    assert torch.equal(seen, data[None])
