"""Collectives on flat blocks: what is asked for, and how torch.distributed is asked.

    all_gather      out = the src blocks of the team, one after the other, in team order
    reduce_scatter  src = one block for each rank, in team order; out = this rank's, reduced
    all_reduce      out = the reduction of the team's src buffers
    exchange        src = a block for each rank, out = a block from each; blocks of any size
    fetch, deliver  out = the src of one rank of the team, each rank's own choice; its own: no copy

Straight, blocks are memory: both buffers are dense, possibly with permuted strides. With a packing,
blocks are regions of the buffers, and an exchange always has one.

Element types: all that meshfuse has; `sum` and `prod` of bool are refused (use an integer type
instead), `max` of bool is "or", `min` "and". reduce_scatter on CPUs, all small sums there and all
of 16-bit floats add in team order, 16-bit floats in float32, rounded once. So does every sum that
asks for team order; for others the backend chooses the order, and NCCL rounds 16-bit floats at each
addition. `max` and `min` give NaN if any rank has NaN, as torch.amax does; gloo and NCCL both lose
it, so neither is asked for those, nor for products, which are rare.
"""

# torch does not declare the options of all-gathers as an export:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast, final

import torch
import torch.distributed as dist

from meshfuse.base.errors import InvariantError, Unsupported
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.packing import Packing
from meshfuse.dist.wires import Wire, wire_of

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "exchange", "fetch", "deliver")
REDUCTIONS = ("sum", "prod", "max", "min")
"""What `CollectiveRequest.function` may be."""

GATHERED_REDUCTION_BYTES = 1 << 16
"""A reduction here that gathers no more is gathered, then done on each rank: one exchange, not two.
Sums on CPUs of no more are done here, too."""

