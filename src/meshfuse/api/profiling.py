"""Profiles of calls: what was compiled and run, for how long, and over how many bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar, Token
from dataclasses import replace
from types import TracebackType
from typing import ClassVar, final

import torch

from meshfuse.api.stream_clock import StreamClock
from meshfuse.base.errors import UserAssertionError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.trace import Activity, Meeting, Span, Trace
from meshfuse.host.executors import WHOLE_PROGRAM
from meshfuse.runtime.arguments import Argument
from meshfuse.runtime.executors import bytes_of


@final
@frozen_dataclass
class KernelProfile:
    """One executor's part of a call: a kernel, operations through torch, or a communication.

    Times are the host's, in milliseconds; a communication lasts from its post to the end of its
    wait. `compile_time_ms` is 0 for what was compiled before. `scheduler` is who scheduled it:
    "pointwise", "reduction", "normalization", "expr_eval", "communication", "user".

    A CPU has no streams, grids or registers, and its peak bandwidth is not known: `stream`,
    `correlation_id` and `registers` are -1, `percentage_peak_bandwidth` is None, the launch texts
    are empty.
    """

    name: str
    segment_id: int
    device: str
    compile_time_ms: float
    time_ms: float
    effective_bandwidth_gbs: float
    input_bytes: int
    output_bytes: int
    scheduler: str
    percentage_peak_bandwidth: float | None = None
    stream: int = -1
    correlation_id: int = -1
    registers: int = -1
    grid_str: str = ""
    block_str: str = ""
    cluster_str: str = ""
    shared_mem_str: str = ""

    def __str__(self) -> str:
        return (
            f"{self.segment_id}: {self.name} ({self.scheduler}) on {self.device}: "
            f"{self.time_ms:.3f} ms, {self.input_bytes} bytes in, {self.output_bytes} bytes out, "
            f"{self.effective_bandwidth_gbs:.2f} GB/s, compiled in {self.compile_time_ms:.1f} ms"
        )


@final
@frozen_dataclass
class FusionProfile:
    """One call.

    `host_time_ms` is all of it; of that, `compile_time_ms` went into compiling and `kernel_time_ms`
    into running executors (the sum over `kernel_profiles`). Bytes are those of its inputs and
    outputs, bandwidth is their sum per kernel time. There are no CUDA events on a CPU:
    `cuda_evt_time_ms` is -1, `percentage_peak_bandwith` None.
    """

    fusion_id: int
    segments: int
    host_time_ms: float
    compile_time_ms: float
    kernel_time_ms: float
    effective_bandwidth_gbs: float
    input_bytes: int
    output_bytes: int
    kernel_profiles: list[KernelProfile]
    cuda_evt_time_ms: float = -1.0
    percentage_peak_bandwith: float | None = None
    verbose: bool = False

    def __str__(self) -> str:
        head = (
            f"fusion {self.fusion_id}: {self.segments} segments, {self.host_time_ms:.3f} ms, of "
            f"which {self.compile_time_ms:.1f} compiling and {self.kernel_time_ms:.3f} running; "
            f"{self.input_bytes} bytes in, {self.output_bytes} bytes out"
        )
        return "\n".join([head, *(f"  {profile}" for profile in self.kernel_profiles)])


@final
class CallProfiler:
    """Measures one call: made before it, finished after it.

    By the host's clock, or else by that of a device's streams.
    """

    __slots__ = ("_clock", "_start", "trace")

    def __init__(self, clock: StreamClock | None = None) -> None:
        self.trace = Trace() if clock is None else Trace(clock=clock)
        self._clock = clock
        self._start = time.perf_counter_ns()

    def spans(self) -> list[Span]:
        """Those of the call, in nanoseconds."""
        clock = self._clock
        spans = self.trace.spans
        return spans if clock is None else [_in_nanoseconds(span, clock) for span in spans]

    def finish(
        self, fusion_id: int, inputs: Sequence[Argument], outputs: Sequence[torch.Tensor]
    ) -> FusionProfile:
        """The profile of the call, which also becomes that of the profilers that are on."""
        milliseconds = (time.perf_counter_ns() - self._start) / 1e6
        spans = self.spans()
        kernels = _kernel_profiles(spans)
        read, written = _bytes_of_tensors(inputs), _bytes_of_tensors(outputs)
        kernel_time = sum(kernel.time_ms for kernel in kernels)
        profile = FusionProfile(
            fusion_id=fusion_id,
            segments=len(kernels),
            host_time_ms=milliseconds,
            compile_time_ms=_compile_time(spans),
            kernel_time_ms=kernel_time,
            effective_bandwidth_gbs=_gigabytes_per_second(read + written, kernel_time),
            input_bytes=read,
            output_bytes=written,
            kernel_profiles=kernels,
        )
        PythonProfiler.remember(profile)
        return profile


@final
class PythonProfiler:
    """Profiles the calls inside its block, on this thread.

        with PythonProfiler() as prof:
            fd.execute(inputs)
        print(prof.profile)

    `profile` is that of the block's most recent call; UserAssertionError before the first.
    `auto_scheduled` is what nvFuser calls it: False says that the block runs `manual_execute`. Both
    kinds of call are profiled in either case.
    """

    _latest: ClassVar[FusionProfile | None] = None

    def __init__(self, auto_scheduled: bool = True) -> None:
        self.auto_scheduled = auto_scheduled
        self._profile: FusionProfile | None = None
        self._token: Token[PythonProfiler | None] | None = None

    def __enter__(self) -> PythonProfiler:
        self._token = _ACTIVE.set(self)
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._token is not None:
            _ACTIVE.reset(self._token)
            self._token = None

    @property
    def profile(self) -> FusionProfile:
        if self._profile is None:
            raise UserAssertionError(
                "PythonProfiler.profile: no call was made inside its block: nothing was profiled"
            )
        return self._profile

    @classmethod
    def remember(cls, profile: FusionProfile) -> None:
        """Make `profile` the process's latest, and that of the profiler that is on here."""
        cls._latest = profile
        active = _ACTIVE.get()
        if active is not None:
            active._profile = profile

    @classmethod
    def latest(cls) -> FusionProfile | None:
        return cls._latest

    @classmethod
    def forget(cls) -> None:
        cls._latest = None


