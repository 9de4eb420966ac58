"""MultiDeviceExecutor: a program run with parameters of its own, and its host program as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from meshfuse.api.enumerations import CommunicatorBackend
from meshfuse.api.executor_cache import FusionExecutorCache
from meshfuse.api.fusion_view import FusionView
from meshfuse.api.overlap_choice import Overlapping, read_overlap
from meshfuse.api.recording import Recording
from meshfuse.base.errors import Unsupported, UserError, UserTypeError
from meshfuse.base.options import DEFAULT_NUMBER_OF_STREAMS, NO_OPTIONS, OVERLAP_MODES
from meshfuse.facts.overlap_form import PLAIN, Overlap
from meshfuse.host.printer import print_host_program
from meshfuse.ir.program import Program
from meshfuse.passes.rotate_streams import rotate_streams
from meshfuse.pipeline import outline_program
from meshfuse.runtime.arguments import default_device, flatten_inputs, list_inputs

BACKENDS_OF = {
    "cpu": (CommunicatorBackend.gloo,),
    "cuda": (CommunicatorBackend.nccl, CommunicatorBackend.cuda),
}
"""Device type -> what may move its tensors, the default first."""


@final
@dataclass(slots=True)
class MultiDeviceExecutorParams:
    """How a MultiDeviceExecutor runs its program. They are read when that is made.

    `use_allocation_cache`: keep buffers between runs. It changes nothing: what a run frees goes
    back to torch's allocator, which on CUDA keeps it for the next run, and results belong to the
    caller, so that each run needs new ones.
    `number_of_streams`: worker streams for loops over chunks, 1 or more.
    `backend_type`: what moves data between ranks, None for the device's own: gloo for CPU tensors,
    NCCL for CUDA ones. On CUDA `cuda`, which is symmetric memory, is taken, too, and changes
    nothing: which of the two carries a transfer is decided for each by what the devices can do.
    `offset_stream_indexing_by_rank`: loops that are not swizzled begin with the chunk of the rank's
    own number, as `swizzle1d` by the mesh axis of their tensor says it.
    `inter_stream_synchronization`: each iteration waits for the one before it: one stream does it.
    `overlap`: as `execute` takes it.

    The number of streams and `overlap` go before the options of the environment.
    """

    use_allocation_cache: bool = False
    number_of_streams: int = DEFAULT_NUMBER_OF_STREAMS
    backend_type: CommunicatorBackend | None = None
    offset_stream_indexing_by_rank: bool = False
    inter_stream_synchronization: bool = False
    overlap: Overlapping = OVERLAP_MODES[0]

    @property
    def streams(self) -> int:
        """How many worker streams there are in the end."""
        return 1 if self.inter_stream_synchronization else self.number_of_streams


@final
class MultiDeviceExecutor:
    """Runs a copy of a program, by FusionExecutorCache, with parameters.

        params = multidevice.MultiDeviceExecutorParams()
        params.number_of_streams = 3
        executor = multidevice.MultiDeviceExecutor(fd.fusion, params)
        [y] = executor.run([x])
        print(executor)

    The definition stays open for changes, which the copy does not see.
    """

    __slots__ = ("_cache", "_params", "_program")

    def __init__(self, fusion: FusionView, params: MultiDeviceExecutorParams | None = None) -> None:
        """Raises UserError for a program without outputs and for a number of streams below 1,
        UserTypeError and UserValueError for parameters of another kind, Unsupported for a backend
        that is not built in, and for loops that have no chunk of the rank's own."""
        call = "MultiDeviceExecutor"
        if not isinstance(fusion, FusionView):
            raise UserTypeError(f"{call}({fusion!r}): takes a definition's fusion, as fd.fusion")
        if not fusion.outputs():
            raise UserError(f"{call}: the program has no outputs; call fd.add_output")
        self._params = _checked(call, params)
        self._program: Program = fusion.recording.program
        if self._params.offset_stream_indexing_by_rank:
            self._program = rotate_streams(self._program)
        recording = Recording()
        recording.program, recording.frozen = self._program, True
        self._cache = FusionExecutorCache(FusionView(recording), enable=self._options())

    def run(self, inputs: Iterable[object]) -> list[torch.Tensor]:
        """Run on this rank's inputs, and return the outputs, as `FusionDefinition.execute` does.

        Raises what that does, with the number of inputs checked first, and UserError for inputs on
        a device that the backend does not serve.
        """
        values = list_inputs(inputs)
        self._check_count(values)
        if self._params.backend_type is not None:
            _check_backend(self._params.backend_type, values)
        return self._cache.run(values, overlap=self._params.overlap)

    def __str__(self) -> str:
        """The host program: of the latest run; before the first, of the program's plain form, or of
        the form that `overlap` is."""
        if self._cache.has_run():
            host = self._cache.host_program()
        else:
            form = self._params.overlap if isinstance(self._params.overlap, Overlap) else PLAIN
            options = self._cache.frozen_program().options
            host = outline_program(self._program, form, options).host
        return print_host_program(replace(host, kernels={}))

    def explain(self) -> str:
        """What each parameter does here, then what `FusionDefinition.explain` says."""
        parameters = "\n".join(["-- parameters --", *_parameter_lines(self._params), "", ""])
        return parameters + self._cache.explain()

    def _options(self) -> tuple[str, ...]:
        return (f"number_of_streams({self._params.streams})",)

    def _check_count(self, values: Sequence[object]) -> None:
        expected = self._cache.frozen_program().expected
        found = len(flatten_inputs(values))
        if found != len(expected):
            names = ", ".join(map(str, expected))
            raise UserError(
                f"MultiDeviceExecutor.run: the program has {len(expected)} inputs ({names}), but "
                f"got {found}"
            )


