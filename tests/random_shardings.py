"""Random sharded programs: operations, placements of inputs and of some results, and meshes.

A Recipe is plain data, so that an example that fails prints whole and can be kept as it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from hypothesis import strategies as st

from meshfuse import FusionDefinition, TensorView
from meshfuse.dist.shard import shard_tensor
from meshfuse.facts.sharding import sharding_of
from meshfuse.ir.axes import TensorName
from meshfuse.multidevice import DeviceMesh
from random_operations import DTYPES, MOST_AXES, OPS, ROUNDED, Draw, Known, NoneFits, Op, Shape

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
EXACT = sorted(OPS.keys() - set(ROUNDED))
FORMS = ("block", "cyclic", "strided")
MOST_ELEMENTS = 4096
LARGEST = float(2**40)


@dataclass(frozen=True)
class Input:
    """A tensor that is passed: axes whose sizes the program does not know, its axes in memory
    (slowest first), whether there are gaps, and an axis along which all is one element."""

    shape: Shape
    dtype: torch.dtype = torch.float64
    unknown: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    gaps: bool = False
    expanded: int | None = None

    @property
    def is_plain(self) -> bool:
        return not self.order and not self.gaps and self.expanded is None

    def values(self, generator: torch.Generator) -> torch.Tensor:
        found = torch.randint(-3, 4, self.shape, generator=generator).to(self.dtype)
        if self.expanded is not None and found.numel():
            found = found.narrow(self.expanded, 0, 1).expand(self.shape).contiguous()
        return found

    def laid_out(self, part: torch.Tensor) -> torch.Tensor:
        """A part of the values, in memory as the program is told."""
        if self.expanded is not None and part.shape[self.expanded]:
            size = part.shape[self.expanded]
            part = part.narrow(self.expanded, 0, 1)
            return self._ordered(part).expand(
                [size if k == self.expanded else -1 for k in range(part.ndim)]
            )
        return self._ordered(part)

    def _ordered(self, part: torch.Tensor) -> torch.Tensor:
        order = self.order or tuple(range(part.ndim))
        part = part.permute(order)
        if self.gaps and part.ndim:
            room = part.new_zeros([*part.shape[:-1], 2 * part.shape[-1] + 1])
            part = room[..., 1::2].copy_(part)
        else:
            part = part.contiguous()
        return part.permute([order.index(k) for k in range(part.ndim)])

    def define(self, fd: FusionDefinition) -> TensorView:
        shape = [-1 if k in self.unknown else size for k, size in enumerate(self.shape)]
        order = self.order or tuple(range(len(shape)))
        single = [k for k in order if shape[k] == 1 or k == self.expanded]
        return fd.define_tensor(
            shape,
            dtype=DTYPES[self.dtype],
            contiguity=[None if k in single else not self.gaps for k in order],
            stride_order=[len(shape) - 1 - order.index(k) for k in range(len(shape))],
        )


@dataclass(frozen=True)
class Cut:
    """Tensor axis `axis` is split over mesh axis `mesh_axis`: in blocks, dealt out, or both.

    `reduced`: the axis with that number of those that the operation reduces.
    """

    mesh_axis: int
    axis: int
    form: str = "block"
    reduced: bool = False


@dataclass(frozen=True)
class Placement:
    """Where a tensor lies: the numbers of its ranks, in the shape of the mesh, and its cuts.

    The ranks are those from `first_rank` on, in that order or in that of `shuffle`.
    """

    first_rank: int
    mesh: Shape
    cuts: tuple[Cut, ...] = ()
    shuffle: tuple[int, ...] = ()

    @property
    def ranks(self) -> list[int]:
        order = self.shuffle or range(math.prod(self.mesh))
        return [self.first_rank + k for k in order]

    def device_mesh(self) -> DeviceMesh:
        return DeviceMesh(torch.tensor(self.ranks).reshape(self.mesh))

    def part(self, value: torch.Tensor, rank: int) -> torch.Tensor | None:
        """What a rank of the mesh holds, index by index; None where the cuts do not divide."""
        place = torch.unravel_index(torch.tensor(self.ranks.index(rank)), self.mesh)
        for axis, size in enumerate(value.shape):
            digits = self._digits(axis, size)
            if math.prod(extent for extent, _ in digits) != size:
                return None
            numbers = itertools.product(*(range(extent) for extent, _ in digits))
            kept = [
                index
                for index, number in enumerate(numbers)
                if all(
                    owner is None or int(place[owner]) == digit
                    for (_, owner), digit in zip(digits, number, strict=True)
                )
            ]
            value = value.index_select(axis, torch.tensor(kept, dtype=torch.long))
        return value

    def _digits(self, axis: int, size: int) -> list[tuple[int, int | None]]:
        digits: list[tuple[int, int | None]] = [(size, None)]
        place = 0
        for cut in self.cuts:
            if cut.reduced or cut.axis != axis:
                continue
            ranks = self.mesh[cut.mesh_axis]
            rest, _ = digits[place]
            if cut.form == "cyclic":
                digits[place : place + 1] = [(-(-rest // ranks), None), (ranks, cut.mesh_axis)]
                continue
            if cut.form == "strided":
                rest = -(-rest // 2)
                digits[place : place + 1] = [(2, None), (rest, None)]
                place += 1
            digits[place : place + 1] = [(ranks, cut.mesh_axis), (-(-rest // ranks), None)]
            place += 1
        return digits

    def write(self, tensor: TensorView) -> None:
        """Into the loops of `tensor`."""
        mesh = self.device_mesh()
        tensor.set_device_mesh(mesh)
        loops = list(enumerate(tensor.get_loop_domain()))
        kept = [k for k, axis in loops if not axis.is_reduction()]
        reduced = [k for k, axis in loops if axis.is_reduction()]
        for position, cuts in sorted(
            [(k, self._cuts(axis, False)) for axis, k in enumerate(kept)]
            + [(k, self._cuts(axis, True)) for axis, k in enumerate(reduced)],
            reverse=True,
            key=lambda pair: pair[0],
        ):
            _split(tensor, position, cuts, mesh)

    def _cuts(self, axis: int, reduced: bool) -> list[Cut]:
        return [cut for cut in self.cuts if (cut.axis, cut.reduced) == (axis, reduced)]


def _split(tensor: TensorView, position: int, cuts: Sequence[Cut], mesh: DeviceMesh) -> None:
    for cut in cuts:
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
class Recipe:
    """A program: inputs, operations (each makes the next tensor), outputs, placements by tensor.

    `updates` are outputs that go into inputs: pairs of a tensor and an input.
    """

    inputs: tuple[Input, ...]
    ops: tuple[Op, ...]
    outputs: tuple[int, ...]
    placements: tuple[tuple[int, Placement], ...]
    updates: tuple[tuple[int, int], ...] = ()
    seed: int = 0

    @property
    def reshapes_unknown(self) -> bool:
        """Whether sizes may not divide that the program cannot know, where it reshapes."""
        return any(given.unknown for given in self.inputs) and any(
            op.name == "reshape" for op in self.ops
        )

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them on one device, by torch."""
        generator = torch.Generator().manual_seed(self.seed)
        found = [given.values(generator) for given in self.inputs]
        for op in self.ops:
            found.append(op.result(found))
        return tuple(found)

    @property
    def ranks(self) -> int:
        return 1 + max(rank for _, placement in self.placements for rank in placement.ranks)

    def define(self) -> FusionDefinition:
        with FusionDefinition() as fd:
            tensors = [given.define(fd) for given in self.inputs]
            for op in self.ops:
                arguments = [tensors[number] for number in op.args]
                tensors.append(OPS[op.name].define(fd, arguments, op.extra))
            for number in self.outputs:
                fd.add_output(tensors[number])
            for number, target in self.updates:
                fd.add_output(tensors[number], tensors[target])
            for number, placement in self.placements:
                placement.write(tensors[number])
        return fd

    def parts(self, fd: FusionDefinition, rank: int) -> list[torch.Tensor]:
        """What a rank passes to that definition."""
        program = fd.fusion.recording.program
        shardings = [sharding_of(program, TensorName(name)) for name in program.fusion.inputs]
        found = zip(self.inputs, self.tensors, shardings, self.placements, strict=False)
        return [
            given.laid_out(part) if rank in placement.ranks else part
            for given, value, sharding, (_, placement) in found
            for part in [shard_tensor(value, sharding, rank).clone()]
        ]


