"""Which axis of an operand is which axis of a result: producer.logical <-> consumer.root.

Each expression states its map once, by position, in the places of its first output's axes; by name
it follows for every output, since outputs have like axes unless `output_places` says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import singledispatch
from typing import Final

from meshfuse.expr import IntExpr, const, mul
from meshfuse.ir.axes import AxisKind, AxisName, TensorName
from meshfuse.ir.comm import Communication
from meshfuse.ir.infer import is_tensor
from meshfuse.ir.ops import (
    Broadcast,
    Cast,
    Expand,
    Expr,
    Linear,
    MatMul,
    Permute,
    Pointwise,
    Reduction,
    Reshape,
    Set,
    Squeeze,
    Welford,
)
from meshfuse.ir.ops_attention import SdpfaBwd, SdpfaFwd, attention_extents
from meshfuse.ir.ops_indexing import (
    Cat,
    IndexSelect,
    Iota,
    Pad,
    Scan,
    Slice,
    TakeAlongAxis,
    TopK,
    is_whole,
)
from meshfuse.ir.ops_random import Random, RandomSource
from meshfuse.ir.program import Program
from meshfuse.ir.terms import Terms

_NOT_STRETCHED: Final = (AxisKind.broadcast, AxisKind.reduction)

Places = tuple[int | None, ...]
"""For each tensor axis of an operand its place among the result's root (else logical) axes."""


@singledispatch
def axis_pairs(expr: Expr, program: Program) -> Mapping[int, Places]:
    """Operand position -> places, broadcast axes included. Without an entry: maps nowhere."""
    return {}


@axis_pairs.register(Pointwise)
def _(expr: Pointwise, program: Program) -> Mapping[int, Places]:
    if not is_tensor(program, expr.out):
        return {}
    places = _tensor_places(program, TensorName(expr.out))
    return {k: places for k, operand in enumerate(expr.args) if is_tensor(program, operand)}


@axis_pairs.register(Cast)
@axis_pairs.register(Set)
@axis_pairs.register(Expand)
@axis_pairs.register(Reshape)
@axis_pairs.register(Communication)
def _(
    expr: Cast | Set | Expand | Reshape | Communication, program: Program
) -> Mapping[int, Places]:
    return {0: _tensor_places(program, expr.out)}


@axis_pairs.register(Broadcast)
def _(expr: Broadcast, program: Program) -> Mapping[int, Places]:
    kept = zip(_tensor_places(program, expr.out), expr.inserted, strict=True)
    return {0: tuple(place for place, inserted in kept if not inserted)}


@axis_pairs.register(Terms)
def _(expr: Terms, program: Program) -> Mapping[int, Places]:
    return {0: _tensor_places(program, expr.out)[:-1]}


@axis_pairs.register(Permute)
def _(expr: Permute, program: Program) -> Mapping[int, Places]:
    places = _tensor_places(program, expr.out)
    return {0: tuple(places[expr.dims.index(k)] for k in range(len(expr.dims)))}


@axis_pairs.register(Squeeze)
def _(expr: Squeeze, program: Program) -> Mapping[int, Places]:
    kept = iter(_tensor_places(program, expr.out))
    ndim = program.tensor(expr.src).ndim
    return {0: tuple(None if k in expr.dims else next(kept) for k in range(ndim))}


@axis_pairs.register(Reduction)
@axis_pairs.register(Welford)
def _(expr: Reduction | Welford, program: Program) -> Mapping[int, Places]:
    """The result keeps the reduced axes in place."""
    places = tuple(range(program.tensor(expr.src).ndim))
    return dict.fromkeys(range(len(expr.ins)), places)