_ACCUMULATION_TYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class CollectiveBackend(Protocol):
    """What is used of gloo and NCCL as torch has them. Methods return before they are done."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any, /) -> dist.Work: ...

    def broadcast(self, tensors: list[torch.Tensor], options: Any, /) -> dist.Work: ...

    def alltoall_base(
        self,
        out: torch.Tensor,
        src: torch.Tensor,
        out_sizes: list[int],
        src_sizes: list[int],
        /,
    ) -> dist.Work: ...

    def _allgather_base(
        self, out: torch.Tensor, src: torch.Tensor, /, opts: Any = ...
    ) -> dist.Work: ...

    def _reduce_scatter_base(
        self, out: torch.Tensor, src: torch.Tensor, /, opts: Any = ...
    ) -> dist.Work: ...

    def abort(self) -> None: ...

    def shutdown(self) -> None: ...


Start = Callable[[torch.Tensor, torch.Tensor], "dist.Work | None"]
"""Starts a collective into a result, from a source: in the order of torch's backends, of which some
are called with nothing between. On CUDA, what returns no work has put it on the current stream."""


@final
@frozen_dataclass
class Transfer:
    """Who gets whose chunk: the rank at place k of the team that at `sources[k]`. `place`: where
    this rank stands.

    `most_bytes`: of the largest chunk of any rank. `chunk` is what all ranks call the chunk by, in
    as many fetches as there are ranks, each of which gets each chunk once.
    """

    place: int
    sources: tuple[int, ...]
    most_bytes: int = 0
    chunk: tuple[int, ...] = ()

    @property
    def is_own(self) -> bool:
        """Whether this rank gets what it has."""
        return self.sources[self.place] == self.place

    @property
    def receivers(self) -> tuple[int, ...]:
        """The places that this rank sends to."""
        pairs = enumerate(self.sources)
        return tuple(k for k, source in pairs if source == self.place != k)

    @property
    def moves(self) -> bool:
        """Whether any rank of the team sends anything."""
        return any(source != k for k, source in enumerate(self.sources))

    @property
    def root(self) -> int | None:
        """The place that all get their chunk from, if it is one."""
        return self.sources[0] if len(set(self.sources)) == 1 else None


@final
@dataclass(frozen=True, slots=True, eq=False)
class CollectiveRequest:
    """One collective as one rank asks for it.

    `number` is the communication's number in the host program, `team` the ranks in mesh order (of
    an exchange, ascending), `cause` the op that needed it. `src` may be changed and `out` read only
    after the wait. `in_team_order`: sums do not leave order and rounding to the backend. A fetch or
    delivery has a `transfer`, and `out` is `src` where it is the rank's own. `at_once`: the wait
    follows the post, so that the backend may take the current stream.
    """

    number: int
    collective: str
    team: tuple[int, ...]
    src: torch.Tensor
    out: torch.Tensor
    function: str | None
    cause: str
    packing: Packing | None = None
    in_team_order: bool = False
    transfer: Transfer | None = None
    at_once: bool = False

    @property
    def bytes(self) -> int:
        """What this rank hands over, padding included."""
        packing = self.packing
        if self.transfer is not None:
            return len(self.transfer.receivers) * self.src.numel() * self.src.element_size()
        elements = self.src.numel() if packing is None else packing.sends.elements
        return elements * self.src.element_size()

    def wire(self) -> Wire:
        """What this rank sends and receives."""
        return wire_of(self.src, self.out, self.packing)

    def __str__(self) -> str:
        function = "" if self.function is None else f"{self.function}, "
        return (
            f"{self.collective} number {self.number} over ranks {self.team} "
            f"({function}{self.bytes} bytes, for {self.cause})"
        )


@final
@dataclass(slots=True)
class Posting:
    """A collective under way.

    `work` is None when nothing is to be waited for. `steps` is what makes `out` of what has
    arrived: whoever waits calls `advance` each time that the work has completed, on the stream that
    waits. `sequence` counts the collectives of the backend, from 1; 0 if the collective never
    reached one. `posts_again`: one of the steps does, so that ranks must come to the wait in one
    order with their posts.
    """

    request: CollectiveRequest
    work: dist.Work | None = None
    steps: tuple[Callable[[], dist.Work | None], ...] = ()
    sequence: int = 0
    posts_again: bool = False

    @property
    def has_arrived(self) -> bool:
        """Whether the first step, or the end of the wait, is held up by nothing."""
        return self.work is None or self.work.is_completed()

    def advance(self) -> None:
        """The work has completed: go on to the next, or make `out` valid; `work` is None then."""
        self.work = None
        while self.steps and self.work is None:
            step, *rest = self.steps
            self.steps = tuple(rest)
            self.work = step()


def check_request(request: CollectiveRequest) -> None:
    """Refuse what no rank could run: sizes that do not fit the team, or an unknown reduction."""
    src, out = request.src, request.out
    if request.collective not in COLLECTIVES:
        raise InvariantError(f"{request}: the collectives are {', '.join(COLLECTIVES)}")
    if request.transfer is not None:
        _check_transfer(request, request.transfer)
    elif request.packing is None:
        _check_sizes(request)
    else:
        _check_packing(request, request.packing)
    if src.dtype != out.dtype or src.device != out.device:
        raise InvariantError(
            f"{request}: from {src.dtype} on {src.device} to {out.dtype} on {out.device}"
        )
    if request.collective in ("all_gather", "exchange", "fetch", "deliver"):
        return
    if request.function not in REDUCTIONS:
        raise Unsupported(f"{request}: ranks can be reduced by {', '.join(REDUCTIONS)}")
    if src.dtype == torch.bool and request.function in ("sum", "prod"):
        raise Unsupported(
            f"{request}: bool has no {request.function} across ranks; cast it to an integer first"
        )


def _check_sizes(request: CollectiveRequest) -> None:
    src, out, ranks = request.src, request.out, len(request.team)
    if request.collective == "exchange":
        raise InvariantError(f"{request}: an exchange needs a packing")
    if request.collective in ("fetch", "deliver"):
        raise InvariantError(f"{request}: nobody says who sends to whom")
    factors = {"all_gather": (ranks, 1), "all_reduce": (1, 1), "reduce_scatter": (1, ranks)}
    src_factor, out_factor = factors[request.collective]
    if src.numel() * src_factor != out.numel() * out_factor:
        raise InvariantError(
            f"{request}: {src.numel()} elements into {out.numel()} over {ranks} ranks"
        )


def _check_transfer(request: CollectiveRequest, transfer: Transfer) -> None:
    if len(transfer.sources) != len(request.team) or request.packing is not None:
        raise InvariantError(f"{request}: gets {transfer.sources}, by place")
    if transfer.is_own and request.out is not request.src:
        raise InvariantError(f"{request}: the rank's own chunk is copied")


def _check_packing(request: CollectiveRequest, packing: Packing) -> None:
    ranks = len(request.team)
    wanted = {"all_gather": (1, ranks), "reduce_scatter": (ranks, 1), "exchange": (ranks, ranks)}
    blocks = (len(packing.sends.lengths), len(packing.receives.lengths))
    if blocks != wanted.get(request.collective):
        raise InvariantError(
            f"{request}: packs {blocks[0]} blocks into {blocks[1]} over {ranks} ranks"
        )
    for name, tensor, shape in (
        ("src", request.src, packing.sends.shape),
        ("out", request.out, packing.receives.shape),
    ):
        if tuple(tensor.shape) != shape:
            raise InvariantError(
                f"{request}: {name} has shape {tuple(tensor.shape)}, its packing is for {shape}"
            )


def moves_nothing(request: CollectiveRequest) -> bool:
    """Whether the rank can serve itself: alone in its team, or nothing to send. Alike on all ranks
    of a team."""
    if len(request.team) == 1:
        return True
    if request.transfer is not None:
        return not request.transfer.moves or _is_empty_broadcast(request, request.transfer)
    return request.collective != "exchange" and request.bytes == 0


def _is_empty_broadcast(request: CollectiveRequest, transfer: Transfer) -> bool:
    return transfer.root is not None and request.out.numel() == 0


def perform_alone(request: CollectiveRequest) -> Posting:
    """A collective that moves nothing, done: `out` is a copy of `src`, of a fetch `src` itself."""
    check_request(request)
    if request.transfer is not None:
        return Posting(request)
    wire = request.wire()
    wire.receive.copy_(wire.send)
    wire.finish()
    return Posting(request)


def post(backend: CollectiveBackend, request: CollectiveRequest) -> Posting:
    """Start `request`; `backend` holds the ranks of the team in team order. All of them must post
    it.

    Raises InvariantError and Unsupported as check_request does; errors of the backend come from
    the wait.
    """
    if moves_nothing(request):
        return perform_alone(request)
    check_request(request)
    wire = request.wire()
    src, out = wire.send, wire.receive
    if src.dtype == torch.bool:  # NCCL has no bool; on bytes, max is "or" and min "and"
        src, out = src.view(torch.uint8), out.view(torch.uint8)
    start = start_of(backend, request)
    if start is not None:
        posting = Posting(request, start(out, src))
    else:
        match request.collective:
            case "exchange":
                posting = Posting(request, _exchange(backend, request, src, out))
            case "fetch" | "deliver":
                posting = Posting(request, _transfer(backend, request, src, out))
            case "all_reduce":
                posting = _post_all_reduce(backend, request, src, out)
            case _:
                posting = _post_reduce_scatter(backend, request, src, out)
    posting.steps = (*posting.steps, wire.finish)
    if posting.work is None:  # it was put on the current stream, and what is left follows there
        posting.advance()
    return posting


def start_of(backend: CollectiveBackend, request: CollectiveRequest) -> Start | None:
    """How the backend itself does what requests like this one ask for, if it does: for any flat
    memory of the same sizes."""
    match request.collective:
        case "all_gather":
            return _gathering(backend, is_at_once=request.at_once and request.src.is_cuda)
        case "all_reduce" if _backend_may_add(request) and not _is_added_here(request):
            options = _summing(dist.AllreduceOptions(), request)

            def reduce(out: torch.Tensor, src: torch.Tensor) -> dist.Work:
                if out is not src and out.data_ptr() != src.data_ptr():
                    out.copy_(src)
                return backend.allreduce([out], options)

            return reduce
        case "reduce_scatter" if _backend_may_add(request) and request.src.is_cuda:
            scattering = _summing(dist.ReduceScatterOptions(), request)
            return partial(backend._reduce_scatter_base, opts=scattering)
        case _:
            return None


def _is_added_here(request: CollectiveRequest) -> bool:
    is_small = request.bytes * len(request.team) <= GATHERED_REDUCTION_BYTES
    return is_small and not request.src.is_cuda


def _post_all_reduce(
    backend: CollectiveBackend, request: CollectiveRequest, src: torch.Tensor, out: torch.Tensor
) -> Posting:
    ranks, function = len(request.team), request.function
    if request.bytes * ranks > GATHERED_REDUCTION_BYTES:
        return _post_scatter_and_gather(backend, request, src, out)
    gathered = src.new_empty((ranks, src.numel()))
    work = _gathering(backend)(gathered.view(-1), src)
    return Posting(request, work, (lambda: reduce_blocks(gathered, function, out),))


def _post_scatter_and_gather(
    backend: CollectiveBackend, request: CollectiveRequest, src: torch.Tensor, out: torch.Tensor
) -> Posting:
    """Each rank reduces one block of all, then all gather the blocks."""
    ranks, elements = len(request.team), src.numel()
    length = -(-elements // ranks)
    is_padded = length * ranks != elements
    send, whole = src, out
    if is_padded:
        send, whole = src.new_empty(length * ranks), out.new_empty(length * ranks)
        send[:elements] = src
    received, block = src.new_empty((ranks, length)), src.new_empty(length)

    def reduce_and_gather() -> dist.Work | None:
        reduce_blocks(received, request.function, block)
        return _gathering(backend)(whole, block)

    def cut() -> None:
        if is_padded:
            out.copy_(whole[:elements])

    work = backend.alltoall_base(received.view(-1), send, [], [])
    return Posting(request, work, (reduce_and_gather, cut), posts_again=True)


def _post_reduce_scatter(
    backend: CollectiveBackend, request: CollectiveRequest, src: torch.Tensor, out: torch.Tensor
) -> Posting:
    # gloo's own reduce_scatter all-reduces the whole buffer, and its wait knows no time limit.
    received = src.new_empty((len(request.team), out.numel()))
    work = backend.alltoall_base(received.view(-1), src, [], [])
    return Posting(request, work, (lambda: reduce_blocks(received, request.function, out),))


def _backend_may_add(request: CollectiveRequest) -> bool:
    """Whether the backend's order and rounding will do: of integers, any will."""
    if request.function != "sum":
        return False
    if not request.src.dtype.is_floating_point:
        return True
    is_rounded = not request.src.is_cuda and request.src.dtype in _ACCUMULATION_TYPES
    return not (request.in_team_order or is_rounded)


