"""Calls like earlier ones: what was checked and decided then holds again.

A call is of a kind: its conditions and the facts of its inputs say all that checks and compiled
code depend on, and the sizes. One like the last is told without its facts, by torch's guards;
others are looked up. Whatever is unusual has no facts, and goes the long way: there errors are made
and warnings given.
"""

# torch's own guards are asked: all else that says how tensors are takes ten times as long.
# pyright: reportPrivateUsage=false, reportMissingModuleSource=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import profiler

from meshfuse.api.frozen_program import FrozenProgram
from meshfuse.api.overlap_choice import Overlapping
from meshfuse.api.prepared import Prepared
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.calls import Call
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.launcher import Place
from meshfuse.dist.tensor import DistributedTensor
from meshfuse.facts.sharding import Sharding
from meshfuse.host.executors import run_executable, run_planned
from meshfuse.host.plan import Executable, Plan
from meshfuse.runtime.arguments import Argument

_INT32_LIMIT, _INT64_LIMIT = 1 << 31, 1 << 63
_TENSORS = (torch.Tensor, torch.nn.Parameter, DistributedTensor)
_is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
"""Whether torch's operations are to be deterministic."""
MOST_CALLS = 256
"""Calls that a definition remembers."""


class Conditions(NamedTuple):
    """What a call depends on beside its inputs: who schedules the program, in which form it is
    wanted, and the sizes that the caller says; on a mesh whether torch is to be deterministic, and
    which rank this is."""

    is_auto: bool
    overlap: Overlapping | None
    given: tuple[tuple[str, int], ...]
    is_deterministic: bool | None
    here: Place | None

    @staticmethod
    def of_call(
        frozen: FrozenProgram,
        communicator: Communicator,
        is_auto: bool,
        overlap: Overlapping | None,
        given: Mapping[str, int],
    ) -> Conditions:
        sizes = tuple(given.items())
        if not frozen.meshes:
            return Conditions(is_auto, overlap, sizes, None, None)
        return Conditions(is_auto, overlap, sizes, _is_deterministic(), communicator.here)


Facts = tuple[object, ...]
"""What a call depends on of its inputs: see facts_of_inputs."""
Kind = tuple[Conditions, Facts]
"""Calls of one kind run alike."""

Give = Callable[[torch.Tensor, Sharding, tuple[int, ...]], DistributedTensor]
"""Makes a shard the DistributedTensor of this sharding and global shape."""
Placed = tuple[int, Give, Sharding, tuple[int, ...]]
"""A result on a mesh: its place among results, and how it is made what users get."""

Guard = Callable[..., bool]
"""Whether as many other inputs have the facts of those that it was made of."""


@final
@frozen_dataclass
class HotCall:
    """How arguments are taken, what runs on them, and how results are given.

    `conditions`, `input_count` and `fits` say which calls: see guard_of. By position: `shards` are
    DistributedTensors, `detached` tensors that require grad, `reals` numbers that must be floats.
    `placed` are the results on a mesh, `views` those of others that may be views: see plain_result.
    `given` are the global sizes that the caller says. `kept` are shardings that the facts know by
    identity, which is theirs while they live. `plan`: of all such calls; None where sizes depend on
    the values of numbers, too.
    """

    conditions: Conditions
    input_count: int
    fits: Guard | None
    prepared: Prepared
    executable: Executable
    shards: tuple[int, ...]
    detached: tuple[int, ...]
    reals: tuple[int, ...]
    placed: tuple[Placed, ...]
    views: tuple[int, ...]
    given: Mapping[str, int]
    kept: tuple[Sharding, ...]
    plan: Plan | None

    def is_like(
        self, inputs: Sequence[Any], communicator: Communicator, is_auto: bool, overlap: object
    ) -> bool:
        """Whether a call, for which the caller says no sizes, is known to be one of those. Not
        where numbers are among its inputs: to find their facts takes no longer than to ask."""
        fits, conditions, here = self.fits, self.conditions, self.conditions.here
        return (
            fits is not None
            and conditions.is_auto is is_auto
            and type(conditions.overlap) is type(overlap)  # others may have no truth value
            and conditions.overlap == overlap
            and not conditions.given
            and (here is None or here is communicator.here or here == communicator.here)
            and (here is None or conditions.is_deterministic is _is_deterministic())
            and len(inputs) == self.input_count
            and fits(*inputs)
        )

    def run(
        self, inputs: Sequence[Any], communicator: Communicator, call: Call | None
    ) -> list[torch.Tensor]:
        """The call. Raises as run_executable."""
        executable, plan, arguments = self.executable, self.plan, inputs
        if self.shards or self.detached or self.reals:
            arguments = self._take(inputs)
        if plan is None:
            found = run_executable(executable, arguments, communicator, given=self.given, call=call)
        else:
            slots = [*arguments, *executable.vacant]
            is_plain = executable.drawing is None and not profiler._is_profiler_enabled
            for direct in plan.direct if is_plain else ():  # as run_planned, with a frame less
                if direct.communicator is communicator:
                    found: list[torch.Tensor] = direct.run(slots, call)
                    break
            else:
                found = run_planned(executable, plan, slots, communicator, None, call)
        for place, give, sharding, shape in self.placed:
            found[place] = give(found[place], sharding, shape)
        for place in self.views:
            if found[place]._is_view():  # as plain_result, with a frame less
                found[place] = found[place].detach()
        return found

    def _take(self, inputs: Sequence[Any]) -> list[Argument]:
        """The arguments as kernels take them."""
        arguments = list(inputs)
        for i in self.shards:
            arguments[i] = arguments[i].local
        for i in self.detached:
            arguments[i] = arguments[i].detach()
        for i in self.reals:
            arguments[i] = float(arguments[i])
        return arguments