@axis_pairs.register(MatMul)
def _(expr: MatMul, program: Program) -> Mapping[int, Places]:
    """a [*batch, m, k], b [*batch, k, n] -> [*batch, m, n, k]; batch axes align at the right."""
    a_rank, b_rank = program.tensor(expr.a).ndim, program.tensor(expr.b).ndim
    contracted = len(program.tensor(TensorName(expr.out)).maybe_root) - 1
    batch = max(a_rank - 2, b_rank - 2, 0)
    a_rows = (batch,) if a_rank > 1 else ()
    b_columns = (contracted - 1,) if b_rank > 1 else ()
    return {
        0: (*range(batch - max(a_rank - 2, 0), batch), *a_rows, contracted),
        1: (*range(batch - max(b_rank - 2, 0), batch), contracted, *b_columns),
    }


@axis_pairs.register(Linear)
def _(expr: Linear, program: Program) -> Mapping[int, Places]:
    """src [*batch, k], weight [*d, n, k], bias [*d, n] -> [*d, *batch, n, k]."""
    contracted = len(program.tensor(TensorName(expr.out)).maybe_root) - 1
    leading = max(program.tensor(expr.weight).ndim - 2, 0)
    batch = program.tensor(expr.src).ndim - 1
    columns = (contracted - 1,) if program.tensor(expr.weight).ndim > 1 else ()
    places: dict[int, Places] = {
        0: (*range(leading, leading + batch), contracted),
        1: (*range(leading), *columns, contracted),
    }
    if expr.bias is not None:
        places[2] = (*range(leading), *columns)
    return places


@axis_pairs.register(Slice)
@axis_pairs.register(Pad)
def _(expr: Slice | Pad, program: Program) -> Mapping[int, Places]:
    places = enumerate(_tensor_places(program, expr.out))
    return {0: tuple(place if is_whole(program, expr, k) else None for k, place in places)}


@axis_pairs.register
def _(expr: Cat, program: Program) -> Mapping[int, Places]:
    places = _all_but(_tensor_places(program, expr.out), expr.axis)
    return dict.fromkeys(range(len(expr.args)), places)


@axis_pairs.register(Scan)
@axis_pairs.register(TopK)
def _(expr: Scan | TopK, program: Program) -> Mapping[int, Places]:
    return {0: _all_but(_tensor_places(program, TensorName(expr.outs[0])), expr.axis)}


@axis_pairs.register
def _(expr: Iota, program: Program) -> Mapping[int, Places]:
    """It reads no tensor."""
    return {}


@axis_pairs.register
def _(expr: IndexSelect, program: Program) -> Mapping[int, Places]:
    """src [*a, size, *b], index [*c] -> [*a, *c, *b, size]."""
    indices = range(expr.axis, expr.axis + program.tensor(expr.index).ndim)
    indexed = len(program.tensor(expr.out).maybe_root) - 1
    return {0: (*range(expr.axis), indexed, *range(indices.stop, indexed)), 1: tuple(indices)}


@axis_pairs.register
def _(expr: TakeAlongAxis, program: Program) -> Mapping[int, Places]:
    """src [*a, size, *b], index [*a, n, *b] -> [*a, n, *b, size]."""
    places = tuple(range(program.tensor(expr.index).ndim))
    return {0: (*places[: expr.axis], len(places), *places[expr.axis + 1 :]), 1: places}


@axis_pairs.register(RandomSource)
@axis_pairs.register(Random)
def _(expr: RandomSource | Random, program: Program) -> Mapping[int, Places]:
    """They read no tensor."""
    return {}


@axis_pairs.register(SdpfaFwd)
@axis_pairs.register(SdpfaBwd)
def _(expr: SdpfaFwd | SdpfaBwd, program: Program) -> Mapping[int, Places]:
    """Batch axes and heads; it works along sequences and features."""
    shared = program.tensor(expr.query).ndim - 2
    found: dict[int, Places] = {}
    for position, operand in enumerate(expr.ins):
        rank = program.tensor(TensorName(str(operand))).ndim if is_tensor(program, operand) else 0
        if rank > shared:
            found[position] = (*range(shared), *(None,) * (rank - shared))
        elif is_tensor(program, operand):
            found[position] = (None,) * rank
    return found


def _all_but(places: Places, axis: int) -> Places:
    """`places` without the axis along which an expression works."""
    return (*places[:axis], None, *places[axis + 1 :])


