"""Plans: sizes evaluated once, slots emptied after the last use, steps traced."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshfuse import DataType, FusionDefinition
from meshfuse.base.errors import InvariantError, UserError
from meshfuse.base.trace import Trace
from meshfuse.dist.communicator import Communicator
from meshfuse.host import plan as plan_module
from meshfuse.host.executors import HostIrExecutor, run_executable
from meshfuse.host.load import load
from meshfuse.host.nodes import Free, HostProgram
from meshfuse.host.plan import Executable
from meshfuse.ir.axes import TensorName
from meshfuse.ir.parser import parse_program
from meshfuse.ir.program import Program
from meshfuse.pipeline import compile
from meshfuse.runtime.arguments import signature_of
from small_programs import norm_linear

CPU = torch.device("cpu")
NORM_INPUTS = [torch.randn(shape) for shape in ((2, 7, 16), (16,), (16,), (32, 16))]


def op_by_op(program: Program, inputs: list[torch.Tensor]) -> Executable:
    return load(compile(program, signature_of(inputs), kernels=False).host, {}, None, 0, CPU)


def test_buffers_are_let_go_right_after_their_last_use() -> None:
    """After each node, just those names hold a value that a later node needs, and the output."""
    executable = op_by_op(norm_linear(), NORM_INPUTS)
    plan, slots = executable.start(NORM_INPUTS)
    body = executable.program.body
    names = [*executable.program.inputs, *executable.program.buffers]
    place = {name: i for i, name in enumerate(dict.fromkeys(names))}
    freed: set[TensorName] = set()
    for node, action in zip(body, plan.actions, strict=True):
        action(slots)
        if isinstance(node, Free):
            freed.update(node.buffers)
        assert all(slots[place[name]] is None for name in freed)
    alive = {name for name, i in place.items() if slots[i] is not None}
    assert alive == {*executable.program.inputs, executable.program.outputs[0].buffer}
    assert freed == set(names) - alive


def test_a_plan_is_made_once_for_each_set_of_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "MOST_PLANS", 2)
    executable = op_by_op(norm_linear(), NORM_INPUTS)

    def plan_of(rows: int) -> object:
        return executable.start([torch.randn(2, rows, 16), *NORM_INPUTS[1:]])[0]

    first = plan_of(7)
    assert plan_of(7) is first
    assert plan_of(8) is not first
    plan_of(9)
    assert plan_of(7) is not first  # forgotten: there is room for two


def test_sizes_that_disagree() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.add(x, y))
    inputs = [torch.zeros(2, 3), torch.zeros(2, 3)]
    executable = op_by_op(parse_program(repr(fd.fusion)), inputs)
    for _ in range(2):
        with pytest.raises(UserError, match=r"Expected input 1, T1, to be of size 2 on axis 0"):
            executable.start([inputs[0], torch.zeros(4, 3)])
        executable.start(inputs)


def test_sizes_from_arithmetic_on_scalars() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([1], contiguity=True)
        n = fd.define_scalar(DataType.Int)
        fd.add_output(fd.ops.broadcast_in_dim(x, [fd.ops.add(fd.ops.mul(n, n), 1)], [0]))
    for n_value in (2, 3, 2):
        [y] = fd.execute([torch.ones(1), n_value])
        assert y.shape == (n_value * n_value + 1,)


def test_a_result_of_another_shape_than_declared_is_a_bug_that_is_named() -> None:
    executable = op_by_op(norm_linear(), NORM_INPUTS)
    program = executable.program
    out = program.outputs[0].buffer
    wrong = replace(program.buffers[out], shape=program.buffers[out].shape[:2])
    broken: HostProgram = replace(program, buffers={**program.buffers, out: wrong})
    with pytest.raises(InvariantError, match=f"{out} must be torch.float32 of shape"):
        run_executable(load(broken, {}, None, 0, CPU), NORM_INPUTS, Communicator({}))


def test_a_trace_has_each_evaluation_with_its_bytes() -> None:
    compiled = compile(norm_linear(), signature_of(NORM_INPUTS), kernels=False)
    executor = HostIrExecutor(compiled.host, {}, None, CPU)
    trace = Trace()
    plain = executor.run(NORM_INPUTS, Communicator({}))
    traced = executor.run(NORM_INPUTS, Communicator({}), trace)
    assert torch.equal(plain[0], traced[0])
    spans = [span for span in trace.spans if span.activity.value == "run"]
    assert [span.work.group for span in spans] == [0, 1, 2]
    linear = spans[1].extent
    assert (linear.device, linear.input_bytes) == ("cpu", 4 * (2 * 7 * 16 + 32 * 16))
    assert linear.output_bytes == 4 * 2 * 7 * 32
