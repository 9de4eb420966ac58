"""What slice, pad, cat, indexing, scans, iota and topk refuse when they are called."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from meshfuse import DataType, FusionDefinition, TensorView


def tensor(fd: Any, *shape: int, dtype: DataType = DataType.Float) -> TensorView:
    return fd.define_tensor(list(shape), dtype=dtype)


Call = Callable[[Any, TensorView], object]
REFUSED: dict[str, tuple[Call, type[Exception], str]] = {
    "start": (lambda fd, x: fd.ops.slice(x, [-1, 0], [2, 2]), RuntimeError, "0 <= start <= end"),
    "end": (lambda fd, x: fd.ops.slice(x, [2, 0], [1, 2]), RuntimeError, "0 <= start <= end"),
    "stride": (lambda fd, x: fd.ops.slice(x, [0, 0], [2, 2], [1, 2]), RuntimeError, "must be 1"),
    "starts": (lambda fd, x: fd.ops.slice(x, [0], [2, 2]), RuntimeError, "each of 2 axes"),
    "strides": (lambda fd, x: fd.ops.slice(x, [0, 0], [2, 2], [1]), RuntimeError, "each of 2"),
    "beyond": (
        lambda fd, x: fd.ops.slice(x, [0, 0], [5, 2], manual_normalization=True),
        RuntimeError,
        "beyond the tensor",
    ),
    "pad_odd": (lambda fd, x: fd.ops.pad(x, [1]), RuntimeError, "pairs of widths"),
    "pad_many": (lambda fd, x: fd.ops.pad(x, [1] * 6), RuntimeError, "each of 2 axes"),
    "pad_negative": (lambda fd, x: fd.ops.pad(x, [-4, -3]), RuntimeError, r"become \[4, -1\]"),
    "pad_kind": (lambda fd, x: fd.ops.pad(x, [1, 1], 1), RuntimeError, "kind, got 1"),
    "pad_bool": (lambda fd, x: fd.ops.pad(x, [1, 1], True), RuntimeError, "kind, got True"),
    "pad_size": (lambda fd, x: fd.ops.pad(x, [1.0, 1]), TypeError, "ints and Vals"),
    "cat_none": (lambda fd, x: fd.ops.cat([]), RuntimeError, "No input tensor given"),
    "cat_dim": (lambda fd, x: fd.ops.cat([x, x], 2), RuntimeError, r"\[-2, 2\)"),
    "cat_low": (lambda fd, x: fd.ops.cat([x, x], -3), RuntimeError, r"\[-2, 2\)"),
    "cat_rank": (lambda fd, x: fd.ops.cat([x, tensor(fd, 3)]), RuntimeError, "equally many axes"),
    "cat_size": (lambda fd, x: fd.ops.cat([x, tensor(fd, 4, 5)]), RuntimeError, "sizes 6 and 5"),
    "cat_one": (lambda fd, x: fd.ops.cat([x, tensor(fd, 4, 1)]), RuntimeError, "sizes 6 and 1"),
    "cat_type": (lambda fd, x: fd.ops.cat([x, x > 0]), RuntimeError, "one element type"),
    "cat_unpadded": (
        lambda fd, x: fd.ops.cat([x, x], 1, manual_padding=True),
        RuntimeError,
        "T0 is none",
    ),
    "cat_misplaced": (
        lambda fd, x: fd.ops.cat([fd.ops.pad(x, [1, 0])], 1, manual_padding=True),
        RuntimeError,
        "not padded to its place, 0",
    ),
    "cat_bare": (lambda fd, x: fd.ops.cat(x), TypeError, "list of TensorViews"),
    "index_dim": (
        lambda fd, x: fd.ops.index_select(x, tensor(fd, 3, dtype=DataType.Int), 2),
        RuntimeError,
        r"\[-2, 2\)",
    ),
    "index_axes": (
        lambda fd, x: fd.ops.index_select(x, tensor(fd, 3, 2, dtype=DataType.Int), 0),
        RuntimeError,
        "one axis",
    ),
    "index_type": (
        lambda fd, x: fd.ops.index_select(x, tensor(fd, 3), 0),
        RuntimeError,
        "must have integers",
    ),
    "index_0d": (
        lambda fd, x: fd.ops.index_select(tensor(fd), tensor(fd, dtype=DataType.Int), 0),
        RuntimeError,
        "0-dim",
    ),
    "take_dim": (
        lambda fd, x: fd.ops.take_along_axis(x, tensor(fd, 4, 2, dtype=DataType.Int), -3),
        RuntimeError,
        r"\[-2, 2\)",
    ),
    "take_rank": (
        lambda fd, x: fd.ops.take_along_axis(x, tensor(fd, 4, dtype=DataType.Int), 0),
        RuntimeError,
        "as many axes",
    ),
    "take_size": (
        lambda fd, x: fd.ops.take_along_axis(x, tensor(fd, 3, 2, dtype=DataType.Int), 1),
        RuntimeError,
        "sizes 4 and 3",
    ),
    "embedding_rank": (
        lambda fd, x: fd.ops.embedding_fwd(tensor(fd, 3, dtype=DataType.Int), tensor(fd, 3)),
        RuntimeError,
        r"two axes, \[v, e\]",
    ),
    "padding_idx": (
        lambda fd, x: fd.ops.embedding_fwd(tensor(fd, 3, dtype=DataType.Int), x, padding_idx=4),
        RuntimeError,
        r"\[-4, 4\)",
    ),
    "max_norm": (
        lambda fd, x: fd.ops.embedding_fwd(tensor(fd, 3, dtype=DataType.Int), x, max_norm="a"),
        TypeError,
        "must be a float",
    ),
    "scan_dim": (lambda fd, x: fd.ops.cumsum(x, 2), RuntimeError, r"\[-2, 2\)"),
    "scan_low": (lambda fd, x: fd.ops.cummax(x, -3), RuntimeError, r"\[-2, 2\)"),
    "scan_0d": (lambda fd, x: fd.ops.cumsum(tensor(fd), 0), RuntimeError, "0-dim"),
    "scan_type": (lambda fd, x: fd.ops.cumsum(x, 1.0), TypeError, "a dim is an int"),
    "scan_init": (lambda fd, x: fd.ops.cumsum(x, 1, 1), RuntimeError, "kind, got 1"),
    "iota_length": (lambda fd, x: fd.ops.iota(1.5), RuntimeError, "length must be an integer"),
    "iota_negative": (lambda fd, x: fd.ops.iota(-1), RuntimeError, "negative"),
    "iota_start": (lambda fd, x: fd.ops.iota(3, 0.5), RuntimeError, "start must be a scalar"),
    "iota_step": (
        lambda fd, x: fd.ops.iota(3, 0.5, 1, DataType.Float),
        RuntimeError,
        "step must be a scalar",
    ),
    "iota_zero": (lambda fd, x: fd.ops.iota(3, 0, 0), RuntimeError, "must not be 0"),
    "iota_inf": (
        lambda fd, x: fd.ops.iota(3, math.inf, dtype=DataType.Float),
        RuntimeError,
        "start must be finite",
    ),
    "iota_bool": (lambda fd, x: fd.ops.iota(3, dtype=DataType.Bool), RuntimeError, "dtype"),
    "topk_dim": (lambda fd, x: fd.ops.topk(x, 1, 2), RuntimeError, r"\[-2, 2\)"),
    "topk_low": (lambda fd, x: fd.ops.topk(x, 1, -3), RuntimeError, r"\[-2, 2\)"),
    "topk_many": (lambda fd, x: fd.ops.topk(x, 7), RuntimeError, r"k must lie in \[0, 6\]"),
    "topk_negative": (lambda fd, x: fd.ops.topk(x, -1), RuntimeError, r"\[0, 6\]"),
    "topk_float": (lambda fd, x: fd.ops.topk(x, 1.0), TypeError, "ints and Vals"),
    "strangers": (
        lambda fd, x: fd.ops.cat([x, FusionDefinition().define_tensor([4, 6])]),
        RuntimeError,
        "another FusionDefinition",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, error, message = REFUSED[name]
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 6])
        with pytest.raises(error, match=message):
            call(fd, x)
