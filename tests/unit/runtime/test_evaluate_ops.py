"""Every expression against torch, on tensors made here."""

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from meshfuse.base.dtypes import DataType
from meshfuse.expr import const, symbol
from meshfuse.ir.axes import AxisKind, AxisName, IterDomain, ScalarName, TensorName
from meshfuse.ir.comm import AllReduce
from meshfuse.ir.fusion import Fusion, Output, TensorDef
from meshfuse.ir.mesh import ParallelType
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
    Set,
    Squeeze,
    Welford,
)
from meshfuse.ir.pointwise import SCALAR_FUNCTIONS, ResultRule
from meshfuse.ir.program import Program
from meshfuse.runtime.evaluate_ops import Environment, evaluate, evaluate_program
from meshfuse.runtime.torch_functions import TORCH_FUNCTIONS
from meshfuse.runtime.torch_types import from_torch_dtype

OUT = TensorName("T9")
A, B, C = TensorName("T0"), TensorName("T1"), TensorName("T2")
EIGHT_BIT_STEPS = torch.linspace(-3, 3, 24).reshape(2, 3, 4)


def run(
    expr: Expr, out: DataType, *tensors: torch.Tensor, shape: tuple[int, ...] = ()
) -> torch.Tensor:
    """The output of `expr` over T0, T1, ..., whose type is `out`."""
    names = [TensorName(f"T{k}") for k in range(len(tensors))]
    dtypes = {name: from_torch_dtype(t.dtype) for name, t in zip(names, tensors, strict=True)}
    shapes = {n: tuple(const(s) for s in t.shape) for n, t in zip(names, tensors, strict=True)}
    env = Environment(
        {**dtypes, OUT: out},
        {**shapes, OUT: tuple(const(s) for s in shape)},
        {},
        dict(zip(names, tensors, strict=True)),
    )
    (result,) = evaluate(expr, env)
    assert isinstance(result, torch.Tensor)
    return result


def pointwise(function: str, *args: Operand) -> Pointwise:
    return Pointwise(OUT, function, args)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in value, NaN included, type and shape."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("function", "reference"),
    [
        ("neg", torch.neg),
        ("exp", torch.exp),
        ("rsqrt", torch.rsqrt),
        ("tanh", torch.tanh),
        ("erf", torch.erf),
        ("relu", torch.relu),
        ("gelu", functional.gelu),
    ],
)
def test_unary_functions_pass_nan_on(
    function: str, reference: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = EIGHT_BIT_STEPS.clone()
    x[0, 0, 0] = math.nan
    same(run(pointwise(function, A), DataType.Float, x), reference(x))


@pytest.mark.parametrize("function", ["add", "sub", "mul", "div"])
def test_arithmetic_of_16_bit_floats_is_done_in_float32(function: str) -> None:
    x, y = EIGHT_BIT_STEPS.bfloat16(), (EIGHT_BIT_STEPS + 7.3).bfloat16()
    wide = getattr(torch, function)(x.float(), y.float())
    same(run(pointwise(function, A, B), DataType.Float, x, y), wide)


def test_relu_keeps_16_bits() -> None:
    x = EIGHT_BIT_STEPS.bfloat16()
    same(run(pointwise("relu", A), DataType.BFloat16, x), torch.relu(x))


def is_asked_of_torch(function: str, dtype: torch.dtype) -> bool:
    """Whether torch's function of this name is called on such tensors as they are."""
    row = SCALAR_FUNCTIONS[function]
    is_refused = dtype == torch.bool and not row.takes_bool
    is_converted = row.rule is ResultRule.floating and not dtype.is_floating_point
    return not (is_refused or is_converted or row.rule is ResultRule.select)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (function, dtype)
        for function in SCALAR_FUNCTIONS
        for dtype in (torch.bool, torch.int64, torch.float32)
        if is_asked_of_torch(function, dtype)
    ],
)
def test_scalar_functions_make_memory_of_their_own(function: str, dtype: torch.dtype) -> None:
    """An all-reduce may overwrite it: what the operands had stays."""
    operands = [torch.ones(3, dtype=dtype) for _ in range(SCALAR_FUNCTIONS[function].arity)]
    made = TORCH_FUNCTIONS[function](*operands)
    assert made.data_ptr() not in [operand.data_ptr() for operand in operands]


