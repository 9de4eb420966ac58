"""Chunks along the axis that ranks share: one piece of each rank's block is gathered, multiplied
and written to its rows, or multiplied and scattered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity, profile

from chunk_programs import KINDS, pieces, product, shards, whole_inputs
from golden_text import GoldenCheck
from host_loops import STREAM, chunks, define, dense, host_program, loops
from meshfuse import DataType, FusionDefinition
from meshfuse.host.check import check_host_program
from meshfuse.host.nodes import Communicate, Evaluate
from meshfuse.host.printer import print_host_program
from meshfuse.ir.ops import Linear, MatMul
from meshfuse.multidevice import Overlap, plan, simulate
from sharded_runs import X, Y, integers, kinds, mesh_of, place, run, without_kernels

RANKS = [1, 2, 3, 4, 8]
COLLECTIVES = {"gather": "all_gather", "scatter": "reduce_scatter", "reduce": "all_reduce"}
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")


def events(call: Callable[[], object], *names: str) -> int:
    """How often torch runs operations of these names."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    return sum(event.name in names for event in found.events() or ())


# Values, and what is done for them.


@pytest.mark.parametrize("d", RANKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "count"), [(4, 2), (6, 3), (8, 8), (5, 2), (7, 4), (5, 4)])
def test_values_of_chunks_by_hand(kind: str, d: int, rows: int, count: int) -> None:
    """Of 5 rows the last chunk has fewer; in 4 chunks of at most 2 it has none."""
    fd, (x, w) = product(kind, d, rows, count), whole_inputs(kind, d, rows)
    run(fd, [x, w], [x @ w])
    host = fd.fec.host_program()
    assert [str(loop.count) for loop in loops(host)] == [str(count)]
    assert kinds(fd) == ([(COLLECTIVES[kind], X)] if d > 1 else [])


@pytest.mark.parametrize("d", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [8, 11])
def test_forms_in_chunks_are_these(kind: str, d: int, rows: int) -> None:
    x, w = whole_inputs(kind, d, rows)
    for count in (2, 4, 8):
        fd = product(kind, d, rows)
        with without_kernels():
            found = simulate(fd, [x, w], overlap=Overlap.chunks(count))
        wanted = (x @ w).chunk(d) if kind == "scatter" else [x @ w] * d
        for (value,), part in zip(found, wanted, strict=True):
            assert torch.equal(torch.as_tensor(value), part)
        [loop] = loops(fd.fec.host_program())
        [post] = [node for node in loop.body if isinstance(node, Communicate)]
        assert (str(loop.count), post.collective.value) == (str(count), COLLECTIVES[kind])
        bodies = [node.body for node in loop.body if isinstance(node, Evaluate)]
        assert sum(isinstance(expr, MatMul) for body in bodies for expr in body) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_as_much_moves_as_at_once(kind: str, count: int) -> None:
    """What an all-reduce shares out is rounded up to equal parts, of each chunk."""
    for rows in (8,) if kind == "reduce" else (8, 11):
        plain = plan(product(kind, 4, rows), overlap=Overlap.plain())
        cut = plan(product(kind, 4, rows), overlap=Overlap.chunks(count))
        by_hand = plan(product(kind, 4, rows, count))
        assert [len(found.communications) for found in (plain, cut, by_hand)] == [1, count, count]
        assert plain.bytes == cut.bytes == by_hand.bytes > 0


