"""uniform, normal and their likes: reproducible, and the same numbers on any mesh."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernel_paths import PATHS
from meshfuse import DataType, FusionDefinition, TensorView
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.host.parser import parse_host_program
from meshfuse.host.printer import print_host_program
from meshfuse.ir.parser import parse_program
from meshfuse.ir.printer import print_program
from meshfuse.multidevice import DeviceMesh, simulate

FLOATS = {
    DataType.Half: torch.float16,
    DataType.BFloat16: torch.bfloat16,
    DataType.Float: torch.float32,
    DataType.Double: torch.float64,
}


def drawing(name: str, *, is_given: bool = False) -> FusionDefinition:
    """x * `name`(0.3, 1.7, [5, 9]); seed and offset are inputs, or torch's generator says."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([5, 9])
        low, high = fd.define_scalar(0.3), fd.define_scalar(1.7)
        shape = [fd.define_scalar(5), fd.define_scalar(9)]
        given: dict[str, Any] = {}
        if is_given:
            given["rng_seed"] = fd.define_scalar(DataType.Int)
            given["rng_offset"] = fd.define_scalar(DataType.Int)
        fd.add_output(fd.ops.mul(x, getattr(fd.ops, name)(low, high, shape, **given)))
    return fd


@pytest.mark.parametrize("name", ["uniform", "normal"])
def test_each_call_draws_on_from_the_seed(name: str) -> None:
    stateful, stateless = drawing(name), drawing(name, is_given=True)
    x = torch.rand(5, 9)
    for seed in (0, 7, 2**63 - 1):
        torch.manual_seed(seed)
        found = [stateful.execute([x])[0] for _ in range(4)]
        wanted = [stateless.execute([x, seed, offset])[0] for offset in range(4)]
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.5, 3.7), (0.1, 0.2)])
def test_uniform_stays_between_its_limits(dtype: DataType, low: float, high: float) -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.uniform(low, high, [300, 301], dtype=dtype))
    (found,) = fd.execute([], device="cpu")
    assert found.dtype == FLOATS[dtype]
    assert found.shape == (300, 301)
    assert low <= found.double().min() < low + 0.01 * (high - low) + abs(low) / 128
    assert high - 0.01 * (high - low) - high / 64 < found.double().max() < high
    assert abs(found.double().mean() - (low + high) / 2) < 0.02 * (high - low)


def test_likes_have_shape_and_type_of_their_operand() -> None:
    for dtype, theirs in FLOATS.items():
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 1, 400], dtype=dtype)
            fd.add_output(fd.ops.rand_like(x))
            fd.add_output(fd.ops.randn_like(x))
        uniform, normal = fd.execute([torch.zeros(250, 1, 400, dtype=theirs)])
        assert uniform.dtype == normal.dtype == theirs
        assert uniform.shape == normal.shape == (250, 1, 400)
        assert uniform.min() >= 0
        assert uniform.max() < 1
        assert abs(uniform.double().mean() - 0.5) < 0.01
        assert abs(normal.double().mean()) < 0.02
        assert abs(normal.double().std() - 1) < 0.02
        assert not torch.equal(uniform, normal)


def dropout(fd: FusionDefinition, x: TensorView) -> TensorView:
    kept = fd.ops.cast(fd.ops.lt(fd.ops.rand_like(x), 0.75), DataType.Float)
    return fd.ops.mul(fd.ops.mul(x, kept), 1 / 0.75)