def test_an_integer_tensor_with_a_float_scalar_gives_double() -> None:
    x = torch.arange(4)
    half = Literal(0.5, DataType.Double)
    same(run(pointwise("mul", A, half), DataType.Double, x), x.double() * 0.5)


def test_integers_divide_towards_zero_and_by_zero_to_zero() -> None:
    x, y = torch.tensor([7, -7, 7, 5]), torch.tensor([2, 2, -2, 0])
    same(run(pointwise("div", A, B), DataType.Int, x, y), torch.tensor([3, -3, -3, 0]))


def test_bool_arithmetic_is_that_of_c() -> None:
    x, y = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    same(run(pointwise("add", A, B), DataType.Bool, x, y), x | y)
    same(run(pointwise("sub", A, B), DataType.Bool, x, y), x ^ y)
    same(run(pointwise("mul", A, B), DataType.Bool, x, y), x & y)


def test_a_comparison_converts_the_scalar_to_the_tensors_type() -> None:
    third = Literal(1 / 3, DataType.Double)
    x = torch.tensor([1 / 3], dtype=torch.float32)
    same(run(pointwise("lt", third, A), DataType.Bool, x), torch.tensor([False]))
    same(run(pointwise("lt", third, A), DataType.Bool, x.double() + 1e-12), torch.tensor([True]))


def test_where_selects_without_widening() -> None:
    condition = torch.tensor([True, False])
    x, y = torch.tensor([1, 2]).half(), torch.tensor([3, 4]).half()
    expr = pointwise("where", A, B, C)
    same(run(expr, DataType.Half, condition, x, y), torch.where(condition, x, y))


