"""Stream leaves become loops of the host over chunks: which loops there are, and their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from random import Random

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from host_loops import STREAM, Definition, chunks, define, dense, host_program, loops
from meshfuse import FusionDefinition
from meshfuse.base.errors import InvariantError
from meshfuse.expr import const
from meshfuse.host.check import check_host_program
from meshfuse.host.faults import FaultKind
from meshfuse.host.memory_use import memory_use
from meshfuse.host.nodes import Allocate, Chunk, Clear, Evaluate, Launch, all_nodes
from meshfuse.host.parser import parse_host_program
from meshfuse.host.printer import print_host_program
from meshfuse.host.verify import verify_host_program
from meshfuse.ir.axes import TensorName
from sharded_runs import integers, without_kernels


def allocated(body: Sequence[object]) -> list[str]:
    return [node.buffer for node in body if isinstance(node, Allocate)]


def products(call: Callable[[], object]) -> list[list[list[int]]]:
    """The shapes of the operands of each product of matrices that torch runs."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        call()
    first = {"aten::mm": 0, "aten::addmm_": 1}
    events = [event for event in found.events() or () if event.name in first]
    return [event.input_shapes[first[event.name] :][:2] for event in events]


# Which loops.


def test_columns_of_a_matmul() -> None:
    def build(fd: FusionDefinition) -> None:
        c = fd.ops.matmul(dense(fd, 5, 7), dense(fd, 7, 6))
        chunks(c, 1, 3)
        fd.add_output(c)

    fd, a, b = define(build), integers(5, 7), integers(7, 6)
    (found,) = fd.execute([a, b])
    assert torch.equal(found, a @ b)
    assert products(lambda: fd.execute([a, b])) == [[[5, 7], [7, 2]]] * 3
    [loop] = loops(host_program(fd, [a, b]))
    assert [(n.out, n.src, n.axis) for n in loop.body if isinstance(n, Chunk)] == [
        ("T1_j0", "T1", 1),
        ("T2_j0", "T2", 1),
    ]


def test_a_timeline_has_each_chunk() -> None:
    """7 columns in chunks of 3, 3 and 1."""

    def build(fd: FusionDefinition) -> None:
        a, b = dense(fd, 5, 4), dense(fd, 4, 7)
        c = fd.ops.matmul(a, b)
        fd.add_output(c)
        chunks(c, 1, 3)

    products = [item.flops for item in define(build).timeline().items if item.flops]
    assert products == [2 * 5 * 4 * columns for columns in (3, 3, 1)]


def test_rows_and_batches_of_a_matmul_with_a_shorter_last_chunk() -> None:
    def build(fd: FusionDefinition) -> None:
        a, b = dense(fd, 4, 5, 7), dense(fd, 4, 7, 6)
        rows, batches = fd.ops.matmul(a, b), fd.ops.matmul(a, b)
        chunks(rows, 1, 3)
        chunks(batches, 0, 3)
        fd.add_output(rows)
        fd.add_output(batches)

    fd, a, b = define(build), integers(4, 5, 7), integers(4, 7, 6)
    for found in fd.execute([a, b]):
        assert torch.equal(found, a @ b)
    first, second = loops(host_program(fd, [a, b]))
    assert (str(first.count), str(second.count)) == ("3", "3")


def test_two_matmuls_share_a_loop_and_a_chunk_is_all_that_lies_between() -> None:
    def build(fd: FusionDefinition) -> None:
        c = fd.ops.matmul(dense(fd, 6, 4), dense(fd, 4, 5))
        d = fd.ops.matmul(c, dense(fd, 5, 3))
        chunks(d, 0, 3)
        fd.add_output(d)

    fd = define(build)
    inputs = [integers(6, 4), integers(4, 5), integers(5, 3)]
    (found,) = fd.execute(inputs)
    assert torch.equal(found, inputs[0] @ inputs[1] @ inputs[2])
    shapes = [[[2, 4], [4, 5]], [[2, 5], [5, 3]]]
    assert products(lambda: fd.execute(inputs)) == shapes * 3
    host = host_program(fd, inputs)
    [loop] = loops(host)
    assert {"T2", "T2_j0"} & set(host.buffers) == {"T2_j0"}
    assert host.buffers[TensorName("T2_j0")].shape == (const(2), const(5))
    assert not any(isinstance(node, Chunk) and node.out == "T2_j0" for node in loop.body)
    assert allocated(host.body) == ["T4"]


