"""Operations beside what torch makes of the same inputs, in each dtype that makes sense.

Cases with like inputs run as one program: that is one kernel instead of twenty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from meshfuse import DataType, TensorView

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
I64, I32, BOOL = torch.int64, torch.int32, torch.bool
NARROW = (F16, BF16)
FLOATS = (F32, F64, *NARROW)
INTEGERS = (I64, I32)
NUMBERS = (*FLOATS, *INTEGERS)
ALL = (*NUMBERS, BOOL)
DATA_TYPES = {
    F32: DataType.Float,
    F64: DataType.Double,
    F16: DataType.Half,
    BF16: DataType.BFloat16,
    I64: DataType.Int,
    I32: DataType.Int32,
    BOOL: DataType.Bool,
}
SPECIALS = [0.0, -0.0, 1.0, -1.0, 0.5, -3.25, 20.0, -20.0, math.inf, -math.inf, math.nan]

Values = Literal["special", "small", "factors"]
"""special: normal numbers behind NaN, infinities and signed zeros. small: integers whose sums are
exact. factors: mostly 1 and -1, so that products are exact."""


@dataclass(frozen=True)
class OpCase:
    """`build` takes (fd, *tensors) and gives the outputs; `reference` does the same in torch.

    16-bit inputs reach the reference as float32: an op that widens returns Float (promotion), one
    that keeps its dtype rounds once.
    """

    name: str
    build: Callable[..., TensorView | Sequence[TensorView]]
    reference: Callable[..., torch.Tensor | Sequence[torch.Tensor]]
    shapes: Sequence[Sequence[int]]
    dtypes: Sequence[torch.dtype] = ALL
    exact: bool = False
    keeps_dtype: bool = False
    values: Values = "special"


def make_input(
    shape: Sequence[int], dtype: torch.dtype, seed: int, values: Values = "special"
) -> torch.Tensor:
    """The same data for the same arguments; specials stand elsewhere for each seed."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is BOOL:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if values == "factors":
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        doubled = torch.randint(0, 20, shape, generator=generator) == 0
        return torch.where(doubled, 2, signs).to(dtype)
    if dtype in INTEGERS:
        return torch.randint(-9, 9, shape, generator=generator).to(dtype)
    if values == "small":
        return torch.randint(-4, 5, shape, generator=generator).to(dtype)
    data = torch.randn(shape, generator=generator, dtype=F64) * 2
    flat, count = data.view(-1), min(len(SPECIALS), data.numel())
    rotated = SPECIALS[seed * 3 % 11 :] + SPECIALS[: seed * 3 % 11]
    flat[:count] = torch.tensor(rotated[:count], dtype=F64)
    return data.to(dtype)


def integer_div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Towards zero; what torch refuses, by zero, is 0."""
    if a.is_floating_point():
        return a / b
    quotient = torch.div(a, torch.where(b == 0, 1, b), rounding_mode="trunc")
    return torch.where(b == 0, 0, quotient)


def widened(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else F32


def exact_gelu(x: torch.Tensor) -> torch.Tensor:
    """torch's own is NaN at +inf in its vectorised float32 path, and inf in the others."""
    return (x.double() / 2 * (1 + torch.erf(x.double() / 2**0.5))).to(x.dtype)


