"""The whole road below the API: programs compiled and run, against their evaluation op by op."""

from __future__ import annotations

import pytest
import torch

from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import UserError
from meshfuse.dist.communicator import Communicator
from meshfuse.host.executors import HostIrExecutor
from meshfuse.host.parser import parse_host_program
from meshfuse.host.printer import print_host_program
from meshfuse.host.simulate import simulate
from meshfuse.ir import build
from meshfuse.ir.axes import ScalarName
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.ir.ops import Literal
from meshfuse.ir.program import Program
from meshfuse.ir.transforms import parallelize, set_device_mesh, split, swizzle1d
from meshfuse.pipeline import Compilation, compile
from meshfuse.runtime.arguments import signature_of
from meshfuse.runtime.compile import KernelCompiler
from meshfuse.runtime.evaluate_ops import evaluate_program
from small_programs import (
    block,
    in_place_update,
    norm_linear,
    pointwise,
    sequence_parallel_mlp,
    softplus_rows,
    tensor_input,
)

ALONE = Communicator({})
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def compiler() -> KernelCompiler:
    return KernelCompiler()


def executor_of(compilation: Compilation, compiler: KernelCompiler | None) -> HostIrExecutor:
    return HostIrExecutor(compilation.host, compilation.sources, compiler, CPU)


