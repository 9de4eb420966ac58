"""Kernels against torch: shapes, types, layouts, and schedules of every kind."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
import torch

from kernel_programs import bias_and_relu, finished, layer_norm, reduced, softmax
from kernel_runs import check_by_value, checked_kernel, run_kernel, scheduled
from meshfuse.base.dtypes import DataType
from meshfuse.ir import build
from meshfuse.ir.axes import TensorName
from meshfuse.kernel.localize import localize
from meshfuse.kernel.nodes import For, Statement
from meshfuse.runtime.torch_types import to_torch_dtype
from program_recorder import Recorder

SIZES = (0, 1, 5, 16, 17, 33)
SHAPES = [
    (),
    *((n,) for n in SIZES),
    *itertools.product((0, 1, 5, 17), (0, 1, 16, 33)),
    (3, 1, 5),
    (2, 3, 17),
    (2, 0, 3),
    (2, 1, 3, 5),
    (3, 2, 2, 16),
]
DTYPES = (DataType.Float, DataType.Double, DataType.BFloat16, DataType.Half, DataType.Int)


def values(shape: Sequence[int], dtype: DataType, seed: int = 0) -> torch.Tensor:
    """Small multiples of 1/4 (whole numbers, for integers): sums of them are exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-8, 9, tuple(shape), generator=generator)
    exact = numbers / 4 if to_torch_dtype(dtype).is_floating_point else numbers
    return exact.to(to_torch_dtype(dtype))


