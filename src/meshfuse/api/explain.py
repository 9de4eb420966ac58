"""What the compiler did with a program, and why, as one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from meshfuse.facts.sharding import describe, sharding_of
from meshfuse.host.nodes import Communicate, HostProgram
from meshfuse.host.printer import print_host_program
from meshfuse.ir.axes import TensorName
from meshfuse.ir.printer import print_expr, print_program
from meshfuse.ir.program import Program
from meshfuse.segment.segments import Segment

if TYPE_CHECKING:
    from meshfuse.pipeline import Compilation


def explain_definition(program: Program) -> str:
    """The program before it was compiled."""
    return _section(
        "program, as defined",
        [print_program(program), "", "It has not been executed: nothing is decided yet."],
    )


def explain_compilation(compilation: Compilation) -> str:
    """The compiled program: what moves and why, notes, segments, and what the host does."""
    notes = [str(note) for note in compilation.notes]
    return "\n".join(
        (
            _section("program, with what the passes added", _describe_program(compilation)),
            _section("communications", _describe_communications(compilation.host)),
            _section("notes", notes or ["none: nothing was gathered, copied or left undone"]),
            _section("segments", _describe_segments(compilation.segmented.segments)),
            _section("host program, the same on every rank", [_print_host(compilation.host)]),
        )
    )


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"-- {title} --", *lines, ""])


def _describe_program(compilation: Compilation) -> list[str]:
    """Inputs and expressions, each with type and placement: `T1 = neg(T0)  | f32 [2, 3] on ...`."""
    program = compilation.segmented.program
    fusion = program.fusion
    lines = [f"{name} is an input{_placement(program, [name])}" for name in fusion.inputs]
    lines += [f"{print_expr(expr)}{_placement(program, expr.outs)}" for expr in fusion.exprs]
    for output in fusion.outputs:
        alias = "" if output.alias is None else f", written into {output.alias} and not returned"
        lines.append(f"{output.tensor} is an output{alias}")
    return lines


def _placement(program: Program, names: Sequence[str]) -> str:
    """Type and sharding of the first tensor among `names`; its siblings are alike."""
    tensors = [TensorName(name) for name in names if name in program.fusion.tensors]
    if not tensors:
        return ""
    dtype = program.tensor(tensors[0]).dtype.value
    return f"  | {dtype} {describe(sharding_of(program, tensors[0]))}"


def _print_host(host: HostProgram) -> str:
    """The host program without its kernels' text."""
    return print_host_program(replace(host, kernels={}))


def communications(host: HostProgram) -> tuple[Communicate, ...]:
    """The collectives of a host program, in the order in which they are posted."""
    return tuple(node for node in host.body if isinstance(node, Communicate))


def _describe_communications(host: HostProgram) -> list[str]:
    """One line each: what, from where to where, over which ranks, how much, and for what."""
    lines = [
        f"{node.number}: {node.collective.value} of {node.src} into {node.out} along "
        f"{node.mesh_axis} of {node.mesh}: {node.bytes} bytes a rank, because of {node.cause}"
        for node in communications(host)
    ]
    return lines or ["none: every rank has what it needs"]


def _describe_segments(segments: Sequence[Segment]) -> list[str]:
    lines: list[str] = []
    for segment in segments:
        fusion = segment.program.fusion
        names = ", ".join(output.tensor for output in fusion.outputs)
        count = len(fusion.exprs)
        lines.append(
            f"{segment.name}: {segment.scheduler}: {count} op{'s' * (count != 1)} giving {names}"
        )
        lines += [f"    not taken by {refusal}" for refusal in segment.refusals]
    return lines
