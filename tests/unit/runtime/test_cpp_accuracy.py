"""How exact the C++ prelude is: functions in units in the last place, conversions bit by bit."""

from collections.abc import Callable

import pytest
import torch

import hand_written_kernels as hand
from meshfuse.base.dtypes import DataType
from meshfuse.codegen.cpp import print_cpp
from meshfuse.kernel.nodes import Kernel
from meshfuse.runtime.compile import KernelCompiler
from meshfuse.runtime.torch_types import to_torch_dtype

NARROW = [(DataType.BFloat16, torch.bfloat16), (DataType.Half, torch.float16)]


def run(
    compiler: KernelCompiler, kernel: Kernel, x: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    compiler.compile_source(print_cpp(kernel))([x, out], {}, {"columns": x.numel()})
    return out


def every_float(low: float, high: float, step: int = 997) -> torch.Tensor:
    """Each `step`-th float32 between two positive ones: as dense at each magnitude."""
    first, last = (torch.tensor(v).view(torch.int32).item() for v in (low, high))
    return torch.arange(int(first), int(last), step, dtype=torch.int32).view(torch.float32)


def ulp_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest distance from `exact` (float64) in units of the last place of float32."""
    _, exponent = torch.frexp(exact)
    unit = torch.ldexp(torch.ones_like(exact), torch.clamp(exponent - 24, min=-149))
    return ((result.double() - exact).abs() / unit).max().item()


LIMITS: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], list[torch.Tensor], float]] = [
    (
        "exp",
        torch.exp,
        [every_float(1e-10, 88.7), -every_float(1e-10, 103.9), torch.linspace(-104, 88.7, 400_000)],
        1.1,
    ),
    (
        "tanh",
        torch.tanh,
        [every_float(1e-38, 30.0), -every_float(1e-38, 30.0), torch.linspace(-10, 10, 400_000)],
        1.4,
    ),
    (
        "erf",
        torch.erf,
        [every_float(1e-37, 30.0), -every_float(1e-37, 30.0), torch.linspace(-5, 5, 400_000)],
        1.3,
    ),
    ("rsqrt", torch.rsqrt, [every_float(1e-38, 3e38)], 1.5),
    ("sqrt", torch.sqrt, [every_float(1e-44, 3e38)], 0.5),
    ("reciprocal", torch.reciprocal, [every_float(1e-37, 3e38)], 0.5),
    ("log", torch.log, [every_float(1e-44, 3e38), torch.linspace(0.5, 2, 400_000)], 1.0),
    # Beyond 1e6 libm takes over.
    ("sin", torch.sin, [every_float(1e-40, 3e38), torch.linspace(-1000, 1000, 400_000)], 1.7),
    ("cos", torch.cos, [every_float(1e-40, 3e38), torch.linspace(-1000, 1000, 400_000)], 1.7),
    # A division of a rounded sum on top of exp.
    ("sigmoid", torch.sigmoid, [torch.linspace(-87, 87, 400_000)], 2.5),
    ("silu", torch.nn.functional.silu, [torch.linspace(-85, 87, 400_000)], 2.5),
]


@pytest.mark.parametrize(
    ("name", "exact", "ranges", "limit"), LIMITS, ids=[row[0] for row in LIMITS]
)
def test_functions_of_float_in_ulp(
    compiler: KernelCompiler,
    name: str,
    exact: Callable[[torch.Tensor], torch.Tensor],
    ranges: list[torch.Tensor],
    limit: float,
) -> None:
    x = torch.cat(ranges)
    out = run(compiler, hand.unary(name, DataType.Float), x, torch.float32)
    error = ulp_error(out, exact(x.double()))
    assert error <= limit, f"{name} is off by {error} ulp"


def run_binary(
    compiler: KernelCompiler, name: str, dtype: DataType, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    out = torch.empty_like(x)
    compiler.compile_source(print_cpp(hand.binary(name, dtype)))(
        [x, y, out], {}, {"columns": x.numel()}
    )
    return out


def test_pow_of_floats_in_ulp(compiler: KernelCompiler) -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randn(400_000, generator=generator) * 10
    x = torch.exp(torch.randn(400_000, generator=generator, dtype=torch.float64) * 5).float()
    near_one = 1 + torch.randn(400_000, generator=generator) * 1e-3
    x, y = torch.cat([x, near_one]), torch.cat([exponents, exponents * 2000])
    out, exact = (
        run_binary(compiler, "pow", DataType.Float, x, y),
        torch.pow(x.double(), y.double()),
    )
    inside = (exact < 3.4e38) & (exact > 1e-44)
    assert ulp_error(out[inside], exact[inside]) <= 0.6


FLOAT_ENDS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 2.5, 1e38, -1e38, 1e-40]
FLOAT_ENDS += [16777217.0, 16777215.0, -16777215.0, float("inf"), float("-inf"), float("nan")]
INTEGER_ENDS = [0, 1, -1, 2, -2, 3, 10, 31, 63, -(2**31), 2**31 - 1]


@pytest.mark.parametrize("dtype", [DataType.Float, DataType.Double, DataType.Int, DataType.Int32])
def test_pow_at_the_ends(compiler: KernelCompiler, dtype: DataType) -> None:
    """All pairs, signs of zeros and infinities included; integers wrap."""
    floating = dtype in (DataType.Float, DataType.Double)
    ends = torch.tensor(FLOAT_ENDS if floating else INTEGER_ENDS, dtype=to_torch_dtype(dtype))
    x, y = ends.repeat_interleave(len(ends)), ends.repeat(len(ends))
    out, expected = run_binary(compiler, "pow", dtype, x, y), torch.pow(x, y)
    tolerance = 1e-6 if floating else 0
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=0, equal_nan=True)
    if floating:
        assert bool(((out.signbit() == expected.signbit()) | out.isnan()).all())


@pytest.mark.parametrize("name", ["exp", "tanh", "erf", "sin", "cos", "sigmoid"])
def test_functions_of_double(compiler: KernelCompiler, name: str) -> None:
    x = torch.linspace(-20, 20, 100_000, dtype=torch.float64)
    out = run(compiler, hand.unary(name, DataType.Double), x, torch.float64)
    torch.testing.assert_close(out, getattr(torch, name)(x), rtol=1e-14, atol=1e-300)


@pytest.mark.parametrize("dtype", [DataType.Float, DataType.Double])
def test_gelu(compiler: KernelCompiler, dtype: DataType) -> None:
    x = torch.linspace(-12, 12, 200_000).to(to_torch_dtype(dtype))
    out = run(compiler, hand.unary("gelu", dtype), x, x.dtype)
    exact = torch.nn.functional.gelu(x.double())
    bound = 1.5e-7 if dtype is DataType.Float else 1e-15
    torch.testing.assert_close(out.double(), exact, rtol=bound, atol=bound)
    ends = torch.tensor([float("inf"), 40.0, float("nan")], dtype=x.dtype)
    ends = run(compiler, hand.unary("gelu", dtype), ends, x.dtype)
    assert ends[:2].tolist() == [float("inf"), 40.0]
    assert ends[2].isnan()


@pytest.mark.parametrize(("ours", "theirs"), NARROW)
def test_every_16_bit_float_survives(
    compiler: KernelCompiler, ours: DataType, theirs: torch.dtype
) -> None:
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    x = bits.view(theirs)
    wide = run(compiler, hand.conversion(ours, DataType.Float), x, torch.float32)
    assert torch.equal(wide.isnan(), x.isnan())
    assert torch.equal(wide[~x.isnan()], x.float()[~x.isnan()])
    back = run(compiler, hand.conversion(DataType.Float, ours), wide, theirs)
    assert torch.equal(back.isnan(), x.isnan())
    same = back.view(torch.int16) == bits
    assert bool((same | x.isnan()).all())


@pytest.mark.parametrize(("ours", "theirs"), NARROW)
def test_floats_round_to_nearest_even(
    compiler: KernelCompiler, ours: DataType, theirs: torch.dtype
) -> None:
    """Each 997th bit pattern, and halfway cases with their neighbours at each exponent."""
    steps = torch.arange(-(2**31), 2**31, 997, dtype=torch.int64)
    exponents = torch.arange(0, 2**31, 2**11, dtype=torch.int64)
    halfway = torch.cat([exponents + d for d in (-1, 0, 1)])
    x = torch.cat([steps, halfway]).to(torch.int32).view(torch.float32)
    out = run(compiler, hand.conversion(DataType.Float, ours), x, theirs)
    expected = x.to(theirs)
    assert torch.equal(out.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(out.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])