# Drawing.


@st.composite
def recipes(
    draw: Draw, mesh: Shape, *, several_meshes: bool = False, rounded: bool = False
) -> Recipe:
    """A program of up to eight operations, its tensors on `mesh`, or some on others too.

    `rounded`: it ends with an operation whose value is, if one fits.
    """
    sizes = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3, unique=True))
    inputs = [draw_input(draw, sizes) for _ in range(draw(st.integers(1, 3)))]
    tensors = [torch.empty(given.shape, dtype=given.dtype, device="meta") for given in inputs]
    stretches = not any(given.unknown for given in inputs)
    ops: list[Op] = []
    for _ in range(draw(st.sampled_from((1, 2, 3, 3, 4, 5, 6, 8)))):
        ops.append(draw_op(draw, Known(tensors, stretches), EXACT))
        tensors.append(ops[-1].result(tensors))
    if rounded:
        ops.append(draw_op(draw, Known(tensors, stretches), ROUNDED))
        tensors.append(ops[-1].result(tensors))
    outputs = [len(tensors) - 1]
    if len(ops) > 1 and draw(st.booleans()):
        outputs.append(draw(st.integers(len(inputs), len(tensors) - 2)))
    return Recipe(
        tuple(inputs),
        tuple(ops),
        tuple(outputs),
        draw_placements(draw, tensors, inputs, ops, mesh, several_meshes),
        draw_updates(draw, tensors, inputs) if stretches else (),
    )


