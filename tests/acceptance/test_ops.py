"""Every op against torch, in each dtype that makes sense, compiled and through the evaluator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from kernel_paths import PATHS
from meshfuse import DataType, FusionDefinition, TensorView

F32, F64, BF16, I64, BOOL = torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool
FLOATS = (F32, F64, BF16)
NUMBERS = (*FLOATS, I64)
ALL = (*NUMBERS, BOOL)
DATA_TYPES = {
    F32: DataType.Float,
    F64: DataType.Double,
    BF16: DataType.BFloat16,
    I64: DataType.Int,
    BOOL: DataType.Bool,
}
SPECIALS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -3.25,
    20.0,
    -20.0,
    float("inf"),
    float("-inf"),
    float("nan"),
]
# Against torch in the compute type: 2 ulp for the maths functions, a few more in a chain.
RELATIVE = {F32: 1e-6, F64: 1e-14}


@dataclass(frozen=True)
class OpCase:
    """`build` takes (fd, *tensors) and gives the outputs; `reference` does the same in torch.

    16-bit inputs reach the reference as float32: an op that widens returns Float (promotion).
    """

    name: str
    build: Callable[..., TensorView | Sequence[TensorView]]
    reference: Callable[..., torch.Tensor | Sequence[torch.Tensor]]
    shapes: Sequence[Sequence[int]]
    dtypes: Sequence[torch.dtype] = ALL
    exact: bool = False
    contraction: bool = False
    keeps_dtype: bool = False
    arguments: Sequence[torch.Tensor] = field(default_factory=tuple)


def make_input(shape: Sequence[int], dtype: torch.dtype, seed: int, *, plain: bool) -> torch.Tensor:
    """Random values; with NaN, infinities and signed zero in front unless `plain`."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is BOOL:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype is I64:
        return torch.randint(-9, 9, shape, generator=generator)
    if plain:
        return torch.randint(-4, 5, shape, generator=generator).to(dtype)
    values = torch.randn(shape, generator=generator, dtype=F64) * 2
    flat = values.view(-1)
    count = min(len(SPECIALS), flat.numel())
    flat[:count] = torch.tensor(SPECIALS[:count], dtype=F64)
    return values.to(dtype)


def true_div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def widened(dtype: torch.dtype) -> torch.dtype:
    return F32 if dtype in (I64, BOOL) else dtype


def exact_gelu(x: torch.Tensor) -> torch.Tensor:
    """torch's own is NaN at +inf in its vectorised float32 path, and inf in the others."""
    return (x.double() / 2 * (1 + torch.erf(x.double() / 2**0.5))).to(x.dtype)