def test_two_matmuls_along_different_axes_have_a_loop_each() -> None:
    def build(fd: FusionDefinition) -> None:
        c = fd.ops.matmul(dense(fd, 6, 4), dense(fd, 4, 5))
        d = fd.ops.matmul(c, dense(fd, 5, 3))
        chunks(c, 1, 2)
        chunks(d, 0, 3)
        fd.add_output(d)

    fd = define(build)
    inputs = [integers(6, 4), integers(4, 5), integers(5, 3)]
    (found,) = fd.execute(inputs)
    assert torch.equal(found, inputs[0] @ inputs[1] @ inputs[2])
    host = host_program(fd, inputs)
    assert [str(loop.count) for loop in loops(host)] == ["2", "3"]
    assert allocated(host.body) == ["T2", "T4"]


@pytest.mark.parametrize("kernels", [True, False])
def test_copies_share_a_loop_where_their_axes_are_one(kernels: bool) -> None:
    def build(fd: FusionDefinition) -> None:
        first = fd.ops.set(dense(fd, 4, 4))
        second = fd.ops.set(first)
        third = fd.ops.set(second)
        chunks(first, 0, 2)
        chunks(second, 0, 2)
        chunks(third, 1, 2)
        for tensor in (first, second, third):
            fd.add_output(tensor)

    fd, a = define(build), integers(4, 4)
    assert all(torch.equal(found, a) for found in fd.execute([a]))
    host = host_program(fd, [a], kernels=kernels)
    rows, columns = loops(host)
    writes = [
        [node.out for node in loop.body if isinstance(node, Chunk)] for loop in (rows, columns)
    ]
    assert writes[0] == ["T0_j0", "T1_j0", "T2_j0"]
    assert writes[1] == ["T2_j1", "T3_j1"]


def test_three_copies_along_other_axes_each_time_share_nothing() -> None:
    def build(fd: FusionDefinition) -> None:
        tensor = dense(fd, 4, 4, 4)
        for axis in range(3):
            tensor = fd.ops.set(tensor)
            chunks(tensor, axis, 2)
        fd.add_output(tensor)

    fd, a = define(build), integers(4, 4, 4)
    assert torch.equal(fd.execute([a])[0], a)
    assert len(loops(host_program(fd, [a]))) == 3


def test_a_reader_of_other_chunks_stays_outside() -> None:
    """Rows of T1 + transposed T1 need all of T1."""

    def build(fd: FusionDefinition) -> None:
        t = fd.ops.relu(dense(fd, 4, 4))
        s = fd.ops.add(t, fd.ops.permute(t, [1, 0]))
        chunks(t, 0, 2)
        chunks(s, 0, 2)
        fd.add_output(s)

    fd, a = define(build), integers(4, 4)
    (found,) = fd.execute([a])
    assert torch.equal(found, a.relu() + a.relu().T)
    assert len(loops(host_program(fd, [a]))) == 2


def test_work_outside_does_not_cut_a_loop_in_two() -> None:
    """The other chain could stand between the two matmuls, as it does in the definition."""

    def build(fd: FusionDefinition) -> None:
        a, b, v = dense(fd, 6, 4), dense(fd, 4, 4), dense(fd, 3)
        c = fd.ops.matmul(a, b)
        other = fd.ops.exp(v)
        d = fd.ops.matmul(c, b)
        chunks(d, 0, 3)
        for tensor in (other, d):
            fd.add_output(tensor)

    fd, inputs = define(build), [integers(6, 4), integers(4, 4), integers(3)]
    other, d = fd.execute(inputs)
    assert torch.equal(d, inputs[0] @ inputs[1] @ inputs[1])
    torch.testing.assert_close(other, inputs[2].exp())
    assert len(loops(host_program(fd, inputs))) == 1


