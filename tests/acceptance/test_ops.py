"""Every op against torch, in each dtype that makes sense, on four paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from kernel_paths import PATHS
from meshfuse import DataType, FusionDefinition
from op_cases import (
    ALL,
    BOOL,
    DATA_TYPES,
    F32,
    F64,
    I32,
    INTEGERS,
    NARROW,
    SHAPE,
    Group,
    OpCase,
    make_groups,
    make_input,
)

# Against torch in the compute type: 2 ulp for the maths functions, a few more in a chain.
RELATIVE = {F32: 1e-6, F64: 1e-14}


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