def symbolic(shape: Sequence[int]) -> tuple[int, ...]:
    """Sizes that are known when run, but for 1, which says broadcast."""
    return tuple(n if n == 1 else -1 for n in shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_pointwise_shapes(shape: tuple[int, ...]) -> None:
    for declared in (shape, symbolic(shape)):
        r = Recorder()
        x, y = r.input(declared), r.input(declared, contiguity=False)
        r.output(r.pointwise("mul", r.pointwise("add", x, y), build.literal(2.0)))
        r.output(r.pointwise("lt", x, y))
        check_by_value(finished(r), [values(shape, DataType.Float, k) for k in range(2)])


def test_whole_axes_of_size_one_stay_iteration_axes() -> None:
    """A symbolic size may turn out to be 1."""
    r = Recorder()
    r.output(r.pointwise("neg", r.input((-1, -1, -1))))
    for shape in ((1, 1, 1), (1, 7, 1), (7, 1, 1)):
        check_by_value(finished(r), [values(shape, DataType.Float)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_element_types(dtype: DataType) -> None:
    for m, n in ((3, 17), (5, 16)):
        x, bias = values((m, n), dtype), values((n,), dtype, 1)
        check_by_value(bias_and_relu((-1, -1), dtype), [x, bias])
        for dims in ([0], [1], [0, 1]):
            check_by_value(reduced("sum", (-1, -1), dims, dtype), [x])
            check_by_value(reduced("max", (-1, -1), dims, dtype), [x])


def test_bool_and_int32() -> None:
    r = Recorder()
    mask, x = r.input((-1, -1), DataType.Bool), r.input((-1, -1), DataType.Int32)
    r.output(r.pointwise("where", mask, x, build.literal(-1)))
    r.output(r.pointwise("mul", mask, x), r.pointwise("add", mask, mask))
    m = torch.rand(5, 19) < 0.5
    check_by_value(finished(r), [m, values((5, 19), DataType.Int32)])
    for dims in ([0], [1]):
        check_by_value(reduced("sum", (-1, -1), dims, DataType.Bool), [m])
        check_by_value(reduced("max", (-1, -1), dims, DataType.Bool), [m])


def test_sixteen_bits_round_where_the_program_says() -> None:
    """A cast between two operations is not lost, a value inside a chain is not rounded."""
    r = Recorder()
    x = r.input((-1,), DataType.BFloat16)
    third = r.pointwise("div", x, build.literal(3.0))
    rounded = r.add(build.cast, third, DataType.BFloat16)
    r.output(third, r.pointwise("mul", rounded, build.literal(3.0)))
    check_by_value(finished(r), [torch.linspace(-4, 4, 37).bfloat16()], rtol=0, atol=0)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape])
def test_reductions_over_every_set_of_axes(shape: tuple[int, ...]) -> None:
    axes = range(len(shape))
    x = values(shape, DataType.Float)
    for count in range(1, len(shape) + 1):
        for dims in itertools.combinations(axes, count):
            keepdim = sum(dims) % 2 == 0
            check_by_value(reduced("sum", symbolic(shape), dims, keepdim=keepdim), [x])
            if all(shape[dim] for dim in dims):
                check_by_value(reduced("max", symbolic(shape), dims, keepdim=keepdim), [x])


def test_a_maximum_of_nothing_is_the_lowest_value() -> None:
    """torch raises here; a kernel leaves the identity."""
    for dtype, lowest in ((DataType.Float, -math.inf), (DataType.Int, -(2**63))):
        program = reduced("max", (-1, -1), [1], dtype)
        localized = localize(program)
        kernel = checked_kernel(scheduled(program))
        (result,) = run_kernel(kernel, localized, program, [values((3, 0), dtype)])
        assert result.tolist() == [lowest] * 3


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("shape", [(3, 33), (17, 16), (1, 1), (5, 0), (0, 5), (33, 17)])
def test_layer_norm(shape: tuple[int, int], dims: tuple[int, ...]) -> None:
    x, weight = values(shape, DataType.Float), values(shape[-1:], DataType.Float, 1)
    check_by_value(layer_norm(dims=dims), [x, weight], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [DataType.Float, DataType.BFloat16])
def test_softmax(dim: int, dtype: DataType) -> None:
    tolerance = 1e-5 if dtype is DataType.Float else 1e-2
    for shape in ((2, 3, 17), (1, 16, 5), (4, 1, 33)):
        check_by_value(
            softmax((-1, -1, -1), dim, dtype),
            [values(shape, dtype)],
            rtol=tolerance,
            atol=tolerance,
        )


def test_infinities_and_nan_reach_the_result() -> None:
    x = values((4, 18), DataType.Float)
    x[0, 3], x[1, 17], x[2, 0], x[3, 16] = math.nan, math.inf, -math.inf, math.nan
    for dims in ([0], [1]):
        check_by_value(reduced("sum", (-1, -1), dims), [x])
        check_by_value(reduced("max", (-1, -1), dims), [x])
    check_by_value(softmax((-1, -1), 1), [x])


def test_masked_lanes_do_not_reach_a_reduction() -> None:
    """1 / 0 in the idle lanes of a tail is infinite; it must not be added."""
    r = Recorder()
    x = r.input((-1, -1))
    inverse = r.pointwise("div", build.literal(1.0), x)
    r.output(
        r.add(build.reduction, "sum", inverse, [1]), r.add(build.reduction, "max", inverse, [1])
    )
    check_by_value(finished(r), [torch.full((3, 21), 2.0)])


# Layouts and views.


def test_strides_of_every_kind() -> None:
    """Transposed, sliced, expanded and padded inputs, each described as it is."""
    r = Recorder()
    descriptions = (
        ((-1, -1), True, (0, 1)),
        ((-1, -1), False, ()),
        ((-1, -1), [None, True], ()),
        ((-1, -1), [False, True], ()),
        ((1, -1), [None, True], ()),
        ((), True, ()),
    )
    terms: list[TensorName] = []
    for shape, contiguity, stride_order in descriptions:
        terms.append(
            r.add(build.define_tensor, shape, contiguity=contiguity, stride_order=stride_order)
        )
        r.program = build.add_input(r.program, terms[-1])
    total = terms[0]
    for term in terms[1:]:
        total = r.pointwise("add", total, term)
    r.output(total, r.add(build.reduction, "sum", r.pointwise("neg", total), [1]))
    for m, n in ((5, 17), (16, 3)):
        inputs = [
            values((n, m), DataType.Float).t(),
            values((2 * m, 3 * n), DataType.Float)[::2, ::3],
            values((n,), DataType.Float).expand(m, n),
            values((m, n + 3), DataType.Float)[:, :n],
            values((1, n), DataType.Float),
            values((), DataType.Float),
        ]
        check_by_value(finished(r), inputs)
        check_by_value(finished(r), inputs, unscheduled=True)


def test_views_only_change_indices() -> None:
    r = Recorder()
    x, column = r.input((-1, -1, -1)), r.input((-1, 1))
    turned = r.add(build.permute, r.pointwise("neg", x), [2, 0, 1])
    narrow = r.add(build.squeeze, column, [1])
    wide = r.add(build.broadcast_in_dim, narrow, [3, 4, 5], [2])
    r.output(r.add(build.set_, r.pointwise("add", turned, wide)))
    kernel = check_by_value(
        finished(r), [values((4, 5, 3), DataType.Float), values((5, 1), DataType.Float)]
    )
    assert len(list(statements(kernel.body))) == 5


def test_a_tensor_and_its_transpose() -> None:
    """One value is needed at two indices."""
    r = Recorder()
    x = r.pointwise("exp", r.input((-1, -1)))
    r.output(r.pointwise("sub", x, r.add(build.permute, x, [1, 0])))
    check_by_value(finished(r), [values((19, 19), DataType.Float)])


def test_outputs_transposed_against_each_other() -> None:
    r = Recorder()
    x = r.input((-1, -1))
    r.output(r.pointwise("neg", x), r.add(build.permute, x, [1, 0]))
    check_by_value(finished(r), [values((5, 18), DataType.Float)])


# Scalars and sizes.


def test_scalars_and_sizes() -> None:
    r = Recorder()
    x = r.input((-1, -1), DataType.Float)
    scale = r.add(build.define_scalar, DataType.Double)
    r.program = build.add_input(r.program, scale)
    twice = r.pointwise("mul", scale, build.literal(2.0))
    total = r.add(build.reduction, "sum", r.pointwise("mul", x, twice), [1])
    r.output(r.pointwise("div", total, build.size(r.program, x, 1)))
    check_by_value(finished(r), [values((3, 20), DataType.Float), 1.5])


def test_what_is_not_read_is_no_argument() -> None:
    r = Recorder()
    x, _ = r.input((-1,)), r.input((-1, -1))
    kept = r.pointwise("neg", x)
    r.pointwise("exp", x)
    r.output(kept, kept)
    kernel = check_by_value(finished(r), [values((5,), DataType.Float), torch.zeros(2, 2)])
    assert [buffer.name for buffer in kernel.buffers] == [x, kept]


def test_divisible_sizes_need_no_mask() -> None:
    kernel = check_by_value(reduced("sum", (4, 64), [1]), [values((4, 64), DataType.Float)])
    assert all(not getattr(each, "mask", ()) for each in statements(kernel.body))


def test_an_unscheduled_program_is_one_program_of_loops() -> None:
    x, weight = values((5, 18), DataType.Float), values((18,), DataType.Float, 1)
    kernel = check_by_value(layer_norm(), [x, weight], unscheduled=True, rtol=1e-5, atol=1e-5)
    assert kernel.grid == () and kernel.tiles == ()


def statements(body: Sequence[Statement]) -> Iterator[Statement]:
    """All statements, loops followed by their bodies."""
    for statement in body:
        yield statement
        if isinstance(statement, For):
            yield from statements(statement.body)


def test_a_long_chain_of_operations() -> None:
    r = Recorder()
    y = r.input((-1,))
    for _ in range(400):
        y = r.pointwise("add", y, build.literal(1.0))
    r.output(y)
    check_by_value(finished(r), [torch.arange(5.0)])