def test_operations_that_know_where_they_stand_are_made_as_a_whole() -> None:
    def build(fd: FusionDefinition) -> None:
        joined = fd.ops.cat([dense(fd, 4, 3), dense(fd, 2, 3)], 0)
        chunks(joined, 0, 2)
        fd.add_output(joined)

    fd, a, b = define(build), integers(4, 3), integers(2, 3)
    assert torch.equal(fd.execute([a, b])[0], torch.cat([a, b]))
    assert loops(host_program(fd, [a, b])) == []
    assert (
        "T2: not_streamed: it is made as a whole: no operand of Cat has that axis" in fd.explain()
    )


# Sizes.


@pytest.mark.parametrize("rows", [0, 1, 5, 6, 7])
def test_chunks_of_a_size_that_a_call_gives(rows: int) -> None:
    """One kernel serves chunks of all sizes."""

    def build(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, -1], contiguity=[True, True])
        y = fd.ops.sum(fd.ops.mul(x, x), [1])
        y.inner_split(0, 3)
        y.axis(0).parallelize(STREAM)
        fd.add_output(y)

    fd, x = define(build), integers(rows, 4)
    assert torch.equal(fd.execute([x])[0], (x * x).sum(1))


# Sums.


def test_a_sum_along_the_stream_is_added_up_where_its_terms_are_made() -> None:
    """No buffer has a * b: each iteration's kernel reads chunks of a and b, and reads and writes
    c."""

    def build(fd: FusionDefinition) -> None:
        c = fd.ops.sum(fd.ops.mul(dense(fd, 7, 5), dense(fd, 7, 5)), [0])
        chunks(c, 0, 3)
        fd.add_output(c)

    fd, a, b = define(build), integers(7, 5), integers(7, 5) + 1
    assert torch.equal(fd.execute([a, b])[0], (a * b).sum(0))
    host = host_program(fd, [a, b])
    [loop] = loops(host)
    launches = [node for node in loop.body if isinstance(node, Launch)]
    assert [node.buffers for node in launches] == [("T0_j0", "T1_j0", "T3", "T3")]
    assert allocated(list(all_nodes(host.body))) == ["T3"]
    assert memory_use(host, {}, 0).peak == 4 * (2 * 35 + 5)


def test_a_contraction_along_the_stream() -> None:
    def build(fd: FusionDefinition) -> None:
        c = fd.ops.matmul(dense(fd, 5, 7), dense(fd, 7, 6))
        chunks(c, 2, 3)
        fd.add_output(c)

    fd, a, b = define(build), integers(5, 7), integers(7, 6)
    assert torch.equal(fd.execute([a, b])[0], a @ b)
    widths = [shapes[0] for shapes in products(lambda: fd.execute([a, b]))]
    assert widths == [[5, 3], [5, 3], [5, 1]]


def test_a_sum_within_chunks_is_a_loop_within_a_loop() -> None:
    def build(fd: FusionDefinition) -> None:
        c = fd.ops.matmul(dense(fd, 5, 7), dense(fd, 7, 6))
        chunks(c, 0, 2)
        chunks(c, 3, 3)
        fd.add_output(fd.ops.relu(c))

    fd, a, b = define(build), integers(5, 7), integers(7, 6)
    assert torch.equal(fd.execute([a, b])[0], (a @ b).relu())
    outer, inner = loops(host_program(fd, [a, b]))
    assert inner in outer.body
    assert allocated(outer.body) == ["T2_j0"]


def nested_sum(fd: FusionDefinition) -> None:
    """Chunks of what is summed outside, of rows inside."""
    c = fd.ops.matmul(dense(fd, 5, 7), dense(fd, 7, 6))
    chunks(c, 2, 3)
    c.reorder({2: 0})
    chunks(c, 1, 2)
    fd.add_output(c)


