"""`fd.capture`: a program as one CUDA graph, called again and again without the host's work."""

from __future__ import annotations

import cmath
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, final

import torch

from meshfuse.api.bound_call import Bound, check_ranks, take_inputs
from meshfuse.api.devices import Device
from meshfuse.api.executor_cache import FusionExecutorCache
from meshfuse.api.frozen_program import FrozenProgram, GlobalSizes, given_sizes
from meshfuse.api.overlap_choice import Overlapping
from meshfuse.base.errors import Unsupported, UserError, UserTypeError
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.tensor import DistributedTensor
from meshfuse.host.capture import LEAST_WARM_UPS, record
from meshfuse.host.repeatable import reason_against_capture
from meshfuse.runtime.arguments import Argument, Expected, ExpectedTensor, list_inputs


@final
class CapturedProgram:
    """A program for inputs of one shape, recorded; made by `FusionDefinition.capture`.

        captured = fd.capture([x])
        [y] = captured([x])

    `inputs` are the tensors that the graph reads, and the numbers that are part of it; `outputs`
    those that it writes, which have no values before the first call and others after each. A call
    is issued on the current stream, as torch's operations are. One call at a time: the memory is
    the graph's. Before a process group is destroyed, `release` the graphs that communicate in it.
    """

    __slots__ = (
        "_arguments",
        "_copies",
        "_device",
        "_expected",
        "_frozen",
        "_given",
        "_graph",
        "_rank",
        "_released",
        "_stream",
        "_updated",
        "outputs",
    )

    def __init__(
        self,
        frozen: FrozenProgram,
        bound: Bound,
        rank: int,
        graph: torch.cuda.CUDAGraph | None,
        outputs: Sequence[torch.Tensor],
        copies: bool,
    ) -> None:
        """`graph`: None on a rank that does nothing. `copies`: calls bring inputs of their own."""
        self.outputs = tuple(outputs)
        self._frozen = frozen
        self._expected: tuple[Expected, ...] = frozen.expected
        self._arguments: tuple[Argument, ...] = tuple(bound.arguments)
        self._given = bound.given
        self._rank = rank
        self._graph = graph
        self._copies = copies
        self._released = False
        self._updated = tuple(position for position, _ in bound.prepared.updates)
        self._device = torch.device(bound.key.device)
        self._stream: torch.cuda.Stream | None = None

    @property
    def inputs(self) -> tuple[Argument, ...]:
        """What the graph reads, by position: of a DistributedTensor the shard."""
        return self._arguments

    def __call__(
        self, inputs: Iterable[object] | None = None, *, clone_outputs: bool = False
    ) -> list[torch.Tensor]:
        """Run the program on `inputs`, or on what its own `inputs` hold; return the outputs.

        They are the graph's own memory: the next call overwrites them, unless `clone_outputs`.
        Inputs are copied in, and those that the program updates in place copied back; with
        `copy_inputs=False` they are the tensors of the capture. Ranks do not agree on the call, and
        no deadline watches it: all must make the same calls in the same order.

        Raises UserError for inputs that differ from those of the capture in number, type, shape or
        device, and for other numbers.
        """
        if self._released:
            raise UserError("captured(): the graph was released; call fd.capture again")
        with torch.no_grad():
            taken = None if inputs is None else self._take(inputs)
            if self._graph is None:
                return list(self.outputs)
            with torch.cuda.device(self._device):
                self._stay_in_order()
                if taken is not None and self._copies:
                    self._copy_in(taken)
                self._graph.replay()
                if taken is not None and self._copies:
                    self._copy_back(taken)
                return [_clone(out) if clone_outputs else out for out in self.outputs]

    def release(self) -> None:
        """Let go of the graph and what only it holds; the device is waited for. No call follows."""
        self._released = True
        if self._graph is not None:
            torch.cuda.synchronize(self._device)
            self._graph.reset()
            self._graph = None

    def _stay_in_order(self) -> None:
        """A call on another stream comes behind the one before it: they share memory."""
        current = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != current:
            current.wait_stream(self._stream)
        self._stream = current

    def _take(self, inputs: Iterable[object]) -> list[Argument | complex]:
        """The inputs as the program takes them, checked."""
        values, given = list_inputs(inputs), dict(self._given)
        taken, _ = take_inputs(self._frozen, values, self._rank, given)
        if len(taken) != len(self._arguments):
            names = ", ".join(map(str, self._expected))
            raise UserError(
                f"captured(inputs): takes {len(self._arguments)} inputs ({names}), but got "
                f"{len(taken)}"
            )
        for position, (value, own) in enumerate(zip(taken, self._arguments, strict=True)):
            self._check(position, value, own)
        return taken

    def _check(self, position: int, value: Argument | complex, own: Argument) -> None:
        want = self._expected[position]
        call = f"captured(inputs): input {position}, {want},"
        if not isinstance(own, torch.Tensor):
            if isinstance(value, torch.Tensor) or not _is_same_number(value, own):
                raise UserError(
                    f"{call} was {own!r} at the capture, which is part of the graph, but got "
                    f"{_describe(value)}; call fd.capture again for another number"
                )
            return
        if not isinstance(value, torch.Tensor) or not _is_alike(value, own, want, self._rank):
            raise UserError(
                f"{call} was {_describe(own)} at the capture, but got {_describe(value)}; call "
                "fd.capture again for others"
            )
        if not self._copies and not _is_same_memory(value, own):
            raise UserError(
                f"{call} is not the tensor of the capture, which the graph reads as "
                "copy_inputs=False says; write the values into that one, or capture with copies"
            )

    def _copy_in(self, taken: Sequence[Argument | complex]) -> None:
        for value, own in zip(taken, self._arguments, strict=True):
            if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor):
                if not _is_same_memory(value, own):
                    _apart(own, own).copy_(_apart(value, own), non_blocking=True)

    def _copy_back(self, taken: Sequence[Argument | complex]) -> None:
        for position in self._updated:
            value, own = taken[position], self._arguments[position]
            if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor):
                if not _is_same_memory(value, own):
                    value.copy_(own, non_blocking=True)