def floating(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Integers and bool compute as float32."""
    return lambda x: function(x.to(widened(x.dtype)))


SHAPE = (3, 37)
ROW = (37,)
COLUMN = (3, 1)

CASES = [
    OpCase("set", lambda fd, x: fd.ops.set(x), torch.clone, [SHAPE], exact=True, keeps_dtype=True),
    OpCase("neg", lambda fd, x: fd.ops.neg(x), torch.neg, [SHAPE], NUMBERS, exact=True),
    OpCase("exp", lambda fd, x: fd.ops.exp(x), floating(torch.exp), [SHAPE]),
    OpCase("rsqrt", lambda fd, x: fd.ops.rsqrt(x), floating(torch.rsqrt), [SHAPE]),
    OpCase("tanh", lambda fd, x: fd.ops.tanh(x), floating(torch.tanh), [SHAPE]),
    OpCase("erf", lambda fd, x: fd.ops.erf(x), floating(torch.erf), [SHAPE]),
    OpCase(
        "relu",
        lambda fd, x: fd.ops.relu(x),
        torch.relu,
        [SHAPE],
        NUMBERS,
        exact=True,
        keeps_dtype=True,
    ),
    OpCase(
        "gelu",
        lambda fd, x: fd.ops.gelu(x),
        floating(exact_gelu),
        [SHAPE],
    ),
    OpCase(
        "add", lambda fd, x, y: fd.ops.add(x, y), torch.add, [SHAPE, SHAPE], NUMBERS, exact=True
    ),
    OpCase(
        "add_row", lambda fd, x, y: fd.ops.add(x, y), torch.add, [SHAPE, ROW], NUMBERS, exact=True
    ),
    OpCase(
        "sub_column",
        lambda fd, x, y: fd.ops.sub(x, y),
        torch.sub,
        [SHAPE, COLUMN],
        NUMBERS,
        exact=True,
    ),
    OpCase(
        "mul", lambda fd, x, y: fd.ops.mul(x, y), torch.mul, [SHAPE, SHAPE], NUMBERS, exact=True
    ),
    OpCase("div", lambda fd, x, y: fd.ops.div(x, y), true_div, [SHAPE, SHAPE], FLOATS, exact=True),
    OpCase("lt", lambda fd, x, y: fd.ops.lt(x, y), torch.lt, [SHAPE, SHAPE], exact=True),
    OpCase(
        "where",
        lambda fd, x, y: fd.ops.where(fd.ops.lt(x, y), x, y),
        lambda x, y: torch.where(x < y, x, y),
        [SHAPE, SHAPE],
        NUMBERS,
        exact=True,
        keeps_dtype=True,
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
    *[
        OpCase(
            f"sum_{'_'.join(map(str, dims))}{'_keep' if keep else ''}",
            lambda fd, x, dims=dims, keep=keep: fd.ops.sum(x, dims, keepdim=keep),
            lambda x, dims=dims, keep=keep: torch.sum(x, dims, keepdim=keep),
            [(5, 6, 35)],
            (F32, F64, I64, BOOL),
            exact=True,
        )
        for dims, keep in (
            ([0], False),
            ([1], True),
            ([2], False),
            ([0, 2], False),
            ([0, 1], True),
            ([1, -1], False),
            ([0, 1, 2], False),
        )
    ],
    OpCase(
        "sum_all", lambda fd, x: fd.ops.sum(x), torch.sum, [(5, 37)], (F32, F64, I64), exact=True
    ),
    *[
        OpCase(
            f"max_{'_'.join(map(str, dims))}",
            lambda fd, x, dims=dims: fd.ops.max(x, dims),
            lambda x, dims=dims: torch.amax(x, dims),
            [(5, 6, 35)],
            NUMBERS,
            exact=True,
            keeps_dtype=True,
        )
        for dims in ([0], [2], [0, 2])
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
            [(5, 6, 35)],
            FLOATS,
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
        "linear",
        lambda fd, x, w, b: fd.ops.linear(x, w, b),
        torch.nn.functional.linear,
        [(2, 7, 12), (5, 12), (5,)],
        FLOATS,
        exact=True,
        contraction=True,
        keeps_dtype=True,
    ),
    OpCase(
        "linear_3d_weight",
        lambda fd, x, w: fd.ops.linear(x, w),
        lambda x, w: torch.einsum("bsk,dnk->dbsn", x, w),
        [(2, 7, 12), (3, 5, 12)],
        FLOATS,
        exact=True,
        contraction=True,
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
            contraction=True,
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


def define(case: OpCase, inputs: Sequence[torch.Tensor], symbolic: bool) -> FusionDefinition:
    with FusionDefinition() as fd:
        tensors = [fd.from_pytorch(tensor, static_sizes=not symbolic) for tensor in inputs]
        outputs = case.build(fd, *tensors)
        for output in outputs if isinstance(outputs, Sequence) else (outputs,):
            fd.add_output(output)
    return fd


def reference_outputs(case: OpCase, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """16-bit floats compute in float32; an op that keeps its dtype rounds once at the end."""
    widened_inputs = [x.float() if x.dtype is BF16 else x for x in inputs]
    results = case.reference(*widened_inputs)
    listed = list(results) if isinstance(results, Sequence) else [results]
    narrow = case.keeps_dtype and inputs[0].dtype is BF16
    return [x.to(BF16) if narrow and x.is_floating_point() else x for x in listed]


@pytest.mark.parametrize(
    ("path", "symbolic"),
    [("compiled", False), ("compiled", True), ("evaluator", True), ("op_by_op", True)],
    ids=["compiled-static", "compiled-symbolic", "evaluator", "op_by_op"],
)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in CASES for dtype in case.dtypes],
    ids=[f"{case.name}-{DATA_TYPES[dtype].value}" for case in CASES for dtype in case.dtypes],
)
def test_op(case: OpCase, dtype: torch.dtype, path: str, symbolic: bool) -> None:
    plain = case.contraction or case.name.startswith(("sum", "var_mean"))
    inputs = [make_input(s, dtype, seed, plain=plain) for seed, s in enumerate(case.shapes)]
    results = PATHS[path](define(case, inputs, symbolic), inputs)
    expected = reference_outputs(case, inputs)
    assert len(results) == len(expected)
    for result, want in zip(results, expected, strict=True):
        tolerance = 0.0 if case.exact else 4 * RELATIVE[want.dtype]
        assert result.dtype == want.dtype
        assert result.shape == want.shape
        torch.testing.assert_close(result, want, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("source", [F32, F64, BF16, I64, BOOL])
@pytest.mark.parametrize("target", [F32, F64, BF16, I64, BOOL])
def test_cast(source: torch.dtype, target: torch.dtype, path: str) -> None:
    data = make_input(SHAPE, source, 0, plain=target is I64)
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.cast(fd.from_pytorch(data), DATA_TYPES[target]))
    [result] = PATHS[path](fd, [data])
    torch.testing.assert_close(result, data.to(target), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 5), (5, 0), (1, 1), (1, 40), (40, 1)])
def test_small_and_empty_shapes(shape: tuple[int, ...], path: str) -> None:
    data = make_input(shape, F32, 3, plain=True)
    with FusionDefinition() as fd:
        x = fd.from_pytorch(data)
        fd.add_output(fd.ops.add(fd.ops.relu(x), 1.5))
        fd.add_output(fd.ops.sum(x))
    doubled, total = PATHS[path](fd, [data])
    assert torch.equal(doubled, data.relu() + 1.5)
    assert torch.equal(total, data.sum())


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
    data = view(make_input((12, 34), F32, 5, plain=True))
    with FusionDefinition() as fd:
        x = fd.from_pytorch(data)
        fd.add_output(fd.ops.mul(x, x))
        fd.add_output(fd.ops.sum(x, [-1]))
        fd.add_output(fd.ops.sum(x, [0]))
    squared, rows, columns = PATHS[path](fd, [data])
    assert torch.equal(squared, data * data)
    assert torch.equal(rows, data.sum(-1))
    assert torch.equal(columns, data.sum(0))