def facts_of_inputs(inputs: Sequence[Any]) -> Facts | None:
    """What a call depends on, of plain tensors and numbers; None where others are among them.

    Numbers count by type, ints by whether they fit 32 bits or 64: no check asks more of their
    values, and plans of sizes look at them again. In torch's inference mode, and of what was made
    there, torch knows no views: so that counts, too.
    """
    facts: list[object] = [torch.is_inference_mode_enabled()]
    for value in inputs:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if value.layout is not torch.strided or value.is_neg():
                return None
            facts.append(
                (
                    value.shape,
                    value.stride(),
                    value.dtype,
                    value.device,
                    value.requires_grad,
                    value.is_inference(),
                )
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
                    value.is_inference(),
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


def guard_of(inputs: Sequence[Any]) -> Guard | None:
    """Asks torch of all tensors at once. None where there is anything else among them.

    Beside sizes, strides, type, device and requires_grad, torch compares the keys by which it finds
    operations: sparse and negated tensors differ there, and those of its inference mode or inside
    of its transforms.
    """
    if not inputs or not all(type(value) in _TENSORS for value in inputs):
        return None
    guards = TensorGuards(*inputs, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    check: Guard = guards.check
    shards = [
        (place, value.sharding, value.global_shape)
        for place, value in enumerate(inputs)
        if type(value) is DistributedTensor
    ]
    if not shards:
        return check
    return lambda *values: (
        check(*values)
        and all(
            values[place].sharding is sharding and values[place].global_shape == shape
            for place, sharding, shape in shards
        )
    )


def remember_call(
    conditions: Conditions,
    inputs: Sequence[Any],
    arguments: Sequence[Argument],
    prepared: Prepared,
    executable: Executable,
    outputs: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    given: Mapping[str, int],
) -> HotCall | None:
    """A call of some kind, as it went: its conditions, its inputs and the arguments they became,
    what ran, the outputs of that and the results they became.

    None where results are shards whose sizes depend on the values of numbers.
    """
    placed = tuple(
        (place, _giving(outputs, place, arguments), result.sharding, result.global_shape)
        for place, result in enumerate(results)
        if isinstance(result, DistributedTensor)
    )
    if placed and executable.sizes_are_scalars:
        return None
    tensors = [(i, value) for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
    shards = [(i, value) for i, value in tensors if isinstance(value, DistributedTensor)]
    return HotCall(
        conditions,
        len(inputs),
        guard_of(inputs),
        prepared,
        executable,
        tuple(i for i, _ in shards),
        tuple(i for i, value in tensors if value.requires_grad),
        tuple(
            i
            for i, (value, taken) in enumerate(zip(inputs, arguments, strict=True))
            if isinstance(taken, float) and not isinstance(value, float)
        ),
        placed,
        _places_of_views(outputs, results, arguments),
        given,
        tuple(value.sharding for _, value in shards),
        executable.only_plan(arguments, given),
    )


def _giving(outputs: Sequence[torch.Tensor], place: int, arguments: Sequence[Argument]) -> Give:
    """How an output becomes a DistributedTensor. Whether torch makes a new tensor, a view, or gives
    back one that it got, depends on facts alone: so one that was new will be.

    A view that was made while no grad was recorded could not be changed in place where grad is.
    """
    output = outputs[place]
    is_known = any(output is other for other in (*arguments, *outputs[:place]))
    is_new = not (is_known or output._is_view())
    return DistributedTensor.made_of if is_new else DistributedTensor.of_checked


def _places_of_views(
    outputs: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    arguments: Sequence[Argument],
) -> tuple[int, ...]:
    """The places of plain results that are detached outputs, not the outputs themselves; or that
    are inputs: whether these are views no fact says."""
    return tuple(
        place
        for place, (output, result) in enumerate(zip(outputs, results, strict=True))
        if not isinstance(result, DistributedTensor)
        if result is not output or any(output is argument for argument in arguments)
    )
