"""Bound expressions: bit for bit what `evaluate` gives, and results written where they belong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from meshfuse.base.dtypes import DataType
from meshfuse.expr import const, symbol
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.infer import dtypes_after_promotion, promoted_dtype, values_of
from meshfuse.ir.ops import (
    Broadcast,
    Cast,
    Expand,
    Expr,
    Linear,
    Literal,
    MatMul,
    Operand,
    Permute,
    Pointwise,
    Reduction,
    Reshape,
    Set,
    Squeeze,
)
from meshfuse.ir.ops_indexing import Scan
from meshfuse.ir.pointwise import REDUCTION_FUNCTIONS, SCALAR_FUNCTIONS
from meshfuse.runtime.bound_exprs import Scope, bind_exprs
from meshfuse.runtime.evaluate_ops import Environment, evaluate
from meshfuse.runtime.torch_types import TORCH_TYPES, from_torch_dtype, to_torch_dtype

OUT = TensorName("T9")
A, B, C = TensorName("T0"), TensorName("T1"), TensorName("T2")
SCALAR = ScalarName("c0")
DTYPES = tuple(TORCH_TYPES)
F32, BF16 = torch.float32, torch.bfloat16


def environment(
    tensors: Sequence[torch.Tensor], out: DataType, shape: Sequence[int]
) -> Environment:
    """T0, T1, .., the scalar c0 = 1.5, the size i0 = 2, and T9, which is to be made."""
    names = [TensorName(f"T{k}") for k in range(len(tensors))]
    dtypes = {name: from_torch_dtype(t.dtype) for name, t in zip(names, tensors, strict=True)}
    shapes = {n: tuple(map(const, t.shape)) for n, t in zip(names, tensors, strict=True)}
    return Environment(
        {**dtypes, SCALAR: DataType.Double, OUT: out},
        {**shapes, OUT: tuple(map(const, shape))},
        {"i0": 2},
        {**dict(zip(names, tensors, strict=True)), SCALAR: 1.5},
    )


def run_bound(
    expr: Expr, env: Environment, into: torch.Tensor | None = None, *, is_added: bool = False
) -> torch.Tensor:
    names = (*env.values, OUT)
    scope = Scope({name: place for place, name in enumerate(names)}, env)
    target = None if into is None else OUT
    run = bind_exprs((expr,), scope, target, is_added=is_added)
    slots: list[object] = [*env.values.values(), into]
    run(slots)
    result = slots[-1]
    assert isinstance(result, torch.Tensor)
    return result


def same(found: torch.Tensor, expected: torch.Tensor, *, is_placed: bool = True) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    zeros = found == 0
    if found.is_floating_point():
        assert torch.equal(found[zeros].signbit(), expected[zeros].signbit())
    if is_placed:
        assert found.stride() == expected.stride()


def check(expr: Expr, *tensors: torch.Tensor, out: DataType, shape: Sequence[int] = ()) -> None:
    """As a new tensor, in a tensor that exists, and added."""
    env = environment(tensors, out, shape)
    (expected,) = evaluate(expr, env)
    assert isinstance(expected, torch.Tensor)
    same(run_bound(expr, env), expected)
    dense = torch.full_like(expected, 7, memory_format=torch.contiguous_format)
    same(run_bound(expr, env, dense), expected, is_placed=False)
    if expected.dim():  # torch's functions take other paths where memory has gaps
        wide = expected.new_full((*expected.shape, 2), 7)
        torch.testing.assert_close(run_bound(expr, env, wide[..., 0]), expected, equal_nan=True)
        assert (wide[..., 1] == wide.new_tensor(7)).all()
    total = torch.ones_like(expected)
    same(run_bound(expr, env, total.clone(), is_added=True), total + expected, is_placed=False)


def values(dtype: torch.dtype, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Small numbers of both signs; floats with zeros of both signs, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(-3, 4, tuple(shape), generator=generator).to(dtype)
    if dtype.is_floating_point and found.numel() >= 8:
        found = found * 0.7
        special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan])
        found.view(-1)[torch.randperm(found.numel(), generator=generator)[:5]] = special.to(dtype)
    return found


def layouts(dtype: torch.dtype) -> Iterator[list[torch.Tensor]]:
    """Three operands that meet: dense, of one element, empty, scalars, with gaps, stretched."""
    for shape in ((2, 3, 4), (1, 1), (0, 3), ()):
        yield [values(dtype, shape, seed) for seed in range(3)]
    yield [values(dtype, (4, 6), 0)[:, ::2], values(dtype, (3, 4), 1).T, values(dtype, (4, 3), 2)]
    yield [values(dtype, (4, 1), 0), values(dtype, (1, 8), 1), values(dtype, (1, 1), 2)]


def out_type(function: str, args: Sequence[Operand], env: Environment) -> DataType:
    def lookup(name: TensorName | ScalarName) -> tuple[DataType, bool]:
        return env.dtypes[name], name in env.shapes

    promoted = promoted_dtype(values_of(function, args), lookup)
    return dtypes_after_promotion(function, promoted)[1]


@pytest.mark.parametrize("function", SCALAR_FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pointwise(function: str, dtype: DataType) -> None:
    row = SCALAR_FUNCTIONS[function]
    if dtype is DataType.Bool and not row.takes_bool:
        return
    if not row.takes_integers and not to_torch_dtype(dtype).is_floating_point:
        return
    operands: dict[int, list[tuple[Operand, ...]]] = {
        1: [(A,)],
        2: [(A, B), (A, Literal(2, DataType.Int)), (SCALAR, B), (A, symbol("i0") + 1)],
        3: [(A, B, C), (A, SCALAR, Literal(False, DataType.Bool))],
    }
    for tensors in layouts(to_torch_dtype(dtype)):
        if row.arity == 3:
            tensors[0] = tensors[0] > 0
        for args in operands[row.arity]:
            used = [t for t, name in zip(tensors, (A, B, C), strict=True) if name in args]
            shape = torch.broadcast_shapes(*(t.shape for t in used))
            env = environment(tensors, dtype, shape)
            out = out_type(function, args, env)
            check(Pointwise(OUT, function, args), *tensors, out=out, shape=shape)


@pytest.mark.parametrize("function", REDUCTION_FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(function: str, dtype: DataType) -> None:
    """Into the type of the operand, and into that of a sum."""
    for src, *_ in layouts(to_torch_dtype(dtype)):
        for axes in ((), (0,), tuple(range(src.dim()))):
            if axes and not src.dim():
                continue
            for out in {dtype, DataType.Float if dtype is DataType.BFloat16 else DataType.Int}:
                if to_torch_dtype(dtype).is_floating_point and out is DataType.Int:
                    continue
                check(Reduction(OUT, function, A, axes), src, out=out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_and_views(dtype: DataType) -> None:
    src = values(to_torch_dtype(dtype), (2, 1, 4), 0)
    gaps = values(to_torch_dtype(dtype), (2, 1, 8), 0)[..., ::2]
    for x in (src, gaps):
        check(Set(OUT, A), x, out=dtype)
        check(Broadcast(OUT, A, (True, False, False, True, False)), x, out=dtype)
        check(Squeeze(OUT, A, (1,)), x, out=dtype)
        check(Permute(OUT, A, (2, 0, 1)), x, out=dtype)
        check(Expand(OUT, A), x, out=dtype, shape=(2, 3, 4))
        check(Reshape(OUT, A), x, out=dtype, shape=(1, 8))
        check(Scan(OUT, "cummax", A, 2), x, out=dtype)
        finite = x.nan_to_num(1, 1, 1)
        for out in DTYPES:
            check(Cast(OUT, A), finite, out=out)


@pytest.mark.parametrize("dtype", [torch.float64, F32, torch.float16, BF16, torch.int64])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 4), (4, 5)),
        ((2, 3, 4), (4, 5)),
        ((2, 3, 4), (2, 4, 5)),
        ((1, 3, 4), (2, 4, 5)),
        ((3, 4), (2, 4, 5)),
        ((2, 2, 3, 4), (4, 5)),
        ((2, 2, 3, 4), (2, 4, 5)),
        ((4,), (4, 5)),
        ((3, 4), (4,)),
        ((3, 0), (0, 5)),
        ((0, 4), (4, 5)),
    ],
)
def test_products(dtype: torch.dtype, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    x, y = (torch.randint(-4, 5, shape).to(dtype) for shape in (a, b))
    check(MatMul(OUT, A, B), x, y, out=from_torch_dtype(dtype))
    check(MatMul(OUT, A, B), x.mT.clone().mT if x.dim() > 1 else x, y, out=from_torch_dtype(dtype))
    if y.dim() == 2:
        bias = torch.randint(-4, 5, (b[1],)).to(dtype)
        check(Linear(OUT, A, B), x, y.T.clone(), out=from_torch_dtype(dtype))
        check(Linear(OUT, A, B, C), x, y.T.clone(), bias, out=from_torch_dtype(dtype))


def test_weights_in_groups() -> None:
    x, w, bias = torch.randn(2, 3, 4), torch.randn(2, 5, 4), torch.randn(2, 5)
    check(Linear(OUT, A, B), x, w, out=DataType.Float)
    check(Linear(OUT, A, B, C), x, w, bias, out=DataType.Float)


# Where results are written.


def copies(call: Callable[[], object]) -> int:
    """How often torch copies a tensor, or makes one."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    names = ("aten::copy_", "aten::empty", "aten::empty_strided", "aten::clone")
    return sum(event.name in names for event in found.events() or ())


