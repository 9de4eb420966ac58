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


def power(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """C's pow of floats: torch's own takes other ways for some exponents that are one number.

    Integers wrap, and to a negative power are 0 but for 1 and -1: torch raises for some of these.
    """
    x, y = torch.broadcast_tensors(x, y)
    if x.is_floating_point():
        return torch.pow(x, y.contiguous())
    whole = torch.pow(x, y.clamp(min=0))
    sign = torch.where(y % 2 == 0, 1, x).to(x.dtype)
    return torch.where(y >= 0, whole, torch.where(x.abs() == 1, sign, torch.zeros_like(x)))


def silu(x: torch.Tensor) -> torch.Tensor:
    """torch's, with NaN at -inf on every device."""
    return x / (1 + torch.exp(-x))


TORCH_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "abs": torch.abs,
    "neg": torch.neg,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "relu": relu,
    "silu": silu,
    "gelu": gelu,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": divide,
    "pow": power,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "where": torch.where,
}
