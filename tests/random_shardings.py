"""Random sharded programs: operations, placements of inputs and of some results, and meshes.

A Recipe is plain data, so that an example that fails prints whole and can be kept as it is. Values
are whole numbers in float64: results are exact, in whatever order ranks add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from meshfuse import DataType, FusionDefinition, TensorView
from meshfuse.multidevice import DeviceMesh

Draw = Callable[..., Any]
Shape = tuple[int, ...]

MESHES: tuple[Shape, ...] = (
    (1,),
    (2,),
    (3,),
    (4,),
    (8,),
    (2, 2),
    (2, 3),
    (4, 2),
    (2, 2, 2),
)
SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12)
FORMS = ("block", "cyclic", "strided")
MOST_ELEMENTS = 4096
LARGEST = float(2**40)


@dataclass(frozen=True)
class Op:
    """One operation: `name` over tensors by number, with what else it takes."""

    name: str
    args: tuple[int, ...]
    extra: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Cut:
    """Tensor axis `axis` is split over mesh axis `mesh_axis`: in blocks, dealt out, or both."""

    mesh_axis: int
    axis: int
    form: str


@dataclass(frozen=True)
class Placement:
    """Where a tensor lies: the numbers of its ranks, in the shape of the mesh, and its cuts."""

    first_rank: int
    mesh: Shape
    cuts: tuple[Cut, ...] = ()

    def device_mesh(self) -> DeviceMesh:
        count = math.prod(self.mesh)
        return DeviceMesh(torch.arange(self.first_rank, self.first_rank + count).reshape(self.mesh))


@dataclass(frozen=True)
class Recipe:
    """A program: inputs, operations (each makes the next tensor), outputs, placements by tensor."""

    shapes: tuple[Shape, ...]
    ops: tuple[Op, ...]
    outputs: tuple[int, ...]
    placements: tuple[tuple[int, Placement], ...]
    seed: int = 0

    def inputs(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [
            torch.randint(-3, 4, shape, generator=generator).to(torch.float64)
            for shape in self.shapes
        ]

    def define(self) -> FusionDefinition:
        with FusionDefinition() as fd:
            tensors = [
                fd.define_tensor(list(shape), dtype=DataType.Double, contiguity=True)
                for shape in self.shapes
            ]
            for op in self.ops:
                arguments = [tensors[number] for number in op.args]
                tensors.append(OPS[op.name].define(fd, arguments, op.extra))
            for number in self.outputs:
                fd.add_output(tensors[number])
            for number, placement in self.placements:
                place(tensors[number], placement)
        return fd

    def expected(self) -> list[torch.Tensor]:
        """The outputs on one device, by torch."""
        tensors = self.inputs()
        for op in self.ops:
            arguments = [tensors[number] for number in op.args]
            tensors.append(OPS[op.name].compute(arguments, op.extra))
        return [tensors[number] for number in self.outputs]


def place(tensor: TensorView, placement: Placement) -> None:
    """Write a placement into the loops of `tensor`."""
    mesh = placement.device_mesh()
    tensor.set_device_mesh(mesh)
    kept = [k for k, axis in enumerate(tensor.get_loop_domain()) if not axis.is_reduction()]
    for axis in reversed(range(len(kept))):
        position = kept[axis]
        for cut in placement.cuts:
            if cut.axis != axis:
                continue
            ranks, owner = mesh.shape[cut.mesh_axis], mesh.axis(cut.mesh_axis)
            if cut.form == "cyclic":
                tensor.split(position, ranks)
                tensor.axis(position + 1).parallelize(owner)
                continue
            if cut.form == "strided":
                tensor.outer_split(position, 2)
                position += 1
            tensor.outer_split(position, ranks)
            tensor.axis(position).parallelize(owner)
            position += 1


@dataclass(frozen=True)
class Kind:
    """How an operation is drawn (None: not for these shapes), defined, and computed by torch."""

    draw: Callable[[Draw, Sequence[Shape]], Op | None]
    define: Callable[[FusionDefinition, list[TensorView], tuple[Any, ...]], TensorView]
    compute: Callable[[list[torch.Tensor], tuple[Any, ...]], torch.Tensor]


def any_of(draw: Draw, shapes: Sequence[Shape], least_rank: int = 0) -> int | None:
    """The number of a tensor of at least this rank; later ones are more likely."""
    fitting = [number for number, shape in enumerate(shapes) if len(shape) >= least_rank]
    if not fitting:
        return None
    return draw(st.sampled_from([*fitting, *fitting[-3:]]))


def draw_unary(name: str) -> Callable[[Draw, Sequence[Shape]], Op | None]:
    def drawn(draw: Draw, shapes: Sequence[Shape]) -> Op | None:
        number = any_of(draw, shapes)
        return None if number is None else Op(name, (number,))

    return drawn


def draw_binary(name: str) -> Callable[[Draw, Sequence[Shape]], Op | None]:
    """Of equal shapes: broadcasts are an operation of their own."""

    def drawn(draw: Draw, shapes: Sequence[Shape]) -> Op | None:
        number = any_of(draw, shapes)
        assert number is not None
        alike = [other for other, shape in enumerate(shapes) if shape == shapes[number]]
        return Op(name, (number, draw(st.sampled_from(alike))))

    return drawn


def draw_along(name: str, *, empty: bool = True) -> Callable[[Draw, Sequence[Shape]], Op | None]:
    """Over one or more axes."""

    def drawn(draw: Draw, shapes: Sequence[Shape]) -> Op | None:
        number = any_of(draw, shapes, 1)
        if number is None:
            return None
        rank = len(shapes[number])
        dims = sorted(draw(st.permutations(range(rank)))[: draw(st.integers(1, rank))])
        if not empty and any(shapes[number][dim] == 0 for dim in dims):
            return None
        return Op(name, (number,), (tuple(dims), draw(st.booleans())))

    return drawn


def draw_permute(draw: Draw, shapes: Sequence[Shape]) -> Op | None:
    number = any_of(draw, shapes, 2)
    if number is None:
        return None
    return Op("permute", (number,), tuple(draw(st.permutations(range(len(shapes[number]))))))


def draw_broadcast(draw: Draw, shapes: Sequence[Shape]) -> Op | None:
    number = any_of(draw, shapes)
    if number is None or len(shapes[number]) > 3:
        return None
    shape = list(shapes[number])
    place_new = draw(st.integers(0, len(shape)))
    shape.insert(place_new, draw(st.sampled_from((1, 2, 3, 5, 8))))
    dims = tuple(k for k in range(len(shape)) if k != place_new)
    return Op("broadcast_in_dim", (number,), (tuple(shape), dims))


def draw_reshape(draw: Draw, shapes: Sequence[Shape]) -> Op | None:
    """Merge two neighbours, or split an axis."""
    number = any_of(draw, shapes, 1)
    if number is None:
        return None
    shape = list(shapes[number])
    axis = draw(st.integers(0, len(shape) - 1))
    if draw(st.booleans()) and axis + 1 < len(shape):
        shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
    else:
        factors = [k for k in (2, 3, 4, 1) if shape[axis] % k == 0]
        factor = draw(st.sampled_from(factors))
        pair = [factor, shape[axis] // factor]
        shape[axis : axis + 1] = pair if draw(st.booleans()) else pair[::-1]
    return Op("reshape", (number,), tuple(shape)) if len(shape) <= 4 else None


def draw_matmul(draw: Draw, shapes: Sequence[Shape]) -> Op | None:
    pairs = [
        (a, b)
        for a, left in enumerate(shapes)
        for b, right in enumerate(shapes)
        if len(left) == len(right) == 2 and left[1] == right[0]
    ]
    return Op("matmul", draw(st.sampled_from(pairs))) if pairs else None


def draw_linear(draw: Draw, shapes: Sequence[Shape]) -> Op | None:
    pairs = [
        (a, b)
        for a, left in enumerate(shapes)
        for b, right in enumerate(shapes)
        if len(left) >= 1 and len(right) == 2 and left[-1] == right[1]
    ]
    return Op("linear", draw(st.sampled_from(pairs))) if pairs else None


def draw_slice(draw: Draw, shapes: Sequence[Shape]) -> Op | None:
    number = any_of(draw, shapes, 1)
    if number is None:
        return None
    starts = tuple(draw(st.integers(0, min(size, 2))) for size in shapes[number])
    ends = tuple(
        draw(st.integers(start, size)) for start, size in zip(starts, shapes[number], strict=True)
    )
    return Op("slice", (number,), (starts, ends))


def draw_pad(draw: Draw, shapes: Sequence[Shape]) -> Op | None:
    number = any_of(draw, shapes, 1)
    if number is None:
        return None
    axes = draw(st.integers(1, len(shapes[number])))
    return Op("pad", (number,), tuple(draw(st.integers(0, 2)) for _ in range(2 * axes)))


def draw_cat(draw: Draw, shapes: Sequence[Shape]) -> Op | None:
    number = any_of(draw, shapes, 1)
    if number is None:
        return None
    dim = draw(st.integers(0, len(shapes[number]) - 1))

    def without(shape: Shape) -> Shape:
        return (*shape[:dim], *shape[dim + 1 :])

    fitting = [
        other
        for other, shape in enumerate(shapes)
        if len(shape) == len(shapes[number]) and without(shape) == without(shapes[number])
    ]
    return Op("cat", (number, draw(st.sampled_from(fitting))), (dim,))


def draw_cumsum(draw: Draw, shapes: Sequence[Shape]) -> Op | None:
    number = any_of(draw, shapes, 1)
    if number is None:
        return None
    return Op("cumsum", (number,), (draw(st.integers(0, len(shapes[number]) - 1)),))


def draw_take(draw: Draw, shapes: Sequence[Shape]) -> Op | None:
    """Rows by the numbers that another tensor's values make, brought into range."""
    number, index = any_of(draw, shapes, 1), any_of(draw, shapes, 1)
    if number is None or index is None or len(shapes[index]) != 1:
        return None
    dim = draw(st.integers(0, len(shapes[number]) - 1))
    size = shapes[number][dim]
    return Op("index_select", (number, index), (dim, size)) if size > 0 else None


