"""Arguments of the wrong kind, to every function that users call: an error that restates the call.

No KeyError, AttributeError, IndexError or InvariantError may reach a user, and nothing may hang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from meshfuse import DataType, FusionDefinition, InvariantError, MeshfuseError, ParallelType
from meshfuse.api.tensor_view import TensorView
from meshfuse.multidevice import DeviceMesh, Sharding, shard_tensor, simulate


class Stranger:
    """What no function takes."""

    def __repr__(self) -> str:
        return "Stranger()"


JUNK = [
    Stranger(),
    None,
    "abc",
    b"x",
    3,
    -1,
    2.5,
    float("nan"),
    True,
    10**30,
    [],
    [None],
    [Stranger()],
    ["a"],
    [1.5],
    [True],
    [10**30],
    (1, 2, 3),
    {},
    {1: 2},
    range(3),
    1j,
    int,
    torch.ones(2),
    DataType.Float,
    ParallelType.mesh_x,
]


def view() -> TensorView:
    return FusionDefinition().define_tensor([-1, -1])


def operation(
    name: str, *before: object, after: tuple[object, ...] = ()
) -> Callable[[Any], object]:
    """`fd.ops.<name>` with the argument between others; "x" stands for a tensor."""

    def call(value: Any) -> object:
        fd = FusionDefinition()
        x = fd.define_tensor([-1, -1])
        function = getattr(fd.ops, name)
        return function(*[x if b == "x" else b for b in before], value, *after)

    return call


def view_of_two(name: str, *after: Any) -> object:
    """`fd.ops.<name>` of a list of two tensors and what follows."""
    fd = FusionDefinition()
    x = fd.define_tensor([-1, -1])
    return getattr(fd.ops, name)([x, x], *after)


def run(**arguments: object) -> list[torch.Tensor]:
    fd = FusionDefinition()
    fd.add_output(fd.define_tensor([2, 2]) + 1)
    given: dict[str, Any] = {"inputs": [torch.ones(2, 2)], **arguments}
    return fd.execute(**given)


def run_scalar(dtype: DataType, value: Any) -> list[torch.Tensor]:
    fd = FusionDefinition()
    scalar = fd.define_scalar(dtype)
    fd.add_output(fd.ops.where(fd.define_tensor([2]) < scalar, 1, 0))
    return fd.execute([value, torch.ones(2)])


def run_simulated(inputs: Any, **arguments: Any) -> object:
    fd = FusionDefinition()
    x = fd.define_tensor([2, 2])
    x.set_device_mesh(DeviceMesh([0, 1]))
    fd.add_output(x + 1)
    return simulate(fd, inputs, **arguments)


def define(*before: Any, **keywords: Any) -> TensorView:
    return FusionDefinition().define_tensor(*before, **keywords)


def contiguity_of_allocation(value: Any) -> None:
    x = view()
    x.set_allocation_domain(x.get_logical_domain(), value)


MESH = DeviceMesh([[0, 1]])
GOOD = [torch.ones(2, 2)]
CALLS: dict[str, Callable[[Any], object]] = {
    "define_tensor": define,
    "define_tensor contiguity": lambda v: define([2, 3], contiguity=v),
    "define_tensor flag": lambda v: define([2, 3], contiguity=[True, v]),
    "define_tensor dtype": lambda v: define([2, 3], dtype=v),
    "define_tensor stride_order": lambda v: define([2, 3], stride_order=v),
    "define_tensor is_cpu": lambda v: define([2, 3], is_cpu=v),
    "define_tensor strides": lambda v: define(sizes=[2, 3], strides=v),
    "define_tensor sizes": lambda v: define(sizes=v, strides=[3, 1]),
    "define_tensor static_sizes": lambda v: define(sizes=[2], strides=[1], static_sizes=v),
    "define_scalar": lambda v: FusionDefinition().define_scalar(v),
    "define_scalar dtype": lambda v: FusionDefinition().define_scalar(1, v),
    "define_vector": lambda v: FusionDefinition().define_vector(v),
    "from_pytorch": lambda v: FusionDefinition().from_pytorch(v),
    "from_pytorch static": lambda v: FusionDefinition().from_pytorch(torch.ones(2), v),
    "add_output": lambda v: FusionDefinition().add_output(v),
    "execute": lambda v: run(inputs=v),
    "execute input": lambda v: run(inputs=[v]),
    "execute int": lambda v: run_scalar(DataType.Int, v),
    "execute double": lambda v: run_scalar(DataType.Double, v),
    "execute device": lambda v: run(device=v),
    "execute overlap": lambda v: run(overlap=v),
    "execute enable": lambda v: run(_enable_options=[v]),
    "execute disable": lambda v: run(_disable_options=[v]),
    "axis": lambda v: view().axis(v),
    "size": lambda v: view().size(v),
    "split axis": lambda v: view().split(v, 2),
    "split factor": lambda v: view().split(0, v),
    "split inner": lambda v: view().split(0, 2, v),
    "merge": lambda v: view().merge(0, v),
    "reorder": lambda v: view().reorder(v),
    "reorder from": lambda v: view().reorder(cast(Any, {str(v): 0})),
    "reorder to": lambda v: view().reorder({0: v}),
    "set_allocation_domain": lambda v: view().set_allocation_domain(v, True),
    "set_allocation_domain contiguity": contiguity_of_allocation,
    "set_device_mesh": lambda v: view().set_device_mesh(v),
    "parallelize": lambda v: view().axis(0).parallelize(v),
    "DeviceMesh": DeviceMesh,
    "DeviceMesh rank": lambda v: DeviceMesh([0, v]),
    "DeviceMesh names": lambda v: DeviceMesh([0, 1], names=v),
    "mesh.axis": MESH.axis,
    "mesh.shard_tensor": lambda v: MESH.shard_tensor(v, 0),
    "mesh.shard_tensor axis": lambda v: MESH.shard_tensor(torch.ones(4, 4), v),
    "Sharding mesh": lambda v: Sharding(v, {}),
    "Sharding axes": lambda v: Sharding(MESH, v),
    "Sharding axis": lambda v: Sharding(MESH, {ParallelType.mesh_x: v}),
    "shard_tensor": lambda v: shard_tensor(v, view()),
    "shard_tensor view": lambda v: shard_tensor(torch.ones(2, 2), v),
    "simulate": lambda v: simulate(v, []),
    "simulate inputs": run_simulated,
    "simulate input": lambda v: run_simulated([v]),
    "simulate ranks": lambda v: run_simulated(GOOD, ranks=v),
    "simulate flag": lambda v: run_simulated(GOOD, per_rank=v),
    "simulate per_rank": lambda v: run_simulated(v, per_rank=True),
    "simulate per_rank input": lambda v: run_simulated([v, v], per_rank=True),
    "exp": operation("exp"),
    "add": operation("add", "x"),
    "where": operation("where", after=(1, 2)),
    "where value": operation("where", True, "x"),
    "cast": operation("cast", after=(DataType.Float,)),
    "cast dtype": operation("cast", "x"),
    "set": operation("set"),
    "broadcast": operation("broadcast", "x"),
    "broadcast_in_dim shape": operation("broadcast_in_dim", "x", after=([0, 1],)),
    "broadcast_in_dim size": lambda v: operation("broadcast_in_dim", "x", after=([0, 1],))([2, v]),
    "broadcast_in_dim dims": operation("broadcast_in_dim", "x", [3, 4]),
    "permute": operation("permute", "x"),
    "squeeze": operation("squeeze", "x"),
    "ops.size": operation("size", "x"),
    "sum": operation("sum"),
    "sum dims": operation("sum", "x"),
    "sum keepdim": operation("sum", "x", [0]),
    "sum dtype": operation("sum", "x", [0], False),
    "max dtype": operation("max", "x", [0], False),
    "mean keepdim": operation("mean", "x", [0]),
    "var_mean dims": operation("var_mean", "x"),
    "var_mean correction": operation("var_mean", "x", [0]),
    "var_mean keepdim": operation("var_mean", "x", [0], 1),
    "linear": operation("linear", "x"),
    "linear bias": operation("linear", "x", "x"),
    "matmul": operation("matmul", "x"),
    "slice": operation("slice", after=([0, 0], [1, 1])),
    "slice starts": operation("slice", "x", after=([1, 1],)),
    "slice end": lambda v: operation("slice", "x", [0, 0])([1, v]),
    "slice strides": operation("slice", "x", [0, 0], [1, 1]),
    "slice flag": operation("slice", "x", [0, 0], [1, 1], None),
    "pad": operation("pad", after=([1, 1],)),
    "pad widths": operation("pad", "x"),
    "pad width": lambda v: operation("pad", "x")([0, v]),
    "pad value": operation("pad", "x", [1, 1]),
    "cat": operation("cat"),
    "cat dim": lambda v: view_of_two("cat", v),
    "cat flag": lambda v: view_of_two("cat", 0, v),
    "index_select": operation("index_select", "x", after=(0,)),
    "index_select dim": operation("index_select", "x", "x"),
    "take_along_axis": operation("take_along_axis", "x", after=(0,)),
    "embedding_fwd": operation("embedding_fwd", after=("x",)),
    "embedding_fwd padding_idx": operation("embedding_fwd", "x", "x"),
    "embedding_fwd max_norm": operation("embedding_fwd", "x", "x", None),
    "embedding_fwd norm_type": operation("embedding_fwd", "x", "x", None, 1.0),
    "embedding_fwd sparse": operation("embedding_fwd", "x", "x", None, None, None, None),
    "cumsum": operation("cumsum", after=(0,)),
    "cumsum dim": operation("cumsum", "x"),
    "cumsum init": operation("cumsum", "x", 0),
    "iota": operation("iota"),
    "iota start": operation("iota", 3),
    "iota step": operation("iota", 3, 0),
    "iota dtype": operation("iota", 3, None, None),
    "topk": operation("topk", after=(1,)),
    "topk k": operation("topk", "x"),
    "topk dim": operation("topk", "x", 1),
    "topk largest": operation("topk", "x", 1, 0),
    "topk sorted": operation("topk", "x", 1, 0, True),
}


@pytest.mark.parametrize("name", CALLS)
def test_nonsense_raises_only_errors_made_for_users(name: str) -> None:
    for value in JUNK:
        try:
            CALLS[name](value)
        except InvariantError as error:
            raise AssertionError(f"{name}({value!r})") from error
        except MeshfuseError as error:
            assert str(error)


@pytest.mark.parametrize("name", CALLS)
def test_a_stranger_is_refused_with_his_name(name: str) -> None:
    with pytest.raises((TypeError, RuntimeError), match="Stranger") as caught:
        CALLS[name](Stranger())
    assert isinstance(caught.value, MeshfuseError)
