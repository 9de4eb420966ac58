"""`DTensorFunction`: a program on DTensors, defined anew for each way in which they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from meshfuse.api.definition import FusionDefinition
from meshfuse.api.dtensors import check_mesh_names, run_on_shards
from meshfuse.api.mesh import DeviceMesh
from meshfuse.api.tensor_view import TensorView, Val
from meshfuse.base.bounded import BoundedTable
from meshfuse.base.dtypes import dtype_of_value
from meshfuse.base.errors import Unsupported, UserTypeError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.dtensor import (
    is_dtensor,
    is_even,
    local_of,
    placements_of_dtensor,
    sharding_of_dtensor,
)
from meshfuse.dist.placements import Shard, StridedShard
from meshfuse.expr import const_value
from meshfuse.facts.sharding import Sharding, describe
from meshfuse.runtime.torch_types import from_torch_dtype

MOST_DEFINITIONS = 256
"""Definitions that a function remembers."""


@final
class DTensorFunction:
    """A function of DTensors: `define` writes its program, given views that lie as they do.

        @DTensorFunction
        def linear(fd, x, w):
            fd.add_output(fd.ops.linear(x, w))

        [y] = linear(x, w)      # x, w, y: torch DTensors, on meshes of any rank

    A number stands for itself in the call, and for a Val in `define`. Called with inputs alike in
    device mesh, placements, element type, layout and number of axes it runs the definition that it
    has; sizes may change, but for axes of size 1 that ranks do not share. With `static_sizes` every
    shape has a definition of its own. Safe to use from threads.
    """

    __slots__ = ("_define", "_definitions", "static_sizes")

    def __init__(self, define: Callable[..., object], *, static_sizes: bool = False) -> None:
        self._define = define
        self._definitions: BoundedTable[tuple[object, ...], FusionDefinition]
        self._definitions = BoundedTable(MOST_DEFINITIONS)
        self.static_sizes = static_sizes

    def __call__(self, *inputs: Any) -> list[Any]:
        """The outputs, in order of `add_output`, as execute_with_dtensors gives them."""
        shards = _shards(inputs)
        return run_on_shards(self._definition(inputs, shards), inputs, shards)

    def definition_for(self, *inputs: Any) -> FusionDefinition:
        """The definition that a call with these inputs runs; made if there is none."""
        return self._definition(inputs, _shards(inputs))

    def __len__(self) -> int:
        """How many definitions there are."""
        return len(self._definitions)

    def _definition(self, inputs: Sequence[Any], shards: Sequence[Any]) -> FusionDefinition:
        check_mesh_names(inputs)
        kinds = tuple(map(self._kind, inputs, shards))
        fd = self._definitions.get(kinds)
        if fd is None:
            fd = FusionDefinition()
            described = enumerate(zip(inputs, kinds, strict=True))
            self._define(fd, *(_describe(fd, k, value, kind) for k, (value, kind) in described))
            self._definitions.put(kinds, fd)
        return fd

    def _kind(self, value: Any, shard: Any) -> _TensorKind | type:
        """What a definition depends on, of one input."""
        if not isinstance(value, torch.Tensor):
            return type(value)
        sizes = _sizes(value, self.static_sizes)
        if not is_dtensor(value):
            return _TensorKind(value.dtype, sizes, value.is_contiguous(), None, ())
        dtensor: Any = value
        if not is_even(dtensor):
            sharding_of_dtensor(dtensor)  # there may be one of other sizes, and none of these
        return _TensorKind(
            value.dtype, sizes, shard.is_contiguous(), dtensor.device_mesh, dtensor.placements
        )


@final
@frozen_dataclass
class _TensorKind:
    """What a definition depends on, of one tensor. `sizes`: -1 where any will do."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    is_contiguous: bool
    device_mesh: Any
    placements: tuple[Any, ...]


def _shards(inputs: Sequence[Any]) -> list[Any]:
    return [local_of(value) if is_dtensor(value) else value for value in inputs]


def _sizes(value: Any, are_static: bool) -> tuple[int, ...]:
    """Sizes as a definition gives them: 1 broadcasts, unless ranks share it; -1 is any."""
    shape = tuple(value.shape)
    shared: frozenset[int] = frozenset()
    if 1 in shape and is_dtensor(value):
        placements = placements_of_dtensor(value)
        shared = frozenset(p.dim for p in placements if isinstance(p, Shard | StridedShard))
    return tuple(
        -1 if (dim in shared if size == 1 else not are_static) else size
        for dim, size in enumerate(shape)
    )


def _describe(
    fd: FusionDefinition, position: int, value: Any, kind: _TensorKind | type
) -> TensorView | Val:
    """The next input of `fd`: a tensor that lies as `value` does, or a scalar."""
    if not isinstance(kind, _TensorKind):
        if not isinstance(value, bool | int | float):
            raise UserTypeError(
                f"input {position} is a {kind.__name__}; accepted are DTensors, tensors, bool, int "
                "and float"
            )
        return fd.define_scalar(dtype=dtype_of_value(value))
    dtype = from_torch_dtype(kind.dtype)
    view = fd.define_tensor(kind.sizes, contiguity=kind.is_contiguous, dtype=dtype)
    if is_dtensor(value):
        sharding = sharding_of_dtensor(value)
        if sharding.partial:
            raise Unsupported(
                f"input {position} is {describe(sharding)}: a definition has no partial inputs; "
                "redistribute() it to Replicate or Shard first"
            )
        _place(view, sharding)
    return view


def _place(view: TensorView, sharding: Sharding) -> None:
    """Give a view the sharding: each digit down to the last of a mesh axis is split off."""
    assert sharding.mesh is not None
    view.set_device_mesh(DeviceMesh(sharding.mesh))
    for axis in reversed(range(len(sharding.axes))):
        digits = sharding.axes[axis]
        count = max((k + 1 for k, digit in enumerate(digits) if digit.owner is not None), default=0)
        for loop_axis, digit in enumerate(digits[:count], start=axis):
            extent = const_value(digit.extent)
            assert extent is not None
            view.outer_split(loop_axis, extent)
            if digit.owner is not None:
                view.axis(loop_axis).parallelize(digit.owner)