def two_dropouts(place: Callable[..., None] | None = None, rows: int = -1) -> FusionDefinition:
    """Two masks around a contraction: several segments, two draws."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([rows, 12], contiguity=True)
        weight = fd.define_tensor([12, 12], contiguity=True)
        first = dropout(fd, x)
        second = dropout(fd, fd.ops.linear(first, weight))
        fd.add_output(first)
        fd.add_output(second)
        if place is not None:
            place(x, weight, second)
    return fd


def dropout_inputs() -> list[torch.Tensor]:
    """Without zeros before the dropouts."""
    return [torch.ones(24, 12), torch.eye(12) + 1]


@pytest.mark.parametrize("path", PATHS)
def test_how_a_program_is_cut_changes_no_number(path: str) -> None:
    torch.manual_seed(9)
    wanted = two_dropouts().execute(dropout_inputs())
    for mask in wanted:
        assert abs((mask != 0).float().mean() - 0.75) < 0.1
    torch.manual_seed(9)
    torch.testing.assert_close(PATHS[path](two_dropouts(), dropout_inputs()), wanted)


def test_segments_run_one_by_one_draw_alike() -> None:
    torch.manual_seed(9)
    fd = two_dropouts(rows=24)
    wanted = [fd.execute(dropout_inputs()) for _ in range(2)]
    fd = two_dropouts(rows=24)
    fd.segment(dropout_inputs())
    assert len(fd.segments) > 3
    torch.manual_seed(9)
    torch.testing.assert_close([fd.execute(dropout_inputs()) for _ in range(2)], wanted)


def test_a_call_is_validated_by_the_numbers_that_it_drew() -> None:
    torch.manual_seed(9)
    wanted = [two_dropouts().execute(dropout_inputs()) for _ in range(2)]
    fd = two_dropouts()
    torch.manual_seed(9)
    first = fd.validate(dropout_inputs())
    second = fd.validate(dropout_inputs(), wanted[1])
    torch.testing.assert_close([first, second], wanted)


def split(mesh: DeviceMesh, tensor: TensorView, *axes: tuple[int, int]) -> None:
    """Blocks of tensor axes over dimensions of the mesh, the last axis first."""
    tensor.set_device_mesh(mesh)
    for axis, dimension in axes:
        tensor.outer_split(axis, mesh.shape[dimension])
        tensor.axis(axis).parallelize(mesh.axis(dimension))


LINES = (1, 2, 3, 4, 5)


@pytest.mark.parametrize("d", LINES)
def test_a_mesh_changes_no_number(d: int) -> None:
    """Rows in blocks, even or not: a mask is a part of what one device has."""
    mesh = DeviceMesh(range(d))
    torch.manual_seed(9)
    wanted = two_dropouts().execute(dropout_inputs())
    torch.manual_seed(9)
    fd = two_dropouts(lambda x, *_: split(mesh, x, (0, 0)))
    ranks = simulate(fd, dropout_inputs())
    assert fd.fec.communications() == ()
    for found, want in zip(zip(*ranks, strict=True), wanted, strict=True):
        assert torch.equal(torch.cat(found), want)


@pytest.mark.parametrize("name", ["uniform", "normal"])
def test_parts_of_any_form_have_their_numbers(name: str) -> None:
    """Blocks on two axes, cycles, and what is replicated."""
    mesh = DeviceMesh([[0, 1, 2], [3, 4, 5]])
    shape = (8, 9)
    with FusionDefinition() as fd:
        made = [getattr(fd.ops, name)(0.0, 1.0, shape) for _ in range(4)]
        for tensor in made:
            fd.add_output(tensor)
        split(mesh, made[0], (1, 1), (0, 0))
        made[1].set_device_mesh(mesh)
        made[1].split(1, 3)
        made[1].axis(2).parallelize(mesh.axis(1))
        split(mesh, made[2], (0, 1))
        made[3].set_device_mesh(mesh)
    with FusionDefinition() as whole:
        for _ in made:
            whole.add_output(getattr(whole.ops, name)(0.0, 1.0, shape))
    torch.manual_seed(1)
    wanted = whole.execute([], device="cpu")
    torch.manual_seed(1)
    for rank, (blocks, cycles, uneven, same) in enumerate(simulate(fd, [])):
        row, column = divmod(rank, 3)
        here = slice(3 * column, 3 * column + 3)
        assert torch.equal(blocks.cpu(), wanted[0][4 * row : 4 * row + 4, here])
        assert torch.equal(cycles.cpu(), wanted[1][:, column::3])
        assert torch.equal(uneven.cpu(), wanted[2][here])
        assert torch.equal(same.cpu(), wanted[3])


def test_threads_draw_different_numbers() -> None:
    fd = drawing("uniform")
    torch.manual_seed(2)
    x = torch.ones(5, 9)
    wanted = [fd.execute([x])[0] for _ in range(40)]
    torch.manual_seed(2)
    found: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(10):
            found.append(fd.execute([x])[0])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(t.sum().item() for t in found) == sorted(t.sum().item() for t in wanted)


def test_text_and_repr_define_it_again() -> None:
    fd = two_dropouts()
    fd.execute(dropout_inputs())
    text = repr(fd.fusion)
    assert "c0, c1 = random_source(2)" in text
    assert "uniform(0.0, 1.0, c0, c1, draw=1)" in text
    assert print_program(parse_program(text)) == text
    host = print_host_program(fd.fec.host_program())
    assert host.count("random_source") == 1
    assert print_host_program(parse_host_program(host)) == host
    scope: dict[str, Any] = {}
    for definition in (fd, drawing("uniform", is_given=True), drawing("normal")):
        exec("from meshfuse import *\n" + repr(definition), scope)
        with FusionDefinition() as again:
            scope["nvfuser_fusion"](again)
        assert repr(again.fusion) == repr(definition.fusion)


def test_what_cannot_be_is_refused() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 4], dtype=DataType.Int)
        with pytest.raises(UserError, match="only create floating point types"):
            fd.ops.uniform(0.0, 1.0, [4], dtype=DataType.Int)
        with pytest.raises(UserError, match=r"rand_like\(T0\): takes floating types"):
            fd.ops.rand_like(x)
        with pytest.raises(UserError, match="must be given together"):
            fd.ops.normal(0.0, 1.0, [4], rng_seed=3)
        with pytest.raises(UserError, match="size -2 is negative"):
            fd.ops.normal(0.0, 1.0, [-2])
        with pytest.raises(UserTypeError, match="shape must be a list"):
            fd.ops.uniform(0.0, 1.0, 4)  # pyright: ignore[reportArgumentType]  # the point
        with pytest.raises(UserTypeError, match="dtype must be a DataType"):
            fd.ops.uniform(0.0, 1.0, [4], dtype=torch.float32)  # pyright: ignore[reportArgumentType]  # the point
        assert repr(fd.fusion).count("tensor(") == 1
