"""What the compiler did with a program, and why, as one text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from meshfuse.api.overlap_choice import OverlapChoice, choice_lines
from meshfuse.base.trace import Note
from meshfuse.expr import IntExpr, free_symbols
from meshfuse.expr.nodes import Symbol
from meshfuse.facts.sharding import Sharding, describe, describe_axes, sharding_of
from meshfuse.host.nodes import Communicate, ForLoop, HostProgram, all_nodes, loop_around
from meshfuse.host.printer import print_host_program
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import DeviceMesh
from meshfuse.ir.ops import Set
from meshfuse.ir.printer import print_expr
from meshfuse.ir.program import Program
from meshfuse.passes.chunk_tensors import whole_name
from meshfuse.pipeline import Compilation
from meshfuse.segment.segments import Segment

STATEMENT_WIDTH = 44
"""Statements up to this long are padded to one length, so that types and shapes line up."""


def explain_definition(program: Program) -> str:
    """The program before it was compiled."""
    lines = [*_describe_program(program), "", "It has not been executed: nothing is decided yet."]
    return _section("program, as defined", lines)


def explain_compilation(
    compilation: Compilation, choice: OverlapChoice | None = None, calls: Sequence[object] = ()
) -> str:
    """The compiled program: what moves and why, how that overlaps, notes, segments, and what the
    host does. `calls`: lines on those made so far."""
    program, host = compilation.segmented.whole, compilation.host
    reasons = _reasons(program, host, compilation.notes)
    told = {id(note) for note in reasons.values()}
    notes = [str(note) for note in compilation.notes if id(note) not in told]
    return "\n".join(
        (
            _section("program, with what the passes added", _describe_program(program)),
            _section("communications", _describe_communications(host, reasons)),
            *([_section("overlap", list(choice_lines(choice)))] if choice is not None else []),
            *([_section("calls", list(map(str, calls)))] if calls else []),
            _section("notes", notes or ["none: nothing was copied or left undone"]),
            _section("segments", _describe_segments(compilation.segmented.segments, host)),
            _section(_host_title(host), [print_host_program(replace(host, kernels={}))]),
        )
    )


def communications(host: HostProgram) -> tuple[Communicate, ...]:
    """The collectives of a host program, in the order in which they are posted."""
    return tuple(node for node in all_nodes(host.body) if isinstance(node, Communicate))


def _host_title(host: HostProgram) -> str:
    if all(buffer.mesh is None for buffer in host.buffers.values()):
        return "host program"
    return "host program, the same on every rank; buffers have the sizes of one rank"


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"-- {title} --", *lines, ""])


# The program.


def _describe_program(program: Program) -> list[str]:
    """What symbols mean, then inputs, expressions and outputs, each with type and shape.

    T1 = neg(T0)        f32 [mesh_x{2} 3, 8]
    """
    fusion, mesh = program.fusion, _only_mesh(program)
    lines = [
        *_describe_names(program),
        *_describe_symbols(program),
        *_describe_mesh(program, mesh),
        "",
    ]
    rows = [(f"{name} is an input", (name,)) for name in fusion.inputs]
    rows += [(print_expr(expr), expr.outs) for expr in fusion.exprs]
    lengths = (len(text) for text, _ in rows)
    width = max((length for length in lengths if length <= STATEMENT_WIDTH), default=0)
    for text, names in rows:
        lines.append(f"{text:{width}}  {_type_and_shape(program, names, mesh)}".rstrip())
    for output in fusion.outputs:
        alias = "" if output.alias is None else f", written into {output.alias} and not returned"
        lines.append(f"{output.tensor} is an output{alias}")
    return lines


def _describe_names(program: Program) -> Iterator[str]:
    """How the names here and those of the user's definition belong together."""
    name = next(iter(program.fusion.tensors), None)
    if name is not None:
        yield (
            f"{name} is {name.replace('T', 'tv')} of the definition, and so on; "
            "tensors that it does not name are the compiler's"
        )


def _describe_symbols(program: Program) -> Iterator[str]:
    """Which axis of an input each symbol measures, said once a symbol."""
    seen: set[Symbol] = set()
    has_mesh = any(schedule.mesh is not None for schedule in program.schedules.values())
    everywhere = ", all ranks together" if has_mesh else ""
    for name in program.fusion.inputs:
        if name not in program.fusion.tensors:
            continue
        for place, axis in enumerate(program.tensor(TensorName(name)).tensor_axes):
            if isinstance(axis.extent, Symbol) and axis.extent not in seen:
                seen.add(axis.extent)
                yield f"{axis.extent} is the size of axis {place} of {name}{everywhere}"


