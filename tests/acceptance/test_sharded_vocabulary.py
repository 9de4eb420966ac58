"""Softmax and cross entropy over classes that ranks share: logits are never gathered."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from meshfuse import DataType, DistributedTensor, FusionDefinition, ParallelType, TensorView
from meshfuse.multidevice import DeviceMesh, simulate
from sharded_cases import block, integers, replicate

X, Y = ParallelType.mesh_x, ParallelType.mesh_y
ROWS = 3


def softmax(fd: FusionDefinition, x: TensorView) -> TensorView:
    shifted = fd.ops.exp(x - fd.ops.max(x, [1], keepdim=True))
    return shifted / fd.ops.sum(shifted, [1], keepdim=True)


def cross_entropy(fd: FusionDefinition, logits: TensorView, target: TensorView) -> TensorView:
    """For each row: log of the sum of exponentials, less the logit of the target."""
    largest = fd.ops.max(logits, [1], keepdim=True)
    shifted = logits - largest
    total = fd.ops.sum(fd.ops.exp(shifted), [1])
    picked = fd.ops.take_along_axis(shifted, fd.ops.broadcast(target, [False, True]), 1)
    return fd.ops.log(total) - fd.ops.squeeze(picked, [1])


def received(fd: FusionDefinition) -> list[tuple[str, int]]:
    """The kind of each collective, and the bytes of what a rank puts into it."""
    return [(step.collective.value, int(str(step.bytes))) for step in fd.fec.communications()]


@pytest.mark.parametrize("classes", [24, 13], ids=["even", "uneven"])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
def test_softmax(d: int, classes: int) -> None:
    data = torch.randn(ROWS, classes)
    fd = FusionDefinition()
    with fd:
        x = fd.define_tensor([ROWS, classes], contiguity=True)
        fd.add_output(softmax(fd, x))
        block(DeviceMesh(range(d)), x, 1)
    size = -(-classes // d)
    for rank, (part,) in enumerate(simulate(fd, [data])):
        assert isinstance(part, DistributedTensor)
        want = data.softmax(1)[:, rank * size : (rank + 1) * size]
        torch.testing.assert_close(part.local, want)
    assert received(fd) == ([("all_reduce", 4 * ROWS)] * 2 if d > 1 else [])


@pytest.mark.parametrize("classes", [24, 13], ids=["even", "uneven"])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
def test_cross_entropy(d: int, classes: int) -> None:
    """Three numbers a row are reduced: the largest, the sum, and the target's logit."""
    logits, target = torch.randn(ROWS, classes), torch.tensor([0, classes - 1, 5])
    fd = FusionDefinition()
    with fd:
        x = fd.define_tensor([ROWS, classes], contiguity=True)
        t = fd.define_tensor([ROWS], dtype=DataType.Int, contiguity=True)
        fd.add_output(cross_entropy(fd, x, t))
        block(DeviceMesh(range(d)), x, 1)
    want = functional.cross_entropy(logits, target, reduction="none")
    for (loss,) in simulate(fd, [logits, target]):
        torch.testing.assert_close(loss.as_subclass(torch.Tensor), want)
    assert received(fd) == ([("all_reduce", 4 * ROWS)] * 3 if d > 1 else [])


@pytest.mark.parametrize("shape", [(2, 2), (2, 3)])
def test_a_vocabulary_parallel_loss_on_a_grid(shape: tuple[int, int]) -> None:
    """Rows over mesh_y, classes over mesh_x, from the hidden states on."""
    dp, tp = shape
    rows, hidden, classes = dp * 2, 4, tp * 5
    mesh = DeviceMesh(torch.arange(dp * tp).reshape(shape))
    fd = FusionDefinition()
    with fd:
        x = fd.define_tensor([rows, hidden], contiguity=True)
        weight = fd.define_tensor([classes, hidden], contiguity=True)
        t = fd.define_tensor([rows], dtype=DataType.Int, contiguity=True)
        fd.add_output(cross_entropy(fd, fd.ops.linear(x, weight), t))
        for tensor, owner, ranks in ((x, Y, dp), (weight, X, tp), (t, Y, dp)):
            tensor.set_device_mesh(mesh)
            tensor.outer_split(0, ranks)
            tensor.axis(0).parallelize(owner)
    inputs = [integers(rows, hidden), integers(classes, hidden), torch.arange(rows) % classes]
    want = functional.cross_entropy(inputs[0] @ inputs[1].T, inputs[2], reduction="none")
    for rank, (loss,) in enumerate(simulate(fd, inputs)):
        part = want.chunk(dp)[rank // tp]
        torch.testing.assert_close(loss.as_subclass(torch.Tensor), part)
    assert received(fd) == [("all_reduce", 4 * 2)] * 3


@pytest.mark.parametrize("d", [1, 2, 3, 4])
def test_an_embedding_whose_rows_are_shared(d: int) -> None:
    """Each rank looks up what it holds; to blocks of the tokens, the sum is scattered."""
    words, width, tokens = d * 3, 4, d * 2
    mesh = DeviceMesh(range(d))
    fd = FusionDefinition()
    with fd:
        index = fd.define_tensor([tokens], dtype=DataType.Int, contiguity=True)
        table = fd.define_tensor([words, width], contiguity=True)
        y = fd.ops.index_select(table, index, 0)
        fd.add_output(y)
        replicate(mesh, index)
        block(mesh, table, 0)
        block(mesh, y, 0)
    inputs = [torch.arange(tokens) % words, integers(words, width)]
    want = inputs[1][inputs[0]]
    for rank, (rows,) in enumerate(simulate(fd, inputs)):
        assert torch.equal(rows.as_subclass(torch.Tensor), want.chunk(d)[rank])
    kinds = [kind for kind, _ in received(fd)]
    assert kinds == (["reduce_scatter"] if d > 1 else [])