def chunks_of(shape: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of a shape [*batch, m, n] that lie in memory in all ways that loops make."""
    *batch, m, n = shape
    found = {
        "dense": torch.empty(*batch, m, n, dtype=dtype),
        "rows": torch.empty(*batch, 3 * m, n, dtype=dtype).narrow(-2, m, m),
        "columns": torch.empty(*batch, m, 3 * n, dtype=dtype).narrow(-1, n, n),
    }
    if not batch:
        found["transposed"] = torch.empty(n, m, dtype=dtype).T
    return found


@pytest.mark.parametrize("dtype", [F32, torch.float64, BF16])
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("is_added", [False, True])
def test_products_are_written_where_they_belong(
    dtype: torch.dtype, batch: tuple[int, ...], is_added: bool
) -> None:
    x, w = torch.randint(-4, 5, (*batch, 6, 8)).to(dtype), torch.randint(-4, 5, (10, 8)).to(dtype)
    expected = functional.linear(x, w)
    for name, out in chunks_of((*batch, 6, 10), dtype).items():
        for expr, operand in ((Linear(OUT, A, B), w), (MatMul(OUT, A, B), w.mT)):
            env = environment([x, operand], from_torch_dtype(dtype), expected.shape)
            out.fill_(2 if is_added else math.nan)
            found = copies(lambda e=expr, n=env, o=out: run_bound(e, n, o, is_added=is_added))
            same(out, expected + 2 * is_added, is_placed=False)
            # baddbmm_ copies the result to itself, which does nothing.
            assert found == (1 if is_added and batch and name == "rows" else 0), (name, expr)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_products_of_blocks_of_rows_are_written_where_they_belong(
    dtype: torch.dtype, step: int
) -> None:
    """Of [2, 3, 4, n] a chunk of one axis: rows go on evenly but for one step, at most."""
    sizes = [2, 3, 4]
    wider = [size * (2 if place == step else 1) for place, size in enumerate(sizes)]
    x = torch.randint(-4, 5, (*wider, 8)).to(dtype).narrow(step, 1, sizes[step])
    out = torch.full((*wider, 10), math.nan, dtype=dtype).narrow(step, 1, sizes[step])
    w = torch.randint(-4, 5, (10, 8)).to(dtype)
    for expr, operand in ((Linear(OUT, A, B), w), (MatMul(OUT, A, B), w.mT)):
        env = environment([x, operand], from_torch_dtype(dtype), out.shape)
        assert copies(lambda e=expr, n=env: run_bound(e, n, out)) == 0
        same(out, functional.linear(x, w), is_placed=False)


def test_rows_with_two_uneven_steps_are_copied() -> None:
    x = torch.randint(-4, 5, (4, 6, 4, 8)).float()[:2, :3, :2]
    out, w = torch.empty(2, 3, 2, 10), torch.randint(-4, 5, (10, 8)).float()
    env = environment([x, w], DataType.Float, out.shape)
    run_bound(Linear(OUT, A, B), env, out)
    same(out, functional.linear(x, w), is_placed=False)


def test_a_bias_is_the_only_copy() -> None:
    x, w, bias = torch.randn(6, 8), torch.randn(10, 8), torch.randn(10)
    env = environment([x, w, bias], DataType.Float, (6, 10))
    out = torch.empty(6, 10)
    assert copies(lambda: run_bound(Linear(OUT, A, B, C), env, out)) == 1
    same(out, functional.linear(x, w, bias))


def test_functions_and_sums_write_directly() -> None:
    x, y, out = torch.randn(6, 8), torch.randn(6, 8), torch.empty(6, 16)[:, 8:]
    env = environment([x, y], DataType.Float, (6, 8))
    for expr in (Pointwise(OUT, "add", (A, B)), Pointwise(OUT, "relu", (A,))):
        assert copies(lambda e=expr: run_bound(e, env, out)) == 0
    assert copies(lambda: run_bound(Reduction(OUT, "sum", A, (1,)), env, out[:, 0])) == 0
    assert copies(lambda: run_bound(Reduction(OUT, "max", A, (1,)), env, out[:, 0])) == 0


def test_sums_of_products_in_16_bits_are_rounded_once() -> None:
    """256 + 0.75 * 1 + .. : a product that is rounded first, and then again in the sum, is off."""
    total = torch.full((1, 1), 256.0, dtype=BF16)
    x, y = torch.tensor([[1.0, 2.0**-9]], dtype=BF16), torch.ones(2, 1, dtype=BF16)
    env = environment([x, y], DataType.BFloat16, (1, 1))
    run_bound(MatMul(OUT, A, B), env, total, is_added=True)
    exact = 256.0 + (x.double() @ y.double())
    assert total.item() == exact.to(BF16).item() == 258.0