@pytest.mark.parametrize("d", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_one_product_for_each_chunk_and_no_copies(kind: str, d: int, count: int) -> None:
    """Products read pieces where they lie, and write them where they belong."""
    fd, inputs = product(kind, d, 8, count), whole_inputs(kind, d, 8)
    simulate(fd, inputs)
    assert events(lambda: simulate(fd, inputs), *PRODUCTS) == d * count
    [loop] = loops(fd.fec.host_program())
    bodies = [node.body for node in loop.body if isinstance(node, Evaluate)]
    assert {type(expr).__name__ for body in bodies for expr in body} <= {"MatMul", "Reshape"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_programs(kind: str, golden: GoldenCheck) -> None:
    host = host_program(product(kind, 2, 5, 2), shards(kind, 2, 5, 0))
    golden(f"host_{kind}_chunks_of_blocks", print_host_program(host))


def test_the_program_with_an_activation(golden: GoldenCheck) -> None:
    """The chunk is multiplied and activated as one, and written to its rows."""
    fd = product("gather", 2, 4, 2, activated=True)
    host = host_program(fd, shards("gather", 2, 4, 0), kernels=False)
    golden("host_gather_chunks_activated", print_host_program(host))


@pytest.mark.parametrize("d", [2, 3, 4])
@pytest.mark.parametrize("count", [2, 3])
def test_pieces_of_blocks_are_reduced(d: int, count: int) -> None:
    """Blocks that are nobody's: all ranks want all rows."""
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, 10, 2 * d), dense(fd, 2 * d, 5)
        y = fd.ops.matmul(x, w)
        place(mesh, {1: X}, x)
        place(mesh, {0: X}, w)
        place(mesh, {}, y)
        pieces(y, 0, 2, count)
        fd.add_output(y)

    fd, x, w = define(build), integers(10, 2 * d), integers(2 * d, 5)
    run(fd, [x, w], [x @ w])
    assert kinds(fd) == [("all_reduce", X)] and len(loops(fd.fec.host_program())) == 1
    assert check_host_program(fd.fec.host_program()) == ()


# What stands between.


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("rows", [4, 5])
def test_a_bias_an_activation_and_a_residual(d: int, rows: int) -> None:
    """The residual exists outside: its pieces are brought together."""
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        x, w, b, z = dense(fd, d * rows, 4), dense(fd, 5, 4), dense(fd, 5), dense(fd, d * rows, 5)
        hidden = fd.ops.relu(fd.ops.linear(x, w, b))
        y = fd.ops.add(hidden, z)
        place(mesh, {0: X}, x)
        place(mesh, {}, w, b, z, y)
        pieces(y, 0, d, 2)
        fd.add_output(y)

    fd = define(build)
    x, w, b, z = integers(d * rows, 4), integers(5, 4), integers(5), integers(d * rows, 5)
    run(fd, [x, w, b, z], [linear(x, w, b).relu() + z])
    assert len(loops(fd.fec.host_program())) == 1


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("rows", [4, 5])
def test_a_cast_behind_what_is_scattered(d: int, rows: int) -> None:
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        x = fd.define_tensor([d * rows, 2 * d], contiguity=True, dtype=DataType.BFloat16)
        w = fd.define_tensor([5, 2 * d], contiguity=True, dtype=DataType.BFloat16)
        z = dense(fd, d * rows, 5)
        y = fd.ops.add(fd.ops.cast(fd.ops.linear(x, w), DataType.Float), z)
        place(mesh, {1: X}, x, w)
        place(mesh, {0: X}, y, z)
        chunks(y, 1, 2)
        fd.add_output(y)

    fd = define(build)
    x = integers(d * rows, 2 * d, low=-2, high=3, dtype=torch.bfloat16)
    w = integers(5, 2 * d, low=-2, high=3, dtype=torch.bfloat16)
    z = integers(d * rows, 5)
    run(fd, [x, w, z], [(x.float() @ w.float().T) + z])
    assert kinds(fd) == [("reduce_scatter", X)] and len(loops(fd.fec.host_program())) == 1


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("rows", [4, 5])
def test_transposed_operands(d: int, rows: int) -> None:
    """Of x the columns are gathered, w is read the other way round."""
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, 4, d * rows), dense(fd, 5, 4)
        y = fd.ops.matmul(fd.ops.permute(x, [1, 0]), fd.ops.permute(w, [1, 0]))
        place(mesh, {1: X}, x)
        place(mesh, {}, w, y)
        pieces(y, 0, d, 2)
        fd.add_output(y)

    fd, x, w = define(build), integers(4, d * rows), integers(5, 4)
    run(fd, [x, w], [x.T @ w.T])
    assert kinds(fd) == [("all_gather", X)] and len(loops(fd.fec.host_program())) == 1


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("rows", [4, 5])
def test_columns_of_weights_that_are_gathered(d: int, rows: int) -> None:
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, 7, 4), dense(fd, d * rows, 4)
        y = fd.ops.relu(fd.ops.linear(x, w))
        place(mesh, {0: X}, w)
        place(mesh, {}, x, y)
        pieces(y, 1, d, 2)
        fd.add_output(y)

    fd, x, w = define(build), integers(7, 4), integers(d * rows, 4)
    run(fd, [x, w], [linear(x, w).relu()])
    assert kinds(fd) == [("all_gather", X)] and len(loops(fd.fec.host_program())) == 1