def define_take(fd: FusionDefinition, args: list[TensorView], extra: tuple[Any, ...]) -> TensorView:
    """|value| clipped to the last row."""
    last = float(extra[1] - 1)
    row = fd.ops.minimum(fd.ops.abs(args[1]), last)
    return fd.ops.index_select(args[0], fd.ops.cast(row, DataType.Int), extra[0])


def compute_take(args: list[torch.Tensor], extra: tuple[Any, ...]) -> torch.Tensor:
    rows = args[1].abs().clamp(max=extra[1] - 1).long()
    return args[0].index_select(extra[0], rows)


def torch_reduction(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda a, extra: function(a[0], extra[0], extra[1])


OPS: dict[str, Kind] = {
    "add": Kind(draw_binary("add"), lambda f, a, _: f.ops.add(*a), lambda a, _: a[0] + a[1]),
    "sub": Kind(draw_binary("sub"), lambda f, a, _: f.ops.sub(*a), lambda a, _: a[0] - a[1]),
    "neg": Kind(draw_unary("neg"), lambda f, a, _: f.ops.neg(a[0]), lambda a, _: -a[0]),
    "relu": Kind(draw_unary("relu"), lambda f, a, _: f.ops.relu(a[0]), lambda a, _: a[0].relu()),
    "twice": Kind(draw_unary("twice"), lambda f, a, _: f.ops.mul(a[0], 2.0), lambda a, _: a[0] * 2),
    "max_of": Kind(
        draw_binary("max_of"),
        lambda f, a, _: f.ops.maximum(*a),
        lambda a, _: torch.maximum(a[0], a[1]),
    ),
    "sum": Kind(
        draw_along("sum"),
        lambda f, a, x: f.ops.sum(a[0], list(x[0]), keepdim=x[1]),
        torch_reduction(torch.sum),
    ),
    "max": Kind(
        draw_along("max", empty=False),
        lambda f, a, x: f.ops.max(a[0], list(x[0]), keepdim=x[1]),
        torch_reduction(torch.amax),
    ),
    "min": Kind(
        draw_along("min", empty=False),
        lambda f, a, x: f.ops.min(a[0], list(x[0]), keepdim=x[1]),
        torch_reduction(torch.amin),
    ),
    "permute": Kind(
        draw_permute,
        lambda f, a, x: f.ops.permute(a[0], list(x)),
        lambda a, x: a[0].permute(x),
    ),
    "broadcast_in_dim": Kind(
        draw_broadcast,
        lambda f, a, x: f.ops.broadcast_in_dim(a[0], list(x[0]), list(x[1])),
        lambda a, x: a[0].reshape([n if k in x[1] else 1 for k, n in enumerate(x[0])]).expand(x[0]),
    ),
    "reshape": Kind(
        draw_reshape,
        lambda f, a, x: f.ops.reshape(a[0], list(x)),
        lambda a, x: a[0].reshape(x),
    ),
    "matmul": Kind(draw_matmul, lambda f, a, _: f.ops.matmul(*a), lambda a, _: a[0] @ a[1]),
    "linear": Kind(
        draw_linear,
        lambda f, a, _: f.ops.linear(*a),
        lambda a, _: torch.nn.functional.linear(a[0], a[1]),
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
        draw_cumsum, lambda f, a, x: f.ops.cumsum(a[0], x[0]), lambda a, x: a[0].cumsum(x[0])
    ),
    "index_select": Kind(draw_take, define_take, compute_take),
}


# Drawing.


@st.composite
def recipes(draw: Draw, mesh: Shape, *, several_meshes: bool = False) -> Recipe:
    """A program of up to eight operations, its tensors on `mesh`, or some on others too."""
    sizes = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3, unique=True))
    shapes = [
        tuple(draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=3)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    inputs, ops = len(shapes), list[Op]()
    for _ in range(draw(st.integers(1, 8))):
        op = OPS[draw(st.sampled_from(sorted(OPS)))].draw(draw, shapes)
        if op is None:
            continue
        shape = shape_after(op, shapes)
        if math.prod(shape) <= MOST_ELEMENTS:
            ops.append(op)
            shapes.append(shape)
    outputs = [len(shapes) - 1]
    if len(shapes) > inputs + 1 and draw(st.booleans()):
        outputs.append(draw(st.integers(inputs, len(shapes) - 2)))
    placements = draw_placements(draw, shapes, inputs, mesh, several_meshes)
    return Recipe(tuple(shapes[:inputs]), tuple(ops), tuple(outputs), placements)


def shape_after(op: Op, shapes: Sequence[Shape]) -> Shape:
    operands = [torch.empty(shapes[number], device="meta") for number in op.args]
    return tuple(OPS[op.name].compute(operands, op.extra).shape)


def draw_placements(
    draw: Draw, shapes: Sequence[Shape], inputs: int, mesh: Shape, several_meshes: bool
) -> tuple[tuple[int, Placement], ...]:
    """Each input's, and that of some results."""
    placements: list[tuple[int, Placement]] = []
    for number, shape in enumerate(shapes):
        if number < inputs or draw(st.integers(0, 3)) == 0:
            first_rank, own = 0, mesh
            if several_meshes and draw(st.booleans()):
                own, first_rank = draw(st.sampled_from(MESHES[:7])), draw(st.integers(0, 2))
            cuts = draw_cuts(draw, len(shape), own)
            placements.append((number, Placement(first_rank, own, cuts)))
    return tuple(placements)


def draw_cuts(draw: Draw, rank: int, mesh: Shape) -> tuple[Cut, ...]:
    if rank == 0:
        return ()
    cuts: list[Cut] = []
    for mesh_axis in draw(st.permutations(range(len(mesh)))):
        if draw(st.integers(0, 3)) > 0:
            form = draw(st.sampled_from(("block", *FORMS)))
            cuts.append(Cut(mesh_axis, draw(st.integers(0, rank - 1)), form))
    return tuple(cuts)