def _describe_mesh(program: Program, mesh: DeviceMesh | None) -> Iterator[str]:
    """Where everything lies, and how to read a sharded axis if there is one."""
    if mesh is not None:
        yield f"every tensor lies on {mesh}"
    owners = (
        digit
        for name in program.fusion.tensors
        for digits in sharding_of(program, name).axes
        for digit in digits
        if digit.owner is not None
    )
    digit = next(owners, None)
    if digit is not None:
        yield (
            f"{digit.owner}{{{digit.extent}}} n is an axis in {digit.extent} blocks of size n, "
            f"one for each place on {digit.owner}"
        )


def _only_mesh(program: Program) -> DeviceMesh | None:
    """The mesh that all tensors lie on; None if there are several, or none."""
    tensors = program.fusion.tensors
    meshes = {program.schedule(name).mesh for name in tensors if not program.tensor(name).is_cpu}
    return next(iter(meshes)) if len(meshes) == 1 else None


def _type_and_shape(program: Program, names: Iterable[str], mesh: DeviceMesh | None) -> str:
    """Of the first tensor among `names`, whose siblings are alike; the mesh unless it is `mesh`."""
    tensor = next((TensorName(name) for name in names if name in program.fusion.tensors), None)
    if tensor is None:
        return ""
    sharding = sharding_of(program, tensor)
    return f"{program.tensor(tensor).dtype.value} {_place(sharding, mesh)}"


def _place(sharding: Sharding, mesh: DeviceMesh | None) -> str:
    return (describe_axes if sharding.mesh in (None, mesh) else describe)(sharding)


# What moves, and why.


def _reasons(program: Program, host: HostProgram, notes: Sequence[Note]) -> dict[int, Note]:
    """The note that says why each collective exists, by the collective's number.

    A note names the tensor that the program had before a layout copy came behind the collective.
    """
    copies = {expr.src: expr.out for expr in program.fusion.exprs if isinstance(expr, Set)}
    found: dict[int, Note] = {}
    for node in communications(host):
        out = whole_name(node.out)
        subjects = (out, copies.get(out))
        for note in notes:
            if note.kind == node.collective.value and note.subject in subjects:
                found.setdefault(node.number, note)
    return found


def _describe_communications(host: HostProgram, reasons: dict[int, Note]) -> list[str]:
    """A paragraph each: what, over which ranks, from where to where, how much, and for what."""
    lines: list[str] = []
    for node in communications(host):
        note = reasons.get(node.number)
        have, want = host.buffers[node.src].sharding, host.buffers[node.out].sharding
        assert have is not None and want is not None
        loop = loop_around(host.body, node)
        times, in_all = ("", "") if loop is None else (f", {_times(loop)} times", " in all")
        received = f"; each rank receives {note.bytes}{in_all}" if note and note.bytes else ""
        lines += [
            f"{node.number}: {node.collective.value} {_between(node)}{times}",
            f"   from  {node.src} {describe_axes(have)}",
            f"   to    {node.out} {describe_axes(want)}",
            f"   size  {node.src} is {node.bytes} bytes on each rank{received}",
            f"   for   {node.cause}",
        ]
        lines += [f"   why   {note.reason}"] if note else []
    return lines or ["none: every rank has what it needs"]


def _times(loop: ForLoop) -> IntExpr | int:
    """How often a loop runs; of one that iterations around it choose, in the one that has most."""
    chosen = [found.high is not None for found in free_symbols(loop.count)]
    return loop.count.high if chosen and all(chosen) and loop.count.high else loop.count


def _between(node: Communicate) -> str:
    if node.mesh_axis is not None:
        return f"over {node.mesh_axis} of {node.mesh}"
    return f"on {node.mesh}" if node.to_mesh is None else f"from {node.mesh} to {node.to_mesh}"


def _describe_segments(segments: Sequence[Segment], host: HostProgram) -> list[str]:
    lines: list[str] = []
    for segment in segments:
        fusion = segment.program.fusion
        names = ", ".join(output.tensor for output in fusion.outputs)
        count = len(fusion.exprs)
        lines.append(
            f"{segment.name}: {segment.scheduler}: {count} op{'s' * (count != 1)} "
            f"{_runner(segment, host)} giving {names}"
        )
        lines += [f"    not taken by {refusal}" for refusal in segment.refusals]
    return lines


def _runner(segment: Segment, host: HostProgram) -> str:
    if segment.name in host.kernels:
        return "in one kernel"
    if segment.scheduler != "communication":
        return "through torch"
    moved = {node.out for node in communications(host)}
    moves = any(output.tensor in moved for output in segment.program.fusion.outputs)
    return "between ranks" if moves else "on this rank, as a view"
