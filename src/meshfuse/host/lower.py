"""Segments to a host program: local buffers, launches, communications posted and awaited."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.options import NO_OPTIONS, Options
from meshfuse.expr import IntExpr, free_symbols
from meshfuse.facts.facts import Facts, facts_of
from meshfuse.host.arrivals import with_arrivals
from meshfuse.host.in_place import with_reductions_in_place
from meshfuse.host.lifetimes import with_early_posts, with_frees, with_waits
from meshfuse.host.lower_segments import MADE, LoweredKernel, lower_segments
from meshfuse.host.nests import with_nests
from meshfuse.host.nodes import (
    Chunk,
    Communicate,
    Evaluate,
    ForLoop,
    HostBuffer,
    HostOutput,
    HostProgram,
    KernelName,
    Launch,
    Node,
    all_nodes,
)
from meshfuse.host.shared_sources import with_shared_sources
from meshfuse.host.sizes import (
    buffer_of,
    check_symbols,
    coordinates_in,
    coverage_demands,
    divisibility_demands,
    size_demands,
    size_symbols,
)
from meshfuse.host.streams import with_streams
from meshfuse.host.sums_in_results import with_sums_in_results
from meshfuse.host.symbols import Coordinate
from meshfuse.host.uses import names_defined, names_needed
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.comm import LocalSlice
from meshfuse.ir.ops import Broadcast, Cast, Expand, Expr, Permute, Reshape, Set, Squeeze
from meshfuse.ir.ops_random import RandomSource
from meshfuse.ir.program import Program
from meshfuse.kernel.nodes import Kernel
from meshfuse.segment.segments import SegmentedProgram

_SAVED = ".saved"
"""Suffix of the copy of a tensor whose memory an update in place overwrites."""

HostPass = Callable[[Sequence[Node]], Iterable[Node]]
"""What it makes of the body of a host program."""


@final
@frozen_dataclass
class HostStep:
    """A step of the lowering, and the nodes that there were behind it."""

    name: str
    body: tuple[Node, ...]


@final
@frozen_dataclass
class HostLowering:
    """A host program, and the steps that led to it, in order."""

    program: HostProgram
    steps: tuple[HostStep, ...]


def lower_to_host(
    segmented: SegmentedProgram,
    kernels: Mapping[str, LoweredKernel],
    options: Options = NO_OPTIONS,
) -> HostLowering:
    """The host program of a segmented program.

    `kernels` are by segment name; a segment that is no communication and has none is evaluated op
    by op. `options` say how ranks' terms are added and how many streams there are for loops. Raises
    Unsupported for a size that no input gives.
    """
    program = segmented.program
    facts, fusion = facts_of(program), program.fusion
    outputs, copies = _lower_outputs(program, facts)
    lowered = lower_segments(segmented, facts, kernels, options)
    body = [*_scalar_sizes(program), *lowered, *copies]
    launched = {KernelName(found.kernel.name): found.kernel for found in kernels.values()}
    kept = {output.buffer for output in outputs} | set(fusion.inputs) | set(fusion.scalars)
    buffers = _buffers(program, body)
    whole = segmented.whole
    symbols = size_symbols(whole)
    coordinates = _coordinates(program, buffers, body)
    given = [entry.symbol for entry in (*symbols, *coordinates)]
    given += [node.index for node in all_nodes(body) if isinstance(node, ForLoop)]
    given += list(fusion.scalars)
    check_symbols(buffers.values(), given)
    passes = _passes(buffers, launched, kept, given, options.number_of_streams)
    steps = _in_steps(body, passes)
    host = HostProgram(
        inputs=fusion.inputs,
        outputs=outputs,
        scalars={name: value.dtype for name, value in fusion.scalars.items()},
        symbols=symbols,
        demands=(
            *size_demands(whole),
            *coverage_demands(whole),
            *divisibility_demands(whole),
        ),
        buffers=_used(buffers, fusion.inputs, steps[-1].body),
        kernels=launched,
        body=steps[-1].body,
        coordinates=tuple(coordinates),
        random=next((e for e in fusion.exprs if isinstance(e, RandomSource)), None),
    )
    return HostLowering(host, steps)


def _passes(
    buffers: Mapping[TensorName, HostBuffer],
    kernels: Mapping[KernelName, Kernel],
    kept: Collection[TensorName | ScalarName],
    symbols: Collection[str],
    number_of_streams: int,
) -> Mapping[str, HostPass]:
    """In order. `kept`: inputs, outputs and scalars; `symbols`: names that are taken."""
    return {
        "nests": with_nests,
        "sums_in_results": lambda body: with_sums_in_results(body, buffers),
        "shared_sources": lambda body: with_shared_sources(body, buffers, kept),
        "early_posts": lambda body: with_early_posts(body, kernels),
        "reductions_in_place": lambda body: with_reductions_in_place(body, buffers, kept),
        "waits": with_waits,
        "frees": lambda body: with_frees(body, kept),
        "streams": lambda body: with_streams(body, number_of_streams, kernels, symbols),
        "arrivals": lambda body: with_arrivals(body, buffers),
    }


def _in_steps(body: Sequence[Node], passes: Mapping[str, HostPass]) -> tuple[HostStep, ...]:
    """What segments became, and what each pass made of it."""
    steps = [HostStep("segments", tuple(body))]
    for name, change in passes.items():
        steps.append(HostStep(name, tuple(change(steps[-1].body))))
    return tuple(steps)


def _coordinates(
    program: Program, buffers: Mapping[TensorName, HostBuffer], body: Sequence[Node]
) -> list[Coordinate]:
    """Those that local sizes name, and who sends what to whom."""
    extents = [extent for buffer in buffers.values() for extent in buffer.shape]
    for node in all_nodes(body):
        extents += node.sizes.values() if isinstance(node, Launch) else ()
        if isinstance(node, Chunk):
            extents += [node.start] if node.pieces is None else [node.start, node.pieces]
        if isinstance(node, Communicate) and node.owner is not None:
            extents.append(node.owner)
    schedules = program.schedules.values()
    return coordinates_in(extents, (s.mesh for s in schedules if s.mesh is not None))


def _scalar_sizes(program: Program) -> Iterator[Evaluate]:
    """The arithmetic on scalars that sizes come from, in front of all else."""
    fusion = program.fusion
    extents = [axis.extent for value in fusion.tensors.values() for axis in value.logical]
    operands = [x for expr in fusion.exprs for x in expr.ins if isinstance(x, IntExpr)]
    needed: set[str] = {s.name for size in (*extents, *operands) for s in free_symbols(size)}
    body: list[Expr] = []
    for expr in reversed(fusion.exprs):
        if needed.intersection(expr.outs) and all(out in fusion.scalars for out in expr.outs):
            needed.update(name for name in expr.ins if isinstance(name, str))
            body.insert(0, expr)
    if body:
        yield Evaluate(body=tuple(body))


# Outputs.


def _lower_outputs(
    program: Program, facts: Facts
) -> tuple[tuple[HostOutput, ...], tuple[Evaluate, ...]]:
    """The outputs' buffers, and the copies at the end that update inputs in place.

    A returned tensor that an update also writes is that input. One that is an updated input, or may
    share its memory, is copied first: it keeps the value from before.
    """
    outputs = program.fusion.outputs
    updates = {o.tensor: o.alias for o in outputs if o.alias is not None}
    saved: dict[TensorName, Evaluate] = {}

    def lasting(tensor: TensorName) -> TensorName:
        if _memory_root(facts, tensor) not in updates.values():
            return tensor
        copy = TensorName(f"{tensor}{_SAVED}")
        saved[copy] = Evaluate(body=(Set(copy, tensor),))
        return copy

    results = tuple(
        HostOutput(output.tensor, output.alias)
        if output.alias is not None
        else HostOutput(updates.get(output.tensor) or lasting(output.tensor))
        for output in outputs
    )
    copies = tuple(
        Evaluate(into=alias, body=(Set(alias, lasting(tensor)),))
        for tensor, alias in updates.items()
    )
    return results, (*saved.values(), *copies)


def _buffers(program: Program, body: Sequence[Node]) -> dict[TensorName, HostBuffer]:
    """The buffers of the program's inputs and of all that the body makes."""
    names = dict.fromkeys(program.fusion.inputs)
    for node in all_nodes(body):
        names.update(dict.fromkeys((*names_needed(node), *names_defined(node))))
    buffers: dict[TensorName, HostBuffer] = {}
    for name in names:
        original = TensorName(name.removesuffix(_SAVED).removesuffix(MADE))
        if original in program.fusion.tensors:
            found = buffer_of(program, original)
            is_view = found.gaps and not name.endswith(MADE)
            buffers[TensorName(name)] = replace(found, name=TensorName(name), gaps=is_view)
    return buffers


def _used(
    buffers: Mapping[TensorName, HostBuffer], inputs: Iterable[str], body: Sequence[Node]
) -> dict[TensorName, HostBuffer]:
    """Without those that passes have found another place for."""
    names: set[str] = set(inputs)
    for node in all_nodes(body):
        names.update((*names_needed(node), *names_defined(node)))
    return {name: buffer for name, buffer in buffers.items() if name in names}


def _memory_root(facts: Facts, tensor: TensorName) -> TensorName:
    """The tensor whose memory `tensor` may share, going back over what can be a view."""
    expr = facts.definitions.get(tensor)
    while isinstance(expr, Broadcast | Cast | Expand | LocalSlice | Permute | Reshape | Squeeze):
        tensor = expr.src
        expr = facts.definitions.get(tensor)
    return tensor
