"""Where an expression could compute, and what would have to move for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

from meshfuse.base.dtypes import ITEM_BYTES
from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, add, const
from meshfuse.facts.facts import tensor_outputs
from meshfuse.facts.nominal import nominal_value
from meshfuse.facts.redistribute import Move, plan
from meshfuse.facts.refusal import Refusal
from meshfuse.facts.reshape import digits_after_reshape
from meshfuse.facts.sharding import (
    Digits,
    Sharding,
    canonical,
    owners_of,
    reduction_function,
    sharding_of,
)
from meshfuse.ir.axes import AxisKind, TensorName
from meshfuse.ir.mesh import DeviceMesh
from meshfuse.ir.ops import Expr, Reshape, Welford
from meshfuse.ir.program import Program
from meshfuse.passes.placement import (
    Placement,
    crossing_axes,
    needed_sharding,
    placed_operands,
    placement_of,
    produced_sharding,
    reshape_placement,
)
from meshfuse.passes.sharding_rules import carried_axes, sharding_rule


@final
@frozen_dataclass
class Site:
    """A mesh, and how the (root) axes of an expression's outputs lie on it while it computes."""

    mesh: DeviceMesh
    placement: Placement


def site_of_result(program: Program, expr: Expr, mesh: DeviceMesh) -> Site:
    """Where the outputs lie, or as near to it as a reshape can compute."""
    placement = placement_of(program, tensor_outputs(program, expr)[0], mesh)
    if isinstance(expr, Reshape):
        placement = reshape_placement(program, expr, placement, mesh)
    return Site(mesh, placement)


def cheapest_site(program: Program, expr: Expr, mesh: DeviceMesh) -> Site:
    """The site of the result or that of an operand: the one for which the fewest bytes move.

    T1 = relu(T0), T0 split, T1 replicated: relu on the blocks, then gather. Where bytes are equal,
    the result's mesh comes first, then the site with more parallelism, then the result's. A result
    that is reduced across ranks, as propagation has decided, is reduced there.
    """
    own = site_of_result(program, expr, mesh)
    rule = sharding_rule(expr)
    if rule is None or crossing_axes(program, TensorName(expr.outs[0]), own.placement):
        return own
    cost = bytes_moved(program, expr, own)
    if cost == 0:
        return own
    best, best_key = own, _rank(program, expr, own, mesh, cost)
    for site in _sites_of_operands(program, expr, own):
        if moves_parameter(program, expr, site) and not moves_parameter(program, expr, own):
            continue
        key = _rank(program, expr, site, mesh, bytes_moved(program, expr, site))
        if key < best_key:
            best, best_key = site, key
    return best


def parameter_of(program: Program, expr: Expr) -> TensorName | None:
    """The weight of a contraction, where it is an input: it is not moved to spare another operand.

    To move it is to move it in every run, and to hold it twice.
    """
    rule = sharding_rule(expr)
    if rule is None or rule.priority is None:
        return None
    weight = TensorName(str(expr.ins[rule.priority[0]]))
    return weight if weight in program.fusion.inputs else None


def moves_parameter(program: Program, expr: Expr, site: Site) -> bool:
    """Whether the parameter must be received for `expr` to compute at `site`."""
    weight = parameter_of(program, expr)
    need = needs_at(program, expr, site).get(weight) if weight is not None else None
    if weight is None or need is None:
        return False
    return bytes_between(program, weight, sharding_of(program, weight), need) != 0


def _rank(
    program: Program, expr: Expr, site: Site, mesh: DeviceMesh, cost: int | None
) -> tuple[bool, int, bool, int]:
    """Smaller is better."""
    spread = {owner for digits in site.placement for owner in owners_of(digits, site.mesh)}
    return cost is None, cost or 0, site.mesh != mesh, -len(spread)


def _sites_of_operands(program: Program, expr: Expr, own: Site) -> Iterator[Site]:
    for position in placed_operands(program, expr):
        site = _site_of_operand(program, expr, position, own)
        if site is not None and (not isinstance(expr, Reshape) or _is_whole(program, expr, site)):
            yield site


def _is_whole(program: Program, expr: Reshape, site: Site) -> bool:
    """Whether ranks that reshape at `site` make whole pieces of the result."""
    axes = [axis.name for axis in program.tensor(expr.out).root]
    root = dict(zip(axes, site.placement, strict=True))
    return digits_after_reshape(program, expr.out, root, site.mesh) is not None


