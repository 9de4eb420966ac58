"""Operations for random programs: how each is drawn, defined, and computed by torch on one device.

Their values are whole numbers, and true or false: exact, in whatever order ranks add. Those of a
few are rounded, and only end a program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from meshfuse import DataType, FusionDefinition, TensorView

Draw = Callable[..., Any]
Shape = tuple[int, ...]
Extra = tuple[Any, ...]

DTYPES = {
    torch.float64: DataType.Double,
    torch.int64: DataType.Int,
    torch.bool: DataType.Bool,
}
NUMBERS = (torch.float64, torch.int64)
MOST_AXES = 4


@dataclass(frozen=True)
class Op:
    """One operation: `name` over tensors by number, with what else it takes."""

    name: str
    args: tuple[int, ...]
    extra: Extra = ()

    def result(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """By torch, of all tensors before it."""
        return OPS[self.name].compute([tensors[k] for k in self.args], self.extra)


@dataclass(frozen=True)
class Known:
    """The tensors so far, on torch's meta device. `stretches`: whether axes of 1 broadcast, all of
    them being known to be of 1."""

    tensors: Sequence[torch.Tensor]
    stretches: bool = True

    def shape(self, number: int) -> Shape:
        return tuple(self.tensors[number].shape)

    def like(
        self, axes: int = 0, *, most: int = MOST_AXES, dtypes: Sequence[torch.dtype] = tuple(DTYPES)
    ) -> list[int]:
        """The numbers of tensors of `axes` to `most` axes and these types."""
        return [
            number
            for number, tensor in enumerate(self.tensors)
            if axes <= tensor.ndim <= most and tensor.dtype in dtypes
        ]


class NoneFits(Exception):
    """No tensor of a program so far is fit for an operation."""


@dataclass(frozen=True)
class Kind:
    """How an operation is drawn (NoneFits for tensors like these), defined, and computed."""

    draw: Callable[[Draw, str, Known], Op]
    define: Callable[[FusionDefinition, list[TensorView], Extra], TensorView]
    compute: Callable[[list[torch.Tensor], Extra], torch.Tensor]


def pick(draw: Draw, numbers: Sequence[int]) -> int:
    """One of them; later ones are more likely."""
    if not numbers:
        raise NoneFits
    return draw(st.sampled_from([*numbers, *numbers[-3:]]))


def pick_axis(draw: Draw, shape: Shape) -> int:
    return draw(st.integers(0, len(shape) - 1))


# Drawing.


def one(axes: int = 0, dtypes: Sequence[torch.dtype] = tuple(DTYPES)) -> Callable[..., Op]:
    def drawn(draw: Draw, name: str, known: Known) -> Op:
        return Op(name, (pick(draw, known.like(axes, dtypes=dtypes)),))

    return drawn


def two(dtypes: Sequence[torch.dtype] = NUMBERS) -> Callable[..., Op]:
    """Of one shape, or with axes of 1 that stretch."""

    def drawn(draw: Draw, name: str, known: Known) -> Op:
        number = pick(draw, known.like(dtypes=dtypes))
        return Op(name, (number, draw(st.sampled_from(fitting(known, number)))))

    return drawn


def fitting(known: Known, number: int) -> list[int]:
    """The tensors that meet tensor `number` axis by axis, and are of its type."""
    tensor = known.tensors[number]

    def meets(other: torch.Tensor) -> bool:
        if other.shape == tensor.shape:
            return True
        pairs = zip(other.shape, tensor.shape, strict=False)
        return other.ndim == tensor.ndim and all(a == b or 1 in (a, b) for a, b in pairs)

    return [
        k
        for k, other in enumerate(known.tensors)
        if other.dtype == tensor.dtype
        and meets(other)
        and (known.stretches or other.shape == tensor.shape)
    ]


def draw_where(draw: Draw, name: str, known: Known) -> Op:
    condition = pick(draw, known.like(dtypes=[torch.bool]))
    shape = known.shape(condition)
    values = [k for k in known.like() if known.shape(k) == shape]
    first = draw(st.sampled_from(values))
    same = [k for k in values if known.tensors[k].dtype == known.tensors[first].dtype]
    return Op(name, (condition, first, draw(st.sampled_from(same))))


def draw_cast(draw: Draw, name: str, known: Known) -> Op:
    return Op(name, (pick(draw, known.like()),), (draw(st.sampled_from(list(DTYPES))),))


def along(*, empty: bool = True, dtypes: Sequence[torch.dtype] = NUMBERS) -> Callable[..., Op]:
    """Over one or more axes."""

    def drawn(draw: Draw, name: str, known: Known) -> Op:
        number = pick(draw, known.like(1, dtypes=dtypes))
        shape = known.shape(number)
        dims = sorted(draw(st.permutations(range(len(shape))))[: draw(st.integers(1, len(shape)))])
        if not empty and any(shape[dim] == 0 for dim in dims):
            raise NoneFits
        return Op(name, (number,), (tuple(dims), draw(st.booleans())))

    return drawn


def draw_along_one(draw: Draw, name: str, known: Known) -> Op:
    number = pick(draw, known.like(1, dtypes=NUMBERS))
    return Op(name, (number,), (pick_axis(draw, known.shape(number)),))


def draw_permute(draw: Draw, name: str, known: Known) -> Op:
    number = pick(draw, known.like(2))
    return Op(name, (number,), tuple(draw(st.permutations(range(len(known.shape(number)))))))


def draw_broadcast(draw: Draw, name: str, known: Known) -> Op:
    number = pick(draw, known.like(most=MOST_AXES - 1))
    shape = list(known.shape(number))
    place = draw(st.integers(0, len(shape)))
    shape.insert(place, draw(st.sampled_from((1, 2, 3, 5, 8))))
    return Op(name, (number,), (tuple(shape), tuple(k for k in range(len(shape)) if k != place)))


def draw_of_ones(draw: Draw, name: str, known: Known) -> Op:
    """An axis of 1, and a size for it."""
    if not known.stretches:
        raise NoneFits
    number = pick(draw, [k for k in known.like(1) if 1 in known.shape(k)])
    shape = known.shape(number)
    axis = draw(st.sampled_from([k for k, size in enumerate(shape) if size == 1]))
    return Op(name, (number,), (axis, draw(st.sampled_from((2, 3, 5, 8)))))


def draw_reshape(draw: Draw, name: str, known: Known) -> Op:
    """Merge two neighbours, or split an axis."""
    number = pick(draw, known.like(1))
    shape = list(known.shape(number))
    axis = draw(st.integers(0, len(shape) - 1))
    if draw(st.booleans()) and axis + 1 < len(shape):
        shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
    else:
        factors = [k for k in (2, 3, 4, 1) if shape[axis] % k == 0]
        factor = draw(st.sampled_from(factors))
        pair = [factor, shape[axis] // factor]
        shape[axis : axis + 1] = pair if draw(st.booleans()) else pair[::-1]
    if len(shape) > MOST_AXES:
        raise NoneFits
    return Op(name, (number,), tuple(shape))


def draw_matmul(draw: Draw, name: str, known: Known) -> Op:
    """Batch axes meet at the right, axes of 1 stretch."""
    floats = [torch.float64]
    pairs = [
        (a, b)
        for a in known.like(1, dtypes=floats)
        for b in known.like(1, dtypes=floats)
        if _multiplies(known.shape(a), known.shape(b), known.stretches)
    ]
    if not pairs:
        raise NoneFits
    return Op(name, draw(st.sampled_from(pairs)))


def _multiplies(left: Shape, right: Shape, stretches: bool) -> bool:
    if left[-1] != right[max(len(right) - 2, 0)]:
        return False
    batches = zip(left[:-2][::-1], right[:-2][::-1], strict=False)
    return all(a == b or (stretches and 1 in (a, b)) for a, b in batches)


def draw_linear(draw: Draw, name: str, known: Known) -> Op:
    floats = known.like(1, dtypes=[torch.float64])
    pairs = [
        (a, b)
        for a in floats
        for b in floats
        if len(known.shape(b)) == 2 and known.shape(a)[-1] == known.shape(b)[1]
    ]
    if not pairs:
        raise NoneFits
    src, weight = draw(st.sampled_from(pairs))
    biases = [k for k in floats if known.shape(k) == known.shape(weight)[:1]]
    if biases and draw(st.booleans()):
        return Op(name, (src, weight, draw(st.sampled_from(biases))))
    return Op(name, (src, weight))


def draw_slice(draw: Draw, name: str, known: Known) -> Op:
    number = pick(draw, known.like(1))
    shape = known.shape(number)
    starts = tuple(draw(st.integers(0, min(size, 2))) for size in shape)
    ends = tuple(draw(st.integers(start, size)) for start, size in zip(starts, shape, strict=True))
    return Op(name, (number,), (starts, ends))


def draw_pad(draw: Draw, name: str, known: Known) -> Op:
    number = pick(draw, known.like(1, dtypes=NUMBERS))
    axes = draw(st.integers(1, len(known.shape(number))))
    return Op(name, (number,), tuple(draw(st.integers(0, 2)) for _ in range(2 * axes)))


def draw_cat(draw: Draw, name: str, known: Known) -> Op:
    number = pick(draw, known.like(1))
    tensor = known.tensors[number]
    dim = pick_axis(draw, tensor.shape)

    others = [
        other
        for other in known.like(tensor.ndim, most=tensor.ndim, dtypes=[tensor.dtype])
        if _but(known.shape(other), dim) == _but(tensor.shape, dim)
    ]
    return Op(name, (number, draw(st.sampled_from(others))), (dim,))


def _but(shape: Shape, dim: int) -> Shape:
    return (*shape[:dim], *shape[dim + 1 :])


def draw_rows(draw: Draw, name: str, known: Known) -> Op:
    """Rows by the numbers that another tensor's values make, brought into range."""
    number, index = pick(draw, known.like(1)), pick(draw, known.like(most=1, dtypes=NUMBERS))
    dim = pick_axis(draw, known.shape(number))
    return Op(name, (number, index), (dim, _rows(known.shape(number)[dim])))