def _checked(call: str, params: object) -> MultiDeviceExecutorParams:
    """A copy of the parameters, which are what they should be."""
    if params is None:
        return MultiDeviceExecutorParams()
    if not isinstance(params, MultiDeviceExecutorParams):
        raise UserTypeError(
            f"{call}(fusion, {params!r}): takes multidevice.MultiDeviceExecutorParams"
        )
    for name in (
        "use_allocation_cache",
        "offset_stream_indexing_by_rank",
        "inter_stream_synchronization",
    ):
        if not isinstance(getattr(params, name), bool):
            raise UserTypeError(f"{call}: {name} is True or False, got {getattr(params, name)!r}")
    streams: object = params.number_of_streams
    if not isinstance(streams, int) or isinstance(streams, bool):
        raise UserTypeError(f"{call}: number_of_streams is an int, got {streams!r}")
    if streams < 1:
        raise UserError(f"{call}: number_of_streams is 1 or more, got {streams}")
    backend: object = params.backend_type
    if backend is not None and not isinstance(backend, CommunicatorBackend):
        raise UserTypeError(f"{call}: backend_type is a CommunicatorBackend, got {backend!r}")
    if backend is CommunicatorBackend.ucc:
        raise Unsupported(
            f"{call}(backend_type=ucc): UCC is not built in; leave backend_type out: NCCL moves "
            "CUDA tensors, gloo those of CPUs"
        )
    read_overlap(call, params.overlap, NO_OPTIONS)
    return replace(params)


def _check_backend(backend: CommunicatorBackend, values: Sequence[object]) -> None:
    """UserError for tensors that `backend` does not move. CPU scalars of a GPU program aside."""
    tensors = [v for v in flatten_inputs(values) if isinstance(v, torch.Tensor)]
    device = next((t.device for t in tensors if t.is_cuda), None)
    device = device or next((t.device for t in tensors), default_device())
    fitting = BACKENDS_OF.get(device.type, ())
    if backend not in fitting:
        raise UserError(
            f"MultiDeviceExecutor.run: backend_type is {backend}, which does not move tensors on "
            f"{device}; there it may be {' or '.join(map(str, fitting)) or 'nothing'}, or left out"
        )


def _parameter_lines(params: MultiDeviceExecutorParams) -> Iterator[str]:
    kept = "freed memory goes back to torch's allocator, results are the caller's"
    yield f"use_allocation_cache {params.use_allocation_cache}: changes nothing: {kept}"
    ordered = params.inter_stream_synchronization
    which = ", as inter_stream_synchronization orders all iterations" if ordered else ""
    count = params.streams
    yield f"number_of_streams {params.number_of_streams}: {count} for loops over chunks{which}"
    match params.backend_type:
        case None:
            yield "backend_type by device: gloo for CPU tensors, NCCL for CUDA ones"
        case backend:
            yield f"backend_type {backend}: changes nothing where it fits the device, as it must"
    offset = params.offset_stream_indexing_by_rank
    first = "the chunk of the rank's own number" if offset else "chunk 0, unless swizzled"
    yield f"offset_stream_indexing_by_rank {offset}: loops begin with {first}"
    yield f"overlap {params.overlap}"