def capture_program(
    cache: FusionExecutorCache,
    inputs: Iterable[object],
    copy_inputs: bool,
    warm_ups: int,
    device: Device | None,
    global_sizes: GlobalSizes | None,
    overlap: Overlapping | None,
) -> CapturedProgram:
    """See FusionDefinition.capture."""
    if not isinstance(copy_inputs, bool):
        raise UserTypeError(f"capture(copy_inputs={copy_inputs!r}): is True or False")
    if type(warm_ups) is not int or warm_ups < LEAST_WARM_UPS:
        raise UserError(f"capture(warm_ups={warm_ups!r}): is an int, {LEAST_WARM_UPS} or more")
    values, communicator = list_inputs(inputs), Communicator.instance()
    frozen, rank = cache.frozen_program(), communicator.rank()
    with communicator.in_call(frozen.key if frozen.meshes else None) as call, torch.no_grad():
        given = given_sizes(frozen, global_sizes) if global_sizes else {}
        check_ranks(frozen, communicator.size())
        is_outside = bool(frozen.meshes) and all(rank not in mesh.ids for mesh in frozen.meshes)
        if not is_outside:
            _check_cuda()
        bound = cache.bind(values, rank, device, given=given)
        if not is_outside:
            _check_devices(frozen, bound, rank)
        arguments = _own(bound.arguments, frozen) if copy_inputs else bound.arguments
        rehearsed = replace(bound, arguments=_rehearsed(bound, arguments))
        bound = cache.in_chosen_form(rehearsed, overlap, communicator, None, is_captured=True)
        executor = bound.prepared.compiled.executor
        reason = reason_against_capture(executor.program)
        if reason is not None:
            raise Unsupported(f"capture: {reason}")
        executable, graph = executor.compile(rank), None
        if is_outside:
            outputs = executor.run(arguments, communicator, None, bound.given, call)
        else:
            graph, outputs = record(
                executable, bound.arguments, arguments, communicator, bound.given, call, warm_ups
            )
        bound = replace(bound, arguments=arguments)
        shown = cache.deliver(bound, outputs, executable)
        return CapturedProgram(frozen, bound, rank, graph, shown, copy_inputs)


