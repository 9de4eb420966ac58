"""Sharded programs with their right answers, run alike in the simulator and by gloo processes.

A case builds, for d ranks, a definition, its global inputs, and the global value and sharded
axis of each visible output. Integer data wherever it can be: then `tolerance` is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from meshfuse import DataType, DistributedTensor, FusionDefinition, ParallelType, TensorView
from meshfuse.multidevice import DeviceMesh, Sharding

MESH_X = ParallelType.mesh_x


@dataclass(frozen=True)
class Expected:
    """A visible output: its global value, and the tensor axis mesh_x shards (-1: replicated)."""

    value: torch.Tensor
    axis: int
    tolerance: float = 0.0


@dataclass(frozen=True)
class Built:
    """`collectives` are the kinds that must be posted, in order, when d > 1."""

    fd: FusionDefinition
    inputs: Sequence[torch.Tensor]
    expected: Sequence[Expected]
    collectives: tuple[str, ...] = ()


Case = Callable[[int], Built]


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers in `dtype`, the same on every rank and in every run of the same shape."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randint(-4, 4, shape, generator=generator).to(dtype)


def replicate(mesh: DeviceMesh, *tensors: TensorView) -> None:
    for tensor in tensors:
        tensor.set_device_mesh(mesh)


def block(mesh: DeviceMesh, tensor: TensorView, axis: int) -> None:
    """Shard loop axis `axis` in equal blocks over mesh_x."""
    tensor.set_device_mesh(mesh)
    tensor.outer_split(axis, mesh.size)
    tensor.axis(axis if axis >= 0 else axis - 1).parallelize(MESH_X)


def whole_axis(mesh: DeviceMesh, tensor: TensorView, axis: int) -> None:
    """Bind a whole axis, whose extent is the mesh's size, to mesh_x."""
    tensor.set_device_mesh(mesh)
    tensor.axis(axis).parallelize(MESH_X)


def pointwise_to_replicated(d: int) -> Built:
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([d, 4], contiguity=True)
        y = fd.ops.mul(fd.ops.relu(x), 2)
        fd.add_output(y)
        whole_axis(mesh, x, 0)
        replicate(mesh, y)
    data = integers(d, 4)
    return Built(fd, [data], [Expected(data.relu() * 2, -1)], ("all_gather",))


def all_gather(d: int) -> Built:
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([d * 4], contiguity=True)
        y = fd.ops.set(x)
        fd.add_output(y)
        block(mesh, x, 0)
        replicate(mesh, y)
    data = integers(d * 4)
    return Built(fd, [data], [Expected(data, -1)], ("all_gather",))


def all_gather_inner_axis(d: int) -> Built:
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([3, d * 2], contiguity=True)
        y = fd.ops.set(x)
        fd.add_output(y)
        block(mesh, x, 1)
        replicate(mesh, y)
    data = integers(3, d * 2)
    return Built(fd, [data], [Expected(data, -1)], ("all_gather",))


def all_reduce_whole_axis(d: int) -> Built:
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([d, 4], contiguity=True)
        y = fd.ops.sum(x, [0])
        fd.add_output(y)
        whole_axis(mesh, x, 0)
        replicate(mesh, y)
    data = integers(d, 4)
    return Built(fd, [data], [Expected(data.sum(0), -1)], ("all_reduce",))


def all_reduce_split_axis(d: int) -> Built:
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([d * 3, 4], contiguity=True)
        y = fd.ops.sum(x, [0])
        fd.add_output(y)
        block(mesh, x, 0)
    data = integers(d * 3, 4)
    return Built(fd, [data], [Expected(data.sum(0), -1)], ("all_reduce",))


def all_reduce_max(d: int) -> Built:
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([5, d * 3], contiguity=True, dtype=DataType.Int)
        y = fd.ops.max(x, [1])
        fd.add_output(y)
        block(mesh, x, 1)
    data = integers(5, d * 3, dtype=torch.int64)
    return Built(fd, [data], [Expected(data.amax(1), -1)], ("all_reduce",))


def all_reduce_min_and_prod(d: int) -> Built:
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([5, d * 3], contiguity=True)
        fd.add_output(fd.ops.min(x, [1]))
        fd.add_output(fd.ops.prod(x, [1]))
        block(mesh, x, 1)
    data = integers(5, d * 3)
    expected = [Expected(data.amin(1), -1), Expected(data.prod(1), -1)]
    return Built(fd, [data], expected, ("all_reduce", "all_reduce"))


