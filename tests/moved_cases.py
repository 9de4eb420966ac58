"""Collectives between ranks by value: every form of sharding, with what each rank sends and gets.

Parts are cut from global tensors index by index, and so are those that are expected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from index_sets import digits
from meshfuse.dist.bound_collectives import BoundCollective, PlacedTensor
from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.expr import const
from meshfuse.facts.digits import Digits, Sharding
from meshfuse.facts.holdings import held, rank_coordinates, shape_outside
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import DeviceMesh, ParallelType, make_mesh

X, Y = ParallelType.mesh(0), ParallelType.mesh(1)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Moved:
    """A tensor of global `sizes` that goes from one sharding to another in one collective.

    `order` is the memory order of both sides on every rank.
    """

    name: str
    collective: str
    mesh_axis: ParallelType | None
    src: Sharding
    out: Sharding
    sizes: tuple[int, ...]
    function: str | None = None
    order: tuple[int, ...] = ()
    packed: bool = True
    dtype: torch.dtype = field(default=torch.float32)

    @property
    def ranks(self) -> tuple[int, ...]:
        sides = (self.src.mesh, self.out.mesh)
        return tuple(sorted({rank for mesh in sides if mesh is not None for rank in mesh.ids}))

    def term(self, number: int) -> torch.Tensor:
        """The global tensor; one for each place along the reduced mesh axis. Sums are exact."""
        count = torch.Size(self.sizes).numel()
        values = (torch.arange(count) * 7 + number * 3) % 11 % (2 if self.is_bool else 11)
        return values.view(self.sizes).to(self.dtype)

    @property
    def is_bool(self) -> bool:
        return self.dtype == torch.bool

    def given(self, rank: int) -> torch.Tensor:
        """What a rank has: of its term, if the source is partial."""
        place = _coordinates(self.src, rank)
        number = place.get(self.mesh_axis, 0) if self.function and self.mesh_axis else 0
        return self._laid_out(cut(self.term(number), self.src, rank))

    def wanted(self, rank: int) -> torch.Tensor:
        """What a rank is to get."""
        if self.function is None or self.mesh_axis is None or self.src.mesh is None:
            return cut(self.term(0), self.out, rank)
        terms = torch.stack(
            [self.term(number) for number in range(self.src.mesh.axis_size(self.mesh_axis))]
        )
        total = terms.sum(0) if self.function == "sum" else terms.amax(0)
        return cut(total.to(self.dtype), self.out, rank)

    def bound(self, rank: int) -> BoundCollective:
        return BoundCollective(
            4,
            self.collective,
            rank,
            self.mesh_axis,
            PlacedTensor(TensorName("T0"), self.src),
            PlacedTensor(TensorName("T1"), self.out),
            tuple(map(const, self.sizes)),
            self.order or tuple(range(len(self.sizes))),
            self.function,
            self.name,
            self.packed,
        )

    def request(self, rank: int) -> CollectiveRequest:
        out = self._laid_out(torch.empty(self.wanted(rank).shape, dtype=self.dtype))
        return self.bound(rank).at({}, CPU).request(self.given(rank), out)

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.order or 0 in tensor.shape:
            return tensor.contiguous()
        back = [self.order.index(axis) for axis in range(len(self.order))]
        return tensor.permute(self.order).contiguous().permute(back)


def _coordinates(sharding: Sharding, rank: int) -> Mapping[ParallelType, int]:
    return {} if sharding.mesh is None else rank_coordinates(sharding.mesh).get(rank, {})


def cut(tensor: torch.Tensor, sharding: Sharding, rank: int) -> torch.Tensor:
    """What a rank holds of a global tensor; an empty one outside the mesh."""
    if sharding.mesh is None or rank not in sharding.mesh.ids:
        return tensor.new_empty(shape_outside(tensor.ndim))
    place = _coordinates(sharding, rank)
    for axis, size in enumerate(tensor.shape):
        indices = [i for run in held(sharding.axes[axis], size, place) for i in run]
        tensor = tensor.index_select(axis, torch.tensor(indices, dtype=torch.int64))
    return tensor


def along_one_axis(mesh: DeviceMesh) -> list[Moved]:
    """Gathers, scatters and reductions along mesh_x of a 1-D mesh."""
    n = mesh.size
    forms = {
        "block": (digits((n, X), 2), 2 * n),
        "cyclic": (digits(2, (n, X)), 2 * n),
        "strided": (digits(2, (n, X), 3), 6 * n),
        "uneven": (digits((n, X), 3), 3 * n - 2),
        "uneven strided": (digits(3, (n, X), 2), 4 * n + 1),
        "uneven cyclic": (digits(3, (n, X)), 2 * n + 1),
        "some empty": (digits((n, X), 2), 1),
        "nothing": (digits((n, X), 0), 0),
    }
    cases: list[Moved] = []
    for name, (axis, size) in forms.items():
        for sizes, place in (((size, 5), 0), ((3, size), 1)):
            whole = Sharding(mesh, tuple(digits(extent) for extent in sizes))
            axes = [*whole.axes]
            axes[place] = axis
            part = Sharding(mesh, tuple(axes))
            partial = replace(whole, partial={X: "sum"})
            text = f"{name} axis {place}"
            cases += [
                Moved(f"gather {text}", "all_gather", X, part, whole, sizes),
                Moved(f"scatter {text}", "reduce_scatter", X, partial, part, sizes, "sum"),
                Moved(f"gather turned {text}", "all_gather", X, part, whole, sizes, None, (1, 0)),
            ]
        straight = [replace(case, packed=False) for case in cases[-6:-4] if "block" in name]
        cases += [replace(case, name=f"straight {case.name}") for case in straight]
    return cases


def exchanges(first: DeviceMesh, second: DeviceMesh) -> list[Moved]:
    """Between two 1-D meshes that may be one, overlap or not: axis to axis, and all that is odd."""
    n, m = first.size, second.size
    sizes = (2 * n + 1, 3 * m)
    rows = Sharding(first, (digits((n, X), 3), digits(3 * m)))
    columns = Sharding(second, (digits(2 * n + 1), digits(3, (m, X))))
    copies = Sharding(second, (digits(2 * n + 1), digits(3 * m)))
    alike = Sharding(second, (digits((m, X), -(-(2 * n + 1) // m)), digits(3 * m)))
    pairs = {"rows to columns": columns, "rows to copies": copies, "rows to rows": alike}
    cases = [
        Moved(f"{name} {first}->{second}", "exchange", None, rows, goal, sizes)
        for name, goal in pairs.items()
    ]
    turned = replace(cases[0], name=f"turned {cases[0].name}", order=(1, 0))
    back = Moved(f"copies to rows {second}->{first}", "exchange", None, copies, rows, sizes)
    name = f"a number {first}->{second}"
    number = Moved(name, "exchange", None, Sharding(first, ()), Sharding(second, ()), ())
    return [*cases, turned, back, number]


def on_two_axes(mesh: DeviceMesh) -> list[Moved]:
    """Along one axis of a 2-D mesh whose other one cuts the tensor, too; and exchanges across."""
    b, a = mesh.shape
    both = digits((b, Y), (a, X), 2)
    only_y, only_x = digits((b, Y), 2 * a), digits(b, (a, X), 2)
    size = 2 * a * b
    plain = digits(3)

    def at(axis: Digits) -> Sharding:
        return Sharding(mesh, (plain, axis))

    partial = replace(at(only_y), partial={X: "sum"})
    corner = Sharding(mesh, (digits((b, Y), 2), digits(2, (a, X), -(-(size - 1) // (2 * a)))))
    turned = Sharding(mesh, (digits((a, X), 2), digits((b, Y), -(-(size - 1) // b))))
    return [
        Moved("inner of two", "all_gather", X, at(both), at(only_y), (3, size)),
        Moved("outer of two", "all_gather", Y, at(both), at(only_x), (3, size)),
        Moved("scatter below another", "reduce_scatter", X, partial, at(both), (3, size), "sum"),
        Moved("axes change places", "exchange", None, corner, turned, (2 * b - 1, size - 1)),
        Moved("one of two", "exchange", None, corner, at(both), (2 * b - 1, size - 1)),
    ]


def mesh_of(*ranks: int) -> DeviceMesh:
    return make_mesh(list(ranks))
