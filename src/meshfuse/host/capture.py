"""A whole host program as one CUDA graph, its collectives included.

The program is issued as at any call, by run_executable, but onto a stream that records. So worker
streams, which fork from the caller's and join it again, are branches of the graph, and NCCL's
collectives are nodes of it. What the host itself does for a call (plans, agreements, deadlines) is
done when the graph is recorded, and not when it is replayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from meshfuse.base.errors import MeshfuseError, Unsupported
from meshfuse.dist.calls import Call
from meshfuse.dist.communicator import Communicator
from meshfuse.host.executors import run_executable
from meshfuse.host.plan import Executable
from meshfuse.runtime.arguments import Argument

LEAST_WARM_UPS = 3
"""Runs before the capture: they compile, form process groups, and make libraries' workspaces."""


def record(
    executable: Executable,
    rehearsed: Sequence[Argument],
    arguments: Sequence[Argument],
    communicator: Communicator,
    given: Mapping[str, int],
    call: Call | None,
    warm_ups: int,
) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """Run a program on `rehearsed` a few times, then record it on `arguments`, which lie alike:
    the graph, and what it writes the results to.

    `given` and `call` are those of run_executable. All ranks of its meshes come here together: each
    returns when all have recorded. Nothing has been computed on `arguments` then. The caller's
    stream is current again on every path. Raises what run_executable does, and Unsupported for an
    operation that cannot be recorded; its peers are told, and their groups are broken.
    """
    device = executable.device
    with torch.cuda.device(device):
        caller, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        stream.wait_stream(caller)
        torch.cuda.set_stream(stream)
        try:
            try:
                for k in range(warm_ups):
                    own = None if k else call
                    run_executable(executable, rehearsed, communicator, given=given, call=own)
            finally:
                caller.wait_stream(stream)
            return _record_together(executable, arguments, communicator, given, stream)
        finally:  # where a capture fails, torch's own context leaves its stream current
            torch.cuda.set_stream(caller)


def _record_together(
    executable: Executable,
    arguments: Sequence[Argument],
    communicator: Communicator,
    given: Mapping[str, int],
    stream: torch.cuda.Stream,
) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """As `_record`, and then wait until all ranks have done it: no replay can."""
    agreements = executable.start(arguments, given)[0].agreements
    try:
        recorded = _record(executable, arguments, communicator, given, stream)
    except BaseException as error:
        if agreements:
            communicator.give_up(f"capture: {type(error).__name__}: {error}")
        raise
    for agreement in agreements:
        communicator.gather(agreement.team, [1], f"the capture of {agreement.purpose}")
    return recorded


def _record(
    executable: Executable,
    arguments: Sequence[Argument],
    communicator: Communicator,
    given: Mapping[str, int],
    stream: torch.cuda.Stream,
) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """Other threads may go on: torch's of NCCL and ours look at the events of earlier calls."""
    graph, failure, outputs = torch.cuda.CUDAGraph(), None, list[torch.Tensor]()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            try:
                outputs = run_executable(executable, arguments, communicator, given=given)
            except BaseException as error:
                failure = error  # the end of a capture that failed raises, too
                raise
    except RuntimeError as error:
        cause = error if failure is None else failure
        if isinstance(cause, MeshfuseError) or not isinstance(cause, RuntimeError):
            raise cause from None
        reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        raise Unsupported(
            f"capture: an operation of the program cannot be in a graph on {executable.device}: "
            f"{reason}; execute runs it"
        ) from cause
    return graph, outputs
