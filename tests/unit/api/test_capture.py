"""fd.capture and what it returns: refusals here, the rest with a stand-in for CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from captured_on_cpu import Cuda
from meshfuse import DataType, FusionDefinition
from meshfuse.base.errors import Unsupported, UserAssertionError, UserError, UserTypeError
from meshfuse.multidevice import DeviceMesh
from sharded_runs import integers


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    fake.install(monkeypatch)
    return fake


def scaled() -> FusionDefinition:
    """[-1, 4] times a number, and its sums."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4], contiguity=True)
        y = fd.ops.mul(x, fd.define_scalar())
        fd.add_output(y)
        fd.add_output(fd.ops.sum(y, [1]))
    return fd


def counting() -> FusionDefinition:
    """Adds one to its input, in place, and returns twice what that was."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([4], contiguity=True)
        fd.add_output(fd.ops.add(x, x))
        fd.add_output(fd.ops.add(x, fd.define_scalar(1.0)), x)
    return fd


# What is refused.


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_cuda_it_says_what_there_is() -> None:
    with pytest.raises(Unsupported, match=r"no CUDA device here; execute is flat already"):
        scaled().capture([integers(2, 4), 2.0])


def test_inputs_on_the_cpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(Unsupported, match=r"input 0, T0 float\[i0, 4\], lies on cpu"):
        scaled().capture([integers(2, 4), 2.0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UserError, match="is being captured already"):
        scaled().capture([integers(2, 4), 2.0])


def test_arguments_are_checked(cuda: Cuda) -> None:
    inputs = [integers(2, 4), 2.0]
    with pytest.raises(UserTypeError, match="copy_inputs=1"):
        scaled().capture(inputs, copy_inputs=1)  # type: ignore[arg-type]  # users' values
    with pytest.raises(UserError, match=r"warm_ups=2.*3 or more"):
        scaled().capture(inputs, warm_ups=2)
    with pytest.raises(UserError, match="expected 2 inputs"):
        scaled().capture(inputs[:1])
    fd = scaled()
    fd.segment(inputs)
    with pytest.raises(UserAssertionError, match="capture: is of what execute runs as one"):
        fd.capture(inputs)
    with pytest.raises(UserError, match="this job has 1 process"):
        on_two_ranks().capture(inputs[:1])
    assert cuda.log == []


def on_two_ranks() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 4], contiguity=True)
        fd.add_output(fd.ops.neg(x))
        x.set_device_mesh(DeviceMesh(range(2)))
    return fd


def test_random_numbers_are_refused(cuda: Cuda) -> None:
    with FusionDefinition() as fd:
        zero, one = fd.define_scalar(0.0), fd.define_scalar(1.0)
        fd.add_output(fd.ops.uniform(zero, one, [4], dtype=DataType.Float))
    with pytest.raises(Unsupported, match="capture: it draws random numbers"):
        fd.capture([])
    assert cuda.log == []


# What is replayed.


def test_calls_replay_with_their_inputs(cuda: Cuda) -> None:
    x, y = integers(2, 4), integers(2, 4).neg()
    fd = scaled()
    captured = fd.capture([x, 2.0])
    assert cuda.log[-1] == "end"
    assert torch.equal(captured.outputs[0], torch.zeros(2, 4))  # nothing is computed yet
    for value in (x, y, x.t().contiguous().t()):
        doubled, sums = captured([value, 2.0])
        assert torch.equal(doubled, 2 * value)
        assert torch.equal(sums, (2 * value).sum(1))
    assert cuda.log[-3:] == ["replay on caller"] * 3
    assert torch.equal(fd.execute([y, 3.0])[0], 3 * y)  # execute goes on as before
    assert "host program" in fd.explain()


def test_outputs_are_the_graphs_own_memory(cuda: Cuda) -> None:
    captured = scaled().capture([integers(2, 4), 2.0])
    first = captured([torch.ones(2, 4), 2.0])
    own = captured([torch.ones(2, 4), 2.0], clone_outputs=True)
    second = captured([3 * torch.ones(2, 4), 2.0])
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert torch.equal(first[0], 6 * torch.ones(2, 4))
    assert torch.equal(own[0], 2 * torch.ones(2, 4))


def test_its_own_inputs_may_be_written(cuda: Cuda) -> None:
    given = integers(2, 4)
    captured = scaled().capture([given, 2.0])
    held = captured.inputs[0]
    assert isinstance(held, torch.Tensor)
    assert held is not given
    held.fill_(5)
    assert torch.equal(captured()[0], torch.full((2, 4), 10.0))
    assert torch.equal(captured([held, 2.0])[0], torch.full((2, 4), 10.0))


def test_without_copies_the_given_tensors_are_read(cuda: Cuda) -> None:
    x = torch.ones(2, 4)
    captured = scaled().capture([x, 2.0], copy_inputs=False)
    assert captured.inputs[0] is x
    x.fill_(4)
    assert torch.equal(captured()[0], torch.full((2, 4), 8.0))
    assert torch.equal(captured([x, 2.0])[0], torch.full((2, 4), 8.0))
    with pytest.raises(UserError, match="is not the tensor of the capture"):
        captured([x.clone(), 2.0])


@pytest.mark.parametrize("copies", [True, False])
def test_updates_in_place_happen_once_a_call(cuda: Cuda, copies: bool) -> None:
    x = torch.ones(4)
    captured = counting().capture([x], copy_inputs=copies)
    assert torch.equal(x, torch.ones(4))  # rehearsals and the capture leave it
    for k in (1, 2):
        [twice] = captured([x])
        assert torch.equal(twice, torch.full((4,), 2.0 * k))
        assert torch.equal(x, torch.full((4,), k + 1.0))


def test_expanded_inputs_are_copied_as_they_are(cuda: Cuda) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([3, 4], contiguity=[None, True])
        fd.add_output(fd.ops.sum(x, [0]))
    row = torch.arange(4.0)
    captured = fd.capture([row.expand(3, 4)])
    assert captured.inputs[0].stride() == (0, 1)  # type: ignore[union-attr]  # is a tensor
    assert torch.equal(captured([(row + 1).expand(3, 4)])[0], 3 * (row + 1))
    with pytest.raises(UserError, match=r"strides \[0, 1\] at the capture, but got"):
        captured([torch.ones(3, 4)])


def test_inputs_whose_elements_overlap_are_not_copied(cuda: Cuda) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([3, 3])
        fd.add_output(fd.ops.neg(x))
    windows = torch.arange(5.0).as_strided((3, 3), (1, 1))
    with pytest.raises(Unsupported, match=r"share memory.*pass a clone"):
        fd.capture([windows])
    assert torch.equal(fd.capture([windows], copy_inputs=False)()[0], -windows)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ([torch.ones(2, 4)], r"takes 2 inputs \(T0 float\[i0, 4\], d0\), but got 1"),
        ([torch.ones(3, 4), 2.0], r"was torch\.float32 \[2, 4\] on cpu .* got torch\.float32 \[3"),
        ([torch.ones(2, 4).double(), 2.0], r"but got torch\.float64 \[2, 4\]"),
        ([torch.ones(2, 4, device="meta"), 2.0], "but got .* on meta"),
        ([torch.ones(2, 4), 3.0], "was 2.0 at the capture, which is part of the graph, but got 3"),
        ([2.0, 2.0], r"input 0, T0 float\[i0, 4\], was torch\.float32"),
        ([torch.ones(2, 4), torch.ones(())], "which is part of the graph, but got torch"),
    ],
)
def test_other_inputs_are_refused(cuda: Cuda, inputs: list[Any], text: str) -> None:
    captured = scaled().capture([integers(2, 4), 2.0])
    cuda.log.clear()
    with pytest.raises(UserError, match=text):
        captured(inputs)
    assert cuda.log == []


def test_a_call_on_another_stream_comes_behind_the_last(cuda: Cuda) -> None:
    captured = scaled().capture([integers(2, 4), float("nan")])
    captured([integers(2, 4), float("nan")])
    cuda.log.clear()
    cuda.current = "another"
    captured()
    captured()
    assert cuda.log == ["another waits for caller", "replay on another", "replay on another"]


def test_modes_stay_the_callers(cuda: Cuda) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.warns(UserWarning, match="input 0 requires grad"):
        captured = scaled().capture([x, 2.0])
    [doubled, _] = captured([x, 2.0])
    assert torch.is_grad_enabled()
    assert not doubled.requires_grad
    assert not captured.inputs[0].requires_grad  # type: ignore[union-attr]  # is a tensor
    assert cuda.current == "caller"


def test_a_released_graph_is_not_called(cuda: Cuda) -> None:
    captured = scaled().capture([integers(2, 4), 2.0])
    captured.release()
    captured.release()
    assert cuda.log[-1] == "synchronize"
    with pytest.raises(UserError, match=r"was released; call fd\.capture again"):
        captured()
