"""What MESHFUSE_DUMP prints of a call, and of the program that was compiled for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from meshfuse.base.options import Options
from meshfuse.codegen.cpp import PRELUDE
from meshfuse.codegen.source import KernelSource
from meshfuse.host.nodes import Node
from meshfuse.host.printer import print_host_program, print_node
from meshfuse.ir.printer import print_program
from meshfuse.ir.program import Program
from meshfuse.kernel.printer import print_kernel
from meshfuse.pipeline import Compilation

Dump = Callable[[Program, Compilation], str]
"""The text of an option, from the program as defined and what became of it."""


def _original(program: Program, compilation: Compilation) -> str:
    return print_program(program)


def _presegmented(program: Program, compilation: Compilation) -> str:
    return print_program(compilation.segmented.whole)


def _segments(program: Program, compilation: Compilation) -> str:
    return "\n\n".join(
        f"{part.name}: {part.scheduler}\n{print_program(part.program)}"
        for part in compilation.segmented.segments
    )


def kernel_text(compilation: Compilation, has_prelude: bool) -> str:
    """The source of all kernels, with or without the functions that each begins with."""

    def text(source: KernelSource) -> str:
        return source.text if has_prelude else source.text.removeprefix(f"{PRELUDE}\n")

    return "\n\n".join(map(text, compilation.sources.values()))


def scheduled_text(compilation: Compilation, has_kernels: bool) -> str:
    """The scheduled local program of each kernel, and with `has_kernels` its tile program."""
    parts: list[str] = []
    for name, program in compilation.scheduled.items():
        parts.append(f"{name}:\n{print_program(program)}")
        if has_kernels:
            parts.append(print_kernel(compilation.sources[name].kernel))
    return "\n\n".join(parts)


def _scheduled(program: Program, compilation: Compilation) -> str:
    return scheduled_text(compilation, has_kernels=False)


def _kernels(program: Program, compilation: Compilation) -> str:
    return "\n\n".join(print_kernel(source.kernel) for source in compilation.sources.values())


def _sources(program: Program, compilation: Compilation) -> str:
    return kernel_text(compilation, has_prelude=False)


def _whole_sources(program: Program, compilation: Compilation) -> str:
    return kernel_text(compilation, has_prelude=True)


def _host_program(program: Program, compilation: Compilation) -> str:
    return print_host_program(replace(compilation.host, kernels={}))


def _host_lowering(program: Program, compilation: Compilation) -> str:
    """The nodes behind each step that changed any."""
    parts: list[str] = []
    before: tuple[Node, ...] | None = None
    for step in compilation.lowering.steps:
        if step.body != before:
            parts += [f"{step.name}:", *map(print_node, step.body), ""]
        before = step.body
    return "\n".join(parts)


def _notes(program: Program, compilation: Compilation) -> str:
    return "\n".join(map(str, compilation.notes))


def _refusals(program: Program, compilation: Compilation) -> str:
    return "\n".join(
        f"{part.name}: {refusal}"
        for part in compilation.segmented.segments
        for refusal in part.refusals
    )


DUMPS: dict[str, Dump] = {
    "fusion_ir_original": _original,
    "fusion_ir_preseg": _presegmented,
    "transform_propagator": _notes,
    "segmented_fusion": _segments,
    "segmenter_logging": _refusals,
    "fusion_ir_presched": _segments,
    "fusion_ir": _scheduled,
    "kernel_ir": _kernels,
    "cuda_kernel": _sources,
    "cuda_full": _whole_sources,
    "host_ir_lowering": _host_lowering,
    "host_ir": _host_program,
}
"""The dump options that mean something here, in the order of compiling; `communication` comes last.
The others print nothing.

`cuda_kernel` is the kernels' C++, `cuda_full` the same with the prelude in front of it.
"""


def debug_output(
    options: Options,
    program: Program,
    compilation: Compilation,
    postings: Callable[[], Iterable[str]],
) -> str:
    """Everything that the options ask for, each under a title; "" for nothing.

    `postings` gives the communications of the call, a line each.
    """
    parts = [
        _section(name, dump(program, compilation))
        for name, dump in DUMPS.items()
        if options.is_dumped(name)
    ]
    if options.is_dumped("communication"):
        parts.append(_section("communication", "\n".join(postings())))
    return "\n".join(parts)


def _section(name: str, text: str) -> str:
    return f"-- {name} --\n{text}\n"
