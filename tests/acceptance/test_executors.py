"""The executor contract: ids, dispatch, outputs that exist, programs with nothing to do, profiles.

Segments are taken from compiled programs and run by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gloo_run import run_ranks
from meshfuse import (
    DeviceMesh,
    FusionCache,
    FusionDefinition,
    PythonProfiler,
    TensorView,
    get_fusion_profile,
    reset_profiler,
)
from meshfuse.base.errors import InvariantError, UserError
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.executors import CommunicationExecutor
from meshfuse.host import dispatch
from meshfuse.host.one_segment import compile_executor, make_executor, run_executor
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import extract
from meshfuse.pipeline import compile
from meshfuse.runtime.arguments import signature_of
from meshfuse.runtime.executors import ExecutorIds, ExprEvalExecutor, KernelExecutor
from meshfuse.segment.segments import Segment
from sharded_cases import all_gather

X = torch.arange(12.0).reshape(3, 4)
W = torch.arange(20.0).reshape(5, 4)


def program_of(fd: FusionDefinition) -> Program:
    return fd.fusion.recording.program


def segments_of(program: Program, *inputs: torch.Tensor) -> tuple[Segment, ...]:
    return compile(program, signature_of(inputs)).segmented.segments


def define(build: Callable[..., TensorView], *inputs: torch.Tensor) -> FusionDefinition:
    """A definition of one output: `build(fd.ops, *tensors)`."""
    with FusionDefinition() as fd:
        fd.add_output(build(fd.ops, *(fd.from_pytorch(x) for x in inputs)))
    return fd


def linear_and_sum() -> FusionDefinition:
    """Three segments: a kernel, an operation through torch, a kernel."""
    return define(lambda ops, x, w: ops.sum(ops.linear(ops.exp(x), w), [1]), X, W)


def gather_segment() -> Program:
    """One all-gather over ranks 0 and 1."""
    built = all_gather(2)
    parts = segments_of(program_of(built.fd), torch.zeros(4))
    (part,) = [part for part in parts if part.scheduler == "communication"]
    return part.program


# Three kinds, each with its own compile, run and is_compiled, all with the same ids.


def test_executors_know_their_ids_when_they_are_made() -> None:
    ids = ExecutorIds(fusion=1, concretisation=2, runtime=3, group=4)
    kernel, linear, _ = segments_of(program_of(linear_and_sum()), X, W)
    made = [make_executor(program, ids) for program in (kernel.program, linear.program)]
    made.append(make_executor(gather_segment(), ids))
    assert [type(e) for e in made] == [KernelExecutor, ExprEvalExecutor, CommunicationExecutor]
    assert [e.ids for e in made] == [ids] * 3
    assert not any(e.is_compiled() for e in made)


def test_segments_run_alone_give_what_the_program_gives() -> None:
    fd = linear_and_sum()
    value = X
    for part in segments_of(program_of(fd), X, W):
        args = [value, W] if part.scheduler == "expr_eval" else [value]
        executor = make_executor(part.program, scheduler=part.scheduler)
        compile_executor(executor, part.program, args)
        assert executor.is_compiled()
        [value] = run_executor(executor, part.program, args)
    torch.testing.assert_close(value, fd.execute([X, W])[0])


def test_an_executor_that_is_not_compiled_does_not_run() -> None:
    program = program_of(define(lambda ops, x: ops.exp(x), X))
    with pytest.raises(UserError, match="KernelExecutor is not compiled; call compile first"):
        run_executor(make_executor(program), program, [X])


def test_ids_of_compiled_programs_count_up() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.exp(fd.define_tensor([-1, -1])))
    first = fd.fec.bind([X], 0).prepared.compiled.executor.ids
    second = fd.fec.bind([X.mT], 0).prepared.compiled.executor.ids
    assert first.fusion == second.fusion
    assert second.runtime == first.runtime + 1


# By the scheduler's name, or by capability in a fixed order.


def test_dispatch_by_scheduler_is_one_lookup() -> None:
    assert dispatch.executor_class("reduction") is KernelExecutor
    assert dispatch.executor_class("user") is KernelExecutor
    assert dispatch.executor_class("expr_eval") is ExprEvalExecutor
    assert dispatch.executor_class("communication") is CommunicationExecutor
    with pytest.raises(InvariantError, match="no executor for scheduler 'magic'"):
        dispatch.executor_class("magic")


def test_dispatch_by_capability() -> None:
    assert dispatch.choose_executor(gather_segment()) is CommunicationExecutor
    assert dispatch.choose_executor(program_of(linear_and_sum())) is ExprEvalExecutor
    fused = program_of(define(lambda ops, x: ops.sum(ops.exp(x), [0]), X))
    assert dispatch.choose_executor(fused) is KernelExecutor


def test_communications_are_all_or_nothing() -> None:
    built = all_gather(2)
    with built.fd as fd:
        fd.add_output(fd.ops.exp(fd.fusion.outputs()[0]))
    whole = compile(program_of(fd), signature_of([torch.zeros(4)])).segmented.program
    assert len(whole.fusion.exprs) > 1
    with pytest.raises(UserError, match="segment the program before choosing an executor"):
        dispatch.choose_executor(whole)


def test_no_executor_is_an_error_with_all_reasons() -> None:
    built = all_gather(2)
    with built.fd as fd:
        x = fd.fusion.inputs()[0]
        assert isinstance(x, TensorView)
        y = fd.ops.set(x)
        y.set_device_mesh(DeviceMesh([0, 1]))
        fd.add_output(y)
    whole = compile(program_of(fd), signature_of([torch.zeros(4)])).segmented.program
    gathers = [expr for expr in whole.fusion.exprs if type(expr).__name__ == "AllGather"]
    assert len(gathers) == 2
    with pytest.raises(UserError, match=r"no executor runs this.*runs one communication, not 2"):
        dispatch.choose_executor(extract(whole, gathers))


# Only kernels need example arguments.


def test_compiling_without_arguments() -> None:
    kernel, linear, _ = segments_of(program_of(linear_and_sum()), X, W)
    executor = make_executor(linear.program)
    compile_executor(executor, linear.program)
    assert executor.is_compiled()
    gather = make_executor(gather_segment())
    compile_executor(gather, gather_segment())
    assert gather.is_compiled()
    with pytest.raises(UserError, match="a kernel needs more information: pass example arguments"):
        compile_executor(make_executor(kernel.program), kernel.program)


# Outputs that exist.


def test_a_kernel_writes_into_given_outputs() -> None:
    program = program_of(define(lambda ops, x: ops.exp(x), X))
    executor = make_executor(program)
    compile_executor(executor, program, [X])
    out = torch.zeros(3, 4)
    [result] = run_executor(executor, program, [X], [out])
    assert result is out
    torch.testing.assert_close(out, X.exp())


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([], r"1 outputs \(T1\), 0 given"),
        ([torch.zeros(4, 3)], r"shape \[3, 4\], but the tensor given for it .* \[4, 3\]"),
        ([torch.zeros(3, 4).double()], "torch.float32 .* is torch.float64"),
        ([torch.zeros(4, 3).mT], r"without gaps; .* strides \[1, 3\]"),
    ],
)
def test_given_outputs_must_fit(outputs: list[torch.Tensor], message: str) -> None:
    program = program_of(define(lambda ops, x: ops.exp(x), X))
    executor = make_executor(program)
    compile_executor(executor, program, [X])
    with pytest.raises(UserError, match=message):
        run_executor(executor, program, [X], outputs)


OUT_FORMS: dict[str, tuple[Callable[..., TensorView], list[torch.Tensor], torch.Tensor]] = {
    "matmul": (lambda ops, x, w: ops.matmul(x, w), [X, W.mT.contiguous()], X @ W.mT),
    "linear": (lambda ops, x, w: ops.linear(x, w), [X, W], X @ W.mT),
    "linear with bias": (
        lambda ops, x, w, b: ops.linear(x, w, b),
        [X, W, torch.arange(5.0)],
        X @ W.mT + torch.arange(5.0),
    ),
    "binary": (lambda ops, x, y: ops.sub(x, y), [X, X.flip(0)], X - X.flip(0)),
    "reduction": (lambda ops, x: ops.sum(x, [1]), [X], X.sum(1)),
    "copy": (lambda ops, x: ops.set(x), [X], X),
}


def evaluator_of(program: Program) -> ExprEvalExecutor:
    executor = ExprEvalExecutor()
    compile_executor(executor, program)
    return executor


@pytest.mark.parametrize("form", OUT_FORMS)
def test_torch_writes_into_given_outputs_where_it_can(form: str) -> None:
    build, inputs, expected = OUT_FORMS[form]
    program = program_of(define(build, *inputs))
    out = torch.full_like(expected, -1.0)
    [result] = run_executor(evaluator_of(program), program, inputs, [out])
    assert result is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda ops, x: ops.permute(x, [1, 0]), "permute"),
        (lambda ops, x: ops.relu(x), "relu"),
        (lambda ops, x: ops.broadcast(x, [False, True, False]), "broadcast"),
    ],
)
def test_torch_refuses_given_outputs_by_the_operation(
    build: Callable[..., TensorView], name: str
) -> None:
    program = program_of(define(build, X))
    executor = evaluator_of(program)
    [expected] = run_executor(executor, program, [X])
    with pytest.raises(UserError, match=f"{name} makes T1 as a new tensor"):
        run_executor(executor, program, [X], [torch.empty(expected.shape)])


# Programs with nothing to do.


def test_an_input_as_output_launches_nothing() -> None:
    with FusionDefinition() as fd:
        x = fd.from_pytorch(X)
        fd.add_output(x)
        fd.add_output(x)
    first, second = fd.execute([X], profile=True)
    assert first.data_ptr() == second.data_ptr() == X.data_ptr()
    assert fd.profile().kernel_profiles == []


def test_empty_tensors_run() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.exp(x))
        fd.add_output(fd.ops.sum(x, [0]))
    exp, total = fd.execute([torch.empty(0, 4)])
    assert exp.shape == (0, 4)
    assert torch.equal(total, torch.zeros(4))


# Profiles.


@pytest.fixture
def clean_profiler() -> Iterator[None]:
    """Nothing is profiled or compiled yet."""
    reset_profiler()
    FusionCache.instance().reset()
    yield
    reset_profiler()


def test_each_executor_reports_itself(clean_profiler: None) -> None:
    fd = linear_and_sum()
    with PythonProfiler() as prof:
        fd.execute([X, W])
    kernels = prof.profile.kernel_profiles
    assert [k.scheduler for k in kernels] == ["pointwise", "expr_eval", "reduction"]
    assert [k.segment_id for k in kernels] == [0, 1, 2]
    assert all(k.name for k in kernels)
    assert {k.device for k in kernels} == {"cpu"}
    floats = [(12, 12), (12 + 20, 15), (15, 3)]
    assert [(k.input_bytes, k.output_bytes) for k in kernels] == [(4 * i, 4 * o) for i, o in floats]
    assert all(k.time_ms > 0 for k in kernels)
    assert kernels[0].compile_time_ms > kernels[1].compile_time_ms
    assert kernels[0].registers == -1
    assert kernels[0].percentage_peak_bandwidth is None
    total = prof.profile
    assert total is get_fusion_profile()
    assert (total.segments, total.fusion_id >= 0) == (3, True)
    assert (total.input_bytes, total.output_bytes) == (4 * 32, 4 * 3)
    assert total.host_time_ms >= total.compile_time_ms > 0
    assert total.kernel_time_ms == pytest.approx(sum(k.time_ms for k in kernels))


def test_a_cached_call_compiles_nothing(clean_profiler: None) -> None:
    fd = linear_and_sum()
    fd.execute([X, W])
    fd.execute([X, W], profile=True)
    assert fd.profile().compile_time_ms == 0
    assert [k.compile_time_ms for k in fd.profile().kernel_profiles] == [0, 0, 0]


def test_without_a_profile_nothing_is_reported(clean_profiler: None) -> None:
    fd = define(lambda ops, x: ops.exp(x), X)
    with PythonProfiler() as prof:
        pass
    fd.execute([X])
    with pytest.raises(AssertionError, match="no call was made inside its block"):
        _ = prof.profile
    with pytest.raises(AssertionError, match="nothing was profiled"):
        get_fusion_profile()
    with pytest.raises(AssertionError, match="no call was profiled"):
        fd.profile()


def test_torch_profiler_shows_kernels_by_name() -> None:
    fd = linear_and_sum()
    fd.execute([X, W])
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        fd.execute([X, W])
    names = {event.key for event in prof.key_averages()}
    assert {"S0", "linear T3", "S2"} <= names


def gather_with_profile(rank: int, size: int) -> list[object]:
    """The communication's profile, and what the segment alone writes into a given tensor."""
    built = all_gather(size)
    shard = built.inputs[0].chunk(size)[rank]
    [out] = built.fd.execute([shard], profile=True)
    [kernel] = built.fd.profile().kernel_profiles
    program = gather_segment()
    executor = make_executor(program)
    compile_executor(executor, program)
    given = torch.zeros(size * 4)
    [result] = run_executor(executor, program, [shard], [given])
    Communicator.instance().barrier()
    return [
        torch.equal(out.as_subclass(torch.Tensor), built.inputs[0]),
        (kernel.scheduler, kernel.name.split()[0], kernel.input_bytes, kernel.output_bytes),
        kernel.time_ms > 0,
        result is given and torch.equal(given, built.inputs[0]),
    ]


def test_a_communication_reports_bytes_and_writes_into_given_outputs() -> None:
    expected = [True, ("communication", "all_gather", 16, 32), True, True]
    assert run_ranks(gather_with_profile, 2) == [expected, expected]


# Nothing is dispatched on the way of a call.


def test_a_cached_call_looks_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = linear_and_sum()
    [first] = fd.execute([X, W])
    monkeypatch.setattr(dispatch, "EXECUTORS", {})
    monkeypatch.setattr(dispatch, "BY_CAPABILITY", ())
    [second] = fd.execute([X, W])
    assert torch.equal(first, second)
