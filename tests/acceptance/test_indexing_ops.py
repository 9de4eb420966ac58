"""slice, pad, cat, indexing, scans, iota and topk against torch, compiled and op by op."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional

from kernel_paths import PATHS
from meshfuse import DataType, FusionDefinition, TensorView
from meshfuse.ir.parser import parse_program
from meshfuse.ir.printer import print_program
from meshfuse.runtime.torch_types import to_torch_dtype

DTYPES = [d for d in DataType if d is not DataType.Null]
FLOATS = [DataType.Double, DataType.Float, DataType.Half, DataType.BFloat16]
Build = Callable[..., TensorView | Sequence[TensorView]]
Reference = Callable[..., torch.Tensor | Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """`build` takes (fd.ops, x [4, 6], index [3], rows [4, 2]) and `reference` the last three."""

    name: str
    build: Build
    reference: Reference
    dtypes: Sequence[DataType] = tuple(DTYPES)

    def __str__(self) -> str:
        return self.name


def integers(shape: Sequence[int], dtype: DataType = DataType.Float) -> torch.Tensor:
    """Small whole numbers, the same for the same arguments; for bool, both values."""
    generator = torch.Generator().manual_seed(len(shape))
    data = torch.randint(-4, 5, tuple(shape), generator=generator)
    return (data > 0) if dtype is DataType.Bool else data.to(to_torch_dtype(dtype))


def scanned(name: str, x: torch.Tensor, dim: int) -> torch.Tensor:
    """torch's, in the element type; bool counts as 0 and 1."""
    wide = x.long() if x.dtype == torch.bool else x
    result: Any = getattr(torch, name)(wide, dim)
    return (result if isinstance(result, torch.Tensor) else result[0]).to(x.dtype)


def ranked(x: torch.Tensor, k: int, dim: int, largest: bool = True) -> list[torch.Tensor]:
    wide = x.int() if x.dtype == torch.bool else x
    values, indices = wide.topk(k, dim, largest=largest, sorted=True)
    return [values.to(x.dtype), indices]


INDEX = torch.tensor([3, 0, 3])
ROWS = torch.tensor([[0, 5], [-1, 2], [1, 1], [-6, 3]])

