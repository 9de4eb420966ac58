"""Products of matrices through torch: as new tensors, written into tensors that exist, or added.

What exists may be contiguous, transposed, or a chunk of rows or columns of something larger: mm and
bmm of torch write all of these where they lie. Its matmul does not: of vectors it resizes `out`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Rows [m, k], columns [k, n] and result [m, n], as views; or all three with a batch in front."""


def batched_linear(
    src: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """[*batch, k] by [*d, n, k] plus [*d, n] -> [*d, *batch, n], one product per index of d."""
    groups, (n, k) = weight.shape[:-2], weight.shape[-2:]
    count = math.prod(groups)  # of -1 torch makes nothing where a size is 0
    rows = src.reshape(1, math.prod(src.shape[:-1]), k).expand(count, -1, -1)
    columns = weight.reshape(count, n, k).mT
    if bias is None:
        product = torch.bmm(rows, columns)
    else:
        product = torch.baddbmm(bias.reshape(count, 1, n), rows, columns)
    return product.reshape(*groups, *src.shape[:-1], n)


def matmul_operands(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Operands | None:
    """Those of mm or bmm that make `torch.matmul(a, b)` in `out`; None where there are none."""
    if a.dim() == 1:
        return matmul_operands(a.unsqueeze(0), b, out.unsqueeze(-2 if b.dim() > 1 else -1))
    if b.dim() == 1:
        return matmul_operands(a, b.unsqueeze(-1), out.unsqueeze(-1))
    if b.dim() == 2:
        return _operands_of_rows(a, b, out)
    if out.dim() == 3:
        count = out.shape[0]
        return a.expand(count, *a.shape[-2:]), b.expand(count, *b.shape[-2:]), out
    return None


def linear_operands(src: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Operands | None:
    """Those of mm or bmm that make `torch.nn.functional.linear(src, weight)` in `out`."""
    return _operands_of_rows(src, weight.mT, out) if weight.dim() == 2 else None


def _operands_of_rows(
    src: torch.Tensor, columns: torch.Tensor, out: torch.Tensor
) -> Operands | None:
    """src [*batch, k] by columns [k, n].

    One product of all rows where these lie at even distances in both tensors, else one per block of
    rows, if these do: a [d, c, n] that is a chunk of [d, more, n] has such blocks.
    """
    if out.dim() == 2:
        return src, columns, out
    steps = {*_uneven_steps(src), *_uneven_steps(out)}
    if len(steps) > 1:
        return None
    blocks = tuple(math.prod(out.shape[: step + 1]) for step in steps)
    rows = math.prod(out.shape[next(iter(steps), -1) + 1 : -1])
    src, out = (each.view(*blocks, rows, each.shape[-1]) for each in (src, out))
    return src, columns.expand(*blocks, -1, -1), out


def _uneven_steps(tensor: torch.Tensor) -> Iterator[int]:
    """The axes of rows [*batch, n] whose steps do not go on where those of the next axis end."""
    shape, strides = tensor.shape, tensor.stride()
    if tensor.is_contiguous():
        return
    for k in range(len(shape) - 2):
        if shape[k] != 1 and strides[k] != strides[k + 1] * shape[k + 1]:
            yield k


def write_product(operands: Operands, bias: torch.Tensor | None = None) -> None:
    """Rows by columns, plus a bias that stretches to it, rounded once into the result.

    torch copies a bias there first and adds the product to it.
    """
    rows, columns, out = operands
    if out.dim() == 2:
        if bias is None:
            torch.mm(rows, columns, out=out)
        else:
            torch.addmm(bias, rows, columns, out=out)
    elif bias is None:
        torch.bmm(rows, columns, out=out)
    else:
        torch.baddbmm(bias, rows, columns, out=out)


def add_product(operands: Operands) -> None:
    """Add rows by columns to the result, rounded once."""
    rows, columns, out = operands
    if out.dim() == 2:
        out.addmm_(rows, columns)
    else:
        out.baddbmm_(rows, columns)