def draw_take_along(draw: Draw, name: str, known: Known) -> Op:
    number = pick(draw, known.like(1))
    shape = known.shape(number)
    dim = pick_axis(draw, shape)
    indices = [
        k
        for k in known.like(len(shape), most=len(shape), dtypes=NUMBERS)
        if all(
            n == m for a, (n, m) in enumerate(zip(known.shape(k), shape, strict=True)) if a != dim
        )
    ]
    return Op(name, (number, pick(draw, indices)), (dim, _rows(shape[dim])))


def draw_embedding(draw: Draw, name: str, known: Known) -> Op:
    weight = pick(draw, known.like(2, most=2, dtypes=[torch.float64]))
    index = pick(draw, known.like(most=2, dtypes=NUMBERS))
    return Op(name, (index, weight), (_rows(known.shape(weight)[0]),))


def _rows(size: int) -> int:
    if size == 0:
        raise NoneFits
    return size


def draw_topk(draw: Draw, name: str, known: Known) -> Op:
    number = pick(draw, known.like(1, dtypes=NUMBERS))
    dim = pick_axis(draw, known.shape(number))
    k = draw(st.integers(0, known.shape(number)[dim]))
    return Op(name, (number,), (k, dim, draw(st.booleans())))


# Defining and computing, where that is more than a call.


