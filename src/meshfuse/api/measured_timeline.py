"""Timelines of calls."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from meshfuse.api.executor_cache import FusionExecutorCache
from meshfuse.api.frozen_program import GlobalSizes
from meshfuse.api.overlap_choice import Overlapping
from meshfuse.api.predicted_timeline import segments_of
from meshfuse.api.profiling import CallProfiler
from meshfuse.api.stream_clock import StreamClock
from meshfuse.api.timeline import Timeline
from meshfuse.base.errors import UserError
from meshfuse.base.trace import Activity
from meshfuse.dist.communicator import Communicator
from meshfuse.host.measurement import measured_items
from meshfuse.host.timeline import labels_by_name
from meshfuse.runtime.arguments import list_inputs


def measure_timeline(
    cache: FusionExecutorCache,
    inputs: Iterable[object],
    global_sizes: GlobalSizes | None,
    overlap: Overlapping | None = None,
) -> Timeline:
    """Run a call, and say what this rank did when: on CUDA by events on its streams."""
    values = list_inputs(inputs)
    profiler = CallProfiler(_clock_for(values))
    cache.run(values, profile=True, global_sizes=global_sizes, overlap=overlap, profiler=profiler)
    compilation = cache.recent_compilation()
    spans = profiler.spans()
    labels = labels_by_name(compilation.host, segments_of(compilation))
    devices = dict.fromkeys(s.extent.device for s in spans if s.activity is Activity.run)
    return Timeline(
        Communicator.instance().rank(),
        is_measured=True,
        source=", ".join(filter(None, devices)) or "nothing ran here",
        items=measured_items(spans, labels),
    )


def check_measured(
    inputs: object, rank: object, rates: object, link_classes: object, bandwidths: object
) -> None:
    """UserError for what only a prediction takes, and without inputs."""
    given = {"rank": rank, "rates": rates, "link_classes": link_classes, "bandwidths": bandwidths}
    for name, value in given.items():
        if value is not None:
            raise UserError(
                f"timeline(measured=True, {name}={value!r}): that is for a prediction; what is "
                "measured is this rank, with the devices and links that it has"
            )
    if inputs is None:
        raise UserError("timeline(measured=True): takes the inputs of a call of execute first")


def _clock_for(inputs: Iterable[object]) -> StreamClock | None:
    """None for the host's clock."""
    tensors = (value for value in inputs if isinstance(value, torch.Tensor) and value.is_cuda)
    first = next(tensors, None)
    return None if first is None else StreamClock(first.device)
