"""The scalar functions of the IR in torch, one entry per row of SCALAR_FUNCTIONS."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional


def divide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """True division of floats. Integers truncate; x / 0 is 0 and lowest / -1 wraps to lowest.

    torch raises for an integer zero; a kernel cannot, and masked lanes hold zeros.
    """
    if x.is_floating_point():
        return x / y
    special = (y == 0) | (y == -1)
    quotient = torch.div(x, torch.where(special, torch.ones_like(y), y), rounding_mode="trunc")
    return torch.where(y == 0, torch.zeros_like(x), torch.where(y == -1, -x, quotient))


def relu(x: torch.Tensor) -> torch.Tensor:
    """torch refuses bool; a kernel takes it, and nothing there is below false."""
    return x if x.dtype == torch.bool else torch.relu(x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """torch's, with gelu(inf) = inf: its vectorised float32 path alone gives NaN there."""
    return torch.where(x == torch.inf, x, functional.gelu(x))


TORCH_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "neg": torch.neg,
    "exp": torch.exp,
    "rsqrt": torch.rsqrt,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "relu": relu,
    "gelu": gelu,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": divide,
    "lt": torch.lt,
    "where": torch.where,
}