def in_range(fd: FusionDefinition, index: TensorView, size: int) -> TensorView:
    """|value|, at most the last row."""
    rows = fd.ops.cast(index, DataType.Int)
    return fd.ops.minimum(fd.ops.abs(rows), size - 1)


def within(index: torch.Tensor, size: int) -> torch.Tensor:
    return index.long().abs().clamp(max=size - 1)


def define_numbered(fd: FusionDefinition, args: list[TensorView], extra: Extra) -> TensorView:
    """Plus its place along an axis."""
    dim, size = extra
    ndim = args[0].ndim
    places = fd.ops.iota(size, dtype=DataType.Double)
    row = fd.ops.broadcast(places, [k != dim for k in range(ndim)])
    return fd.ops.add(args[0], row)


def compute_numbered(args: list[torch.Tensor], extra: Extra) -> torch.Tensor:
    dim, size = extra
    shape = [size if k == dim else 1 for k in range(args[0].ndim)]
    return args[0] + torch.arange(size, dtype=torch.float64, device=args[0].device).reshape(shape)


def draw_numbered(draw: Draw, name: str, known: Known) -> Op:
    number = pick(draw, known.like(1, dtypes=[torch.float64]))
    dim = pick_axis(draw, known.shape(number))
    return Op(name, (number,), (dim, known.shape(number)[dim]))


