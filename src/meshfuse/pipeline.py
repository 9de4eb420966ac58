"""The map: how a program becomes a host program. Read this file first.

    Program -> passes -> segments -> per kernel: local program -> schedule -> Kernel -> text
                                  -> HostProgram

Everything here is a function of its arguments. cache.py calls it once per program and signature,
and host/load.py makes what it returns run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from meshfuse.base import optional
from meshfuse.base.errors import Unsupported
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.options import NO_OPTIONS, Options
from meshfuse.base.trace import Note
from meshfuse.codegen.cpp import print_cpp
from meshfuse.codegen.source import KernelSource
from meshfuse.facts.overlap_form import PLAIN, Overlap
from meshfuse.facts.refusal import Refusal
from meshfuse.facts.views import is_in_place
from meshfuse.host.dispatch import executor_class
from meshfuse.host.loops import chunk_program, form_loops
from meshfuse.host.lower import HostLowering, lower_to_host
from meshfuse.host.lower_segments import LoweredKernel
from meshfuse.host.nodes import HostProgram, KernelName
from meshfuse.host.one_segment import lower_scheduled
from meshfuse.host.verify import verify_host_program
from meshfuse.ir.program import Program
from meshfuse.ir.verify import verify
from meshfuse.kernel.localize import localize
from meshfuse.kernel.lower import lower
from meshfuse.kernel.nodes import IndexName
from meshfuse.kernel.outline import outline
from meshfuse.kernel.verify import verify_kernel
from meshfuse.passes.join_reductions import join_reductions
from meshfuse.passes.overlap import BOUND, binds
from meshfuse.passes.pipeline import (
    BEFORE_USER_SCHEDULE,
    overlap_notes,
    passes_for,
    run_passes,
)
from meshfuse.passes.place_locally import place_locally
from meshfuse.runtime.arguments import Signature
from meshfuse.runtime.executors import KernelExecutor
from meshfuse.runtime.layouts import refine_layouts
from meshfuse.schedulers.registry import accepts, refusals_of, schedule
from meshfuse.segment.segment import Answer, segment
from meshfuse.segment.segments import Segment, SegmentedProgram

USER = "user"
"""The scheduler of a program that its user scheduled as one kernel."""


@final
@frozen_dataclass
class Compilation:
    """What compiling gives: the host program, the text of its kernels, and the record of how.

    `scheduled` has the local program of each kernel with the loops that were lowered.
    """

    lowering: HostLowering
    sources: Mapping[KernelName, KernelSource]
    segmented: SegmentedProgram
    notes: tuple[Note, ...]
    scheduled: Mapping[KernelName, Program]

    @property
    def host(self) -> HostProgram:
        return self.lowering.program

    @property
    def schedulers(self) -> dict[KernelName, str]:
        """Who scheduled each kernel: kernels are named like their segments."""
        return {KernelName(part.name): part.scheduler for part in self.segmented.segments}


def compile(
    program: Program,
    signature: Signature,
    *,
    kernels: bool = True,
    options: Options = NO_OPTIONS,
    form: Overlap = PLAIN,
) -> Compilation:
    """Compile a program for arguments of a signature, in a form of overlap.

    Without `kernels` (for a device or machine that has no compiler) every segment runs op by op.
    Raises UserError for a schedule that contradicts itself, Unsupported for a legal program that is
    beyond this version, naming tensor and stage.
    """
    prepared, notes = run_passes(program, passes_for(form, options))
    segmented = form_loops(segment(prepared, _accepts_locally))
    return _compile_segments(segmented, notes, signature, kernels, options)


def outline_program(
    program: Program, form: Overlap = PLAIN, options: Options = NO_OPTIONS
) -> Compilation:
    """As `compile`, but no kernel is scheduled or lowered: each has its arguments and no body.

    For planning: what moves and what is allocated is all there. Raises as `compile`.
    """
    prepared, notes = run_passes(program, passes_for(form))
    segmented = form_loops(segment(prepared, _accepts_locally))
    kernels = {
        part.name: LoweredKernel(outline(part.program, part.name), {})
        for part in segmented.segments
        if executor_class(part.scheduler) is KernelExecutor
    }
    lowering = _verified(lower_to_host(segmented, kernels, options), options)
    return Compilation(lowering, {}, segmented, notes, {})


def forms_of(
    program: Program, candidates: Sequence[Overlap]
) -> tuple[tuple[Overlap, ...], tuple[Note, ...]]:
    """Those of `candidates` that make something else of a program than its plain form, and notes
    on what they could not do. Raises as `compile`."""
    found: list[Overlap] = []
    notes: list[Note] = []
    for form, said in overlap_notes(program, candidates):
        if binds(said):
            found.append(form)
        notes += (note for note in said if note.kind != BOUND)
    return tuple(found), tuple(dict.fromkeys(notes))


def compile_segment(
    program: Program,
    scheduler: str,
    signature: Signature,
    *,
    kernels: bool = True,
    options: Options = NO_OPTIONS,
) -> Compilation:
    """Compile one segment of a program by itself; `scheduler` has taken it. Raises as `compile`."""
    segmented = SegmentedProgram(program, (Segment("S0", program, scheduler),))
    return _compile_segments(segmented, (), signature, kernels, options)


def _compile_segments(
    segmented: SegmentedProgram,
    notes: tuple[Note, ...],
    signature: Signature,
    kernels: bool,
    options: Options,
) -> Compilation:
    lowered: dict[str, LoweredKernel] = {}
    sources: dict[KernelName, KernelSource] = {}
    loops: dict[KernelName, Program] = {}
    for part in segmented.segments:
        if executor_class(part.scheduler) is not KernelExecutor:
            notes += _explain_fallback(part)
            continue
        if not kernels:
            notes += (_op_by_op(part, "there is no compiler for this device"),)
            continue
        scheduled, kernel = _lower_segment(segmented.program, part, signature)
        loops[KernelName(part.name)] = scheduled
        lowered[part.name] = kernel
        sources[KernelName(part.name)] = print_cpp(kernel.kernel)
    lowering = _verified(lower_to_host(segmented, lowered, options), options)
    return Compilation(lowering, sources, segmented, notes, loops)


def _verified(lowering: HostLowering, options: Options) -> HostLowering:
    """The lowering itself. Raises InvariantError for a program that no stage may make."""
    verify_host_program(lowering.program)
    if options.is_enabled("check_host_program"):  # who does not ask for it does not import it
        optional.load("meshfuse.host.check").require_sound(lowering.program)
    return lowering


def prepare_for_schedule(program: Program) -> Program:
    """The program that a user schedules as one kernel."""
    return run_passes(program, BEFORE_USER_SCHEDULE)[0]


def compile_scheduled(
    program: Program,
    signature: Signature,
    *,
    kernels: bool = True,
    options: Options = NO_OPTIONS,
) -> Compilation:
    """Compile a program as one kernel, by the schedule that its user wrote.

    Raises ScheduleError for a schedule that is no legal form, Unsupported for an operation that
    kernels do not have, UserError for a tensor of which other ranks hold a part. Without `kernels`
    it runs op by op, and the schedule changes nothing.
    """
    verify(program)
    refusal = KernelExecutor.supports(program)
    if refusal is not None:
        raise Unsupported(f"a program with a schedule of its user's is one kernel: {refusal}")
    program = place_locally(program if kernels else join_reductions(program)[0])
    part = Segment("S0", program, USER)
    segmented = SegmentedProgram(program, (part,))
    if not kernels:
        notes = (_op_by_op(part, "there is no compiler for this device"),)
        lowering = _verified(lower_to_host(segmented, {}), options)
        return Compilation(lowering, {}, segmented, notes, {})
    lowered = lower_scheduled(program, part.name, signature)
    lowering = _verified(lower_to_host(segmented, {part.name: lowered}), options)
    sources = {KernelName(part.name): print_cpp(lowered.kernel)}
    return Compilation(lowering, sources, segmented, (), {KernelName(part.name): program})


def _lower_segment(
    whole: Program, part: Segment, signature: Signature
) -> tuple[Program, LoweredKernel]:
    """One segment on local shapes (law 1), scheduled, and the kernel of that."""
    refined = refine_layouts(part.program, whole.fusion.inputs, signature)
    local = localize(refined)
    scheduled, _ = schedule(local.program, part.scheduler)
    kernel = lower(scheduled, part.name)
    verify_kernel(kernel)
    sizes = {IndexName(name): size for name, size in local.sizes.items()}
    return scheduled, LoweredKernel(kernel, sizes)


def _accepts_locally(program: Program) -> Answer:
    """The scheduler that takes the local form of a program, or the refusals of all."""
    try:
        return accepts(localize(chunk_program(program)).program)
    except Unsupported as error:
        return (Refusal("localize", str(error).removeprefix("localize: ")),)


def _explain_fallback(part: Segment) -> tuple[Note, ...]:
    """Why ops that a kernel could hold run through torch; nothing for others and for views."""
    if KernelExecutor.supports(part.program) is not None:
        return ()
    if all(is_in_place(part.program, expr) for expr in part.program.fusion.exprs):
        return ()
    refusals = part.refusals or refusals_of(localize(part.program).program)
    return (_op_by_op(part, "; ".join(map(str, refusals))),)


def _op_by_op(part: Segment, reason: str) -> Note:
    names = ", ".join(output.tensor for output in part.program.fusion.outputs)
    return Note("pipeline", names, "op_by_op", f"runs op by op through torch: {reason}")