@singledispatch
def output_places(expr: Expr, program: Program, out: TensorName) -> Places:
    """For each root (else logical) axis of `out` its place in the first output, None for none."""
    return tuple(range(len(program.tensor(out).maybe_root)))


@output_places.register(SdpfaFwd)
@output_places.register(SdpfaBwd)
def _(expr: SdpfaFwd | SdpfaBwd, program: Program, out: TensorName) -> Places:
    """Seed and offset are no rows; keys are no queries."""
    rank = len(program.tensor(out).maybe_root)
    shared = program.tensor(expr.query).ndim - 2
    if out == expr.outs[0]:
        return tuple(range(rank))
    if isinstance(expr, SdpfaFwd) and out == expr.logsumexp:
        return tuple(range(shared + 1))
    return (*range(shared), None, None) if rank > shared else (None,) * rank


def operand_axis_map(
    expr: Expr, program: Program, position: int, out: TensorName | None = None
) -> dict[AxisName, AxisName]:
    """Tensor axes of an operand -> root (else logical) axes of `out`, by default the first output.

    A broadcast axis that stretches is left out: each rank has all of it. One that is reduced meets
    others of one place, and stretches over nothing.
    """
    places = axis_pairs(expr, program).get(position)
    if places is None:
        return {}
    source = program.tensor(TensorName(str(expr.ins[position])))
    out = out or TensorName(expr.outs[0])
    own = zip(output_places(expr, program, out), program.tensor(out).maybe_root, strict=True)
    target = {place: axis for place, axis in own if place is not None}
    return {
        axis.name: target[place].name
        for axis, place in zip(source.tensor_axes, places, strict=True)
        if place in target
        and (axis.kind is not AxisKind.broadcast or target[place].kind in _NOT_STRETCHED)
    }


def meeting_extents(program: Program) -> Iterator[tuple[TensorName, IntExpr, IntExpr]]:
    """What must be equal: a tensor, the extent of one of its (root) axes, and an operand's there.

    For an output that goes into an input: that input's, too. For an axis that a squeeze drops: 1.
    For attention: those of operands that meet in no axis of the result.
    """
    for expr in program.fusion.exprs:
        for out in (TensorName(name) for name in expr.outs if name in program.fusion.tensors):
            target = {axis.name: axis.extent for axis in program.tensor(out).maybe_root}
            for position, operand in enumerate(expr.ins):
                if not is_tensor(program, operand):
                    continue
                axes = program.tensor(TensorName(str(operand))).tensor_axes
                extents = {axis.name: axis.extent for axis in axes}
                for axis, image in operand_axis_map(expr, program, position, out).items():
                    yield out, target[image], extents[axis]
        if isinstance(expr, SdpfaFwd | SdpfaBwd):
            yield from attention_extents(program, expr)
        if isinstance(expr, Squeeze):
            for dim in expr.dims:
                yield expr.src, program.tensor(expr.src).tensor_axes[dim].extent, const(1)
    for output in program.fusion.outputs:
        if output.alias is not None:
            have, want = program.tensor(output.tensor), program.tensor(output.alias)
            for ours, theirs in zip(have.tensor_axes, want.tensor_axes, strict=True):
                yield output.tensor, theirs.extent, ours.extent


def element_counts(program: Program) -> Iterator[tuple[TensorName, IntExpr, IntExpr]]:
    """Tensors that are reshaped from others, their numbers of elements, and those of the others."""
    for expr in program.fusion.exprs:
        if isinstance(expr, Reshape):
            definition = program.tensor(expr.out)
            count = mul(const(1), *(axis.extent for axis in definition.logical))
            yield expr.out, count, mul(const(1), *(axis.extent for axis in definition.root))


def _tensor_places(program: Program, out: TensorName) -> tuple[int, ...]:
    axes = enumerate(program.tensor(out).maybe_root)
    return tuple(place for place, axis in axes if axis.kind.is_tensor_axis)