def compute_expand(args: list[torch.Tensor], extra: Extra) -> torch.Tensor:
    return args[0].expand([extra[1] if k == extra[0] else -1 for k in range(args[0].ndim)])


def compute_broadcast(args: list[torch.Tensor], extra: Extra) -> torch.Tensor:
    shape, dims = extra
    return args[0].reshape([n if k in dims else 1 for k, n in enumerate(shape)]).expand(shape)


def compute_sorted(args: list[torch.Tensor], extra: Extra) -> torch.Tensor:
    return args[0].topk(extra[0], extra[1], largest=extra[2], sorted=True)[0]


def define_moments(fd: FusionDefinition, args: list[TensorView], extra: Extra) -> TensorView:
    dims, keepdim = extra
    return fd.ops.add(*fd.ops.var_mean(args[0], list(dims), 1, keepdim))


def compute_moments(args: list[torch.Tensor], extra: Extra) -> torch.Tensor:
    dims, keepdim = extra
    mean = args[0].mean(dims, keepdim=True)
    squares = (args[0] - mean).square().sum(dims, keepdim)
    terms = math.prod(args[0].shape[dim] for dim in dims)
    return squares / max(terms - 1, 0) + (mean if keepdim else mean.squeeze(dims))


def reduction(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda args, extra: function(args[0], extra[0], extra[1])


def along_axes(name: str) -> Callable[..., TensorView]:
    return lambda fd, a, x: getattr(fd.ops, name)(a[0], list(x[0]), keepdim=x[1])


OPS: dict[str, Kind] = {
    "add": Kind(two(), lambda f, a, _: f.ops.add(*a), lambda a, _: a[0] + a[1]),
    "sub": Kind(two(), lambda f, a, _: f.ops.sub(*a), lambda a, _: a[0] - a[1]),
    "max_of": Kind(two(), lambda f, a, _: f.ops.maximum(*a), lambda a, _: torch.maximum(*a)),
    "less": Kind(two(), lambda f, a, _: f.ops.lt(*a), lambda a, _: a[0] < a[1]),
    "neg": Kind(one(dtypes=NUMBERS), lambda f, a, _: f.ops.neg(a[0]), lambda a, _: -a[0]),
    "relu": Kind(
        one(dtypes=[torch.float64]), lambda f, a, _: f.ops.relu(a[0]), lambda a, _: a[0].relu()
    ),
    "twice": Kind(one(dtypes=NUMBERS), lambda f, a, _: f.ops.mul(a[0], 2), lambda a, _: a[0] * 2),
    "set": Kind(one(), lambda f, a, _: f.ops.set(a[0]), lambda a, _: a[0]),
    "cast": Kind(
        draw_cast, lambda f, a, x: f.ops.cast(a[0], DTYPES[x[0]]), lambda a, x: a[0].to(x[0])
    ),
    "where": Kind(draw_where, lambda f, a, _: f.ops.where(*a), lambda a, _: torch.where(*a)),
    "sum": Kind(along(dtypes=tuple(DTYPES)), along_axes("sum"), reduction(torch.sum)),
    "max": Kind(along(empty=False), along_axes("max"), reduction(torch.amax)),
    "min": Kind(along(empty=False), along_axes("min"), reduction(torch.amin)),
    "permute": Kind(
        draw_permute, lambda f, a, x: f.ops.permute(a[0], list(x)), lambda a, x: a[0].permute(x)
    ),
    "broadcast_in_dim": Kind(
        draw_broadcast,
        lambda f, a, x: f.ops.broadcast_in_dim(a[0], list(x[0]), list(x[1])),
        compute_broadcast,
    ),
    "expand": Kind(
        draw_of_ones,
        lambda f, a, x: f.ops.expand(a[0], [x[1] if k == x[0] else -1 for k in range(a[0].ndim)]),
        compute_expand,
    ),
    "squeeze": Kind(
        draw_of_ones, lambda f, a, x: f.ops.squeeze(a[0], [x[0]]), lambda a, x: a[0].squeeze(x[0])
    ),
    "reshape": Kind(
        draw_reshape, lambda f, a, x: f.ops.reshape(a[0], list(x)), lambda a, x: a[0].reshape(x)
    ),
    "matmul": Kind(draw_matmul, lambda f, a, _: f.ops.matmul(*a), lambda a, _: a[0] @ a[1]),
    "linear": Kind(
        draw_linear,
        lambda f, a, _: f.ops.linear(*a),
        lambda a, _: torch.nn.functional.linear(*a),
    ),
    "slice": Kind(
        draw_slice,
        lambda f, a, x: f.ops.slice(a[0], list(x[0]), list(x[1])),
        lambda a, x: a[0][tuple(slice(s, e) for s, e in zip(*x, strict=True))],
    ),
    "pad": Kind(
        draw_pad,
        lambda f, a, x: f.ops.pad(a[0], list(x)),
        lambda a, x: torch.nn.functional.pad(a[0], x),
    ),
    "cat": Kind(draw_cat, lambda f, a, x: f.ops.cat(a, x[0]), lambda a, x: torch.cat(a, x[0])),
    "cumsum": Kind(
        draw_along_one, lambda f, a, x: f.ops.cumsum(a[0], x[0]), lambda a, x: a[0].cumsum(x[0])
    ),
    "cummax": Kind(
        draw_along_one,
        lambda f, a, x: f.ops.cummax(a[0], x[0]),
        lambda a, x: a[0].cummax(x[0])[0],
    ),
    "topk": Kind(
        draw_topk,
        lambda f, a, x: f.ops.topk(a[0], x[0], x[1], largest=x[2], sorted=True)[0],
        compute_sorted,
    ),
    "numbered": Kind(draw_numbered, define_numbered, compute_numbered),
    "index_select": Kind(
        draw_rows,
        lambda f, a, x: f.ops.index_select(a[0], in_range(f, a[1], x[1]), x[0]),
        lambda a, x: a[0].index_select(x[0], within(a[1], x[1])),
    ),
    "take_along_axis": Kind(
        draw_take_along,
        lambda f, a, x: f.ops.take_along_axis(a[0], in_range(f, a[1], x[1]), x[0]),
        lambda a, x: a[0].gather(x[0], within(a[1], x[1])),
    ),
    "embedding": Kind(
        draw_embedding,
        lambda f, a, x: f.ops.embedding_fwd(in_range(f, a[0], x[0]), a[1]),
        lambda a, x: torch.nn.functional.embedding(within(a[0], x[0]), a[1]),
    ),
    "moments": Kind(along(dtypes=[torch.float64]), define_moments, compute_moments),
    "mean": Kind(along(dtypes=[torch.float64]), along_axes("mean"), reduction(torch.mean)),
}

ROUNDED = ("moments", "mean")
"""Operations whose values depend on the order in which ranks add."""
