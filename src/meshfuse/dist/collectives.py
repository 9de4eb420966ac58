"""Collectives on flat blocks: what is asked for, and how torch.distributed is asked.

Both buffers are dense in memory, possibly with permuted strides; what moves are blocks of memory:

    all_gather      out = the src blocks of the team, one after the other, in team order
    reduce_scatter  src = one block for each rank, in team order; out = this rank's, reduced
    all_reduce      out = the reduction of the team's src buffers

Element types: all that meshfuse has; `sum` and `prod` of bool are refused (use an integer type
instead), `max` of bool is "or", `min` "and". reduce_scatter on CPUs and all small sums there add in
team order, 16-bit floats in float32, rounded once; elsewhere the backend chooses the order and
rounds 16-bit floats at each addition. `max` and `min` give NaN if any rank has NaN, as torch.amax
does; gloo and NCCL both lose it, so neither is asked for those, nor for products, which are rare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast, final

import torch
import torch.distributed as dist

from meshfuse.base.errors import InvariantError, Unsupported

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")
REDUCTIONS = ("sum", "prod", "max", "min")
"""What `CollectiveRequest.function` may be."""

GATHERED_REDUCTION_BYTES = 1 << 16
"""A sum on CPUs that gathers no more is gathered, then added locally: one exchange, not two."""

_ACCUMULATION_TYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class CollectiveBackend(Protocol):
    """What is used of gloo and NCCL as torch has them. Methods return before they are done."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any, /) -> dist.Work: ...

    def alltoall_base(
        self,
        out: torch.Tensor,
        src: torch.Tensor,
        out_sizes: list[int],
        src_sizes: list[int],
        /,
    ) -> dist.Work: ...

    def _allgather_base(self, out: torch.Tensor, src: torch.Tensor, /) -> dist.Work: ...

    def _reduce_scatter_base(
        self, out: torch.Tensor, src: torch.Tensor, options: Any, /
    ) -> dist.Work: ...

    def abort(self) -> None: ...

    def shutdown(self) -> None: ...


@final
@dataclass(frozen=True, slots=True)
class CollectiveRequest:
    """One collective as one rank asks for it.

    `number` is the communication's number in the host program, `team` the ranks in mesh order,
    `cause` the op that needed it. `src` may be changed and `out` read only after the wait.
    """

    number: int
    collective: str
    team: tuple[int, ...]
    src: torch.Tensor
    out: torch.Tensor
    function: str | None
    cause: str

    @property
    def bytes(self) -> int:
        """What `src` holds on this rank."""
        return self.src.numel() * self.src.element_size()

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

    `work` is None when nothing had to move. `finish`, if any, makes `out` of what has arrived:
    whoever waits calls it once, after the work has completed, on the stream that waits. `sequence`
    counts the collectives of the backend, from 1; 0 if the collective never reached one.
    """

    request: CollectiveRequest
    work: dist.Work | None = None
    finish: Callable[[], None] | None = None
    sequence: int = 0

    def complete(self) -> None:
        """Make `out` valid; the work has completed."""
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor as a 1-D view of stride 1, in memory order.

    Axes of size 1 may have any stride, and `view` would keep it where all axes are. Raises InvariantError for memory with holes or overlaps.
    """
    if tensor.is_contiguous():
        return tensor.as_strided((tensor.numel(),), (1,))
    squeezed = tensor.squeeze()
    order = sorted(range(squeezed.ndim), key=squeezed.stride, reverse=True)
    ordered = squeezed.permute(order)
    if not ordered.is_contiguous():
        raise InvariantError(
            f"a buffer of a collective must be dense in memory; this one has sizes "
            f"{tuple(tensor.shape)}, strides {tensor.stride()}"
        )
    return ordered.as_strided((tensor.numel(),), (1,))


