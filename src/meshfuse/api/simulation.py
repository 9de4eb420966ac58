"""`multidevice.simulate`: all ranks of a mesh inside this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch

from meshfuse.api.bound_call import Bound
from meshfuse.api.definition import FusionDefinition
from meshfuse.api.frozen_program import (
    FrozenProgram,
    GlobalSizes,
    given_sizes,
    note_global_shape,
)
from meshfuse.api.overlap_choice import Overlapping, form_unmeasured
from meshfuse.api.results import wrap_result
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.dist.shard import shard_tensor
from meshfuse.host import simulate as driver
from meshfuse.host.plan import Executable
from meshfuse.runtime.arguments import flatten_inputs

_MOST_RANKS = 1 << 16


@final
class SimulatedResults(list[list[torch.Tensor]]):
    """For each rank what `execute` would return; `inputs[rank]` are its inputs updated in place."""

    def __init__(
        self, outputs: Sequence[list[torch.Tensor]], inputs: Sequence[list[torch.Tensor]]
    ) -> None:
        super().__init__(outputs)
        self.inputs = list(inputs)


def simulate(
    fd: FusionDefinition,
    inputs: Sequence[Any],
    *,
    per_rank: bool = False,
    ranks: int | None = None,
    global_sizes: GlobalSizes | None = None,
    overlap: Overlapping | None = None,
) -> SimulatedResults:
    """Run a definition as every rank of its meshes, in this process.

    `inputs` are global: each rank gets a copy of its shard. With `per_rank`, `inputs[rank]` is what
    that rank would pass to `execute`, used as it is. `ranks` is the size of the job, by default as
    large as the meshes need. `global_sizes` are those of `execute`, for `per_rank`. `overlap`:
    a form instead of the plain one, multidevice.Overlap.chunks(n) or .peers(). Collectives are
    checked: ranks that disagree, a missing wait or a deadlock raise CommunicationError.
    """
    if not isinstance(fd, FusionDefinition):
        raise UserTypeError(f"simulate({fd!r}, inputs): takes a FusionDefinition first")
    fd.freeze("simulate")
    frozen = fd.fec.frozen_program()
    count = _count_ranks(frozen, ranks)
    _check_per_rank(inputs, per_rank, count)
    given = _sizes_of(frozen, inputs, per_rank, global_sizes)
    form = form_unmeasured("simulate", overlap)
    bound = [
        fd.fec.bind(inputs[rank] if per_rank else _shards(frozen, inputs, rank), rank, given=given)
        for rank in range(count)
    ]
    given = _merge_sizes(bound)
    bound = [replace(fd.fec.in_form(b, form), given=given) for b in bound]
    executables = {rank: b.prepared.compiled.executor.compile(rank) for rank, b in enumerate(bound)}
    arguments = {rank: b.arguments for rank, b in enumerate(bound)}
    outputs = driver.simulate(executables, arguments, given)
    return SimulatedResults(
        [fd.fec.deliver(b, outputs[rank], executables[rank]) for rank, b in enumerate(bound)],
        [_updated(b, executables[rank]) for rank, b in enumerate(bound)],
    )


def _sizes_of(
    frozen: FrozenProgram,
    inputs: Sequence[Any],
    per_rank: bool,
    global_sizes: GlobalSizes | None,
) -> dict[str, int]:
    """The global sizes by symbol: those of the inputs, where they are global."""
    given = given_sizes(frozen, global_sizes) if global_sizes else {}
    if per_rank or not frozen.meshes:
        return given
    for position, value in enumerate(flatten_inputs(inputs)):
        want = frozen.shardings[position] if position < len(frozen.shardings) else None
        if isinstance(value, torch.Tensor) and want and value.ndim == len(want.axes):
            note_global_shape(frozen, position, value.shape, given, f"simulate: input {position}")
    return given


def _merge_sizes(bound: Sequence[Bound]) -> dict[str, int]:
    """What all ranks say of global sizes. UserError where two of them disagree."""
    seen: dict[str, tuple[int, int]] = {}
    for rank, one in enumerate(bound):
        for name, size in one.given.items():
            other, found = seen.setdefault(name, (rank, size))
            if found != size:
                raise UserError(
                    f"simulate: ranks {other} and {rank} disagree on the global size {name}: "
                    f"{found} and {size}"
                )
    return {name: size for name, (_, size) in seen.items()}


def _check_per_rank(inputs: Sequence[Any], per_rank: bool, count: int) -> None:
    if not isinstance(per_rank, bool):
        raise UserTypeError(f"simulate(per_rank={per_rank!r}): must be True or False")
    if not per_rank:
        return
    wanted = f"simulate(per_rank=True): takes one list of inputs for each of {count} ranks"
    if not isinstance(inputs, list | tuple):
        raise UserTypeError(f"{wanted}, got {type(inputs).__name__}")
    if len(inputs) != count:
        raise UserError(f"{wanted}, got {len(inputs)}")


def _count_ranks(frozen: FrozenProgram, ranks: int | None) -> int:
    if ranks is not None and type(ranks) is not int:
        raise UserTypeError(f"simulate(ranks={ranks!r}): a number of ranks is an int")
    if ranks is not None and ranks > _MOST_RANKS:
        raise UserError(f"simulate(ranks={ranks}): this process can be {_MOST_RANKS} ranks at most")
    needed = 1
    for mesh, tensor in frozen.meshes.items():
        needed = max(needed, max(mesh.ids) + 1)
        if ranks is not None and ranks < needed:
            raise UserError(
                f"simulate(ranks={ranks}): {tensor} lies on {mesh}, which takes {needed} ranks"
            )
    return needed if ranks is None else ranks


def _shards(frozen: FrozenProgram, inputs: Sequence[Any], rank: int) -> list[object]:
    """Copies of what `rank` holds of global inputs. Scalars are the same everywhere."""
    flat: list[object] = list(flatten_inputs(inputs))
    for position, (value, sharding) in enumerate(zip(flat, frozen.shardings, strict=False)):
        if not isinstance(value, torch.Tensor) or sharding is None:
            continue
        if value.ndim != len(sharding.axes):
            continue  # binding says what is wrong with it
        part = value if sharding.mesh is None else shard_tensor(value, sharding, rank)
        flat[position] = part.clone(memory_format=torch.preserve_format)
    return flat


def _updated(bound: Bound, executable: Executable) -> list[torch.Tensor]:
    """One rank's inputs that were updated in place, in the order of their outputs."""
    shapes = executable.result_shapes(bound.arguments, bound.given)
    outputs = zip(shapes, executable.program.outputs, strict=True)
    aliased = [shape for shape, output in outputs if output.alias is not None]
    found: list[torch.Tensor] = []
    for (position, sharding), shape in zip(bound.prepared.updates, aliased, strict=True):
        value = bound.arguments[position]
        assert isinstance(value, torch.Tensor)
        found.append(wrap_result(value, sharding, shape))
    return found
