"""Plans that are bound to a communicator: collectives that are awaited at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch

from alike_ranks import Backend, Peers, peers_over, seem_to_be_on_a_stream
from frames import frames_of
from host_loops import define, dense
from meshfuse import FusionDefinition
from meshfuse.dist.communicator import Communicator
from meshfuse.host.direct import DirectPlan
from meshfuse.host.load import load
from meshfuse.host.plan import Executable
from meshfuse.pipeline import compile
from meshfuse.runtime.arguments import signature_of
from reduced_in_place import row_parallel
from sharded_runs import X, mesh_of, place

ROWS = 128
"""Smaller sums of CPU tensors take another way than those of a GPU."""


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    seem_to_be_on_a_stream(monkeypatch)
    return Backend()


def gathered() -> FusionDefinition:
    """x @ w, of which each of two ranks has half of the rows of x."""

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, ROWS, 4), dense(fd, 4, 5)
        y = fd.ops.matmul(x, w)
        mesh = mesh_of(2)
        place(mesh, {0: X}, x)
        place(mesh, {}, w, y)
        fd.add_output(y)

    return define(build)


def executable_of(fd: FusionDefinition, inputs: list[torch.Tensor]) -> Executable:
    compiled = compile(fd.fusion.recording.program, signature_of(inputs), kernels=False)
    return load(compiled.host, {}, None, 0, torch.device("cpu"))


def direct_plan(executable: Executable, inputs: list[torch.Tensor], peers: Peers) -> DirectPlan:
    """The plan, on which ranks need not agree."""
    plan, _ = executable.start(inputs)
    return DirectPlan(executable, replace(plan, agreements=()), cast(Communicator, peers))


@pytest.mark.parametrize("has_work", [False, True])
def test_sums_in_place_are_awaited_at_once(backend: Backend, has_work: bool) -> None:
    backend.has_work = has_work
    fd, peers = row_parallel(2, ROWS, ROWS).fd, peers_over(backend)
    inputs = [torch.randn(ROWS, 4), torch.randn(4, ROWS)]
    executable = executable_of(fd, inputs)
    direct = direct_plan(executable, inputs, peers)
    for k in range(4):
        x, w = inputs[0] + k, inputs[1]
        [y] = direct.run(executable.slots([x, w]), None)
        assert torch.equal(y, 2 * (x @ w))
    assert backend.log == (["reduce", "wait"] if has_work else ["reduce"]) * 4
    assert (peers.requests, peers.group.posted) == (1, 4)


@pytest.mark.parametrize("has_work", [False, True])
def test_gathers_are_awaited_at_once_however_their_sources_lie(
    backend: Backend, has_work: bool
) -> None:
    """A source that is not contiguous is asked for the long way, and the next one is not."""
    backend.has_work = has_work
    peers, inputs = peers_over(backend), [torch.randn(ROWS // 2, 4), torch.randn(4, 5)]
    executable = executable_of(gathered(), inputs)
    direct = direct_plan(executable, inputs, peers)
    turned = inputs[0].T.contiguous().T
    requests = list[int]()
    for x in (inputs[0], inputs[0], turned, inputs[0]):
        [y] = direct.run(executable.slots([x, inputs[1]]), None)
        torch.testing.assert_close(y, x.repeat(2, 1) @ inputs[1])
        requests.append(peers.requests)
    assert requests == [1, 1, 2, 2]
    assert (
        backend.log == ([f"gather {ROWS * 2}", "wait"] if has_work else [f"gather {ROWS * 2}"]) * 4
    )


def test_a_collective_takes_few_frames(backend: Backend) -> None:
    peers, inputs = peers_over(backend), [torch.randn(ROWS // 2, 4), torch.randn(4, 5)]
    executable = executable_of(gathered(), inputs)
    direct = direct_plan(executable, inputs, peers)
    for _ in range(2):
        direct.run(executable.slots(inputs), None)
    slots = executable.slots(inputs)
    [y], frames = frames_of(partial(direct.run, slots, None), apart_from="alike_ranks.py")
    torch.testing.assert_close(y, inputs[0].repeat(2, 1) @ inputs[1])
    assert frames == ["run", "allocate", "perform", "post", "apply"]


class Interrupted:
    """Actions, before the first of which there is an interrupt, once."""

    def __init__(self, actions: Sequence[Any]) -> None:
        self._count, self._rest, self._is_over = len(actions), iter(actions), False

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Interrupted:
        return self

    def __next__(self) -> Any:
        if not self._is_over:
            self._is_over = True
            raise KeyboardInterrupt
        return next(self._rest)


def scaled() -> FusionDefinition:
    """No rank counts on another one."""

    def build(fd: FusionDefinition) -> None:
        fd.add_output(fd.ops.relu(dense(fd, ROWS // 2, 4)))

    return define(build)


@pytest.mark.parametrize(("make", "told"), [(gathered, ["KeyboardInterrupt: "]), (scaled, [])])
def test_an_interrupt_before_all_actions_is_told_if_there_are_collectives(
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], FusionDefinition],
    told: list[str],
) -> None:
    peers = peers_over(backend)
    inputs = [torch.randn(ROWS // 2, 4), torch.randn(4, 5)][: 2 if told else 1]
    executable = executable_of(make(), inputs)
    direct = direct_plan(executable, inputs, peers)
    direct.run(executable.slots(inputs), None)
    monkeypatch.setattr(direct, "_actions", Interrupted(direct._actions))
    with pytest.raises(KeyboardInterrupt):
        direct.run(executable.slots(inputs), None)
    assert peers.told == told