def check_request(request: CollectiveRequest) -> None:
    """Refuse what no rank could run: sizes that do not fit the team, or an unknown reduction."""
    src, out, ranks = request.src, request.out, len(request.team)
    if request.collective not in COLLECTIVES:
        raise InvariantError(f"{request}: the collectives are {', '.join(COLLECTIVES)}")
    factors = {"all_gather": (ranks, 1), "all_reduce": (1, 1), "reduce_scatter": (1, ranks)}
    src_factor, out_factor = factors[request.collective]
    if src.numel() * src_factor != out.numel() * out_factor:
        raise InvariantError(
            f"{request}: {src.numel()} elements into {out.numel()} over {ranks} ranks"
        )
    if src.dtype != out.dtype or src.device != out.device:
        raise InvariantError(
            f"{request}: from {src.dtype} on {src.device} to {out.dtype} on {out.device}"
        )
    if request.collective == "all_gather":
        return
    if request.function not in REDUCTIONS:
        raise Unsupported(f"{request}: ranks can be reduced by {', '.join(REDUCTIONS)}")
    if src.dtype == torch.bool and request.function in ("sum", "prod"):
        raise Unsupported(
            f"{request}: bool has no {request.function} across ranks; cast it to an integer first"
        )


def moves_nothing(request: CollectiveRequest) -> bool:
    """Whether the rank can serve itself: alone in its team, or nothing to send. Alike on all ranks
    of a team."""
    return len(request.team) == 1 or request.src.numel() == 0


def perform_alone(request: CollectiveRequest) -> Posting:
    """A collective that moves nothing, done: `out` is a copy of `src`."""
    check_request(request)
    memory_of(request.out).copy_(memory_of(request.src))
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
    src, out = memory_of(request.src), memory_of(request.out)
    if src.dtype == torch.bool:  # NCCL has no bool; on bytes, max is "or" and min "and"
        src, out = src.view(torch.uint8), out.view(torch.uint8)
    match request.collective:
        case "all_gather":
            return Posting(request, _gather(backend, src, out))
        case "all_reduce":
            return _post_all_reduce(backend, request, src, out)
        case _:
            return _post_reduce_scatter(backend, request, src, out)


def _post_all_reduce(
    backend: CollectiveBackend, request: CollectiveRequest, src: torch.Tensor, out: torch.Tensor
) -> Posting:
    ranks = len(request.team)
    is_small = not src.is_cuda and request.bytes * ranks <= GATHERED_REDUCTION_BYTES
    if request.function != "sum" or is_small:
        gathered = src.new_empty((ranks, src.numel()))
        work = _gather(backend, src, gathered.view(-1))
        return Posting(request, work, lambda: reduce_blocks(gathered, request.function, out))
    if out.data_ptr() != src.data_ptr():
        out.copy_(src)
    return Posting(request, backend.allreduce([out], _summing(dist.AllreduceOptions())))


def _post_reduce_scatter(
    backend: CollectiveBackend, request: CollectiveRequest, src: torch.Tensor, out: torch.Tensor
) -> Posting:
    if request.function == "sum" and src.is_cuda:
        options = _summing(dist.ReduceScatterOptions())
        return Posting(request, backend._reduce_scatter_base(out, src, options))
    # gloo's own reduce_scatter all-reduces the whole buffer, and its wait knows no time limit.
    received = src.new_empty((len(request.team), out.numel()))
    work = backend.alltoall_base(received.view(-1), src, [], [])
    return Posting(request, work, lambda: reduce_blocks(received, request.function, out))


_Options = TypeVar("_Options", dist.AllreduceOptions, dist.ReduceScatterOptions)


def _summing(options: _Options) -> _Options:
    options.reduceOp = cast(dist.ReduceOp, dist.ReduceOp.SUM)
    return options


def _gather(backend: CollectiveBackend, src: torch.Tensor, out: torch.Tensor) -> dist.Work:
    # The public function of this name was renamed in torch 2.13; what it calls was not.
    return backend._allgather_base(out, src)


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