def rarely(draw: Draw) -> bool:
    return draw(st.sampled_from((False, False, False, True)))


def draw_op(draw: Draw, known: Known, names: Sequence[str]) -> Op:
    """One of those names that fits what is there, of moderate size; else a copy."""
    for name in draw(st.lists(st.sampled_from(names), min_size=3, max_size=3)):
        try:
            op = OPS[name].draw(draw, name, known)
        except NoneFits:
            continue
        result = op.result(known.tensors)
        if result.numel() <= MOST_ELEMENTS and result.ndim <= MOST_AXES:
            return op
    return Op("set", (draw(st.integers(0, len(known.tensors) - 1)),))


def draw_input(draw: Draw, sizes: Sequence[int]) -> Input:
    rank = draw(st.sampled_from((1, 2, 2, 3, 3, 0)))
    shape = tuple(draw(st.sampled_from(sizes)) for _ in range(rank))
    dtype = draw(st.sampled_from((torch.float64, torch.float64, *DTYPES)))
    axes = range(len(shape))
    unknown, order, gaps, expanded = (), (), False, None
    if rarely(draw):
        unknown = tuple(k for k in axes if draw(st.booleans()))
    if shape and rarely(draw):
        order = tuple(draw(st.permutations(axes)))
        gaps = draw(st.booleans())
        wide = [k for k in axes if shape[k] > 1]
        if wide and draw(st.booleans()):
            expanded = draw(st.sampled_from(wide))
    return Input(shape, dtype, unknown, order, gaps, expanded)


def draw_updates(
    draw: Draw, tensors: Sequence[torch.Tensor], inputs: Sequence[Input]
) -> tuple[tuple[int, int], ...]:
    """Sometimes an input of the type and shape of a result is updated by it."""
    pairs = [
        (number, k)
        for k, given in enumerate(inputs)
        for number in range(len(inputs), len(tensors))
        if given.expanded is None
        and not given.unknown
        and tensors[number].shape == given.shape
        and tensors[number].dtype == given.dtype
    ]
    return (draw(st.sampled_from(pairs)),) if pairs and rarely(draw) else ()


def draw_placements(
    draw: Draw,
    tensors: Sequence[torch.Tensor],
    inputs: Sequence[Input],
    ops: Sequence[Op],
    mesh: Shape,
    several_meshes: bool,
) -> tuple[tuple[int, Placement], ...]:
    """Each input's, and that of some results."""
    first, shuffle = 0, ()
    if rarely(draw):
        first = draw(st.integers(0, 3))
        shuffle = tuple(draw(st.permutations(range(math.prod(mesh)))))
    found: list[tuple[int, Placement]] = []
    for number, tensor in enumerate(tensors):
        if number >= len(inputs) and not rarely(draw):
            continue
        own = Placement(first, mesh, shuffle=shuffle)
        if several_meshes and draw(st.booleans()):
            own = Placement(draw(st.integers(0, 2)), draw(st.sampled_from(MESHES[:7])))
        reduced = 0 if number < len(inputs) else reduced_axes(ops[number - len(inputs)])
        cuts = draw_cuts(draw, tensor.ndim, reduced, own.mesh)
        found.append((number, Placement(own.first_rank, own.mesh, cuts, own.shuffle)))
    return tuple(found)


def reduced_axes(op: Op) -> int:
    """How many axes an operation reduces."""
    if op.name in ("matmul", "linear", "index_select", "take_along_axis", "embedding"):
        return 1
    return len(op.extra[0]) if op.name in ("sum", "max", "min", "moments", "mean") else 0


def draw_cuts(draw: Draw, rank: int, reduced: int, mesh: Shape) -> tuple[Cut, ...]:
    cuts: list[Cut] = []
    for mesh_axis in draw(st.permutations(range(len(mesh)))):
        if rank and not rarely(draw):
            form = draw(st.sampled_from(("block", *FORMS)))
            cuts.append(Cut(mesh_axis, draw(st.integers(0, rank - 1)), form))
        if reduced and rarely(draw):
            cuts.append(Cut(mesh_axis, draw(st.integers(0, reduced - 1)), reduced=True))
    return tuple(cuts)
