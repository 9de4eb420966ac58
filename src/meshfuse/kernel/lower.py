"""Lower a scheduled Program on local shapes to one kernel, whatever wrote the schedule.

A kernel computes a list of anchors: its reductions, and the stores of its outputs. Each has the
loop nest of its own tensor; everything else is made where an anchor needs it (values.py). Anchors
share a loop wherever the next loop of both has one extent and neither waits for the other's
reduction over it (loops.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshfuse.base.errors import Unsupported
from meshfuse.expr import IntExpr, free_symbols
from meshfuse.facts.facts import Facts, facts_of, tensor_operands
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.ops import Reduction, Welford
from meshfuse.ir.program import Program
from meshfuse.kernel.blocks import BodyBuilder
from meshfuse.kernel.buffers import buffer_of
from meshfuse.kernel.frame import Frame, frame_of
from meshfuse.kernel.loops import Anchor, LoopEmitter, emit_anchors
from meshfuse.kernel.nests import Nest, nest_of
from meshfuse.kernel.nodes import Kernel, ScalarParameter, ValueName
from meshfuse.kernel.sizes import declare_sizes
from meshfuse.kernel.values import Emitter


def lower(program: Program, name: str) -> Kernel:
    """The kernel that computes the outputs of a localized program by its schedules.

    Inputs that are not read are no arguments. Raises ScheduleError for a schedule that is no legal
    form, and Unsupported for an output that is an input: no kernel makes that.
    """
    facts = facts_of(program)
    outputs = tuple(dict.fromkeys(output.tensor for output in program.fusion.outputs))
    for output in outputs:
        if output not in facts.definitions:
            raise Unsupported(f"kernel {name}: output {output} is an input; pass it on instead")
    anchors = _anchors(program, facts, outputs)
    taken = _symbols_of(program)
    frame = frame_of([anchor.nest for anchor in anchors], taken)
    values = Emitter(program, facts, BodyBuilder(taken))
    emit_anchors(LoopEmitter(values, frame), anchors, (), {})
    return declare_sizes(_kernel(program, name, values, frame, outputs))


def nests_in(program: Program) -> tuple[Nest, ...]:
    """The loop nests that the kernel of a localized program is made of, of reductions and stores.

    Raises ScheduleError for one that is no legal form.
    """
    outputs = tuple(dict.fromkeys(output.tensor for output in program.fusion.outputs))
    return tuple(anchor.nest for anchor in _anchors(program, facts_of(program), outputs))


def _kernel(
    program: Program, name: str, values: Emitter, frame: Frame, outputs: Sequence[TensorName]
) -> Kernel:
    """Everything but the sizes."""
    inputs = program.fusion.inputs
    read = [TensorName(given) for given in inputs if given in values.loaded]
    scalars = [ScalarName(given) for given in inputs if given in values.scalars]
    return Kernel(
        name,
        buffers=(
            *(buffer_of(program, tensor, written=False) for tensor in read),
            *(buffer_of(program, tensor, written=True) for tensor in outputs),
        ),
        scalars=tuple(
            ScalarParameter(ValueName(scalar), program.fusion.scalars[scalar].dtype)
            for scalar in scalars
        ),
        sizes=(),
        grid=tuple(frame.grid.values()),
        tiles=tuple(frame.tiles.values()),
        body=values.body.close(),
    )


def _anchors(program: Program, facts: Facts, outputs: Sequence[TensorName]) -> list[Anchor]:
    """The reductions that outputs need, in program order, then the stores."""
    needed = _needed_reductions(program, facts, outputs)
    number_of = {out: k for k, expr in enumerate(needed) for out in expr.outs}
    anchors = [
        Anchor(
            number,
            nest_of(program, expr.outs[0], reducing=True),
            expr,
            frozenset(
                number_of[t]
                for t in reductions_behind(program, facts, tensor_operands(program, expr))
            ),
        )
        for number, expr in enumerate(needed)
    ]
    for number, output in enumerate(outputs, start=len(needed)):
        waits = frozenset(number_of[t] for t in reductions_behind(program, facts, [output]))
        anchors.append(Anchor(number, nest_of(program, output, reducing=False), None, waits))
    return anchors


def _needed_reductions(
    program: Program, facts: Facts, outputs: Sequence[TensorName]
) -> list[Reduction | Welford]:
    needed: set[TensorName] = set()
    pending = list(reductions_behind(program, facts, outputs))
    while pending:
        tensor = pending.pop()
        if tensor in needed:
            continue
        expr = facts.definitions[tensor]
        needed.update(TensorName(out) for out in expr.outs)
        pending += reductions_behind(program, facts, tensor_operands(program, expr))
    return [
        expr
        for expr in program.fusion.exprs
        if isinstance(expr, Reduction | Welford) and expr.outs[0] in needed
    ]


def reductions_behind(
    program: Program, facts: Facts, tensors: Sequence[TensorName]
) -> Iterator[TensorName]:
    """The reduction results that `tensors` are made of, not looking behind reductions."""
    seen: set[TensorName] = set()
    pending = list(tensors)
    while pending:
        tensor = pending.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        expr = facts.definitions.get(tensor)
        if isinstance(expr, Reduction | Welford):
            yield tensor
        elif expr is not None:
            pending += tensor_operands(program, expr)


def _symbols_of(program: Program) -> frozenset[str]:
    """All size symbols of a program: no axis of the kernel may have their names."""
    expressions: list[IntExpr] = []
    for tensor in program.fusion.tensors:
        expressions += (axis.extent for axis in program.all_axes(tensor).values())
    for expr in program.fusion.exprs:
        expressions += (operand for operand in expr.ins if isinstance(operand, IntExpr))
    return frozenset(found.name for e in expressions for found in free_symbols(e))