CASES = [
    Case("slice", lambda o, x, i, r: o.slice(x, [1, 0], [3, 6]), lambda x, i, r: x[1:3]),
    Case("slice_clamps", lambda o, x, i, r: o.slice(x, [2, 3], [9, 99]), lambda x, i, r: x[2:, 3:]),
    Case("slice_empty", lambda o, x, i, r: o.slice(x, [9, 2], [9, 2]), lambda x, i, r: x[9:, 2:2]),
    Case("slice_to_one", lambda o, x, i, r: o.slice(x, [1, 0], [2, 6]), lambda x, i, r: x[1:2]),
    Case(
        "slice_by_sizes",
        lambda o, x, i, r: o.slice(x, [0, 0], [o.size(i, 0), o.size(x, 1) - 1], [1, 1]),
        lambda x, i, r: x[:3, :-1],
    ),
    Case(
        "slice_as_given",
        lambda o, x, i, r: o.slice(x, [1, 1], [4, 6], manual_normalization=True),
        lambda x, i, r: x[1:, 1:],
    ),
    Case("pad", lambda o, x, i, r: o.pad(x, [1, 2]), lambda x, i, r: functional.pad(x, (1, 2))),
    Case(
        "pad_and_crop",
        lambda o, x, i, r: o.pad(x, [-2, 1, 3, -1]),
        lambda x, i, r: functional.pad(x, (-2, 1, 3, -1)),
    ),
    Case(
        "pad_by_a_size",
        lambda o, x, i, r: o.pad(x, [0, 0, o.size(x, 1), 0]),
        lambda x, i, r: functional.pad(x, (0, 0, 6, 0)),
    ),
    Case(
        "pad_value",
        lambda o, x, i, r: o.pad(x, [1, 1], -math.inf),
        lambda x, i, r: functional.pad(x, (1, 1), value=-math.inf),
        FLOATS,
    ),
    Case("cat_rows", lambda o, x, i, r: o.cat([x, x, x]), lambda x, i, r: torch.cat([x, x, x])),
    Case(
        "cat_parts",
        lambda o, x, i, r: o.cat([o.slice(x, [0, 4], [4, 6]), o.slice(x, [0, 0], [4, 4])], -1),
        lambda x, i, r: torch.cat([x[:, 4:], x[:, :4]], -1),
    ),
    Case("cat_of_one", lambda o, x, i, r: o.cat([x], 1), lambda x, i, r: x),
    Case(
        "cat_padded",
        lambda o, x, i, r: o.cat(
            [o.pad(x, [0, o.size(x, 1)]), o.pad(x, [o.size(x, 1), 0])], 1, manual_padding=True
        ),
        lambda x, i, r: torch.cat([x, x], 1),
    ),
    Case("index_select", lambda o, x, i, r: o.index_select(x, i, 0), lambda x, i, r: x[i]),
    Case("index_select_last", lambda o, x, i, r: o.index_select(x, i, -1), lambda x, i, r: x[:, i]),
    Case(
        "index_select_one",
        lambda o, x, i, r: o.index_select(x, o.max(i, [0]), 1),
        lambda x, i, r: x[:, 3:4],
    ),
    Case(
        "index_select_broadcast",
        lambda o, x, i, r: o.index_select(x, o.broadcast(i, [False, True]), 0),
        lambda x, i, r: x[i],
    ),
    Case(
        "take_along_axis",
        lambda o, x, i, r: o.take_along_axis(x, r, 1),
        lambda x, i, r: x.gather(1, r % 6),
    ),
    Case(
        "take_along_axis_stretched",
        lambda o, x, i, r: o.take_along_axis(x, o.broadcast(i, [True, False]), -1),
        lambda x, i, r: x[:, i],
    ),
    Case("embedding", lambda o, x, i, r: o.embedding_fwd(i, x), lambda x, i, r: x[i]),
    Case(
        "embedding_2d",
        lambda o, x, i, r: o.embedding_fwd(
            o.broadcast(i, [False, True]), x, padding_idx=-1, sparse=False
        ),
        lambda x, i, r: x[i[:, None]],
    ),
    *[
        Case(
            f"{name}_{dim}",
            lambda o, x, i, r, name=name, dim=dim: getattr(o, name)(x, dim),
            lambda x, i, r, name=name, dim=dim: scanned(name, x, dim),
        )
        for name in ("cumsum", "cumprod", "cummax", "cummin")
        for dim in (0, -1)
    ],
    *[
        Case(
            f"topk_{k}_{dim}_{largest}",
            lambda o, x, i, r, k=k, dim=dim, largest=largest: o.topk(x, k, dim, largest, True)[0],
            lambda x, i, r, k=k, dim=dim, largest=largest: ranked(x, k, dim, largest)[0],
        )
        for k, dim, largest in ((2, -1, True), (4, 0, False), (0, 1, True), (1, 0, True))
    ],
]


def run_cases(
    cases: Sequence[Case], inputs: Sequence[torch.Tensor], path: str, symbolic: bool
) -> tuple[list[torch.Tensor], FusionDefinition]:
    with FusionDefinition() as fd:
        tensors = [fd.from_pytorch(tensor, static_sizes=not symbolic) for tensor in inputs]
        for case in cases:
            result = case.build(fd.ops, *tensors)
            for output in result if isinstance(result, Sequence) else [result]:
                fd.add_output(output)
    return PATHS[path](fd, inputs), fd