def test_an_axis_that_is_gathered_and_summed_over() -> None:
    """Iterations add up products of one piece of each block."""
    mesh = mesh_of(2)

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, 3, 8), dense(fd, 8, 5)
        y = fd.ops.matmul(x, w)
        place(mesh, {1: X}, x)
        place(mesh, {}, w, y)
        pieces(y, 2, 2, 2)
        fd.add_output(y)

    fd, x, w = define(build), integers(3, 8), integers(8, 5)
    run(fd, [x, w], [x @ w])
    assert kinds(fd) == [("all_gather", X)] and len(loops(fd.fec.host_program())) == 1


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("axis", [0, 1])
def test_two_layers_of_sequences(d: int, axis: int) -> None:
    """Sequences first, or batches; the first product is a result, too, and read in the loop."""
    mesh, shape = mesh_of(d), [3, 3, 4]
    shape[axis] = 4 * d

    def build(fd: FusionDefinition) -> None:
        x, v, w = dense(fd, *shape), dense(fd, 6, 4), dense(fd, 5, 6)
        hidden = fd.ops.linear(x, v)
        y = fd.ops.linear(fd.ops.relu(hidden), w)
        place(mesh, {axis: X}, x)
        place(mesh, {}, v, w, hidden, y)
        pieces(y, axis, d, 2)
        fd.add_output(hidden)
        fd.add_output(y)

    fd, x, v, w = define(build), integers(*shape), integers(6, 4), integers(5, 6)
    hidden = linear(x, v)
    run(fd, [x, v, w], [hidden, linear(hidden.relu(), w)])
    assert len(loops(fd.fec.host_program())) == 1


@pytest.mark.parametrize("axis", [0, 1])
def test_pieces_of_sequences_are_written_where_they_belong(axis: int) -> None:
    mesh, shape = mesh_of(2), [3, 3, 4]
    shape[axis] = 8

    def build(fd: FusionDefinition) -> None:
        x, w, b = dense(fd, *shape), dense(fd, 5, 4), dense(fd, 5)
        y = fd.ops.linear(x, w, b)
        place(mesh, {axis: X}, x)
        place(mesh, {}, w, b, y)
        pieces(y, axis, 2, 2)
        fd.add_output(y)

    host = host_program(define(build), [integers(*shape).chunk(2, axis)[0], *weights()])
    written = [n for loop in loops(host) for n in loop.body if isinstance(n, Evaluate) and n.into]
    assert [type(expr) for node in written for expr in node.body] == [Linear]
    fd, (w, b) = define(build), weights()
    x = integers(*shape)
    run(fd, [x, w, b], [linear(x, w, b)])
    assert events(lambda: simulate(fd, [x, w, b]), *PRODUCTS) == 4


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    return integers(5, 4), integers(5)


@pytest.mark.parametrize("d", [2, 3, 4])
@pytest.mark.parametrize("count", [2, 4])
def test_a_layer_in_parallel_along_its_sequence_is_one_loop(d: int, count: int) -> None:
    """A piece of each rank's rows is gathered, goes through both products, and is scattered."""
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        x, v, w = dense(fd, 4 * d, 4), dense(fd, 3 * d, 4), dense(fd, 4, 3 * d)
        y = fd.ops.linear(fd.ops.relu(fd.ops.linear(x, v)), w)
        place(mesh, {0: X}, x, v, y)
        place(mesh, {1: X}, w)
        fd.add_output(y)

    fd, x, v, w = define(build), integers(4 * d, 4), integers(3 * d, 4), integers(4, 3 * d)
    wanted = linear(linear(x, v).relu(), w).chunk(d)
    with without_kernels():
        found = simulate(fd, [x, v, w], overlap=Overlap.chunks(count))
    for (value,), part in zip(found, wanted, strict=True):
        assert torch.equal(torch.as_tensor(value), part)
    assert kinds(fd) == [("all_gather", X), ("reduce_scatter", X)]
    [loop] = loops(fd.fec.host_program())
    done = [expr for node in loop.body if isinstance(node, Evaluate) for expr in node.body]
    assert [type(expr).__name__ for expr in done] == ["Linear", "Pointwise", "Linear"]
    plain, cut = plan(define(build)), plan(define(build), overlap=Overlap.chunks(count))
    assert plain.bytes == cut.bytes > 0


