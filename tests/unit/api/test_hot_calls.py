"""Calls like earlier ones: the short way gives what the long way gives, errors included."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy
import pytest
import torch

from frames import frames_of
from meshfuse import DataType, DistributedTensor, FusionDefinition, ParallelType
from meshfuse.api import executor_cache
from meshfuse.api.executor_cache import FusionExecutorCache
from meshfuse.api.hot_calls import MOST_CALLS, facts_of_inputs, guard_of
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.launcher import Place
from meshfuse.expr import const
from meshfuse.facts.digits import Digit, Sharding
from meshfuse.ir.mesh import make_mesh
from meshfuse.multidevice import DeviceMesh, Overlap


def scaled(contiguity: bool = True) -> FusionDefinition:
    """x * c + 1 of a float matrix with 4 columns and a float."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4], contiguity=contiguity)
        c = fd.define_scalar(DataType.Double)
        fd.add_output(fd.ops.add(fd.ops.mul(x, c), 1.0))
    return fd


def linear() -> tuple[FusionDefinition, list[torch.Tensor]]:
    """x @ w.T without a kernel, and inputs."""
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([-1, 4], contiguity=True) for _ in range(2))
        fd.add_output(fd.ops.linear(x, w))
    return fd, [torch.randn(3, 4), torch.randn(5, 4)]


def only_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the long way")

    monkeypatch.setattr(FusionExecutorCache, "bind", fail)


def test_the_second_call_goes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    fd, x = scaled(), torch.randn(3, 4)
    fd.execute([x, 2.0])
    only_the_short_way(monkeypatch)
    for scale in (2.0, -1.5):
        [y] = fd.execute([x + 1, scale])
        torch.testing.assert_close(y, (x + 1) * scale + 1)
    with pytest.raises(AssertionError, match="the long way"):
        fd.execute([torch.randn(5, 4), 2.0])
    with pytest.raises(AssertionError, match="the long way"):
        fd.execute([x, 2])  # an int in place of the float is another call


def test_numbers_are_converted_each_time() -> None:
    fd, x = scaled(), torch.ones(3, 4)
    for scale in (2, 3, True, False):
        [y] = fd.execute([x, scale])
        assert torch.equal(y, torch.full((3, 4), scale + 1.0))


def test_strides_and_other_sizes_are_other_calls() -> None:
    fd = scaled(contiguity=False)
    for _ in range(2):
        for x in (torch.randn(3, 4), torch.randn(4, 3).T, torch.randn(6, 4)[::2], torch.ones(0, 4)):
            [y] = fd.execute([x, 0.5])
            torch.testing.assert_close(y, x * 0.5 + 1)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([torch.zeros(3, 4)], "expected 2 inputs"),
        ([torch.zeros(3, 4), 1.0, 1.0], "expected 2 inputs"),
        ([torch.zeros(3, 5), 1.0], "of size 4 on axis 1"),
        ([torch.zeros(4), 1.0], "tensor of rank 2, but got a tensor of rank 1"),
        ([torch.zeros(3, 4, dtype=torch.float64), 1.0], "dtype float, but got"),
        ([torch.zeros(4, 3).T, 1.0], "contiguous on axis 1"),
        ([torch.zeros(3, 4).to_sparse(), 1.0], "a dense tensor"),
        ([torch.zeros(3, 4), torch.zeros(())], "to be a scalar but got"),
        ([1.0, torch.zeros(3, 4)], "an at::Tensor but got scalar"),
        ([torch.zeros(3, 4), 1j], "not compatible with the expected data type"),
        ([torch.zeros(3, 4), "1"], "accepted are tensors"),
    ],
)
def test_wrong_inputs_get_their_errors_after_right_ones(
    inputs: Sequence[object], message: str
) -> None:
    fd = scaled()
    for _ in range(2):
        fd.execute([torch.zeros(3, 4), 1.0])
        with pytest.raises(RuntimeError, match=re.escape(message)):
            fd.execute(inputs)


def test_inputs_in_other_containers() -> None:
    fd, x = scaled(), torch.randn(3, 4)
    want = x * 2 + 1
    for _ in range(2):
        for inputs in ([x, 2.0], (x, 2.0), [[x], (2.0,)], iter([x, 2.0])):
            torch.testing.assert_close(fd.execute(inputs)[0], want)