def expected(cases: Sequence[Case], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    results: list[torch.Tensor] = []
    for case in cases:
        value = case.reference(*inputs)
        results += [value] if isinstance(value, torch.Tensor) else value
    return results


def assert_equal(results: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    assert len(results) == len(wanted)
    for position, (result, want) in enumerate(zip(results, wanted, strict=True)):
        assert result.dtype == want.dtype, position
        torch.testing.assert_close(result, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("path", ["compiled", "op_by_op"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.value)
def test_values(dtype: DataType, path: str, symbolic: bool) -> None:
    cases = [case for case in CASES if dtype in case.dtypes]
    inputs = [integers((4, 6), dtype), INDEX, ROWS]
    results, fd = run_cases(cases, inputs, path, symbolic)
    assert_equal(results, expected(cases, inputs))
    text = repr(fd.fusion)
    assert print_program(parse_program(text)) == text


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_repr_defines_the_program_again(symbolic: bool) -> None:
    _, fd = run_cases(CASES, [integers((4, 6)), INDEX, ROWS], "compiled", symbolic)
    scope: dict[str, Any] = {}
    exec("from meshfuse import *\n" + repr(fd), scope)
    with FusionDefinition() as again:
        scope["nvfuser_fusion"](again)
    assert repr(again.fusion) == repr(fd.fusion)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: integers((6, 4)).mT,
    "every_second": lambda: integers((4, 12))[:, ::2],
    "expanded_column": lambda: integers((4, 1)).expand(4, 6),
    "expanded_row": lambda: integers((6,)).expand(4, 6),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_and_expanded_inputs(layout: str) -> None:
    inputs = [LAYOUTS[layout](), INDEX.repeat_interleave(2)[::2], ROWS.T.contiguous().T]
    results, _ = run_cases(CASES, inputs, "compiled", True)
    assert_equal(results, expected(CASES, inputs))


def test_nan_and_infinity() -> None:
    x = torch.tensor([[1.0, math.nan, 3.0, -math.inf], [math.inf, -0.0, math.nan, 2.0]])
    index = torch.tensor([1, 0, 1])
    with FusionDefinition() as fd:
        ops, a, i = fd.ops, fd.from_pytorch(x), fd.from_pytorch(index)
        for output in (
            ops.cumsum(a, 1),
            ops.cummax(a, 1),
            ops.cummin(a, 0),
            ops.index_select(a, i, 1),
            *ops.topk(a, 2, 1, sorted=True),
            *ops.topk(a, 3, 1, largest=False, sorted=True),
        ):
            fd.add_output(output)
    wanted = [
        x.cumsum(1),
        x.cummax(1).values,
        x.cummin(0).values,
        x[:, index],
        *x.topk(2, 1),
        *x.topk(3, 1, largest=False),
    ]
    assert_equal(fd.execute([x, index]), wanted)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 3), (1, 1), (0, 0)], ids=str)
def test_empty_and_single_axes(shape: tuple[int, int], symbolic: bool) -> None:
    x = integers(shape)
    index = torch.zeros(2 if shape[0] else 0, dtype=torch.int64)
    with FusionDefinition() as fd:
        ops = fd.ops
        a, i = (fd.from_pytorch(t, static_sizes=not symbolic) for t in (x, index))
        for output in (
            ops.slice(a, [0, 1], [5, 2]) if shape[1] else ops.slice(a, [0, 0], [5, 0]),
            ops.pad(a, [2, 0, 0, 1], 7.0),
            ops.cat([a, a], 1),
            ops.cat([ops.slice(a, [0, 0], [0, 9]), a]),
            ops.index_select(a, i, 0),
            ops.cumsum(a, 0),
            ops.cummax(a, 1),
            ops.topk(a, min(shape[0], 1), 0)[1],
        ):
            fd.add_output(output)
    wanted = [
        x[:, 1:2] if shape[1] else x,
        functional.pad(x, (2, 0, 0, 1), value=7.0),
        torch.cat([x, x], 1),
        x,
        x[index],
        x.cumsum(0),
        x.cummax(1).values,
        x.topk(min(shape[0], 1), 0).indices,
    ]
    assert_equal(fd.execute([x, index]), wanted)


def test_an_empty_axis_can_be_indexed_by_nothing_else() -> None:
    empty, nothing = torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)
    with FusionDefinition() as fd:
        rows = fd.from_pytorch(empty)
        fd.add_output(fd.ops.embedding_fwd(fd.define_tensor([-1], dtype=DataType.Int), rows))
    assert fd.execute([empty, nothing])[0].shape == (0, 3)
    with pytest.raises(RuntimeError, match=r"index 0 must lie in \[0, 0\)"):
        fd.execute([empty, torch.zeros(1, dtype=torch.int64)])