def split_heads(d: int) -> Built:
    """The heads of a column-parallel linear stay where they are; to sum over them, one exchange."""
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([2, -1, 8], contiguity=True)
        weight = fd.define_tensor([d * 2 * 3, 8], contiguity=True)
        heads = fd.ops.reshape(fd.ops.linear(x, weight), [2, fd.ops.size(x, 1), d * 2, 3])
        fd.add_output(fd.ops.permute(heads, [0, 2, 1, 3]) * 2.0)
        fd.add_output(fd.ops.sum(heads, [2, 3]))
        replicate(mesh, x)
        block(mesh, weight, 0)
    inputs = [integers(2, 5, 8), integers(d * 6, 8)]
    value = torch.nn.functional.linear(*inputs).reshape(2, 5, d * 2, 3)
    expected = [Expected(value.permute(0, 2, 1, 3) * 2, 1), Expected(value.sum((2, 3)), -1)]
    return Built(fd, inputs, expected, ("all_reduce",))


def reshape_gathers(d: int) -> Built:
    """The ranks' blocks are strided pieces of the merged axis, and are gathered as such."""
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([3, d * 2], contiguity=True)
        y = fd.ops.relu(fd.ops.reshape(x, [-1]))
        fd.add_output(y)
        block(mesh, x, 1)
        replicate(mesh, y)
    data = integers(3, d * 2)
    return Built(fd, [data], [Expected(data.reshape(-1).relu(), -1)], ("all_gather",))


def reduce_scatter(d: int) -> Built:
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([d, d * 4], contiguity=True)
        y = fd.ops.sum(x, [0])
        fd.add_output(y)
        whole_axis(mesh, x, 0)
        block(mesh, y, -1)
        if d > 1:  # a sum over an axis of one element leaves no reduced axis
            y.axis(0).parallelize(MESH_X)
    data = integers(d, d * 4)
    return Built(fd, [data], [Expected(data.sum(0), 0)], ("reduce_scatter",))


def reduce_scatter_noncontiguous(d: int) -> Built:
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([d, 3, d * 4], contiguity=True)
        y = fd.ops.sum(x, [0])
        fd.add_output(y)
        whole_axis(mesh, x, 0)
        block(mesh, y, -1)
        if d > 1:  # a sum over an axis of one element leaves no reduced axis
            y.axis(0).parallelize(MESH_X)
    data = integers(d, 3, d * 4)
    return Built(fd, [data], [Expected(data.sum(0), 1)], ("reduce_scatter",))


def linear_3d_weight(d: int) -> Built:
    """Weight [d, e, e] sharded on its leading axis; all else follows."""
    b, s, e = 2, 1024, 768
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([b, s, e])
        weight = fd.define_tensor([d, e, e], contiguity=True)
        bias = fd.define_tensor([d, e], contiguity=True)
        y = fd.ops.linear(x, weight, bias)
        fd.add_output(y)
        replicate(mesh, x)
        whole_axis(mesh, weight, 0)
        whole_axis(mesh, bias, 0)
    inputs = [integers(b, s, e), integers(d, e, e), integers(d, e)]
    value = torch.einsum("bsk,dnk->dbsn", inputs[0], inputs[1]) + inputs[2][:, None, None, :]
    return Built(fd, inputs, [Expected(value, 0)])


def matmul_column_parallel(d: int) -> Built:
    """Second operand and result split on n; contiguity not given, and still no copy."""
    b, m, k, n = 2, 1024, 768, 768
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([b, m, k])
        weight = fd.define_tensor([k, d * n])
        y = fd.ops.matmul(x, weight)
        fd.add_output(y)
        replicate(mesh, x)
        block(mesh, weight, 1)
        block(mesh, y, 2)
    inputs = [integers(b, m, k), integers(k, d * n)]
    return Built(fd, inputs, [Expected(inputs[0] @ inputs[1], 2)])


def linear_column_parallel(d: int) -> Built:
    """Loop splits only, a bias, symbolic leading sizes."""
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1, 12], contiguity=True)
        weight = fd.define_tensor([d * 5, 12], contiguity=True)
        bias = fd.define_tensor([d * 5], contiguity=True)
        y = fd.ops.linear(x, weight, bias)
        fd.add_output(y)
        replicate(mesh, x)
        block(mesh, weight, 0)
        block(mesh, bias, 0)
    inputs = [integers(2, 7, 12), integers(d * 5, 12), integers(d * 5)]
    return Built(fd, inputs, [Expected(torch.nn.functional.linear(*inputs), 2)])


def linear_row_parallel(d: int) -> Built:
    """The contraction is sharded: local products, one all-reduce, the bias added once."""
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([2, 7, d * 6], contiguity=True)
        weight = fd.define_tensor([5, d * 6], contiguity=True)
        bias = fd.define_tensor([5], contiguity=True)
        y = fd.ops.linear(x, weight, bias)
        fd.add_output(y)
        block(mesh, x, 2)
        block(mesh, weight, 1)
        replicate(mesh, bias)
    inputs = [integers(2, 7, d * 6), integers(5, d * 6), integers(5)]
    return Built(fd, inputs, [Expected(torch.nn.functional.linear(*inputs), -1)], ("all_reduce",))