_ACTIVE: ContextVar[PythonProfiler | None] = ContextVar("meshfuse_profiler", default=None)
"""The profiler whose block this thread or task is in."""

active_profiler = _ACTIVE.get
"""That profiler, or None. Every call asks: so it is the variable's own method, and no frame."""


def get_fusion_profile() -> FusionProfile:
    """The profile of the most recent call that was profiled; UserAssertionError without one."""
    latest = PythonProfiler.latest()
    if latest is None:
        raise UserAssertionError(
            "get_fusion_profile(): nothing was profiled; run under PythonProfiler, or with "
            "fd.execute(inputs, profile=True)"
        )
    return latest


def reset_profiler() -> None:
    """Forget the most recent profile."""
    PythonProfiler.forget()


def merge_profiles(profiles: Sequence[FusionProfile]) -> FusionProfile:
    """One profile of several calls that together are one, in order; bytes are those of each."""
    kernels = [
        replace(kernel, segment_id=number)
        for number, kernel in enumerate(k for p in profiles for k in p.kernel_profiles)
    ]
    kernel_time = sum(profile.kernel_time_ms for profile in profiles)
    read = sum(profile.input_bytes for profile in profiles)
    written = sum(profile.output_bytes for profile in profiles)
    return FusionProfile(
        fusion_id=profiles[0].fusion_id if profiles else 0,
        segments=len(kernels),
        host_time_ms=sum(profile.host_time_ms for profile in profiles),
        compile_time_ms=sum(profile.compile_time_ms for profile in profiles),
        kernel_time_ms=kernel_time,
        effective_bandwidth_gbs=_gigabytes_per_second(read + written, kernel_time),
        input_bytes=read,
        output_bytes=written,
        kernel_profiles=kernels,
    )


def _in_nanoseconds(span: Span, clock: StreamClock) -> Span:
    when, meeting = clock.nanoseconds, span.meeting
    if meeting is not None:
        arrived = None if meeting.arrived is None else when(meeting.arrived)
        meeting = Meeting(meeting.number, when(meeting.posted), when(meeting.awaited), arrived)
    return replace(span, start=when(span.start), end=when(span.end), meeting=meeting)


def _kernel_profiles(spans: Sequence[Span]) -> list[KernelProfile]:
    """One for each executor that ran, by group; a group that ran several times is added up."""
    compiled: dict[str, float] = {}
    runs: dict[int, list[Span]] = {}
    for span in spans:
        if span.activity is Activity.compile:
            name = span.work.name
            compiled[name] = compiled.get(name, 0.0) + span.milliseconds
        else:
            runs.setdefault(span.work.group, []).append(span)
    return [_kernel_profile(runs[group], compiled) for group in sorted(runs)]


def _kernel_profile(runs: Sequence[Span], compiled: dict[str, float]) -> KernelProfile:
    work = runs[0].work
    milliseconds = sum(span.milliseconds for span in runs)
    read = sum(span.extent.input_bytes for span in runs)
    written = sum(span.extent.output_bytes for span in runs)
    return KernelProfile(
        name=work.name,
        segment_id=work.group,
        device=runs[0].extent.device,
        compile_time_ms=compiled.get(work.name, 0.0),
        time_ms=milliseconds,
        effective_bandwidth_gbs=_gigabytes_per_second(read + written, milliseconds),
        input_bytes=read,
        output_bytes=written,
        scheduler=work.scheduler,
    )


def _compile_time(spans: Sequence[Span]) -> float:
    """Of the whole program: its parts are compiled inside that, some at the same time."""
    return sum(
        span.milliseconds
        for span in spans
        if span.activity is Activity.compile and span.work is WHOLE_PROGRAM
    )


def _gigabytes_per_second(count: int, milliseconds: float) -> float:
    return count / milliseconds * 1e-6 if milliseconds else 0.0


def _bytes_of_tensors(values: Sequence[Argument] | Sequence[torch.Tensor]) -> int:
    return sum(bytes_of(value) for value in values if isinstance(value, torch.Tensor))