def test_inputs_that_require_grad_warn_once_and_outputs_do_not() -> None:
    fd, x = scaled(), torch.nn.Parameter(torch.randn(3, 4))
    with pytest.warns(UserWarning, match="input 0 requires grad"):
        fd.execute([x, 2.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [y] = fd.execute([x, 2.0])
    assert not y.requires_grad
    torch.testing.assert_close(y, x.detach() * 2 + 1)


def test_sizes_that_are_numbers() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([1, 4], contiguity=True)
        n = fd.define_scalar(DataType.Int)
        fd.add_output(fd.ops.add(fd.ops.broadcast_in_dim(x, [n, 4], [0, 1]), 1.0))
    x = torch.randn(1, 4)
    for count in (3, 5, 3, 1):
        [y] = fd.execute([x, count])
        assert torch.equal(y, x.expand(count, 4) + 1)


def test_shards_keep_their_sharding_and_other_shardings_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def doubled(axis: int, mesh: DeviceMesh) -> FusionDefinition:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 4], contiguity=True)
            y = fd.ops.add(x, x)
            fd.add_output(y)
            for tensor in (x, y):
                tensor.set_device_mesh(mesh)
                tensor.outer_split(axis, 1)
                tensor.axis(axis).parallelize(ParallelType.mesh_x)
        return fd

    fd, x = doubled(0, DeviceMesh([0])), torch.randn(2, 4)
    others = [doubled(axis, DeviceMesh([0], names=("tp",))).execute([x])[0] for axis in (0, 1)]
    [first] = fd.execute([x])
    [second] = fd.execute([first])
    assert isinstance(second, DistributedTensor)
    for other in others:  # of the same size, here and in all
        fd.execute([first])
        with pytest.raises(UserError, match="must be sharded as"):
            fd.execute([other])
    only_the_short_way(monkeypatch)
    [third] = fd.execute([first])
    assert isinstance(third, DistributedTensor)
    assert third.sharding == second.sharding
    assert torch.equal(third.local, x * 4)


def test_shards_of_one_size_are_of_several_wholes() -> None:
    """Of three rows and of four, the first of two ranks has two."""
    rows = Digit(const(2), ParallelType.mesh_x), Digit(const(2))
    sharding = Sharding(make_mesh([0, 1]), (rows, (Digit(const(4)),)))
    three, four, again = (
        DistributedTensor.made_of(torch.ones(2, 4), sharding, (count, 4)) for count in (3, 4, 4)
    )
    guard = guard_of([four])
    assert guard is not None and guard(again) and not guard(three)
    assert facts_of_inputs([four]) == facts_of_inputs([again]) != facts_of_inputs([three])


def shifted(size: int = 4) -> FusionDefinition:
    """x + w of float matrices, which may lie in any way."""
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([-1, size], contiguity=False) for _ in range(2))
        fd.add_output(fd.ops.add(x, w))
    return fd


def test_a_call_like_the_last_is_told_without_its_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    fd, x = shifted(), torch.randn(3, 4)
    weight = torch.nn.Parameter(torch.randn(3, 4), requires_grad=False)
    fd.execute([x, weight])
    fd.execute([x, weight])
    monkeypatch.setattr(executor_cache, "facts_of_inputs", lambda _: pytest.fail("its facts"))
    for _ in range(2):
        assert torch.equal(fd.execute([x + 1, weight])[0], x + 1 + weight)
    for others in ([x, x], [x.T.contiguous().T, weight], [x[:2], weight[:2]], [x.double(), weight]):
        with pytest.raises(pytest.fail.Exception, match="its facts"):
            fd.execute(others)
    with pytest.raises(pytest.fail.Exception, match="its facts"):
        fd.execute([x, weight], overlap="off")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda x, w: [x], "expected 2 inputs"),
        (lambda x, w: [x, w, w], "expected 2 inputs"),
        (lambda x, w: [x, 1.0], "an at::Tensor but got scalar"),
        (lambda x, w: [x, w.double()], "dtype float, but got"),
        (lambda x, w: [x, w[:2]], "of size 3"),
        (lambda x, w: [x, w.to_sparse()], "a dense tensor"),
    ],
)
def test_calls_unlike_the_last_get_their_errors(
    other: Callable[..., list[object]], message: str
) -> None:
    fd, x, w = shifted(), torch.randn(3, 4), torch.randn(3, 4)
    for _ in range(3):
        fd.execute([x, w])
        with pytest.raises(RuntimeError, match=re.escape(message)):
            fd.execute(other(x, w))


@pytest.mark.filterwarnings("ignore:input 0 requires grad")
def test_calls_unlike_the_last_that_are_right() -> None:
    fd, x, w = shifted(), torch.randn(3, 4), torch.randn(3, 4)
    grown = x.clone().requires_grad_()
    for _ in range(3):
        for own, other in ((x, w), (x.T.contiguous().T, w), (x[:2], w[1:]), (grown, w), (x, w)):
            [y] = fd.execute([own, other])
            assert torch.equal(y, own.detach() + other) and not y.requires_grad
        with pytest.raises(UserError, match="resolve_neg"):
            fd.execute([torch.randn(3, 4, dtype=torch.complex64).conj().imag, w])
        with torch.inference_mode():
            assert torch.equal(fd.execute([x, w])[0], x + w)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(fd.execute([x, w])[0], x + w)


