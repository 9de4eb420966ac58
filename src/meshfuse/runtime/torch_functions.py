"""The scalar functions of the IR in torch, one entry per row of SCALAR_FUNCTIONS.

Each takes `out=` as torch's own do: a tensor of the result's shape and type that it is left in.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

Out = torch.Tensor | None


def divide(x: torch.Tensor, y: torch.Tensor, *, out: Out = None) -> torch.Tensor:
    """True division of floats. Integers truncate; x / 0 is 0 and lowest / -1 wraps to lowest.

    torch raises for an integer zero; a kernel cannot, and masked lanes hold zeros.
    """
    if x.is_floating_point():
        return torch.div(x, y, out=out)
    special = (y == 0) | (y == -1)
    quotient = torch.div(x, torch.where(special, torch.ones_like(y), y), rounding_mode="trunc")
    rest = torch.where(y == -1, -x, quotient)
    return torch.where(y == 0, torch.zeros_like(x), rest, out=out)


def relu(x: torch.Tensor, *, out: Out = None) -> torch.Tensor:
    """torch refuses bool; a kernel takes it, and nothing there is below false."""
    if x.dtype == torch.bool:
        return x.clone() if out is None else out.copy_(x)
    return torch.relu(x) if out is None else torch.clamp_min(x, 0, out=out)


def gelu(x: torch.Tensor, *, out: Out = None) -> torch.Tensor:
    """torch's, with gelu(inf) = inf: its vectorised float32 path alone gives NaN there."""
    return torch.where(x == torch.inf, x, functional.gelu(x), out=out)


def power(x: torch.Tensor, y: torch.Tensor, *, out: Out = None) -> torch.Tensor:
    """C's pow of floats: torch's own takes other ways for some exponents that are one number.

    Integers wrap, and to a negative power are 0 but for 1 and -1: torch raises for some of these.
    """
    x, y = torch.broadcast_tensors(x, y)
    if x.is_floating_point():
        return torch.pow(x, y.contiguous(), out=out)
    whole = torch.pow(x, y.clamp(min=0))
    sign = torch.where(y % 2 == 0, 1, x).to(x.dtype)
    rest = torch.where(x.abs() == 1, sign, torch.zeros_like(x))
    return torch.where(y >= 0, whole, rest, out=out)


def silu(x: torch.Tensor, *, out: Out = None) -> torch.Tensor:
    """torch's, with NaN at -inf on every device."""
    return torch.div(x, 1 + torch.exp(-x), out=out)


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

EXACT_FUNCTIONS = frozenset(
    ("abs", "neg", "relu", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge")
)
"""Those whose result has no rounding: in 16 bits they give what they do in more."""