def test_one_axis_of_a_mesh_of_two() -> None:
    """Along the other all rows stay in their blocks."""
    mesh = mesh_of(2, 2)

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, 16, 4), dense(fd, 5, 4)
        y = fd.ops.linear(x, w)
        x.set_device_mesh(mesh)
        x.outer_split(0, 2)
        x.outer_split(1, 2)
        x.axis(0).parallelize(Y)
        x.axis(1).parallelize(X)
        place(mesh, {}, w)
        place(mesh, {0: Y}, y)
        fd.add_output(y)

    x, w = integers(16, 4), integers(5, 4)
    fd = define(build)
    for rank, outputs in enumerate(simulate(fd, [x, w], overlap=Overlap.chunks(2))):
        assert torch.equal(torch.as_tensor(outputs[0]), linear(x, w).chunk(2)[rank // 2])
    assert kinds(fd) == [("all_gather", X)] and len(loops(fd.fec.host_program())) == 1


@given(
    d=st.sampled_from([1, 2, 3, 4]),
    blocks=st.sampled_from([1, 2, 3, 4, 6]),
    count=st.integers(1, 5),
    rows=st.integers(1, 4),
    axis=st.integers(0, 1),
    is_gathered=st.booleans(),
    is_kept=st.booleans(),
)
@settings(max_examples=60)
def test_any_blocks_of_any_tensor(
    d: int, blocks: int, count: int, rows: int, axis: int, is_gathered: bool, is_kept: bool
) -> None:
    """Blocks are ranks', or others, or none; loops have the values that there are without them."""
    mesh, shape = mesh_of(d), [4, 4]
    shape[axis] = 12 * rows

    def build(fd: FusionDefinition) -> None:
        x, v, z = dense(fd, *shape), dense(fd, shape[1], shape[1]), dense(fd, *shape)
        hidden = fd.ops.matmul(x, v) if axis == 0 else fd.ops.relu(x)
        y = fd.ops.permute(fd.ops.add(hidden, z), [1, 0])
        place(mesh, {axis: X} if is_gathered else {}, x)
        place(mesh, {}, v, z, y)
        if is_kept:
            fd.add_output(hidden)
        pieces(y, 1 - axis, blocks, count)
        fd.add_output(y)
        fd.add_output(fd.ops.sum(y, [1 - axis]))

    x, v, z = integers(*shape), integers(shape[1], shape[1]), integers(*shape)
    hidden = x @ v if axis == 0 else x.relu()
    y = (hidden + z).T
    wanted = [*([hidden] if is_kept else []), y, y.sum(1 - axis)]
    with without_kernels():
        fd = define(build)
        run(fd, [x, v, z], wanted)
    assert check_host_program(fd.fec.host_program()) == ()


# Without ranks.


def test_kernels_read_and_write_pieces_of_one_device() -> None:
    def build(fd: FusionDefinition) -> None:
        x, z = dense(fd, 12, 4), dense(fd, 4, 12)
        y = fd.ops.add(fd.ops.relu(x), fd.ops.permute(z, [1, 0]))
        pieces(y, 0, 3, 2)
        fd.add_output(y)
        fd.add_output(fd.ops.sum(y, [1]))

    fd, x, z = define(build), integers(12, 4), integers(4, 12)
    y, total = fd.execute([x, z])
    assert torch.equal(y, x.relu() + z.T) and torch.equal(total, (x.relu() + z.T).sum(1))
    assert len(loops(host_program(fd, [x, z]))) == 1


def test_every_second_row() -> None:
    """Chunks of one row of each block."""

    def build(fd: FusionDefinition) -> None:
        x = dense(fd, 8, 4)
        y = fd.ops.relu(x)
        y.split(0, 2)
        y.axis(1).parallelize(STREAM)
        fd.add_output(y)

    fd, x = define(build), integers(8, 4)
    assert torch.equal(fd.execute([x])[0], x.relu())
    assert [str(loop.count) for loop in loops(host_program(fd, [x]))] == ["2"]


def test_loops_in_loops() -> None:
    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, 12, 4), dense(fd, 4, 6)
        y = fd.ops.relu(fd.ops.matmul(x, w))
        pieces(y, 0, 3, 2)
        chunks(y, 3, 2)
        fd.add_output(y)

    fd, x, w = define(build), integers(12, 4), integers(4, 6)
    assert torch.equal(fd.execute([x, w])[0], (x @ w).relu())
    assert len(loops(host_program(fd, [x, w]))) == 2