# Scans from a first value, iota, embedding with a norm, topk's indices.


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d is not DataType.Bool], ids=str)
def test_scans_from_a_first_value(dtype: DataType) -> None:
    x = integers((3, 5), dtype)
    first = 2 if not x.is_floating_point() else 2.0
    with FusionDefinition() as fd:
        a = fd.from_pytorch(x)
        c = fd.define_scalar(dtype=DataType.Double if x.is_floating_point() else DataType.Int)
        fd.add_output(fd.ops.cumsum(a, 1, first))
        fd.add_output(fd.ops.cumprod(a, 0, init=c))
        fd.add_output(fd.ops.cummax(a, 1, c))
        fd.add_output(fd.ops.cummin(a, -1, first))
    wanted = [
        x.cumsum(1, dtype=x.dtype) + 2,
        x.cumprod(0, dtype=x.dtype) * 2,
        x.cummax(1).values.clamp(min=2),
        x.cummin(1).values.clamp(max=2),
    ]
    assert_equal(fd.execute([x, first]), wanted)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d is not DataType.Bool], ids=str)
def test_iota(dtype: DataType) -> None:
    target = to_torch_dtype(dtype)
    first, step = (0.5, -0.25) if target.is_floating_point else (7, -3)
    with FusionDefinition() as fd:
        n = fd.define_scalar(dtype=DataType.Int)
        fd.add_output(fd.ops.iota(5, dtype=dtype))
        fd.add_output(fd.ops.iota(n, first, step, dtype))
        fd.add_output(fd.ops.iota(1, dtype=dtype))
        fd.add_output(fd.ops.iota(0, dtype=dtype))
    counted = (torch.arange(6, dtype=torch.float64) * step + first).to(target)
    wanted = [torch.arange(5), counted, torch.zeros(1), torch.zeros(0)]
    assert_equal(fd.execute([6], device="cpu"), [value.to(target) for value in wanted])


def test_iota_without_inputs_and_by_scalars() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.iota(4) * 2)
    assert_equal(fd.execute([], device="cpu"), [torch.arange(4) * 2])
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1])
        first, step = fd.ops.size(x, 0), fd.define_scalar(dtype=DataType.Int)
        fd.add_output(fd.ops.iota(first, first, step))
    assert_equal(fd.execute([torch.zeros(3), 0]), [torch.full((3,), 3)])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("norm_type", [None, 1.0, 2.5, math.inf, 0.0])
def test_embedding_with_a_norm(norm_type: float | None, dtype: DataType) -> None:
    weight = integers((7, 5), dtype)
    index = torch.tensor([[0, 6], [3, 3]])
    with FusionDefinition() as fd:
        rows, table = fd.from_pytorch(index), fd.from_pytorch(weight)
        fd.add_output(fd.ops.embedding_fwd(rows, table, max_norm=2.0, norm_type=norm_type))
    kept = weight.clone()
    (result,) = fd.execute([index, weight])
    wanted = functional.embedding(
        index,
        weight.double().clone(),
        max_norm=2.0,
        norm_type=2.0 if norm_type is None else norm_type,
    )
    precision = {DataType.Double: 1e-12, DataType.Float: 1e-6}.get(dtype, 1e-2)
    assert result.dtype == weight.dtype
    torch.testing.assert_close(result.double(), wanted, rtol=precision, atol=precision)
    assert torch.equal(weight, kept)


