"""`multidevice.simulate`: all ranks of a mesh inside this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from meshfuse.api.definition import FusionDefinition
from meshfuse.api.executor_cache import Bound
from meshfuse.api.frozen_program import FrozenProgram
from meshfuse.api.results import wrap_result
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.dist.shard import shard_tensor
from meshfuse.host import simulate as driver
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
) -> SimulatedResults:
    """Run a definition as every rank of its meshes, in this process.

    `inputs` are global: each rank gets a copy of its shard. With `per_rank`, `inputs[rank]` is what
    that rank would pass to `execute`, used as it is. `ranks` is the size of the job, by default as
    large as the meshes need. Collectives are checked: ranks that disagree, a missing wait or a
    deadlock raise CommunicationError.
    """
    if not isinstance(fd, FusionDefinition):
        raise UserTypeError(f"simulate({fd!r}, inputs): takes a FusionDefinition first")
    fd.freeze("simulate")
    frozen = fd.fec.frozen_program()
    count = _count_ranks(frozen, ranks)
    _check_per_rank(inputs, per_rank, count)
    bound = [
        fd.fec.bind(inputs[rank] if per_rank else _shards(frozen, inputs, rank), rank)
        for rank in range(count)
    ]
    executables = {rank: b.prepared.compiled.executor.compile(rank) for rank, b in enumerate(bound)}
    outputs = driver.simulate(executables, {rank: b.arguments for rank, b in enumerate(bound)})
    return SimulatedResults(
        [fd.fec.deliver(b.prepared, outputs[rank]) for rank, b in enumerate(bound)],
        [_updated(b) for b in bound],
    )


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


def _updated(bound: Bound) -> list[torch.Tensor]:
    """One rank's inputs that were updated in place, in the order of their outputs."""
    found: list[torch.Tensor] = []
    for position, sharding in bound.prepared.updates:
        value = bound.arguments[position]
        assert isinstance(value, torch.Tensor)
        found.append(wrap_result(value, sharding))
    return found
