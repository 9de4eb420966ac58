"""The segments of a definition as programs of their own, run one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from meshfuse.api.devices import Device, read_device
from meshfuse.api.executor_cache import FusionExecutorCache
from meshfuse.api.frozen_program import GlobalSizes
from meshfuse.api.fusion_view import FusionView
from meshfuse.api.profiling import FusionProfile, merge_profiles
from meshfuse.api.recording import Recording
from meshfuse.base.errors import Unsupported, UserError
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.random_states import draw_alike
from meshfuse.dist.tensor import DistributedTensor
from meshfuse.ir.ops_random import RandomSource
from meshfuse.ir.printer import print_program
from meshfuse.ir.program import Program
from meshfuse.runtime.arguments import Argument, default_device, flatten_inputs
from meshfuse.segment.segments import Loop, Segment, SegmentedProgram

FIRST_KERNEL = "S0"
"""What compiling names the first kernel of any program."""


@final
@dataclass(frozen=True, slots=True, repr=False)
class DefinitionSegment:
    """One segment: its name, who scheduled it, its program, and what it has compiled."""

    name: str
    scheduler: str
    program: Program
    fec: FusionExecutorCache

    def execute(
        self,
        inputs: Iterable[object],
        *,
        device: Device | None = None,
        profile: bool = False,
        global_sizes: GlobalSizes | None = None,
    ) -> list[torch.Tensor]:
        """Run it alone, on this rank's values of the inputs that its text names."""
        return self.fec.run(inputs, device, profile=profile, global_sizes=global_sizes)

    def __repr__(self) -> str:
        return f"# {self.name}: {self.scheduler}\n{print_program(self.program)}"


def segments_of(segmented: SegmentedProgram) -> list[DefinitionSegment]:
    """A definition's segments, in the order of running.

    Raises Unsupported for a program that updates inputs in place, or loops over chunks: that is the
    whole program's.
    """
    loop = next((item for item in segmented.items if isinstance(item, Loop)), None)
    if loop is not None:
        made = ", ".join([*loop.made, *loop.wholes.values(), *dict.fromkeys(loop.sums.values())])
        raise Unsupported(
            f"segment: {made} is made chunk by chunk, in a loop around segments; execute the "
            "definition as a whole"
        )
    for output in segmented.whole.fusion.outputs:
        if output.alias is not None:
            raise Unsupported(
                f"segment: {output.tensor} updates input {output.alias} in place, which no segment "
                "does by itself; execute the definition as a whole"
            )
    return [_definition_segment(part) for part in segmented.segments]


def _definition_segment(part: Segment) -> DefinitionSegment:
    recording = Recording()
    recording.program = part.program
    recording.frozen = True
    fec = FusionExecutorCache(FusionView(recording), scheduler=part.scheduler)
    return DefinitionSegment(part.name, part.scheduler, part.program, fec)


def run_segments(
    segments: Sequence[DefinitionSegment],
    whole: Program,
    inputs: Iterable[object],
    device: Device | None,
    profile: bool,
    global_sizes: GlobalSizes | None = None,
) -> tuple[list[torch.Tensor], FusionProfile | None]:
    """The outputs of the whole program, segment by segment, and with `profile` what that took.

    `global_sizes` are those of `execute`.
    """
    flat = flatten_inputs(inputs)
    names = whole.fusion.inputs
    if len(flat) != len(names):
        raise UserError(f"expected {len(names)} inputs ({', '.join(names)}), but got {len(flat)}")
    values: dict[str, Argument | complex] = dict(zip(names, flat, strict=True))
    results = {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}
    where = read_device(device) or _device_of(results.values())
    values.update(_draw(whole, where))
    shapes: dict[str, Sequence[int]] = {
        names[key] if isinstance(key, int) else key.name: shape
        for key, shape in (global_sizes or {}).items()
    }
    profiles: list[FusionProfile] = []
    for segment in segments:
        fusion = segment.program.fusion
        known = {k: shapes[name] for k, name in enumerate(fusion.inputs) if name in shapes}
        made = segment.execute(
            [values[name] for name in fusion.inputs],
            device=where,
            profile=profile,
            global_sizes=known,
        )
        for output, value in zip(fusion.outputs, made, strict=True):
            values[output.tensor] = value.local if isinstance(value, DistributedTensor) else value
            results[output.tensor] = value
            if isinstance(value, DistributedTensor):
                shapes[output.tensor] = value.global_shape
        if profile:
            profiles.append(_named(segment.fec.profile(), segment.name))
    outputs = [results[output.tensor] for output in whole.fusion.outputs]
    return outputs, merge_profiles(profiles) if profile else None


def _device_of(inputs: Iterable[torch.Tensor]) -> torch.device:
    """Where all segments run, those without inputs too. Numbers may lie on the CPU of a GPU."""
    ordered = sorted(inputs, key=lambda x: x.dim() == 0)
    return ordered[0].device if ordered else default_device()


def _draw(whole: Program, where: torch.device) -> dict[str, int]:
    """Seed and offset of the call's random numbers, which all segments read."""
    source = next((e for e in whole.fusion.exprs if isinstance(e, RandomSource)), None)
    if source is None:
        return {}
    meshes = [s.mesh for s in whole.schedules.values() if s.mesh is not None]
    team = tuple(sorted({rank for mesh in meshes for rank in mesh.ids}))
    state = draw_alike(Communicator.instance(), team, where, source.draws)
    return {source.seed: state.seed, source.offset: state.offset}


def _named(profile: FusionProfile, segment: str) -> FusionProfile:
    """A segment's profile with its kernel, which it knows as its first, named after itself."""
    kernels = [
        replace(kernel, name=segment) if kernel.name == FIRST_KERNEL else kernel
        for kernel in profile.kernel_profiles
    ]
    return replace(profile, kernel_profiles=kernels)