def floating(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Integers and bool compute as float32."""
    return lambda x: function(x.to(widened(x.dtype)))


SHAPE = (3, 37)
ROW = (37,)
COLUMN = (3, 1)
CUBE = (5, 6, 35)


def unary(
    name: str,
    reference: Callable[..., torch.Tensor],
    dtypes: Sequence[torch.dtype] = ALL,
    *,
    exact: bool = False,
    keeps_dtype: bool = False,
) -> OpCase:
    return OpCase(
        name,
        lambda fd, x: getattr(fd.ops, name)(x),
        reference,
        [SHAPE],
        dtypes,
        exact,
        keeps_dtype,
    )


def binary(
    name: str,
    reference: Callable[..., torch.Tensor] | None = None,
    dtypes: Sequence[torch.dtype] = ALL,
    shapes: Sequence[Sequence[int]] = (SHAPE, SHAPE),
    *,
    exact: bool = True,
) -> OpCase:
    return OpCase(
        name,
        lambda fd, x, y: getattr(fd.ops, name)(x, y),
        reference or getattr(torch, name),
        shapes,
        dtypes,
        exact,
    )


UNARY = [
    unary("set", torch.clone, exact=True, keeps_dtype=True),
    unary("neg", torch.neg, NUMBERS, exact=True),
    unary("abs", torch.abs, NUMBERS, exact=True, keeps_dtype=True),
    unary("relu", torch.relu, NUMBERS, exact=True, keeps_dtype=True),
    unary("silu", torch.nn.functional.silu, FLOATS, keeps_dtype=True),
    unary("gelu", floating(exact_gelu)),
    *[
        unary(name, floating(getattr(torch, name)))
        for name in (
            ("exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "erf", "sigmoid")
        )
    ],
    OpCase("square", lambda fd, x: x**2, lambda x: x * x, [SHAPE], NUMBERS),
    OpCase("scalar_base", lambda fd, x: 2**x, lambda x: torch.pow(2.0, x), [SHAPE], FLOATS),
    OpCase("scalar_left", lambda fd, x: 1 - x, lambda x: 1 - x, [SHAPE], NUMBERS, exact=True),
    OpCase("scalar_compared", lambda fd, x: x >= 1, lambda x: x >= 1, [SHAPE], NUMBERS, exact=True),
]

BINARY = [
    binary("add", dtypes=NUMBERS),
    binary("sub", dtypes=NUMBERS),
    binary("mul", dtypes=NUMBERS),
    binary("div", integer_div, NUMBERS),
    binary("pow", dtypes=NUMBERS, exact=False),
    binary("add", dtypes=NUMBERS, shapes=(SHAPE, ROW)),
    binary("sub", dtypes=NUMBERS, shapes=(SHAPE, COLUMN)),
    *[binary(name) for name in ("maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge")],
    OpCase(
        "where",
        lambda fd, x, y: fd.ops.where(fd.ops.lt(x, y), x, y),
        lambda x, y: torch.where(x < y, x, y),
        [SHAPE, SHAPE],
        NUMBERS,
        exact=True,
        keeps_dtype=True,
    ),
]

RESHAPED = (
    ((6, 35), [2, 3, 35]),
    ((6, 35), [-1]),
    ((6, 35), [14, 15]),
    ((6, 35), [6, 1, 35]),
    ((4, 1, 6), [2, 12, 1]),
    ((4, 6, 5), [24, 5]),
    ((4, 6, 5), [4, -1]),
)

SHAPES = [
    *[
        OpCase(
            f"reshape_{'_'.join(map(str, new))}",
            lambda fd, x, new=new: fd.ops.reshape(x, new),
            lambda x, new=new: x.reshape(new),
            [shape],
            exact=True,
            keeps_dtype=True,
        )
        for shape, new in RESHAPED
    ],
    *[
        OpCase(
            f"reshape_{'_'.join(map(str, new))}_and_compute",
            lambda fd, x, new=new: fd.ops.sum(fd.ops.reshape(fd.ops.neg(x), new), [-1]),
            lambda x, new=new: (-x).reshape(new).sum(-1),
            [shape],
            (F32, I64),
            exact=True,
            values="small",
        )
        for shape, new in RESHAPED
    ],
    OpCase(
        "expand",
        lambda fd, x: fd.ops.expand(x, [2, -1, 7]),
        lambda x: x.expand(2, 3, 7),
        [COLUMN],
        exact=True,
        keeps_dtype=True,
    ),
    OpCase(
        "squeeze",
        lambda fd, x: fd.ops.squeeze(x, [1]),
        lambda x: x.squeeze(1),
        [COLUMN],
        exact=True,
        keeps_dtype=True,
    ),
    OpCase(
        "squeeze_expanded",
        lambda fd, x: fd.ops.squeeze(fd.ops.expand(x, [3, 5]), [1], squeeze_expanded=True) + 1,
        lambda x: x.squeeze(1) + 1,
        [COLUMN],
        NUMBERS,
        exact=True,
    ),
    OpCase(
        "broadcast",
        lambda fd, x: fd.ops.broadcast(x, [False, True, False]),
        lambda x: x[:, None, :].clone(),
        [SHAPE],
        exact=True,
        keeps_dtype=True,
    ),
    OpCase(
        "broadcast_in_dim",
        lambda fd, x: fd.ops.broadcast_in_dim(x, [5, 37, 2], [1]),
        lambda x: x[None, :, None].expand(5, 37, 2).clone(),
        [ROW],
        exact=True,
        keeps_dtype=True,
    ),
    OpCase(
        "permute",
        lambda fd, x: fd.ops.permute(x, [2, 0, 1]),
        lambda x: x.permute(2, 0, 1).contiguous(),
        [(3, 4, 17)],
        exact=True,
        keeps_dtype=True,
    ),
    OpCase(
        "permute_add",
        lambda fd, x, y: fd.ops.add(fd.ops.permute(x, [1, 0]), y),
        lambda x, y: x.permute(1, 0) + y,
        [(19, 33), (33, 19)],
        NUMBERS,
        exact=True,
    ),
]


def reduction(
    name: str,
    dims: Sequence[int],
    keep: bool,
    reference: Callable[..., torch.Tensor],
    dtypes: Sequence[torch.dtype],
    values: Values,
    *,
    keeps_dtype: bool = True,
) -> OpCase:
    return OpCase(
        f"{name}_{'_'.join(map(str, dims))}{'_keep' if keep else ''}",
        lambda fd, x: getattr(fd.ops, name)(x, dims, keepdim=keep),
        lambda x: reference(x, dims, keep),
        [CUBE],
        dtypes,
        exact=True,
        keeps_dtype=keeps_dtype,
        values=values,
    )


def torch_prod(x: torch.Tensor, dims: Sequence[int], keep: bool) -> torch.Tensor:
    for dim in sorted((dim % x.dim() for dim in dims), reverse=True):
        x = x.prod(dim, keepdim=keep)
    return x


REDUCED = (
    ([0], False),
    ([1], True),
    ([2], False),
    ([0, 2], False),
    ([0, 1], True),
    ([1, -1], False),
    ([0, 1, 2], False),
)
REDUCTIONS = [
    *[reduction("sum", dims, keep, torch.sum, ALL, "small") for dims, keep in REDUCED],
    *[reduction("prod", dims, keep, torch_prod, ALL, "factors") for dims, keep in REDUCED],
    *[reduction("max", dims, keep, torch.amax, ALL, "special") for dims, keep in REDUCED],
    *[reduction("min", dims, keep, torch.amin, ALL, "special") for dims, keep in REDUCED],
    OpCase(
        "sum_all",
        lambda fd, x: fd.ops.sum(x),
        torch.sum,
        [CUBE],
        exact=True,
        keeps_dtype=True,
        values="small",
    ),
    OpCase(
        "mean_all",
        lambda fd, x: fd.ops.mean(x),
        lambda x: x.to(widened(x.dtype)).mean(),
        [CUBE],
        values="small",
    ),
    *[
        OpCase(
            f"mean_{'_'.join(map(str, dims))}",
            lambda fd, x, dims=dims, keep=keep: fd.ops.mean(x, dims, keepdim=keep),
            lambda x, dims=dims, keep=keep: x.to(widened(x.dtype)).mean(dims, keepdim=keep),
            [CUBE],
            values="small",
        )
        for dims, keep in REDUCED[:4]
    ],
    *[
        OpCase(
            f"var_mean_{'_'.join(map(str, dims))}_{correction}{'_keep' if keep else ''}",
            lambda fd, x, dims=dims, correction=correction, keep=keep: fd.ops.var_mean(
                x, dims, correction=correction, keepdim=keep
            ),
            lambda x, dims=dims, correction=correction, keep=keep: torch.var_mean(
                x, dims, correction=correction, keepdim=keep
            ),
            [CUBE],
            FLOATS,
            values="small",
        )
        for dims, correction, keep in (
            ([2], 1, False),
            ([2], 0, True),
            ([0], 1, False),
            ([0, 2], 0, False),
            ([0, 1, 2], 1, False),
        )
    ],
    OpCase(
        "var",
        lambda fd, x: fd.ops.var(x, [1], keepdim=True),
        lambda x: x.var([1], keepdim=True),
        [CUBE],
        FLOATS,
        values="small",
    ),
    *[
        OpCase(
            f"welford_{'_'.join(map(str, dims))}",
            lambda fd, x, dims=dims: fd.ops.welford(x, dims),
            lambda x, dims=dims: welford(x, dims),
            [CUBE],
            FLOATS,
            values="small",
        )
        for dims in ([2], [0], [0, 1, 2])
    ],
]


def welford(x: torch.Tensor, dims: list[int]) -> list[torch.Tensor]:
    mean = x.mean(dims)
    count = math.prod(x.shape[dim] for dim in dims)
    m2 = ((x - x.mean(dims, keepdim=True)) ** 2).sum(dims)
    return [mean, m2, torch.full(mean.shape, count, dtype=I64)]


CONTRACTIONS = [
    OpCase(
        "linear",
        lambda fd, x, w, b: fd.ops.linear(x, w, b),
        torch.nn.functional.linear,
        [(2, 7, 12), (5, 12), (5,)],
        FLOATS,
        exact=True,
        values="small",
        keeps_dtype=True,
    ),
    OpCase(
        "linear_3d_weight",
        lambda fd, x, w: fd.ops.linear(x, w),
        lambda x, w: torch.einsum("bsk,dnk->dbsn", x, w),
        [(2, 7, 12), (3, 5, 12)],
        FLOATS,
        exact=True,
        values="small",
        keeps_dtype=True,
    ),
    *[
        OpCase(
            f"matmul_{len(a)}_{len(b)}",
            lambda fd, x, y: fd.ops.matmul(x, y),
            torch.matmul,
            [a, b],
            FLOATS,
            exact=True,
            values="small",
            keeps_dtype=True,
        )
        for a, b in (
            ((4, 9), (9, 6)),
            ((9,), (9, 6)),
            ((4, 9), (9,)),
            ((9,), (9,)),
            ((2, 4, 9), (9, 6)),
            ((2, 1, 4, 9), (3, 9, 6)),
        )
    ],
]

CASES = [*UNARY, *BINARY, *SHAPES, *REDUCTIONS, *CONTRACTIONS]


@dataclass(frozen=True)
class Group:
    """Cases that take the same inputs in one dtype."""

    dtype: torch.dtype
    cases: Sequence[OpCase]

    def __str__(self) -> str:
        shapes = "_".join("x".join(map(str, shape)) for shape in self.cases[0].shapes)
        return f"{DATA_TYPES[self.dtype].value}-{shapes}-{self.cases[0].values}"

    def inputs(self) -> list[torch.Tensor]:
        first = self.cases[0]
        return [
            make_input(shape, self.dtype, seed, first.values)
            for seed, shape in enumerate(first.shapes)
        ]


def make_groups() -> list[Group]:
    groups: dict[tuple[torch.dtype, object, Values], list[OpCase]] = {}
    for case in CASES:
        for dtype in case.dtypes:
            key = (dtype, tuple(map(tuple, case.shapes)), case.values)
            groups.setdefault(key, []).append(case)
    return [Group(dtype, cases) for (dtype, _, _), cases in groups.items()]