_GatherOptions: Any = dist.distributed_c10d.AllgatherOptions


def _summing(options: Any, request: CollectiveRequest) -> Any:
    options.reduceOp = cast(dist.ReduceOp, dist.ReduceOp.SUM)
    if request.at_once and request.src.is_cuda:
        _stay_on_stream(options)
    return options


def _gathering(backend: CollectiveBackend, *, is_at_once: bool = False) -> Start:
    # The public function of this name was renamed in torch 2.13; what it calls was not.
    if not is_at_once:
        return backend._allgather_base
    options = _GatherOptions()
    _stay_on_stream(options)
    return partial(backend._allgather_base, opts=options)


def _stay_on_stream(options: Any) -> None:
    """A stream of the backend's own, to be ordered with the current one, is for what runs beside
    something else. Versions of torch that have no such option take their own."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False


def _exchange(
    backend: CollectiveBackend, request: CollectiveRequest, src: torch.Tensor, out: torch.Tensor
) -> dist.Work:
    packing = request.packing
    assert packing is not None
    sends, receives = list(packing.sends.lengths), list(packing.receives.lengths)
    return backend.alltoall_base(out, src, receives, sends)


def _transfer(
    backend: CollectiveBackend, request: CollectiveRequest, src: torch.Tensor, out: torch.Tensor
) -> dist.Work:
    """How chunks go from rank to rank: what all get from one is broadcast."""
    transfer = request.transfer
    assert transfer is not None
    if transfer.root is not None:
        options = dist.BroadcastOptions()
        options.rootRank = transfer.root
        return backend.broadcast([src if transfer.is_own else out], options)
    sends, receives = ([0] * len(request.team) for _ in range(2))
    for receiver in transfer.receivers:
        sends[receiver] = src.numel()
    if transfer.is_own:
        out = out.new_empty(0)
    else:
        receives[transfer.sources[transfer.place]] = out.numel()
    copies = len(transfer.receivers)
    return backend.alltoall_base(out, src if copies == 1 else src.repeat(copies), receives, sends)


def reduce_blocks(
    blocks: torch.Tensor | Sequence[torch.Tensor], function: str | None, out: torch.Tensor
) -> None:
    """out = the reduction of equally shaped blocks, in their order, accumulated as this file
    says."""
    total = blocks[0].to(_ACCUMULATION_TYPES.get(out.dtype, out.dtype), copy=True)
    for block in blocks[1:]:
        match function:
            case "sum":
                total.add_(block)
            case "prod":
                total.mul_(block)
            case "min":
                torch.minimum(total, block.to(total.dtype), out=total)
            case _:
                torch.maximum(total, block.to(total.dtype), out=total)
    out.copy_(total)
