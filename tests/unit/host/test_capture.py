"""Recording a host program: in which order, what is refused, and what failures leave behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from captured_on_cpu import Cuda
from meshfuse import DataType, FusionDefinition, ParallelType, TensorView
from meshfuse.base.errors import CommunicationError, MeshfuseError, Unsupported
from meshfuse.dist.communicator import Communicator
from meshfuse.host.capture import record
from meshfuse.host.load import load
from meshfuse.host.nodes import HostProgram
from meshfuse.host.plan import Executable
from meshfuse.host.repeatable import reason_against_capture
from meshfuse.ir.parser import parse_program
from meshfuse.multidevice import DeviceMesh, Overlap
from meshfuse.pipeline import compile, outline_program
from meshfuse.runtime.arguments import signature_of
from sharded_runs import integers


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    fake.install(monkeypatch)
    return fake


def all_reduced() -> tuple[Executable, list[torch.Tensor]]:
    """Rank 0 of two that sum [4, 6] over its rows."""
    mesh = DeviceMesh(range(2))
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 6], contiguity=True)
        fd.add_output(fd.ops.sum(x, [0]))
        x.set_device_mesh(mesh)
        x.outer_split(0, 2).axis(0).parallelize(ParallelType.mesh_x)
    inputs = [integers(2, 6)]
    program = parse_program(repr(fd.fusion))
    host = compile(program, signature_of(inputs), kernels=False).host
    return load(host, {}, None, 0, torch.device("cpu")), inputs


@dataclass(eq=False)
class Peers:
    """In place of a communicator whose peers do and send the same."""

    log: list[str] = field(default_factory=list[str])
    lost: bool = False
    group: None = None

    def rank(self) -> int:
        return 0

    def entry(self, agreements: Sequence[object], has_readers: bool) -> Any:
        return self

    def is_of(self, communicator: object) -> bool:
        return True

    def bind(self, bound: object) -> None:
        pass

    def enter(self, call: object, inputs: Sequence[object]) -> Any:
        return self

    def leave(self) -> None:
        pass

    def post(self, request: Any) -> Any:
        request.out.copy_(2 * request.src)
        return self

    def wait(self) -> None:
        pass

    def gather(self, team: tuple[int, ...], mine: Sequence[int], purpose: str) -> None:
        self.log.append(f"{list(mine)} to {team} for {purpose.partition(' of ')[0]}")
        if self.lost:
            raise CommunicationError("rank 1 gave up")

    def give_up(self, reason: str) -> None:
        self.log.append(f"gave up: {reason}")


def recorded(peers: Peers, warm_ups: int = 3) -> list[torch.Tensor]:
    executable, inputs = all_reduced()
    communicator = cast(Communicator, peers)
    return record(executable, inputs, inputs, communicator, {}, None, warm_ups)[1]


def test_a_program_is_rehearsed_and_recorded_on_a_stream_of_its_own(cuda: Cuda) -> None:
    peers = Peers()
    recorded(peers, 4)
    assert cuda.log == [
        "side 0 waits for caller",
        *["run on side 0"] * 4,
        "caller waits for side 0",
        "begin on side 0",
        "run on side 0, captured",
        "end",
    ]
    assert cuda.current == "caller"
    assert peers.log == ["[1] to (0, 1) for the capture"]


def test_what_cannot_be_recorded_is_said(cuda: Cuda) -> None:
    cuda.fails = RuntimeError("operation not permitted when stream is capturing\nCUDA kernel ..")
    peers = Peers()
    with pytest.raises(Unsupported, match=r"cannot be in a graph on cpu: operation not permitted"):
        recorded(peers)
    assert cuda.current == "caller"
    assert len(peers.log) == 1
    assert peers.log[0].startswith("gave up: capture: Unsupported: ")


def test_errors_of_a_call_stay_what_they_are(cuda: Cuda) -> None:
    class Odd(MeshfuseError, RuntimeError):
        pass

    cuda.fails = Odd("as it is")
    with pytest.raises(Odd, match="as it is"):
        recorded(Peers())
    assert cuda.current == "caller"
    assert torch.is_grad_enabled()


def test_peers_that_could_not_record_are_told_of(cuda: Cuda) -> None:
    with pytest.raises(CommunicationError, match="rank 1 gave up"):
        recorded(Peers(lost=True))
    assert cuda.current == "caller"


# What no graph can repeat.


def host_of(fd: FusionDefinition, form: Overlap | None = None) -> HostProgram:
    return outline_program(parse_program(repr(fd.fusion)), form or Overlap.plain()).host


def test_programs_that_draw_random_numbers() -> None:
    with FusionDefinition() as fd:
        zero, one = fd.define_scalar(0.0), fd.define_scalar(1.0)
        fd.add_output(fd.ops.uniform(zero, one, [4], dtype=DataType.Float))
    assert "random numbers from torch's generator" in str(reason_against_capture(host_of(fd)))


@pytest.mark.parametrize(("dropout", "reads"), [(0.0, False), (0.1, True)])
def test_attention_whose_dropout_the_host_reads(dropout: float, reads: bool) -> None:
    with FusionDefinition() as fd:
        q, k, v, grad, out = (
            fd.define_tensor([1, 2, 4, 8], contiguity=True, dtype=DataType.BFloat16)
            for _ in range(5)
        )
        lse = fd.define_tensor([1, 2, 4], contiguity=True)
        seed = fd.define_tensor([2], contiguity=True, dtype=DataType.Int)
        offset = fd.define_tensor([], dtype=DataType.Int)
        rate, causal = fd.define_scalar(dropout), fd.define_scalar(False)
        for tensor in fd.ops.sdpfa_bwd(grad, q, k, v, out, lse, rate, causal, seed, offset, None):
            fd.add_output(tensor)
    found = reason_against_capture(host_of(fd))
    assert ("the host waits for the values of" in str(found)) == reads


def test_chunks_between_peers() -> None:
    mesh = DeviceMesh(range(2))
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor(shape, contiguity=True) for shape in ([8, 4], [6, 4]))
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        tensors: list[TensorView] = [x, w, y]
        for tensor in tensors:
            tensor.set_device_mesh(mesh)
        x.outer_split(0, 2).axis(0).parallelize(ParallelType.mesh_x)
    assert reason_against_capture(host_of(fd)) is None
    found = str(reason_against_capture(host_of(fd, Overlap.peers())))
    assert found.startswith("fetch number ")
    assert 'overlap="off"' in found
    assert reason_against_capture(host_of(fd, Overlap.chunks(2))) is None
