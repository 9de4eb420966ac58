"""A stand-in for what captures use of torch.cuda: programs run on the CPU, and calls are recorded.

A graph keeps what was run while it was captured, and runs it again when it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from meshfuse.api import capture as surface
from meshfuse.host import capture
from meshfuse.host.executors import run_executable


@dataclass(eq=False)
class Cuda:
    """`log`: streams that wait, runs and captures, in order. `fails`: what ends the capture."""

    log: list[str] = field(default_factory=list[str])
    current: str = "caller"
    streams: int = 0
    capturing: Graph | None = None
    fails: RuntimeError | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Stream", self._make_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream(self.current, self))
        monkeypatch.setattr(torch.cuda, "set_stream", self._set_stream)
        monkeypatch.setattr(torch.cuda, "device", Guard)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: self.log.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self))
        monkeypatch.setattr(torch.cuda, "graph", self._capture)
        monkeypatch.setattr(capture, "run_executable", self._run)
        monkeypatch.setattr(surface, "_check_cuda", lambda: None)
        monkeypatch.setattr(surface, "_check_devices", lambda *_: None)

    def _make_stream(self, device: torch.device) -> Stream:
        self.streams += 1
        return Stream(f"side {self.streams - 1}", self)

    def _set_stream(self, stream: Stream) -> None:
        self.current = stream.name

    def _capture(self, graph: Graph, *, stream: Stream, capture_error_mode: str) -> Capture:
        assert capture_error_mode == "thread_local"
        return Capture(graph, stream)

    def _run(self, executable: Any, inputs: Any, *rest: Any, **named: Any) -> list[torch.Tensor]:
        graph = self.capturing
        self.log.append(f"run on {self.current}{', captured' if graph else ''}")

        def run() -> list[torch.Tensor]:
            return run_executable(executable, inputs, *rest, **named)

        if graph is None:
            return run()
        if self.fails is not None:
            raise self.fails
        kept = [value.clone() for value in inputs if isinstance(value, torch.Tensor)]
        outputs = run()
        for value, before in zip(filter(torch.is_tensor, inputs), kept, strict=True):
            if not torch.equal(value, before):
                value.copy_(before)  # a capture computes nothing
        for output in outputs:
            output.zero_()

        def again() -> None:
            for output, value in zip(outputs, run(), strict=True):
                output.copy_(value)

        graph.again = again
        return outputs


@dataclass(frozen=True)
class Stream:
    name: str
    cuda: Cuda = field(compare=False)

    def wait_stream(self, other: Stream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


@dataclass(frozen=True)
class Guard:
    device: torch.device

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@dataclass(eq=False)
class Graph:
    cuda: Cuda
    again: Callable[[], None] | None = None

    def replay(self) -> None:
        assert self.again is not None
        self.cuda.log.append(f"replay on {self.cuda.current}")
        self.again()

    def reset(self) -> None:
        self.again = None


@dataclass(eq=False)
class Capture:
    """As torch's: where the end of a capture raises, its stream stays current."""

    graph: Graph
    stream: Stream

    def __enter__(self) -> None:
        cuda = self.graph.cuda
        cuda.log.append(f"begin on {self.stream.name}")
        self.before, cuda.current, cuda.capturing = cuda.current, self.stream.name, self.graph

    def __exit__(self, *_: object) -> None:
        cuda = self.graph.cuda
        cuda.capturing = None
        if cuda.fails is not None:
            raise RuntimeError("the capture was invalidated")
        cuda.log.append("end")
        cuda.current = self.before