def check(
    program: Program,
    inputs: list[torch.Tensor],
    compiler: KernelCompiler,
    schedulers: list[str],
) -> HostIrExecutor:
    """Kernels, and op by op, against the meaning of the program. Returns the one with kernels."""
    compilation = compile(program, signature_of(inputs))
    assert [part.scheduler for part in compilation.segmented.segments] == schedulers
    text = print_host_program(compilation.host)
    assert parse_host_program(text) == compilation.host
    executor = executor_of(compilation, compiler)
    without = executor_of(compile(program, signature_of(inputs), kernels=False), None)
    expected = evaluate_program(program, inputs)
    for found in (executor.run(inputs, ALONE), without.run(inputs, ALONE)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    return executor


def test_pointwise_and_reduction_in_one_kernel(compiler: KernelCompiler) -> None:
    program = softplus_rows()
    executor = check(program, [torch.randn(5, 37)], compiler, ["reduction"])
    for shape in ((64, 3), (2, 1000), (0, 4)):
        x = torch.randn(shape)
        found = executor.run([x], ALONE)
        torch.testing.assert_close(found, evaluate_program(program, [x]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(37, 5).T,
        torch.randn(5, 80)[:, ::2],
        torch.randn(1, 40).expand(6, 40),
        torch.randn(40, 1),
        torch.randn(4, 40)[::2],
    ],
)
def test_any_strides_are_taken(x: torch.Tensor, compiler: KernelCompiler) -> None:
    check(softplus_rows(), [x], compiler, ["reduction"])


def test_layer_norm_linear_gelu(compiler: KernelCompiler) -> None:
    inputs = [torch.randn(shape) for shape in ((2, 7, 16), (16,), (16,), (32, 16))]
    check(norm_linear(), inputs, compiler, ["normalization", "expr_eval", "pointwise"])


@pytest.mark.parametrize("kernels", [True, False])
def test_an_update_in_place(kernels: bool, compiler: KernelCompiler) -> None:
    x, total = torch.arange(4.0), torch.ones(4)
    compilation = compile(in_place_update(), signature_of([x, total]), kernels=kernels)
    executor = executor_of(compilation, compiler)
    for _ in range(2):
        [doubled] = executor.run([x, total], ALONE)
        assert torch.equal(doubled, 2 * x)
    assert torch.equal(total, 1 + 2 * x)


@pytest.mark.parametrize("kernels", [True, False])
def test_what_is_returned_from_before_an_update_keeps_its_value(
    kernels: bool, compiler: KernelCompiler
) -> None:
    program, x = tensor_input(Program(), [2, 3])
    program, column = build.broadcast(program, x, [False, False, True])
    program, updated = pointwise(program, "neg", x)
    program = build.add_output(program, column)
    program = build.add_output(program, updated, alias=x)
    program = build.add_output(program, updated)
    data = torch.arange(6.0).reshape(2, 3)
    before = data.clone()
    executor = executor_of(compile(program, signature_of([data]), kernels=kernels), compiler)
    found, same = executor.run([data], ALONE)
    assert torch.equal(found, before[:, :, None])
    assert same is data
    assert torch.equal(data, -before)


def test_inputs_and_repeated_outputs_are_passed_on(compiler: KernelCompiler) -> None:
    program, x = tensor_input(Program(), [-1])
    program, y = pointwise(program, "neg", x)
    for output in (y, x, y):
        program = build.add_output(program, output)
    data = torch.arange(3.0)
    executor = executor_of(compile(program, signature_of([data])), compiler)
    first, second, third = executor.run([data], ALONE)
    assert second is data
    assert first is third
    assert torch.equal(first, -data)


def test_sizes_that_meet_must_agree(compiler: KernelCompiler) -> None:
    program, x = tensor_input(Program(), [-1])
    program, y = tensor_input(program, [-1])
    program, total = pointwise(program, "add", x, y)
    program = build.add_output(program, total)
    inputs = [torch.zeros(3), torch.zeros(4)]
    executor = executor_of(compile(program, signature_of(inputs)), compiler)
    with pytest.raises(UserError, match=r"input 1, T1, to be of size 3 .*i0 is 3 by axis 0 of T0"):
        executor.run(inputs, ALONE)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kernels", [True, False])
def test_sequence_parallel_mlp(ranks: int, kernels: bool, compiler: KernelCompiler) -> None:
    case = sequence_parallel_mlp(ranks)
    inputs = {rank: case.shards(rank) for rank in range(ranks)}
    compilation = compile(case.program, signature_of(inputs[0]), kernels=kernels)
    executor = executor_of(compilation, compiler)
    outputs = simulate({rank: executor.compile(rank) for rank in inputs}, inputs)
    [whole] = evaluate_program(case.program, case.inputs)
    for rank, part in enumerate(whole.chunk(ranks, 1)):
        assert torch.equal(outputs[rank][0], part)


def test_a_size_that_the_mesh_does_not_divide(compiler: KernelCompiler) -> None:
    """An axis that is whole says the size of one that ranks share in blocks of 3 and 2."""
    mesh = make_mesh(range(2))
    program, x = tensor_input(Program(), [-1])
    program, whole = tensor_input(program, [-1])
    program, total = pointwise(program, "add", x, whole)
    program = build.add_output(program, total)
    program = set_device_mesh(block(program, mesh, x, 0), whole, mesh)
    inputs = {rank: [torch.ones(3 - rank), torch.arange(5.0)] for rank in range(2)}
    executor = executor_of(compile(program, signature_of(inputs[0])), compiler)
    outputs = simulate({rank: executor.compile(rank) for rank in range(2)}, inputs)
    assert [outputs[rank][0].tolist() for rank in range(2)] == [[1, 2, 3], [4, 5]]


def test_strides_change_kernels_but_no_communication() -> None:
    case = sequence_parallel_mlp(2)
    x, *weights = case.shards(0)
    plain = compile(case.program, signature_of([x, *weights]))
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    other = compile(case.program, signature_of([turned, *weights]))
    assert plain.host.body == other.host.body
    assert plain.host.kernels != other.host.kernels


def test_a_computed_scalar_may_be_a_size(compiler: KernelCompiler) -> None:
    program, count = build.define_scalar(Program(), DataType.Int)
    program = build.add_input(program, count)
    program, row = tensor_input(program, [3])
    program, more = build.pointwise(program, "add", [count, Literal(1, DataType.Int)])
    program, rows = build.broadcast_in_dim(program, row, [ScalarName(more), 3], [1])
    program, result = pointwise(program, "mul", rows, 2.0)
    program = build.add_output(program, result)
    data = torch.arange(3.0)
    for kernels in (True, False):
        compilation = compile(program, signature_of([4, data]), kernels=kernels)
        [found] = executor_of(compilation, compiler).run([4, data], ALONE)
        assert torch.equal(found, (data * 2).expand(5, 3))


def test_strided_pieces_are_one_kernel(compiler: KernelCompiler) -> None:
    """Each rank holds three pieces of one axis, as of a fused QKV weight."""
    mesh = make_mesh(range(2))
    program, x = tensor_input(Program(), [12])
    program, result = pointwise(program, "neg", x)
    program = build.add_output(program, result)
    program = split(set_device_mesh(program, x, mesh), x, 0, 3, False)
    program = split(program, x, 1, 2, False)
    middle = program.schedule(x).leaves[1]
    program = parallelize(program, x, middle, ParallelType.mesh_x)
    pieces = torch.arange(12.0).reshape(3, 2, 2)
    inputs = {rank: [pieces[:, rank].reshape(-1)] for rank in range(2)}
    compilation = compile(program, signature_of(inputs[0]))
    assert (compilation.notes, len(compilation.sources)) == ((), 1)
    executor = executor_of(compilation, compiler)
    outputs = simulate({rank: executor.compile(rank) for rank in inputs}, inputs)
    for rank, [output] in outputs.items():
        assert torch.equal(output, -inputs[rank][0])


def test_what_no_kernel_can_hold_runs_op_by_op_and_says_why() -> None:
    """Where a rank begins its loop is not known to kernels."""
    mesh = make_mesh(range(2))
    program, x = tensor_input(Program(), [4, 6])
    program, result = pointwise(program, "neg", x)
    program = build.add_output(program, result)
    program = block(program, mesh, x, 1)
    program = swizzle1d(program, x, 0, ParallelType.mesh_x)
    data = torch.arange(24.0).reshape(4, 6)
    inputs = {rank: [data[:, 3 * rank : 3 * rank + 3].contiguous()] for rank in range(2)}
    compilation = compile(program, signature_of(inputs[0]))
    [note] = compilation.notes
    assert (note.subject, note.kind) == (result, "op_by_op")
    assert "through torch: localize: T0, axis a0: it is swizzled by mesh_x" in note.reason
    executor = executor_of(compilation, None)
    outputs = simulate({rank: executor.compile(rank) for rank in inputs}, inputs)
    for rank, [output] in outputs.items():
        assert torch.equal(output, -inputs[rank][0])