def _rehearsed(bound: Bound, arguments: Sequence[Argument]) -> list[Argument]:
    """What the program may run on before the capture: those that it updates are copies."""
    updated = {position for position, _ in bound.prepared.updates}
    return [
        v.clone() if isinstance(v, torch.Tensor) and k in updated else v
        for k, v in enumerate(arguments)
    ]


# What can be captured.


def _check_cuda() -> None:
    if not torch.cuda.is_available():
        raise Unsupported(
            "capture: graphs are CUDA's, and there is no CUDA device here; execute is flat "
            "already: a call like an earlier one runs a list of prepared steps, and no compiler"
        )
    if torch.cuda.is_current_stream_capturing():
        raise UserError(
            "capture: the current stream is being captured already; call fd.execute in that "
            "capture, or fd.capture outside of it"
        )


def _check_devices(frozen: FrozenProgram, bound: Bound, rank: int) -> None:
    """Unsupported for what lies on the CPU."""
    for position, (want, value) in enumerate(zip(frozen.expected, bound.arguments, strict=True)):
        if not isinstance(want, ExpectedTensor) or not want.is_on(rank):
            continue
        if isinstance(value, torch.Tensor) and not value.is_cuda:
            raise Unsupported(
                f"capture: input {position}, {want}, lies on {value.device}, where the host would "
                "have to read it at each call; pass it on the GPU"
                + (", and define it without is_cpu" if want.is_cpu else "")
            )
    if torch.device(bound.key.device).type != "cuda":
        raise Unsupported(
            f"capture: the program runs on {bound.key.device}, and graphs are CUDA's; pass "
            "device='cuda'"
        )


# Memory.


def _own(arguments: Sequence[Argument], frozen: FrozenProgram) -> list[Argument]:
    """Tensors of the graph's own that lie as `arguments` do, with their values."""
    found: list[Argument] = []
    for want, value in zip(frozen.expected, arguments, strict=True):
        if not isinstance(value, torch.Tensor):
            found.append(value)
            continue
        if _overlaps(value):
            raise Unsupported(
                f"capture: elements of input {want} share memory (shape {list(value.shape)}, "
                f"strides {list(value.stride())}), and a copy of it cannot be written; pass a "
                "clone, or capture with copy_inputs=False"
            )
        own = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
        _apart(own, own).copy_(_apart(value, own))
        found.append(own)
    return found


def _expanded(tensor: torch.Tensor) -> list[int]:
    """Axes all along which there is one element."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [axis for axis, (size, stride) in enumerate(sizes) if size > 1 and stride == 0]


def _apart(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What there is of a tensor once, where `like` is expanded."""
    for axis in _expanded(like):
        tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory, expanded axes aside."""
    if not tensor.numel():
        return False
    reached = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride:
            if stride <= reached:
                return True
            reached += stride * (size - 1)
    return False


def _is_alike(value: torch.Tensor, own: torch.Tensor, want: Expected, rank: int) -> bool:
    if isinstance(want, ExpectedTensor) and not want.is_on(rank):
        return value.numel() == 0
    return (
        value.shape == own.shape
        and value.dtype == own.dtype
        and value.device == own.device
        and value.layout is torch.strided
        and all(value.stride(axis) == 0 for axis in _expanded(own))
    )


def _is_same_number(value: complex, own: complex) -> bool:
    """NaN is the same as NaN."""
    return value == own or (cmath.isnan(value) and cmath.isnan(own))


def _is_same_memory(value: torch.Tensor, own: torch.Tensor) -> bool:
    return value.data_ptr() == own.data_ptr() and value.stride() == own.stride()


def _clone(out: torch.Tensor) -> torch.Tensor:
    if isinstance(out, DistributedTensor):
        return DistributedTensor.made_of(out.local.clone(), out.sharding, out.global_shape)
    return out.clone()


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    expanded = f", strides {list(value.stride())}" if _expanded(value) else ""
    return f"{value.dtype} {list(value.shape)} on {value.device}{expanded}"