def test_topk_gives_places_in_any_order_unless_sorted() -> None:
    x = torch.randperm(40, generator=torch.Generator().manual_seed(0)).float().reshape(4, 10)
    with FusionDefinition() as fd:
        a = fd.from_pytorch(x)
        k = fd.define_scalar(dtype=DataType.Int)
        values, indices = fd.ops.topk(a, k)
        fd.add_output(values)
        fd.add_output(indices)
    values, indices = fd.execute([x, 3])
    assert torch.equal(x.gather(1, indices), values)
    assert torch.equal(values.sort(descending=True).values, x.topk(3).values)
    with pytest.raises(RuntimeError, match=r"k=11 must lie in \[0, 10\]"):
        fd.execute([x, 11])


def test_int32_indices() -> None:
    x, index = integers((4, 6)), INDEX.int()
    with FusionDefinition() as fd:
        a, i = fd.from_pytorch(x), fd.from_pytorch(index)
        fd.add_output(fd.ops.index_select(a, i, 0))
        fd.add_output(fd.ops.take_along_axis(a, fd.ops.broadcast(i, [False, True]), 0))
    assert_equal(fd.execute([x, index]), [x[INDEX], x[INDEX]])


def test_a_tensor_indexes_itself() -> None:
    x = torch.tensor([2, 0, 1])
    with FusionDefinition() as fd:
        a = fd.from_pytorch(x)
        fd.add_output(fd.ops.index_select(a, a, 0))
        fd.add_output(fd.ops.take_along_axis(a, a, 0))
    assert_equal(fd.execute([x]), [x[x], x[x]])


def test_what_is_around_them_fuses() -> None:
    """rope: one operation through torch each, and one kernel for all pointwise ones behind."""
    x = integers((4, 8))
    with FusionDefinition() as fd:
        a = fd.from_pytorch(x)
        half = fd.ops.slice(a, [0, 4], [4, 8])
        turned = fd.ops.cat([fd.ops.neg(half), fd.ops.slice(a, [0, 0], [4, 4])], 1)
        fd.add_output(fd.ops.relu(fd.ops.add(a * 2.0, turned * 3.0)))
    (result,) = fd.execute([x])
    assert torch.equal(result, (x * 2 + torch.cat([-x[:, 4:], x[:, :4]], 1) * 3).relu())
    kinds = [line.split(": ")[1] for line in fd.explain().splitlines() if line[:1] == "S"]
    assert kinds == ["expr_eval", "pointwise", "expr_eval", "expr_eval", "pointwise"]


# What only a run can find.


def test_sizes_found_wrong_when_run() -> None:
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([-1, -1]), fd.define_tensor([-1, -1])
        n = fd.define_scalar(dtype=DataType.Int)
        fd.add_output(fd.ops.cat([x, y], 0))
        fd.add_output(fd.ops.slice(x, [n, 0], [3, 1]))
        fd.add_output(fd.ops.slice(x, [0, 0], [3, 1], manual_normalization=True))
    assert fd.execute([torch.ones(3, 2), torch.ones(1, 2), 1])[0].shape == (4, 2)
    with pytest.raises(RuntimeError, match="size"):
        fd.execute([torch.ones(3, 2), torch.ones(1, 3), 1])
    with pytest.raises(RuntimeError, match="size -1"):
        fd.execute([torch.ones(5, 2), torch.ones(1, 2), 4])
    with pytest.raises(RuntimeError, match="beyond axis 0, of size 2"):
        fd.execute([torch.ones(2, 2), torch.ones(1, 2), 1])


@pytest.mark.parametrize("index", [-1, 4])
def test_an_index_out_of_range(index: int) -> None:
    x = integers((4, 6))
    with FusionDefinition() as fd:
        a, i = fd.from_pytorch(x), fd.define_tensor([-1], dtype=DataType.Int)
        fd.add_output(fd.ops.index_select(a, i, 0))
    with pytest.raises(RuntimeError, match=rf"index {index} must lie in \[0, 4\)"):
        fd.execute([x, torch.tensor([0, index])])