def test_sizes_and_scalars_are_operands() -> None:
    c0, c1 = ScalarName("c0"), ScalarName("c1")
    env = Environment({c0: DataType.Double, c1: DataType.Double}, {}, {"i0": 6}, {c0: 1.5})
    assert evaluate(Pointwise(c1, "mul", (c0, symbol("i0") + 1)), env) == (10.5,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_cast(dtype: torch.dtype) -> None:
    same(run(Cast(OUT, A), from_torch_dtype(dtype), EIGHT_BIT_STEPS), EIGHT_BIT_STEPS.to(dtype))


def test_set_copies() -> None:
    result = run(Set(OUT, A), DataType.Float, EIGHT_BIT_STEPS)
    same(result, EIGHT_BIT_STEPS)
    assert result.data_ptr() != EIGHT_BIT_STEPS.data_ptr()


def test_views() -> None:
    x = EIGHT_BIT_STEPS
    inserted = run(Broadcast(OUT, A, (True, False, False, True, False)), DataType.Float, x)
    same(inserted, x[None, :, :, None])
    same(run(Squeeze(OUT, A, (0, 3)), DataType.Float, inserted), x)
    same(run(Permute(OUT, A, (2, 0, 1)), DataType.Float, x), x.permute(2, 0, 1))
    expanded = run(Expand(OUT, A), DataType.Float, x[:, :1], shape=(2, 5, 4))
    same(expanded, x[:, :1].expand(2, 5, 4))


def test_a_communication_moves_nothing_on_one_device() -> None:
    expr = AllReduce(OUT, A, ParallelType.mesh_x)
    same(run(expr, DataType.Float, EIGHT_BIT_STEPS), EIGHT_BIT_STEPS)


def reduction(function: str, *axes: int) -> Reduction:
    return Reduction(OUT, function, A, axes)


def test_sums() -> None:
    x = EIGHT_BIT_STEPS
    same(run(reduction("sum", 0, 2), DataType.Float, x), x.sum((0, 2)))
    same(run(reduction("sum"), DataType.Float, x), x)
    half = torch.full((4096,), 1.0, dtype=torch.float16)
    same(run(reduction("sum", 0), DataType.Half, half), torch.tensor(4096).half())
    int32 = torch.full((3,), 2**30, dtype=torch.int32)
    same(run(reduction("sum", 0), DataType.Int, int32), torch.tensor(3 * 2**30))


def test_maxima() -> None:
    x = EIGHT_BIT_STEPS.clone()
    x[1, 0, 2] = math.nan
    same(run(reduction("max", 1), DataType.Float, x), x.amax(1))
    nothing = torch.empty(2, 0)
    same(run(reduction("max", 1), DataType.Float, nothing), torch.tensor([-math.inf] * 2))
    none = torch.empty(2, 0, dtype=torch.int64)
    same(run(reduction("max", 1), DataType.Int, none), torch.tensor([-(2**63)] * 2))


def test_welford() -> None:
    x = EIGHT_BIT_STEPS.bfloat16()
    mean, m2, count = TensorName("T7"), TensorName("T8"), OUT
    expr = Welford(mean, m2, count, A, (0, 2))
    floats = {mean: DataType.Float, m2: DataType.Float}
    dtypes = {A: DataType.BFloat16, count: DataType.Int, **floats}
    results = evaluate(expr, Environment({**dtypes}, {}, {}, {A: x}))
    var, average = torch.var_mean(x.float(), (0, 2), correction=0)
    expected = (average, var * 8, torch.full((3,), 8))
    for found, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(dtype: torch.dtype, with_bias: bool) -> None:
    x, weight, bias = (torch.randint(-4, 5, s).to(dtype) for s in ((2, 3, 4), (5, 4), (5,)))
    operands = (x, weight, bias) if with_bias else (x, weight)
    expr = Linear(OUT, A, B, C if with_bias else None)
    expected = functional.linear(*(t.double() for t in operands)).to(dtype)
    same(run(expr, from_torch_dtype(dtype), *operands), expected)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_with_grouped_weights(groups: int, with_bias: bool) -> None:
    shapes = ((2, 3, 4), (groups, 5, 4), (groups, 5))
    x, weight, bias = (torch.randint(-4, 5, shape).float() for shape in shapes)
    operands = (x, weight, bias) if with_bias else (x, weight)
    result = run(Linear(OUT, A, B, C if with_bias else None), DataType.Float, *operands)
    expected = [
        functional.linear(x, weight[g], bias[g] if with_bias else None) for g in range(groups)
    ]
    same(result, torch.stack(expected))


def test_matmul() -> None:
    a, b = torch.randint(-4, 5, (6, 1, 3, 4)), torch.randint(-4, 5, (2, 4, 5))
    same(run(MatMul(OUT, A, B), DataType.Int, a, b), torch.matmul(a, b))
    same(run(MatMul(OUT, A, B), DataType.Int, a[0, 0], b[0, :, 0]), a[0, 0] @ b[0, :, 0])


def test_a_program_binds_its_sizes_and_returns_every_output() -> None:
    rows = symbol("i0", 0)

    def axes(letter: str) -> tuple[IterDomain, ...]:
        return tuple(
            IterDomain(AxisName(f"{letter}{k}"), AxisKind.iteration, extent)
            for k, extent in enumerate((rows, const(3)))
        )

    fusion = Fusion(
        tensors={
            A: TensorDef(DataType.Float, axes("a")),
            OUT: TensorDef(DataType.Double, axes("b")),
        },
        exprs=(Pointwise(OUT, "mul", (A, rows)),),
        inputs=(A,),
        outputs=(Output(OUT, alias=A), Output(A)),
    )
    x = torch.ones(4, 3)
    result, untouched = evaluate_program(Program(fusion), [x])
    same(result, torch.full((4, 3), 4.0, dtype=torch.float64))
    assert untouched is x
