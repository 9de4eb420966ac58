"""Which expressions are in which host loops, and which of them can be in one together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from meshfuse.facts.axis_map import operand_axis_map
from meshfuse.facts.facts import tensor_outputs
from meshfuse.facts.peers import delivered_stream, span_read
from meshfuse.facts.streams import Stream, streams_of
from meshfuse.ir.axes import AxisName, TensorName
from meshfuse.ir.comm import Communication, Deliver
from meshfuse.ir.infer import is_tensor
from meshfuse.ir.ops import Expr
from meshfuse.ir.program import Program


def loops_of(program: Program, expr: Expr) -> tuple[Stream, ...]:
    """The host loops of an expression: those of its output, inside of the one whose chunks it
    delivers."""
    delivered = delivered_stream(program, expr)
    outs = tensor_outputs(program, expr)
    loops = streams_of(program, outs[0]) if outs else ()
    return (delivered, *loops) if isinstance(delivered, Stream) else loops


def carried_to(
    program: Program, expr: Expr, position: int, out: TensorName, axis: AxisName
) -> AxisName | None:
    """The axis of an operand that becomes `axis` of `out`."""
    pairs = operand_axis_map(expr, program, position, out).items()
    return next((name for name, image in pairs if image == axis), None)


def cut_operand(
    program: Program, expr: Expr, position: int, out: TensorName, stream: Stream
) -> AxisName | None:
    """The axis of an operand of which an iteration of `stream` reads a chunk; None where it reads
    all of it."""
    delivered = delivered_stream(program, expr)
    if isinstance(delivered, Stream) and stream.is_reduced:
        return delivered.axis
    axis = carried_to(program, expr, position, out, stream.axis)
    if axis is not None and isinstance(expr, Communication):
        return axis if span_read(program, expr, stream) is not None else None
    return axis


def share_loop(program: Program, exprs: Sequence[Expr], depth: int = 0) -> bool:
    """Whether expressions can be in one loop, `depth` loops further in: each chunk needs of what
    they make the same chunk alone."""
    loops = [loops_of(program, expr)[depth : depth + 1] for expr in exprs]
    if not any(loops):
        return True
    if not all(loops):
        return False
    if not _are_alike(program, exprs, [own for (own,) in loops]):
        return False
    made = {
        out: own.axis if own is not None and not own.is_reduced else None
        for expr in exprs
        for out, own in _results(program, expr, depth)
    }
    for expr, (own,) in zip(exprs, loops, strict=True):
        out = tensor_outputs(program, expr)[0]
        for position, operand in enumerate(expr.ins):
            if operand not in made or not is_tensor(program, operand):
                continue
            carried = cut_operand(program, expr, position, out, own)
            if carried is None or carried != made[TensorName(str(operand))]:
                return False
    return True


def _are_alike(program: Program, exprs: Sequence[Expr], loops: Sequence[Stream]) -> bool:
    """Whether loops have the same chunks: behind what delivers pieces of a block, those pieces of
    each rank's block."""
    spans, rotation = [loops[0].span], loops[0].rotation
    for expr, own in zip(exprs, loops, strict=True):
        if isinstance(expr, Deliver) and span_read(program, expr, own) in spans:
            spans.append(own.span)
        if own.span not in spans or own.rotation != rotation:
            return False
    return True


def _results(
    program: Program, expr: Expr, depth: int = 0
) -> Iterator[tuple[TensorName, Stream | None]]:
    """The results of an expression with their loops, `depth` loops further in: None for one that
    has no such axis."""
    first, *others = tensor_outputs(program, expr)
    yield first, next(iter(loops_of(program, expr)[depth:]), None)
    for out in others:
        yield out, next(iter(streams_of(program, out)[depth:]), None)


def share_loops(program: Program, exprs: Sequence[Expr]) -> bool:
    """Whether expressions have the same loops and can be in them together."""
    depths = {len(loops_of(program, expr)) for expr in exprs}
    return len(depths) <= 1 and all(
        share_loop(program, exprs, depth) for depth in range(max(depths, default=0))
    )


def continues_loop(program: Program, before: Sequence[Expr], exprs: Sequence[Expr]) -> bool:
    """Whether `exprs` can be in the outermost loop of those before them, and have a chunk in
    common."""
    if not loops_of(program, exprs[0]) or not share_loop(program, [*before, *exprs]):
        return False
    return not _chunks_touched(program, before).isdisjoint(_chunks_touched(program, exprs))


def _chunks_touched(program: Program, exprs: Iterable[Expr]) -> set[tuple[TensorName, AxisName]]:
    """Tensors of which expressions make or read chunks, each with the axis along which."""
    found: set[tuple[TensorName, AxisName]] = set()
    for expr in exprs:
        out = tensor_outputs(program, expr)[0]
        own = loops_of(program, expr)[0]
        found.update((name, loop.axis) for name, loop in _results(program, expr) if loop)
        for position, operand in enumerate(expr.ins):
            if is_tensor(program, operand):
                carried = cut_operand(program, expr, position, out, own)
                if carried is not None:
                    found.add((TensorName(str(operand)), carried))
    return found