@pytest.mark.parametrize("odd", [["off"], {}, numpy.ones(2), torch.ones(2), 1, False, b"off"])
def test_what_is_no_overlap_is_refused_before_calls_are_compared(odd: Any) -> None:
    """Some of it has no hash, or cannot be told to be equal."""
    fd, x, w = shifted(), torch.randn(3, 4), torch.randn(3, 4)
    for _ in range(3):
        with pytest.raises(UserTypeError, match="takes 'auto', 'off', 'require'"):
            fd.execute([x, w], overlap=odd)
        is_auto: Any
        for is_auto in (["yes"], 1, True, False):
            assert torch.equal(fd.execute([x, w], override_user_schedule=is_auto)[0], x + w)


def test_inputs_that_are_outputs_stay_what_they_are() -> None:
    mesh = DeviceMesh([0])
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4], contiguity=True)
        y = fd.ops.cast(x, DataType.Float)
        fd.add_output(y)
        fd.add_output(x)
        fd.add_output(fd.ops.add(x, 1.0))
        for tensor in (x, y):
            tensor.set_device_mesh(mesh)
            tensor.outer_split(0, 1)
            tensor.axis(0).parallelize(ParallelType.mesh_x)
    plain = torch.randn(2, 4)
    for _ in range(4):
        outputs = fd.execute([plain])
        assert type(plain) is torch.Tensor
        for output, more in zip(outputs, (0, 0, 1), strict=True):
            assert isinstance(output, DistributedTensor)
            assert torch.equal(output.local, plain + more)


def test_results_that_are_views_take_part_in_grad() -> None:
    mesh = DeviceMesh([0])
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4], contiguity=True)
        y = fd.ops.permute(x, [1, 0])
        fd.add_output(y)
        for tensor, axis in ((x, 0), (y, 1)):
            tensor.set_device_mesh(mesh)
            tensor.outer_split(axis, 1)
            tensor.axis(axis).parallelize(ParallelType.mesh_x)
    more = torch.nn.Parameter(torch.ones(4, 2))
    for _ in range(3):
        x = torch.randn(2, 4)
        [y] = fd.execute([x.clone()])
        assert isinstance(y, DistributedTensor)
        assert torch.equal(y.add_(more), x.T + 1)


def test_an_interrupt_leaves_grad_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind any function, also that which switches grad off."""
    fd, inputs = linear()
    for _ in range(2):
        fd.execute(inputs)
    switch: Callable[[bool], None] = torch._C._set_grad_enabled

    def switch_and_end(is_on: bool) -> None:
        switch(is_on)
        if not is_on:
            raise KeyboardInterrupt

    with torch.enable_grad():  # and nothing is left to other tests
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(torch._C, "_set_grad_enabled", switch_and_end)
            fd.execute(inputs)
        assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "other",
    [
        {"is_auto": True},
        {"overlap": Overlap.chunks(2)},
        {"overlap": "auto"},
        {"overlap": None},
        {"given": (("i0", 2),)},
        {"is_deterministic": True},
        {"here": Place(1, 2, 1, 2)},
    ],
)
def test_a_call_under_other_conditions_is_unlike_the_last(other: dict[str, Any]) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4], contiguity=True)
        fd.add_output(fd.ops.relu(x))
        x.set_device_mesh(DeviceMesh([0]))
    inputs, communicator = [torch.randn(2, 4)], Communicator.instance()
    for _ in range(2):
        fd.execute(inputs, overlap="off")
    last = fd.fec._last_hot
    assert last is not None and last.is_like(inputs, communicator, False, "off")
    unlike = replace(last, conditions=last.conditions._replace(**other))
    assert not unlike.is_like(inputs, communicator, False, "off")


def test_calls_are_forgotten_again() -> None:
    fd = scaled()
    for rows in range(1, MOST_CALLS + 20):
        fd.execute([torch.zeros(rows, 4), 1.0])
    assert len(fd.fec._hot_calls) == MOST_CALLS


def test_what_is_unusual_has_no_facts() -> None:
    class Mine(torch.Tensor):
        pass

    plain = torch.zeros(2)
    assert facts_of_inputs([plain, 1, 2.0, True]) is not None
    for odd in (plain.as_subclass(Mine), plain.to_sparse(), 1j, [plain], None):
        assert facts_of_inputs([plain, odd]) is None


def test_a_call_like_the_last_takes_few_frames() -> None:
    fd, inputs = linear()
    for _ in range(3):
        fd.execute(inputs)
    [y], frames = frames_of(partial(fd.execute, inputs))
    assert torch.equal(y, torch.nn.functional.linear(*inputs))
    assert frames[0] == "execute"
    assert len(frames) <= 8, frames
