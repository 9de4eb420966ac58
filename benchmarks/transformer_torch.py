"""The same transformer block in eager torch: with the backend's collectives, and with async TP.

Both as good implementations have it: what is saved for the backward are shards, gathered anew there
while another product runs. And the block on one device in float32, from which errors are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformer_programs import EPSILON, Sizes

Weights = Mapping[str, torch.Tensor]
NORMS = ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias")


class Linears(Protocol):
    """The two linears of a half, and what their backwards are made of. All matrices are 2-D."""

    def gather_multiply(
        self, x: torch.Tensor, w: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows of x, and their product with w."""
        ...

    def multiply_scatter(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The rank's rows of the sum over ranks of x @ w."""
        ...

    def column_backward(
        self, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of x (the rank's rows) and w [n, k] of gather(x) @ w.T."""
        ...


class Collectives:
    """Linears with the backend's collectives; in the backward under products, as Megatron does."""

    def gather(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        whole = x.new_empty(x.shape[0] * dist.get_world_size(), x.shape[1])
        return whole, dist.all_gather_into_tensor(whole, x.contiguous(), async_op=True)

    def scatter(self, terms: torch.Tensor) -> tuple[torch.Tensor, Any]:
        own = terms.new_empty(terms.shape[0] // dist.get_world_size(), terms.shape[1])
        return own, dist.reduce_scatter_tensor(own, terms, async_op=True)

    def gather_multiply(
        self, x: torch.Tensor, w: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        whole, work = self.gather(x)
        work.wait()
        return whole, whole @ w

    def multiply_scatter(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        own, work = self.scatter(x @ w)
        work.wait()
        return own

    def column_backward(
        self, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        whole, gathered = self.gather(x)
        terms = grad @ w
        gathered.wait()
        own, scattered = self.scatter(terms)
        grad_w = grad.T @ whole
        scattered.wait()
        return own, grad_w


class AsyncTensorParallel(Collectives):
    """Linears by torch's fused operations on symmetric memory."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def gather_multiply(
        self, x: torch.Tensor, w: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.ops.symm_mem.fused_all_gather_matmul(x.contiguous(), [w], 0, self.group)
        return found[0], found[1][0]

    def multiply_scatter(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, self.group)

    def column_backward(
        self, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = self.multiply_scatter(grad, w)
        whole, gathered = self.gather(x)
        gathered.wait()
        return own, grad.T @ whole


class _ColumnParallel(torch.autograd.Function):
    """x [rows of this rank, k], w [n of this rank, k] -> [all rows, n of this rank]"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, linears: Linears) -> torch.Tensor:
        ctx.linears = linears
        ctx.save_for_backward(x, w)
        return linears.gather_multiply(x, w.T)[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        grad_x, grad_w = ctx.linears.column_backward(grads[0].contiguous(), x, w)
        return grad_x, grad_w, None


class _RowParallel(torch.autograd.Function):
    """x [all rows, k of this rank], w [n, k of this rank] -> [rows of this rank, n]"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, linears: Linears) -> torch.Tensor:
        ctx.linears = linears
        ctx.save_for_backward(x, w)
        return linears.multiply_scatter(x, w.T)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        whole, grad_x = ctx.linears.gather_multiply(grads[0].contiguous(), w)
        return grad_x, whole.T @ x, None


Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def block(
    sizes: Sizes, x: torch.Tensor, w: Weights, column: Linear, row: Linear, ranks: int
) -> torch.Tensor:
    """x [rows, e] -> [rows, e]; `column` and `row` are the linears, `ranks` share the heads."""
    shape, s = (sizes.features,), sizes
    normal = functional.layer_norm(x, shape, w["norm1.weight"], w["norm1.bias"], EPSILON)
    joined = column(normal, w["qkv"]).view(s.sequence, s.batch, 3, s.heads // ranks, s.head)
    query, key, value = joined.permute(2, 1, 3, 0, 4)
    attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    middle = x + row(attended.permute(2, 0, 1, 3).reshape(s.tokens, -1), w["out"])
    normal = functional.layer_norm(middle, shape, w["norm2.weight"], w["norm2.bias"], EPSILON)
    return middle + row(functional.gelu(column(normal, w["up"])), w["down"])


class ParallelBlock:
    """The block on this rank's shards."""

    def __init__(self, sizes: Sizes, w: Weights, linears: Linears, flash_only: bool) -> None:
        """`flash_only`: attention by the kernel that meshfuse calls, else torch chooses."""
        self.sizes, self.linears, self.flash_only = sizes, linears, flash_only
        self.weights = {name: tensor.detach().requires_grad_() for name, tensor in w.items()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def column(of: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return _ColumnParallel.apply(of, w, self.linears)

        def row(of: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return _RowParallel.apply(of, w, self.linears)

        chosen = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self.flash_only else nullcontext()
        with torch.enable_grad(), chosen:
            return block(self.sizes, x, self.weights, column, row, self.sizes.ranks)

    def backward(self, y: torch.Tensor, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of x and of the weights; those of norms are sums over the ranks."""
        wanted = [x, *self.weights.values()]
        found = list(torch.autograd.grad(y, wanted, grad, retain_graph=True))
        places = [1 + list(self.weights).index(name) for name in NORMS]
        joined = torch.cat([found[place] for place in places])
        dist.all_reduce(joined)
        for place, total in zip(places, joined.chunk(len(places)), strict=True):
            found[place] = total
        return found


def by_float32(
    sizes: Sizes, w: Weights, x: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """y, and the gradients of x and of the weights, all whole."""
    with torch.enable_grad():
        whole = {name: tensor.float().requires_grad_() for name, tensor in w.items()}
        rows = x.float().requires_grad_()
        y = block(sizes, rows, whole, functional.linear, functional.linear, 1)
        gradients = torch.autograd.grad(y, [rows, *whole.values()], grad.float())
    return y.detach(), list(gradients)
