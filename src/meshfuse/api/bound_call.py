"""One call of a definition: its inputs as kernels take them, and what it is compiled for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import final

import torch

from meshfuse.api.devices import Device, read_device
from meshfuse.api.dtensor_inputs import take_dtensor
from meshfuse.api.frozen_program import FrozenProgram, check_sharding, note_global_shape
from meshfuse.api.overlap_choice import Overlapping
from meshfuse.api.prepared import Prepared
from meshfuse.base.errors import UserError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.options import Options, with_options
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.dtensor import is_dtensor
from meshfuse.dist.tensor import DistributedTensor
from meshfuse.facts.overlap_form import PLAIN, Overlap
from meshfuse.host.postings import postings_of
from meshfuse.runtime.arguments import Argument, Signature, check_arguments, flatten_inputs


@final
@frozen_dataclass
class CallKey:
    """What a call is compiled for, as the definition looks it up.

    `is_scheduled`: as one kernel, by its user's schedule. `form`: else, how communications overlap.
    """

    signature: Signature
    device: str
    options: Options
    is_scheduled: bool
    form: Overlap = PLAIN


@final
@frozen_dataclass
class Bound:
    """The arguments of one call, checked, what it is compiled for, and what runs on them.

    `given` are global sizes that the caller or DistributedTensors among the inputs say, by symbol.
    """

    arguments: list[Argument]
    prepared: Prepared
    key: CallKey
    given: Mapping[str, int] = field(default_factory=dict[str, int])


@final
@frozen_dataclass
class Wishes:
    """What a call asks for besides its inputs and their sizes: see FusionExecutorCache.run."""

    device: Device | None
    enable: Sequence[str]
    disable: Sequence[str]
    is_auto: bool
    profile: bool
    capture: bool
    overlap: Overlapping | None


def posted_by_this_rank(bound: Bound) -> Iterator[str]:
    """The communications of a call, a line each, in the order in which this rank posts them."""
    rank = Communicator.instance().rank()
    executable = bound.prepared.compiled.executor.compile(rank)
    if not executable.is_outside:
        sizes = executable.sizes(bound.arguments, bound.given)
        yield from postings_of(executable.program, sizes, rank)


def options_of_call(
    frozen: FrozenProgram, enable: Sequence[str], disable: Sequence[str]
) -> Options:
    """The definition's options with those of one call, and what torch is told to do."""
    options = frozen.options
    if frozen.meshes and torch.are_deterministic_algorithms_enabled():
        options = with_options(options, ["deterministic_collectives"])
    return with_options(options, enable, disable) if enable or disable else options


def check_ranks(frozen: FrozenProgram, size: int) -> None:
    """UserError where a tensor lies on ranks that a job of `size` processes does not have."""
    for mesh, tensor in frozen.meshes.items():
        if max(mesh.ids) >= size:
            raise UserError(
                f"execute: {tensor} lies on {mesh}, but this job has {size} "
                f"{'process' if size == 1 else 'processes'}: start it with torchrun "
                f"--nproc-per-node={max(mesh.ids) + 1}, or run all ranks in this process with "
                "multidevice.simulate"
            )


def take_inputs(
    frozen: FrozenProgram, inputs: Iterable[object], rank: int, given: dict[str, int]
) -> tuple[list[Argument | complex], int | None]:
    """One rank's inputs as kernels take them, none with grad, and where the first was that had it.

    DistributedTensors and DTensors are taken by their shards. The global sizes that they say are
    added to `given`.
    """
    taken: list[Argument | complex] = []
    with_grad: int | None = None
    for position, value in enumerate(flatten_inputs(inputs)):
        if not isinstance(value, torch.Tensor):
            taken.append(value)
            continue
        shard = _take_shard(frozen, position, value, rank, given)
        if value.requires_grad:
            with_grad = position if with_grad is None else with_grad
            shard = shard.detach()
        taken.append(shard)
    return taken, with_grad


def _take_shard(
    frozen: FrozenProgram, position: int, value: torch.Tensor, rank: int, given: dict[str, int]
) -> torch.Tensor:
    if is_dtensor(value):
        note_global_shape(frozen, position, value.shape, given, f"input {position}")
        return take_dtensor(frozen, position, value)
    if not isinstance(value, DistributedTensor):
        return value
    check_sharding(frozen, position, value)
    if rank in value.mesh.ids:
        note_global_shape(frozen, position, value.global_shape, given, f"input {position}")
    return value.local


def check_taken(
    frozen: FrozenProgram, taken: Sequence[Argument | complex], device: Device | None, rank: int
) -> tuple[list[Argument], torch.device]:
    """What `take_inputs` gave, checked, and the device that the program runs on."""
    wanted = read_device(device)
    if frozen.meshes and all(rank not in mesh.ids for mesh in frozen.meshes):
        arguments = [value for value in taken if not isinstance(value, complex)]
        return arguments, torch.device("cpu") if wanted is None else wanted
    return check_arguments(frozen.expected, taken, wanted, rank)