def sequence_parallel_mlp(d: int) -> Built:
    """Gather tokens, two linears, reduce-scatter; inputs and the second product are annotated."""
    b, s, e, inner = 2, d * 3, 8, d * 4
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([b, -1, e], contiguity=True)
        up = fd.define_tensor([inner, e], contiguity=True)
        down = fd.define_tensor([e, inner], contiguity=True)
        bias = fd.define_tensor([e], contiguity=True)
        hidden = fd.ops.relu(fd.ops.linear(x, up))
        product = fd.ops.linear(hidden, down, bias)
        y = fd.ops.add(product, x)
        fd.add_output(y)
        block(mesh, x, 1)
        block(mesh, up, 0)
        block(mesh, down, 1)
        replicate(mesh, bias)
        block(mesh, product, 1)
    inputs = [integers(b, s, e), integers(inner, e), integers(e, inner), integers(e)]
    hidden_value = torch.nn.functional.linear(inputs[0], inputs[1]).relu()
    value = torch.nn.functional.linear(hidden_value, inputs[2], inputs[3]) + inputs[0]
    return Built(fd, inputs, [Expected(value, 1)], ("all_gather", "reduce_scatter"))


def sequence_parallel_var_mean(d: int) -> Built:
    """Statistics over an axis that is whole on every rank: nothing moves."""
    rows, features = (6 * 64 * d if d == 3 else 2048), 12288
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([1, rows, features], contiguity=True)
        variance, mean = fd.ops.var_mean(x, [2], correction=0, keepdim=False)
        fd.add_output(variance)
        fd.add_output(mean)
        block(mesh, x, 1)
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(1, rows, features, generator=generator)
    variance_value, mean_value = torch.var_mean(data.double(), 2, correction=0)
    expected = [
        Expected(variance_value.float(), 1, tolerance=1e-5),
        Expected(mean_value.float(), 1, tolerance=1e-6),
    ]
    return Built(fd, [data], expected)


def vocabulary_parallel_embedding(d: int) -> Built:
    """Each rank looks up the rows that it holds, and the sum is scattered over the sequence."""
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        tokens = fd.define_tensor([2, -1], dtype=DataType.Int, contiguity=True)
        table = fd.define_tensor([d * 5, 8], contiguity=True)
        rows = fd.ops.embedding_fwd(tokens, table)
        fd.add_output(rows * 2.0)
        replicate(mesh, tokens)
        block(mesh, table, 0)
        block(mesh, rows, 1)
    inputs = [integers(2, d * 3, dtype=torch.int64) % (d * 5), integers(d * 5, 8)]
    expected = [Expected(inputs[1][inputs[0]] * 2, 1)]
    return Built(fd, inputs, expected, ("reduce_scatter",))


def rotary_embedding(d: int) -> Built:
    """Heads in blocks, turned by their position: slices, cat and iota, and nothing moves."""
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([d * 2, 3, 8], contiguity=True)
        low = fd.ops.slice(x, [0, 0, 0], [d * 2, 3, 4])
        high = fd.ops.slice(x, [0, 0, 4], [d * 2, 3, 8])
        turned = fd.ops.cat([fd.ops.neg(high), low], -1)
        position = fd.ops.broadcast(fd.ops.iota(3, dtype=DataType.Float), [False, True])
        fd.add_output(x + turned * position)
        block(mesh, x, 0)
    data = integers(d * 2, 3, 8)
    turned_value = torch.cat([-data[..., 4:], data[..., :4]], -1)
    return Built(fd, [data], [Expected(data + turned_value * torch.arange(3.0)[:, None], 0)])


def replicated_to_sharded(d: int) -> Built:
    """A local slice: nothing moves."""
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([3, d * 4], contiguity=True)
        y = fd.ops.neg(x)
        z = fd.ops.set(y)
        fd.add_output(z)
        replicate(mesh, x, y)
        block(mesh, z, 1)
    data = integers(3, d * 4)
    return Built(fd, [data], [Expected(-data, 1)])


def hidden_output_keeps_alignment(d: int) -> Built:
    """An in-place update is not returned; the other outputs keep their places and shardings."""
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([d * 2, 3], contiguity=True)
        total = fd.define_tensor([3], contiguity=True)
        y = fd.ops.mul(x, 3)
        updated = fd.ops.add(total, 1.0)
        reduced = fd.ops.sum(x, [0])
        fd.add_output(y)
        fd.add_output(updated, total)
        fd.add_output(reduced)
        block(mesh, x, 0)
        replicate(mesh, total)
    inputs = [integers(d * 2, 3), integers(3)]
    expected = [Expected(inputs[0] * 3, 0), Expected(inputs[0].sum(0), -1)]
    return Built(fd, inputs, expected, ("all_reduce",))