def test_a_chunk_of_a_sum_is_added_to_in_a_loop_within() -> None:
    """The first iteration of the outer loop writes both chunks of rows."""
    fd, a, b = define(nested_sum), integers(5, 7), integers(7, 6)
    assert torch.equal(fd.execute([a, b])[0], a @ b)
    outer, inner = loops(host_program(fd, [a, b]))
    [added] = [node for node in inner.body if isinstance(node, Evaluate)]
    assert added.sum_over == outer.index
    assert [shapes[0] for shapes in products(lambda: fd.execute([a, b]))][:2] == [[3, 3], [2, 3]]


def summed(fd: FusionDefinition) -> None:
    x = dense(fd, 7, 5)
    c = fd.ops.sum(fd.ops.mul(x, x), [0])
    chunks(c, 0, 3)
    fd.add_output(c)


def test_the_first_iteration_writes_a_sum_and_only_kernels_want_zeros() -> None:
    fd, x = define(summed), integers(7, 5)
    for kernels in (True, False):
        host = host_program(fd, [x], kernels=kernels)
        assert any(isinstance(node, Clear) for node in host.body) == kernels
        with nullcontext() if kernels else without_kernels():
            assert torch.equal(fd.execute([x])[0], (x * x).sum(0))


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_sum_of_no_iterations_is_zero(size: int) -> None:
    def build(fd: FusionDefinition) -> None:
        a, b = (fd.define_tensor([-1, -1], contiguity=[True, True]) for _ in range(2))
        c = fd.ops.matmul(a, b)
        c.inner_split(2, 3)
        c.axis(2).parallelize(STREAM)
        fd.add_output(c)

    a, b = integers(5, size), integers(size, 6)
    assert torch.equal(define(build).execute([a, b])[0], a @ b)


def test_the_checker_knows_which_iteration_writes() -> None:
    """Each iteration of the outer loop has a buffer, which the first inner one writes."""

    def build(fd: FusionDefinition) -> None:
        c = fd.ops.matmul(dense(fd, 5, 7), dense(fd, 7, 6))
        chunks(c, 0, 2)
        chunks(c, 3, 3)
        fd.add_output(fd.ops.relu(c))

    text = print_host_program(host_program(define(build), [integers(5, 7), integers(7, 6)]))
    wrong = parse_host_program(text.replace("sum_over=j1", "sum_over=j0"))
    assert [fault.kind for fault in check_host_program(wrong)] == [FaultKind.unwritten_read]
    with pytest.raises(InvariantError, match="no such loop"):
        verify_host_program(parse_host_program(text.replace("sum_over=j1", "sum_over=j9")))


def test_who_reads_a_sum_or_a_whole_outside_gets_a_kernel() -> None:
    def build(fd: FusionDefinition) -> None:
        x = dense(fd, 5, 4)
        total = fd.ops.sum(x, [0])
        chunks(total, 0, 2)
        y = fd.ops.exp(x)
        chunks(y, 0, 2)
        fd.add_output(fd.ops.neg(total))
        fd.add_output(fd.ops.reshape(fd.ops.sum(y, [0]), [2, 2]))

    fd, x = define(build), integers(5, 4)
    total, turned = fd.execute([x])
    assert torch.equal(total, -x.sum(0))
    torch.testing.assert_close(turned, x.exp().sum(0).reshape(2, 2))
    host = host_program(fd, [x])
    assert sum(isinstance(node, Launch) for node in host.body) == 2


# What else stands in programs.


def check(build: Definition, inputs: Sequence[torch.Tensor], *wanted: torch.Tensor) -> None:
    """With kernels and without, from the same inputs."""
    fd = define(build)
    for kernels in (True, False):
        with nullcontext() if kernels else without_kernels():
            found = fd.execute([tensor.clone() for tensor in inputs])
        for value, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(value, expected)


