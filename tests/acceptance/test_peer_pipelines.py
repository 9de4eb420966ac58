"""Pipelines between peers: loops with a chunk for each rank, fetched from it or delivered to it."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from golden_text import GoldenCheck
from host_loops import STREAM, define, dense, host_program, loops
from meshfuse import DataType, FusionDefinition
from meshfuse.api.planning import plan
from meshfuse.host.nodes import Allocate, Communicate, all_nodes
from meshfuse.host.printer import print_host_program
from meshfuse.ir.schedule import MemoryType
from meshfuse.multidevice import simulate
from peer_programs import (
    gather_then_multiply,
    in_blocks,
    multiply_then_scatter,
    pipelined_mlp,
    terms_one_by_one,
)
from sharded_runs import X, Y, integers, kinds, mesh_of, place, posted, run

RANKS = [1, 2, 3, 4, 8]
Blocks = tuple[tuple[int, int], tuple[int, int]]


def received(fd: FusionDefinition) -> int:
    """Bytes that the rank receives that gets most, in all iterations."""
    return sum(each.bytes for each in plan(fd, [None, None]).communications)


def why_whole(fd: FusionDefinition) -> str:
    """What notes say of loops that are not there."""
    return "\n".join(line for line in fd.explain().splitlines() if "not_streamed" in line)


# Gather and multiply.


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("d", RANKS)
def test_blocks_are_fetched_and_multiplied(d: int, rotated: bool) -> None:
    """The last block is shorter, of 8 ranks the last ones have none; behind the product stand a
    bias, an activation and a cast."""
    rows = {1: 4, 3: 7, 8: 9}.get(d, 2 * d + 1)
    fd = gather_then_multiply(d, rows, rotated=rotated, epilogue=True)
    x, w, b = integers(rows, 4), integers(4, 5), integers(5)
    run(fd, [x, w, b], [(x @ w + b).relu().half()])
    assert kinds(fd) == ([("fetch", X)] if d > 1 else [])
    assert len(loops(fd.fec.host_program())) == 1


@pytest.mark.parametrize("d", [2, 3, 4])
def test_as_much_is_fetched_as_is_gathered(d: int) -> None:
    fd = gather_then_multiply(d, 4 * d)
    wanted = (d - 1) * 4 * 4 * 4
    assert received(fd) == wanted
    plain = gather_then_multiply(d, 4 * d, streamed=False)
    assert received(plain) == wanted
    own, *others = (each.bytes for each in plan(fd, [None, None]).communications)
    assert own == 0
    assert others == [64] * (d - 1)


@pytest.mark.parametrize(("d", "pieces"), [(1, 2), (2, 2), (3, 4), (8, 2)])
@pytest.mark.parametrize("rotated", [True, False])
def test_blocks_are_fetched_in_pieces(d: int, pieces: int, rotated: bool) -> None:
    rows = 2 * d * pieces
    fd = gather_then_multiply(d, rows, pieces=pieces, rotated=rotated)
    x, w = integers(rows, 4), integers(4, 5)
    run(fd, [x, w], [(x @ w).relu()])
    if d > 1:
        assert posted(fd) == [("fetch", X, 32)]
        most = d - 1 if rotated else d  # not rotated: of each block, the ranks that lack it
        assert received(fd) == most * pieces * 32


def test_blocks_of_unequal_size_are_fetched_as_they_are() -> None:
    fd = gather_then_multiply(3, 7, pieces=2)
    x, w = integers(7, 4), integers(4, 5)
    run(fd, [x, w], [(x @ w).relu()])
    assert posted(fd) == [("fetch", X, 48)]
    assert "not all of one size" in why_whole(fd)


@pytest.mark.parametrize("d", RANKS)
def test_columns_are_fetched_and_their_products_added_up(d: int) -> None:
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, 3, 2 * d), dense(fd, 2 * d, 20)
        y = fd.ops.matmul(x, w)
        place(mesh, {1: X}, x)
        for tensor in (w, y):
            tensor.set_device_mesh(mesh)
        in_blocks(y, 2, d)
        fd.add_output(y)

    fd, x, w = define(build), integers(3, 2 * d), integers(2 * d, 20)
    run(fd, [x, w], [x @ w])
    assert kinds(fd) == ([("fetch", X)] if d > 1 else [])


@pytest.mark.parametrize("d", [2, 3])
def test_a_transposed_block_and_two_readers_are_in_one_loop(d: int) -> None:
    """x is gathered as [K, rows] lies, permuted, and read by two products."""
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        x, w, v = dense(fd, 4, 3 * d), dense(fd, 4, 5), dense(fd, 4, 2)
        turned = fd.ops.permute(x, [1, 0])
        whole = fd.ops.set(turned)
        products = [fd.ops.matmul(whole, w), fd.ops.matmul(whole, v)]
        place(mesh, {1: X}, x)
        place(mesh, {0: X}, turned)
        for tensor in (w, v, whole, *products):
            tensor.set_device_mesh(mesh)
        for product in products:
            in_blocks(product, 0, d)
            fd.add_output(product)

    fd, x, w, v = define(build), integers(4, 3 * d), integers(4, 5), integers(4, 2)
    run(fd, [x, w, v], [x.T @ w, x.T @ v])
    assert kinds(fd) == [("fetch", X)]


@pytest.mark.parametrize("shape", [(2, 3), (3, 2)])
def test_on_a_larger_mesh_blocks_come_along_one_axis(shape: tuple[int, int]) -> None:
    """Ranks along y have other columns of w; rows are fetched along x."""
    mesh, d = mesh_of(*shape), shape[1]

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, 2 * d, 4), dense(fd, 4, 3 * shape[0])
        y = fd.ops.matmul(x, w)
        place(mesh, {0: X}, x)
        place(mesh, {1: Y}, w, y)
        in_blocks(y, 0, d)
        fd.add_output(y)

    fd, x, w = define(build), integers(2 * d, 4), integers(4, 3 * shape[0])
    run(fd, [x, w], [x @ w])
    assert kinds(fd) == [("fetch", X)]


def test_a_gathered_tensor_that_is_wanted_as_a_whole_is_put_together() -> None:
    mesh = mesh_of(3)

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, 7, 4), dense(fd, 4, 5)
        whole = fd.ops.set(x)
        y = fd.ops.matmul(whole, w)
        place(mesh, {0: X}, x)
        place(mesh, {}, whole, w, y)
        in_blocks(y, 0, 3)
        fd.add_output(y)
        fd.add_output(whole)

    fd, x, w = define(build), integers(7, 4), integers(4, 5)
    run(fd, [x, w], [x @ w, x])
    assert kinds(fd) == [("fetch", X)]
    [fetch] = [n for n in all_nodes(fd.fec.host_program().body) if isinstance(n, Communicate)]
    assert fetch.into is not None and fetch.sum_over is None  # where it is put together


@pytest.mark.parametrize("rows", [9, 7, 2])
def test_rows_of_a_size_that_a_call_says(rows: int) -> None:
    mesh = mesh_of(3)

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, -1, 4), dense(fd, 4, 5)
        y = fd.ops.matmul(x, w)
        place(mesh, {0: X}, x)
        place(mesh, {}, w, y)
        in_blocks(y, 0, 3)
        fd.add_output(y)

    fd, x, w = define(build), integers(rows, 4), integers(4, 5)
    run(fd, [x, w], [x @ w])
    assert kinds(fd) == [("fetch", X)]


def test_loops_along_two_axes() -> None:
    """Of each block that is fetched, one half of the columns after the other."""
    mesh = mesh_of(3)

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, 9, 4), dense(fd, 4, 6)
        y = fd.ops.matmul(x, w)
        place(mesh, {0: X}, x)
        place(mesh, {}, w, y)
        y.outer_split(1, 2)
        y.axis(1).parallelize(STREAM)
        in_blocks(y, 0, 3)
        fd.add_output(y)

    fd, x, w = define(build), integers(9, 4), integers(4, 6)
    run(fd, [x, w], [x @ w])
    assert [str(loop.count) for loop in loops(fd.fec.host_program())] == ["3", "2"]


# Multiply and scatter.


@pytest.mark.parametrize("d", RANKS)
@pytest.mark.parametrize("rows", [16, 13])
def test_terms_are_delivered_as_they_are_made(d: int, rows: int) -> None:
    fd = multiply_then_scatter(d, rows, 4 * d)
    x, w = integers(rows, 4 * d), integers(4 * d, 3)
    run(fd, [x, w], [x @ w])
    assert kinds(fd) == ([("deliver", X)] if d > 1 else [])


@pytest.mark.parametrize("d", [2, 4])
def test_as_much_is_delivered_as_is_scattered(d: int) -> None:
    fd, wanted = multiply_then_scatter(d, 16, 4 * d), (d - 1) * (16 // d) * 3 * 4
    assert received(fd) == wanted
    assert received(multiply_then_scatter(d, 16, 4 * d, streamed=False)) == wanted
    *others, own = (each.bytes for each in plan(fd, [None, None]).communications)
    assert own == 0
    assert others == [16 // d * 3 * 4] * (d - 1)


def test_a_bias_is_added_to_what_was_delivered() -> None:
    mesh = mesh_of(3)

    def build(fd: FusionDefinition) -> None:
        x, w, b = dense(fd, 9, 6), dense(fd, 5, 6), dense(fd, 5)
        y = fd.ops.linear(x, w, b)
        place(mesh, {1: X}, x, w)
        place(mesh, {0: X}, y)
        place(mesh, {}, b)
        terms_one_by_one(y, 3)
        fd.add_output(y)

    fd, x, w, b = define(build), integers(9, 6), integers(5, 6), integers(5)
    run(fd, [x, w, b], [x @ w.T + b])
    assert kinds(fd) == [("deliver", X)]


def test_terms_are_made_in_memory_that_peers_read() -> None:
    fd = multiply_then_scatter(2, 8, 4)
    host = host_program(fd, [integers(8, 2), integers(2, 3)])
    [delivered] = [n for n in all_nodes(host.body) if isinstance(n, Communicate)]
    allocated = {n.buffer: n.memory for n in all_nodes(host.body) if isinstance(n, Allocate)}
    assert allocated[delivered.src] is MemoryType.symmetric
    assert delivered.out not in allocated


def test_half_terms_are_added_in_the_order_of_iterations() -> None:
    """Each term is rounded, and each sum: 2048 + 1 is 2048, as often as it is added."""
    fd = multiply_then_scatter(4, 4, 4, dtype=DataType.Half)
    x = torch.tensor([[2048.0, 1.0, 1.0, 1.0]] * 4).half()
    run(fd, [x, torch.ones(4, 3).half()], [own_last(x)])


def own_last(x: torch.Tensor) -> torch.Tensor:
    """The sum of each row for rank r: of parts r - 1, r - 2, .., r."""
    sums = []
    for rank in range(4):
        total = torch.zeros((), dtype=torch.float16)
        for j in range(4):
            total = total + x[rank, (rank - j - 1) % 4]
        sums.append(total)
    return torch.stack(sums)[:, None].expand(4, 3)


def test_terms_in_the_order_of_the_team_are_not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = multiply_then_scatter(2, 8, 4)
    x, w = integers(8, 4), integers(4, 3)
    monkeypatch.setenv("MESHFUSE_ENABLE", "deterministic_collectives")
    run(fd, [x, w], [x @ w])
    assert kinds(fd) == [("reduce_scatter", X)]
    assert "in the order of the team" in why_whole(fd)


# Both.


@pytest.mark.parametrize("d", RANKS)
def test_both_linears_of_an_mlp_are_pipelined(d: int) -> None:
    rows, wide = 2 * d + 1, 8 * d
    fd = pipelined_mlp(d, rows, wide)
    x, v, w = integers(rows, 4), integers(4, wide), integers(wide, 4)
    hidden = (x @ v).relu()
    run(fd, [x, v, w], [hidden @ w])
    assert kinds(fd) == ([("fetch", X), ("deliver", X)] if d > 1 else [])


def test_the_host_program_of_both(golden: GoldenCheck) -> None:
    fd = pipelined_mlp(2, 8, 32)
    host = host_program(fd, [integers(4, 4), integers(4, 16), integers(16, 4)], kernels=False)
    golden("host_peer_pipelines", print_host_program(host))


@pytest.mark.parametrize(
    ("fd", "sizes", "block"),
    [
        (gather_then_multiply(4, 8), (8, 4, 5), ((2, 4), (4, 5))),
        (multiply_then_scatter(4, 8, 8), (8, 8, 3), ((2, 2), (2, 3))),
    ],
    ids=["gather", "scatter"],
)
def test_each_rank_multiplies_once_for_each_chunk(
    fd: FusionDefinition, sizes: tuple[int, int, int], block: Blocks
) -> None:
    """4 ranks, each 4 products of one block."""
    rows, k, columns = sizes
    x, w = integers(rows, k), integers(k, columns)
    simulate(fd, [x, w])
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        simulate(fd, [x, w])
    found = [
        tuple(map(tuple, event.input_shapes[:2]))
        for event in recorded.events() or ()
        if event.name == "aten::mm"
    ]
    assert found == [block] * 16
