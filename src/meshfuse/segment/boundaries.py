"""What may stand in a segment together, and what one kernel for two expressions saves."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from itertools import pairwise

from meshfuse.facts.facts import Facts, tensor_operands, tensor_outputs
from meshfuse.facts.nominal import nominal_bytes
from meshfuse.facts.shared_loops import continues_loop, loops_of, share_loops
from meshfuse.facts.streams import has_streams
from meshfuse.facts.views import views_of_inputs
from meshfuse.ir.axes import TensorName
from meshfuse.ir.comm import Communication
from meshfuse.ir.mesh import DeviceMesh
from meshfuse.ir.ops import Expr, LibraryExpr
from meshfuse.ir.program import Program
from meshfuse.segment.merge import Edge, Preference


def standing_alone(program: Program) -> frozenset[int]:
    """Positions of the expressions that are segments of their own, for membership tests.

    Communications, what a library runs, and views of inputs that are returned.
    """
    views = views_of_inputs(program)
    return frozenset(
        position
        for position, expr in enumerate(program.fusion.exprs)
        if isinstance(expr, Communication | LibraryExpr) or not views.isdisjoint(expr.outs)
    )


def mesh_of(program: Program, expr: Expr) -> DeviceMesh | None:
    """The mesh that `expr` runs on: that of its first output."""
    return program.schedule(tensor_outputs(program, expr)[0]).mesh


def tensor_positions(program: Program) -> dict[TensorName, int]:
    """For each defined tensor, the position of its expression in the program."""
    return {
        tensor: position
        for position, expr in enumerate(program.fusion.exprs)
        for tensor in tensor_outputs(program, expr)
    }


def predecessors_of(program: Program) -> dict[int, tuple[int, ...]]:
    """Position -> positions it reads tensors from, for the expressions that define tensors."""
    defined = tensor_positions(program)
    return {
        position: tuple(
            dict.fromkeys(defined[t] for t in tensor_operands(program, expr) if t in defined)
        )
        for position, expr in enumerate(program.fusion.exprs)
        if tensor_outputs(program, expr)
    }


def loops_allow(program: Program) -> Callable[[tuple[int, ...]], bool]:
    """Whether expressions, by position, may be one kernel inside the same host loops."""
    exprs = program.fusion.exprs
    if not has_streams(program):
        return lambda members: True
    return lambda members: share_loops(program, [exprs[position] for position in members])


def keeping_loops(program: Program) -> Preference | None:
    """The order that leaves few loops: what goes on with the last one, then what is in none.

    None where there are no loops.
    """
    if not has_streams(program):
        return None
    exprs = program.fusion.exprs

    def exprs_of(members: tuple[int, ...]) -> list[Expr]:
        return [exprs[position] for position in members]

    def lateness(ordered: Sequence[tuple[int, ...]], members: tuple[int, ...]) -> int:
        own = exprs_of(members)
        if not loops_of(program, own[0]):
            return 1
        last: list[Expr] = []
        for before in reversed(ordered):
            loop = exprs_of(before)
            is_looped = bool(loops_of(program, loop[0]))
            if not is_looped or (last and not continues_loop(program, loop, last)):
                break
            last = [*loop, *last]
        return 0 if last and continues_loop(program, last, own) else 2

    return lateness


def merge_edges(program: Program, facts: Facts, alone: Container[int]) -> tuple[Edge, ...]:
    """Pairs that share a tensor: its definition with each reader, and each reader with the next.

    Only of expressions that may share a segment: none that stands `alone`, both on one mesh.
    """
    positions = {id(expr): position for position, expr in enumerate(program.fusion.exprs)}
    edges: list[Edge] = []
    for tensor in program.fusion.tensors:
        uses = facts.uses.get(tensor, ())
        readers = [expr for expr in uses if positions[id(expr)] not in alone]
        definition = facts.definitions.get(tensor)
        if definition is not None and positions[id(definition)] in alone:
            definition = None
        if not readers:
            continue
        saved = nominal_bytes(program, tensor)
        for first, second in _pairs(definition, readers):
            if mesh_of(program, first) == mesh_of(program, second):
                edges.append(Edge(positions[id(first)], positions[id(second)], saved))
    return tuple(edges)


def _pairs(definition: Expr | None, readers: list[Expr]) -> Iterator[tuple[Expr, Expr]]:
    if definition is not None:
        for reader in readers:
            yield definition, reader
    yield from pairwise(readers)
