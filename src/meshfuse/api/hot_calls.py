"""Calls like earlier ones: what was checked and decided then holds again.

A call is looked up by facts that say all that checks and compiled code depend on, and the sizes.
Whatever is unusual has no facts, and goes the long way: there errors are made and warnings given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from meshfuse.api.frozen_program import FrozenProgram
from meshfuse.api.overlap_choice import Overlapping
from meshfuse.api.prepared import Prepared
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.calls import Call
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.tensor import DistributedTensor
from meshfuse.facts.sharding import Sharding
from meshfuse.host.executors import run_executable, run_planned
from meshfuse.host.plan import Executable, Plan
from meshfuse.runtime.arguments import Argument

_INT32_LIMIT, _INT64_LIMIT = 1 << 31, 1 << 63
MOST_CALLS = 256
"""Calls that a definition remembers."""

Facts = tuple[object, ...]


@final
@frozen_dataclass
class HotCall:
    """How arguments are taken, what runs on them, and how results are given.

    By position: `shards` are DistributedTensors, `detached` tensors that require grad, `reals`
    numbers that must be floats. `outputs` has the shardings of results on a mesh, None for plain
    ones, with their global shapes. `given` are the global sizes that the caller says. `kept` are
    shardings that the facts know by identity, which is theirs while they live. `plan`: of all such
    calls; None where sizes depend on the values of numbers, too.
    """

    prepared: Prepared
    executable: Executable
    shards: tuple[int, ...]
    detached: tuple[int, ...]
    reals: tuple[int, ...]
    outputs: tuple[tuple[Sharding, tuple[int, ...]] | None, ...]
    is_plain: bool
    given: Mapping[str, int]
    kept: tuple[Sharding, ...]
    plan: Plan | None

    def run(
        self, inputs: Sequence[Any], communicator: Communicator, call: Call | None
    ) -> list[torch.Tensor]:
        """The call. Raises as run_executable."""
        executable, plan, arguments = self.executable, self.plan, self.take(inputs)
        if plan is None:
            found = run_executable(executable, arguments, communicator, given=self.given, call=call)
        else:
            slots = executable.slots(arguments)
            found = run_planned(executable, plan, slots, communicator, None, call)
        return self.give(found)

    def take(self, inputs: Sequence[Any]) -> list[Argument]:
        """The arguments as kernels take them."""
        arguments = list(inputs)
        for i in self.shards:
            arguments[i] = arguments[i].local
        for i in self.detached:
            arguments[i] = arguments[i].detach()
        for i in self.reals:
            arguments[i] = float(arguments[i])
        return arguments

    def give(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results as users get them."""
        if self.is_plain:
            return results
        return [
            result if placed is None else DistributedTensor.of_checked(result, *placed)
            for result, placed in zip(results, self.outputs, strict=True)
        ]


def facts_of_call(
    inputs: Sequence[Any],
    frozen: FrozenProgram,
    communicator: Communicator,
    is_auto: bool,
    overlap: Overlapping | None,
) -> Facts | None:
    """Of inputs, by whom the program is scheduled, and who runs it; None as `facts_of_inputs`."""
    facts = facts_of_inputs(inputs)
    if facts is None or not frozen.meshes:
        return None if facts is None else (is_auto, overlap, facts)
    order, place = torch.are_deterministic_algorithms_enabled(), communicator.place()
    return (is_auto, overlap, order, place.rank, place.size, facts)


def facts_of_inputs(inputs: Sequence[Any]) -> Facts | None:
    """What a call depends on, of plain tensors and numbers; None where others are among them.

    Numbers count by type, ints by whether they fit 32 bits or 64: no check asks more of their
    values, and plans of sizes look at them again.
    """
    facts: list[object] = []
    for value in inputs:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if value.layout is not torch.strided or value.is_neg():
                return None
            facts.append(
                (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
            )
        elif kind is DistributedTensor:
            if value.requires_grad or value.is_neg():
                return None
            facts.append(
                (
                    value.shape,
                    value.stride(),
                    value.dtype,
                    value.device,
                    id(value.sharding),
                    value.global_shape,
                )
            )
        elif kind is int:
            if not -_INT64_LIMIT <= value < _INT64_LIMIT:
                return None
            facts.append(kind if -_INT32_LIMIT <= value < _INT32_LIMIT else "int64")
        elif kind is float or kind is bool:
            facts.append(kind)
        else:
            return None
    return tuple(facts)


def remember_call(
    inputs: Sequence[Any],
    arguments: Sequence[Argument],
    prepared: Prepared,
    executable: Executable,
    results: Sequence[torch.Tensor],
    given: Mapping[str, int],
) -> HotCall | None:
    """A call that has facts, as it went: its inputs, what became of them, and its results.

    None where results are shards whose sizes depend on the values of numbers.
    """
    outputs = tuple(
        (result.sharding, result.global_shape) if isinstance(result, DistributedTensor) else None
        for result in results
    )
    if any(outputs) and executable.sizes_are_scalars:
        return None
    tensors = [(i, value) for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
    shards = [(i, value) for i, value in tensors if isinstance(value, DistributedTensor)]
    return HotCall(
        prepared,
        executable,
        tuple(i for i, _ in shards),
        tuple(i for i, value in tensors if value.requires_grad),
        tuple(
            i
            for i, (value, taken) in enumerate(zip(inputs, arguments, strict=True))
            if isinstance(taken, float) and not isinstance(value, float)
        ),
        outputs,
        not any(outputs),
        given,
        tuple(value.sharding for _, value in shards),
        executable.only_plan(arguments, given),
    )
