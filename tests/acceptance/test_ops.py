"""Every op against torch, in each dtype that makes sense, on four paths.

Cases with like inputs run as one program: that is one kernel instead of twenty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from kernel_paths import PATHS
from meshfuse import DataType, FusionDefinition, TensorView

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
# Against torch in the compute type: 2 ulp for the maths functions, a few more in a chain.
RELATIVE = {F32: 1e-6, F64: 1e-14}

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


def as_list(results: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


def define(group: Group, inputs: Sequence[torch.Tensor], symbolic: bool) -> FusionDefinition:
    with FusionDefinition() as fd:
        tensors = [fd.from_pytorch(tensor, static_sizes=not symbolic) for tensor in inputs]
        for case in group.cases:
            outputs = case.build(fd, *tensors)
            for output in outputs if isinstance(outputs, Sequence) else (outputs,):
                fd.add_output(output)
    return fd


def reference_outputs(case: OpCase, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    dtype = inputs[0].dtype
    results = as_list(case.reference(*[x.float() if dtype in NARROW else x for x in inputs]))
    narrow = case.keeps_dtype and dtype in NARROW
    return [x.to(dtype) if narrow and x.is_floating_point() else x for x in results]


@pytest.mark.parametrize(
    ("path", "symbolic"),
    [("compiled", False), ("compiled", True), ("evaluator", True), ("op_by_op", True)],
    ids=["compiled-static", "compiled-symbolic", "evaluator", "op_by_op"],
)
@pytest.mark.parametrize("group", make_groups(), ids=str)
def test_ops(group: Group, path: str, symbolic: bool) -> None:
    inputs = group.inputs()
    results = iter(PATHS[path](define(group, inputs, symbolic), inputs))
    for case in group.cases:
        for want in reference_outputs(case, inputs):
            result, narrow = next(results), want.dtype in NARROW and not case.exact
            tolerance = 0.0 if case.exact else 4 * RELATIVE.get(want.dtype, 0.0)
            if narrow:  # one rounding more
                tolerance = torch.finfo(want.dtype).eps
            assert result.dtype == want.dtype, case.name
            assert result.shape == want.shape, case.name
            torch.testing.assert_close(
                result,
                want,
                rtol=tolerance,
                atol=tolerance,
                equal_nan=True,
                msg=lambda text, case=case: f"{case.name}: {text}",
            )
    assert next(results, None) is None


@pytest.mark.parametrize(
    "group", [group for group in make_groups() if group.dtype in (F32, I32)], ids=str
)
def test_repr_defines_the_same_program(group: Group) -> None:
    fd = define(group, group.inputs(), symbolic=True)
    scope: dict[str, Callable[[FusionDefinition], None]] = {}
    exec("from meshfuse import *\n" + repr(fd), scope)  # as users do
    with FusionDefinition() as again:
        scope["nvfuser_fusion"](again)
    assert repr(again.fusion) == repr(fd.fusion)


@pytest.mark.parametrize("path", PATHS)
def test_a_sum_of_all_elements_counts_as_dimensioned(path: str) -> None:
    """It keeps its type beside a 0-dim tensor of a wider one, compared or added: nvFuser's."""
    data, wide = torch.tensor([1.0, 1e-9]), torch.tensor(1.0 + 1e-9, dtype=F64)
    with FusionDefinition() as fd:
        x, y = fd.from_pytorch(data), fd.define_tensor([], [], dtype=DataType.Double)
        total = fd.ops.sum(x)
        for output in (total + y, fd.ops.eq(total, y), fd.ops.where(x < 1.0, total, y)):
            fd.add_output(output)
    added, equal, chosen = PATHS[path](fd, [data, wide])
    assert torch.equal(added, torch.tensor(2.0))
    assert bool(equal)
    assert torch.equal(chosen, torch.tensor([1.0, 1.0]))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("source", ALL, ids=str)
def test_cast(source: torch.dtype, path: str) -> None:
    special, small = make_input(SHAPE, source, 0), make_input(SHAPE, source, 0, "small")
    expected: list[torch.Tensor] = []
    with FusionDefinition() as fd:
        x, y = fd.from_pytorch(special), fd.from_pytorch(small)
        for target, dtype in DATA_TYPES.items():
            fd.add_output(fd.ops.cast(y if target in INTEGERS else x, dtype))
            expected.append((small if target in INTEGERS else special).to(target))
    for result, want in zip(PATHS[path](fd, [special, small]), expected, strict=True):
        torch.testing.assert_close(result, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 5), (5, 0), (1, 1), (1, 40), (40, 1)])
