"""DistributedTensor: a shard that keeps its sharding."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from meshfuse.base.errors import InvariantError, UserError, UserTypeError
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.placements import Shard
from meshfuse.dist.tensor import DistributedTensor
from meshfuse.expr import const, symbol
from meshfuse.facts.sharding import Digit, Sharding
from meshfuse.ir.mesh import ParallelType, make_mesh

X, Y = ParallelType.mesh_x, ParallelType.mesh_y


def make(dtype: torch.dtype = torch.float32) -> DistributedTensor:
    """Axis 0 of a [4, 3] tensor in blocks over mesh_x; partial over mesh_y."""
    mesh = make_mesh([[0, 1], [2, 3]], names=("data", "tensor"))
    axes = ((Digit(const(2), X), Digit(const(2))), (Digit(const(3)),))
    return DistributedTensor(torch.arange(6).view(2, 3).to(dtype), Sharding(mesh, axes, {Y: "sum"}))


def test_is_the_local_shard() -> None:
    tensor = make()
    assert tensor.shape == (2, 3)
    assert tensor.global_shape == (4, 3)
    assert type(tensor.local) is torch.Tensor
    assert tensor.local.data_ptr() == tensor.data_ptr()
    assert not tensor.requires_grad
    assert (tensor.axis_sharded_on(X), tensor.axis_sharded_on(Y)) == (0, -1)
    assert tensor.mesh.axis("tensor") == X
    assert tensor.placements[1] == Shard(0)


def test_results_of_torch_are_plain() -> None:
    tensor = make()
    for result in (tensor + 1, tensor @ torch.ones(3, 2), tensor.sum(), tensor.t(), tensor.clone()):
        assert type(result) is torch.Tensor
    assert torch.equal(tensor * 2, tensor.local * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_copies_and_pickles_keep_the_sharding(dtype: torch.dtype) -> None:
    tensor = make(dtype)
    file = io.BytesIO()
    torch.save({"state": tensor}, file)
    file.seek(0)
    for other in (
        copy.copy(tensor),
        copy.deepcopy(tensor),
        pickle.loads(pickle.dumps(tensor)),
        torch.load(file, weights_only=True)["state"],
    ):
        assert type(other) is DistributedTensor
        assert other.sharding == tensor.sharding
        assert torch.equal(other.local, tensor.local)
    assert copy.copy(tensor).data_ptr() == tensor.data_ptr()
    assert copy.deepcopy(tensor).data_ptr() != tensor.data_ptr()
    twice = copy.deepcopy([tensor, tensor])
    assert twice[0] is twice[1]


def test_full_tensor_of_a_process_that_is_alone() -> None:
    sharding = Sharding(make_mesh([0]), ((Digit(const(3)),),))
    tensor = DistributedTensor(torch.arange(3), sharding)
    assert tensor.full_tensor(Communicator({})).tolist() == [0, 1, 2]
    elsewhere = DistributedTensor(torch.arange(3), Sharding(make_mesh([1]), sharding.axes))
    with pytest.raises(UserError, match=r"rank 0 is not in DeviceMesh\{1\}"):
        elsewhere.full_tensor(Communicator({}))


def test_outside_the_mesh_a_number_is_a_tensor_of_no_elements() -> None:
    tensor = DistributedTensor(torch.empty(0), Sharding(make_mesh([1]), ()))
    for there in (tensor, copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert there.local.shape == (0,) and there.global_shape == ()
    with pytest.raises(UserError, match="must have 0 axes"):
        DistributedTensor(torch.ones(1), tensor.sharding)


def test_refusals() -> None:
    with pytest.raises(UserError, match=r"shape \(3,\).*must have 2 axes"):
        DistributedTensor(torch.ones(3), make().sharding)
    with pytest.raises(InvariantError, match="without a mesh"):
        DistributedTensor(torch.ones(3), Sharding(None, ((Digit(const(3)),),)))
    with pytest.raises(InvariantError, match="symbolic"):
        DistributedTensor(torch.ones(3), Sharding(make_mesh([0]), ((Digit(symbol("i0", low=1)),),)))
    with pytest.raises(UserTypeError, match="takes a mesh axis"):
        make().axis_sharded_on(ParallelType.stream)


def test_repr_says_sharding_and_values() -> None:
    text = repr(make())
    assert text.startswith("DistributedTensor([mesh_x{2} 2, 3] on DeviceMesh{{0 1} {2 3}}, partial")
    assert "tensor([[0., 1., 2.]" in text