def test_an_update_in_place() -> None:
    def build(fd: FusionDefinition) -> None:
        x = dense(fd, 5, 4)
        y = fd.ops.mul(x, 2.0)
        z = fd.ops.add(y, 1.0)
        chunks(z, 0, 2)
        fd.add_output(y, x)
        fd.add_output(z)

    x = integers(5, 4)
    check(build, [x], 2 * x + 1)
    given = x.clone()
    define(build).execute([given])
    assert torch.equal(given, 2 * x)


def test_a_view_that_is_made_in_chunks_is_a_copy() -> None:
    def build(fd: FusionDefinition) -> None:
        y = fd.ops.permute(dense(fd, 5, 4), [1, 0])
        chunks(y, 0, 3)
        fd.add_output(y)

    check(build, [integers(5, 4)], integers(5, 4).T)


def test_chunks_of_inputs_with_gaps_and_of_one_row() -> None:
    def build(fd: FusionDefinition) -> None:
        y = fd.ops.relu(fd.define_tensor([-1, -1]))
        z = fd.ops.sum(y, [0])
        y.axis(0).parallelize(STREAM)
        chunks(z, 1, 3)
        fd.add_output(y)
        fd.add_output(z)

    x = integers(6, 8)[:, ::2]
    check(build, [x], x.relu(), x.relu().sum(0))


def test_a_bias_is_cut_with_the_columns() -> None:
    def build(fd: FusionDefinition) -> None:
        y = fd.ops.linear(dense(fd, 5, 4), dense(fd, 6, 4), dense(fd, 6))
        chunks(y, 1, 4)
        fd.add_output(y)
        fd.add_output(fd.ops.sum(y, [1]))

    x, w, b = integers(5, 4), integers(6, 4), integers(6)
    y = torch.nn.functional.linear(x, w, b)
    check(build, [x, w, b], y, y.sum(1))


def test_a_softmax_of_chunks_is_one_kernel() -> None:
    def build(fd: FusionDefinition) -> None:
        x = dense(fd, 5, 7)
        e = fd.ops.exp(fd.ops.sub(x, fd.ops.max(x, [1], keepdim=True)))
        y = fd.ops.div(e, fd.ops.sum(e, [1], keepdim=True))
        chunks(y, 0, 2)
        fd.add_output(y)

    check(build, [integers(5, 7)], integers(5, 7).softmax(1))
    [loop] = loops(host_program(define(build), [integers(5, 7)]))
    assert sum(isinstance(node, Launch) for node in loop.body) == 1


# Any loops.


@pytest.mark.parametrize("seed", range(12))
def test_chains_of_operations_with_any_stream_leaves(seed: int) -> None:
    """What is in loops, and in how many chunks, changes no value."""
    choose = Random(seed)
    inputs = [integers(5, 7), integers(7, 4), integers(4)]

    returned: list[int] = []

    def build(fd: FusionDefinition) -> None:
        x, w, bias = (dense(fd, *tensor.shape) for tensor in inputs)
        h = fd.ops.relu(x)
        y = fd.ops.matmul(h, w)
        z = fd.ops.add(y, fd.ops.broadcast_in_dim(bias, [5, 4], [1]))
        t = fd.ops.permute(z, [1, 0])
        rows, total = fd.ops.sum(t, [0]), fd.ops.sum(fd.ops.mul(z, y), [0])
        for number, tensor in enumerate((h, y, z, t, rows, total)):
            axes = tensor.get_loop_domain()
            if choose.random() < 0.5:
                chunks(tensor, choose.randrange(len(axes)), choose.randint(1, 4))
            if tensor is total or choose.random() < 0.5:
                fd.add_output(tensor)
                returned.append(number)

    fd = define(build)
    h = inputs[0].relu()
    y = h @ inputs[1]
    z = y + inputs[2]
    wanted = [h, y, z, z.T, z.sum(1), (z * y).sum(0)]
    for kernels in (True, False):
        with nullcontext() if kernels else without_kernels():
            found = fd.execute(inputs)
        assert all(map(torch.equal, found, [wanted[k] for k in returned]))
        host_program(fd, inputs, kernels=kernels)