def _site_of_operand(program: Program, expr: Expr, position: int, own: Site) -> Site | None:
    """`own`, but the axes of one operand as that has them; None where one has no place.

    On another mesh than `own`, all other axes are whole.
    """
    operand, out = TensorName(str(expr.ins[position])), TensorName(expr.outs[0])
    have = sharding_of(program, operand)
    if have.mesh is None or have.partial:
        return None
    carried, root = carried_axes(program, expr, position, out), program.tensor(out).maybe_root
    places = {axis.name: place for place, axis in enumerate(root)}
    combines = isinstance(expr, Welford) and expr.src_m2 is not None  # of all terms, on each rank
    reduces = reduction_function(expr) is not None and not combines
    found: dict[int, Digits] = {}
    for axis, digits in zip(program.tensor(operand).tensor_axes, have.axes, strict=True):
        place = places[carried[axis.name]] if axis.name in carried else None
        is_spread = bool(owners_of(digits, have.mesh))
        if is_spread and (place is None or not (root[place].kind.is_tensor_axis or reduces)):
            return None
        if place is not None:
            axis = root[place]
            is_single = axis.kind is AxisKind.broadcast or (
                not axis.kind.is_tensor_axis and axis.extent is const(1)
            )
            own_digits = () if is_single else digits
            found[place] = canonical(own_digits, root[place].extent, have.mesh)
    used = {owner for digits in found.values() for owner in owners_of(digits, have.mesh)}
    placement: list[Digits] = []
    for place, digits in enumerate(own.placement):
        here = have.mesh == own.mesh and not used.intersection(owners_of(digits, own.mesh))
        whole = canonical((), root[place].extent, have.mesh)
        placement.append(found.get(place, digits if here else whole))
    return Site(have.mesh, tuple(placement))


# Costs.


def bytes_moved(program: Program, expr: Expr, site: Site) -> int | None:
    """What a rank receives at most for `expr` to compute at `site`, its result brought home.

    Sizes that are not known are nominal. None if something cannot get to where it is needed.
    """
    total = 0
    for operand, need in needs_at(program, expr, site).items():
        moved = bytes_between(program, operand, sharding_of(program, operand), need)
        if moved is None:
            return None
        total += moved
    for out in tensor_outputs(program, expr):
        made = produced_sharding(program, expr, out, site.placement, site.mesh)
        moved = bytes_between(program, out, made, sharding_of(program, out))
        if moved is None:
            return None
        total += moved
    return total


def needs_at(program: Program, expr: Expr, site: Site) -> dict[TensorName, Sharding]:
    """How each placed operand must lie; the last need of one that is read twice."""
    return {
        TensorName(str(expr.ins[position])): needed_sharding(
            program, expr, position, site.placement, site.mesh
        )
        for position in placed_operands(program, expr)
    }


def moves_between(
    program: Program, tensor: TensorName, have: Sharding, want: Sharding
) -> tuple[Move, ...] | Refusal:
    """How `tensor` gets from one sharding to another: `plan`, with its extents."""
    return plan(have, want, [axis.extent for axis in program.tensor(tensor).tensor_axes])


def bytes_between(
    program: Program, tensor: TensorName, have: Sharding, want: Sharding
) -> int | None:
    """Nominal bytes that a rank receives for `tensor` to get from one sharding to another."""
    moves = moves_between(program, tensor, have, want)
    return None if isinstance(moves, Refusal) else moved_bytes(program, tensor, moves)


def moved_bytes(program: Program, tensor: TensorName, moves: Sequence[Move]) -> int:
    """Nominal bytes that a rank receives in all of `moves`."""
    elements = sum(nominal_value(move.elements) for move in moves)
    return elements * ITEM_BYTES[program.tensor(tensor).dtype]


def received_bytes(program: Program, tensor: TensorName, have: Sharding, want: Sharding) -> IntExpr:
    """What a rank receives for `tensor` to get from one sharding to another, which is possible."""
    moves = moves_between(program, tensor, have, want)
    if isinstance(moves, Refusal):
        raise InvariantError(f"{tensor}: {moves.reason}")
    elements = add(const(0), *(move.elements for move in moves))
    return elements * ITEM_BYTES[program.tensor(tensor).dtype]