def test_small_and_empty_shapes(shape: tuple[int, ...], path: str) -> None:
    data = make_input(shape, F32, 3, "small")
    with FusionDefinition() as fd:
        x = fd.from_pytorch(data)
        dims = list(range(len(shape))) or [0]
        outputs = [fd.ops.add(fd.ops.relu(x), 1.5), fd.ops.cos(abs(x)), x <= 1]
        outputs += [fd.ops.sum(x), fd.ops.prod(x), fd.ops.mean(x), fd.ops.max(x), fd.ops.min(x)]
        outputs += [fd.ops.var(x, dims), *fd.ops.welford(x, dims)]
        for output in outputs:
            fd.add_output(output)
    lowest, highest = torch.tensor(-math.inf), torch.tensor(math.inf)
    expected = [data.relu() + 1.5, data.abs().cos(), data <= 1]
    expected += [data.sum(), data.prod(), data.mean()]
    expected += [lowest, highest] if data.numel() == 0 else [data.max(), data.min()]
    m2 = (data - data.mean()).square().sum()
    expected += [m2 / max(data.numel() - 1, 0), data.mean(), m2, torch.tensor(data.numel())]
    for result, want in zip(PATHS[path](fd, [data]), expected, strict=True):
        torch.testing.assert_close(result, want, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_reductions_of_nothing_in_each_type() -> None:
    """Where torch raises, ours is the value that changes no maximum or minimum."""
    for dtype in ALL:
        data = torch.zeros((0, 3), dtype=dtype)
        with FusionDefinition() as fd:
            x = fd.from_pytorch(data)
            for name in ("max", "min", "sum", "prod"):
                fd.add_output(getattr(fd.ops, name)(x, [0]))
        lowest, highest, zero, one = (result.tolist() for result in fd.execute([data]))
        floating = dtype.is_floating_point
        limits = None if floating or dtype is BOOL else torch.iinfo(dtype)
        ends = (False, True) if limits is None else (limits.min, limits.max)
        low, high = (-math.inf, math.inf) if floating else ends
        assert (lowest, highest) == ([low] * 3, [high] * 3)
        assert (zero, one) == ([0] * 3, [1] * 3)


def test_statistics_of_one_infinite_element_are_nan() -> None:
    data = torch.tensor([[math.inf], [2.0]])
    with FusionDefinition() as fd:
        x = fd.from_pytorch(data)
        mean, m2, count = fd.ops.welford(x, [1])
        for output in (fd.ops.var(x, [1], correction=0), mean, m2, count):
            fd.add_output(output)
    var, mean, m2, count = fd.execute([data])
    torch.testing.assert_close(var, torch.tensor([math.nan, 0.0]), equal_nan=True)
    torch.testing.assert_close(mean, torch.tensor([math.inf, 2.0]))
    torch.testing.assert_close(m2, torch.tensor([math.nan, 0.0]), equal_nan=True)
    assert count.tolist() == [1, 1]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[::3],
        lambda x: x[:, :1].expand(-1, 8),
        lambda x: x[2].expand(6, -1),
        lambda x: x.unsqueeze(1).expand(-1, 3, -1),
    ],
    ids=[
        "transposed",
        "every_second",
        "rows",
        "expanded_column",
        "expanded_row",
        "expanded_middle",
    ],
)
def test_strided_and_expanded_inputs(
    view: Callable[[torch.Tensor], torch.Tensor], path: str
) -> None:
    data = view(make_input((12, 34), F32, 5, "small"))
    with FusionDefinition() as fd:
        x = fd.from_pytorch(data)
        fd.add_output(fd.ops.mul(x, x))
        fd.add_output(fd.ops.sum(x, [-1]))
        fd.add_output(fd.ops.sum(x, [0]))
    squared, rows, columns = PATHS[path](fd, [data])
    assert torch.equal(squared, data * data)
    assert torch.equal(rows, data.sum(-1))
    assert torch.equal(columns, data.sum(0))