def attention_on_heads(d: int) -> Built:
    """Attention and the gradient of its values: all of a head is on one rank."""
    mesh = DeviceMesh(range(d))
    shape = [2, d * 2, 5, 8]
    with FusionDefinition() as fd:
        query, key, value, grad = (
            fd.define_tensor(shape, dtype=DataType.BFloat16, contiguity=True) for _ in range(4)
        )
        out, logsumexp, seed, offset = fd.ops.sdpfa_fwd(query, key, value, is_causal=True)
        back = fd.ops.sdpfa_bwd(
            grad, query, key, value, out, logsumexp, 0.0, True, seed, offset, None
        )
        fd.add_output(out)
        fd.add_output(back[2])
        for tensor in (query, key, value, grad):
            block(mesh, tensor, 1)
    data = integers(*shape, dtype=torch.bfloat16)
    scores = data.double() @ data.double().mT / 8**0.5
    hidden = ~torch.ones(5, 5, dtype=torch.bool).tril()
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    values = (weights @ data.double(), weights.mT @ data.double())
    expected = [Expected(value.to(torch.bfloat16), 1, tolerance=2e-2) for value in values]
    return Built(fd, [data] * 4, expected)


def gathered_in_chunks(d: int) -> Built:
    """Rows in 3 chunks of d blocks: each chunk is gathered, multiplied and forgotten."""
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([6 * d, 4], contiguity=True)
        w = fd.define_tensor([4, 5], contiguity=True)
        y = fd.ops.matmul(x, w)
        fd.add_output(y)
        replicate(mesh, x, w, y)
        x.outer_split(0, 3)
        x.outer_split(1, d)
        x.axis(1).parallelize(ParallelType.mesh_x)
        y.outer_split(0, 3)
        y.axis(0).parallelize(ParallelType.stream)
    a, b = integers(6 * d, 4), integers(4, 5)
    return Built(fd, [a, b], [Expected(a @ b, -1)], ("all_gather",))


def summed_in_chunks(d: int) -> Built:
    """Each chunk of columns is multiplied and summed over the ranks; the last one is shorter."""
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([3, 2 * d], contiguity=True)
        w = fd.define_tensor([2 * d, 7], contiguity=True)
        y = fd.ops.matmul(x, w)
        fd.add_output(y)
        block(mesh, x, 1)
        block(mesh, w, 0)
        replicate(mesh, y)
        y.outer_split(1, 3)
        y.axis(1).parallelize(ParallelType.stream)
    a, b = integers(3, 2 * d), integers(2 * d, 7)
    return Built(fd, [a, b], [Expected(a @ b, -1)], ("all_reduce",))


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        pointwise_to_replicated,
        all_gather,
        all_gather_inner_axis,
        all_reduce_whole_axis,
        all_reduce_split_axis,
        all_reduce_max,
        all_reduce_min_and_prod,
        split_heads,
        reshape_gathers,
        reduce_scatter,
        reduce_scatter_noncontiguous,
        attention_on_heads,
        gathered_in_chunks,
        summed_in_chunks,
        linear_3d_weight,
        matmul_column_parallel,
        linear_column_parallel,
        linear_row_parallel,
        sequence_parallel_mlp,
        sequence_parallel_var_mean,
        vocabulary_parallel_embedding,
        rotary_embedding,
        replicated_to_sharded,
        hidden_output_keeps_alignment,
    )
}


def local_part(expected: Expected, d: int, rank: int) -> torch.Tensor:
    """What rank `rank` of d must hold."""
    return expected.value if expected.axis < 0 else expected.value.chunk(d, expected.axis)[rank]


def check_outputs(built: Built, d: int, rank: int, outputs: Sequence[torch.Tensor]) -> None:
    """Value, dtype, shape and sharding of every visible output of one rank."""
    assert len(outputs) == len(built.expected)
    for output, expected in zip(outputs, built.expected, strict=True):
        assert isinstance(output, DistributedTensor)
        want = local_part(expected, d, rank)
        assert output.shape == want.shape
        assert output.dtype == want.dtype
        torch.testing.assert_close(
            output.local.cpu(), want, rtol=expected.tolerance, atol=expected.tolerance
        )
        assert output.axis_sharded_on(MESH_X) == expected.axis
        assert output.mesh.size == d
    shardings: list[Sharding] = built.fd.fec.get_output_shardings()
    assert [s.axis_sharded_on(MESH_X) for s in shardings] == [e.axis for e in built.expected]
