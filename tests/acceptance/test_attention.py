"""sdpfa_fwd and sdpfa_bwd: by value, by memory layout, and without communication on heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from kernel_paths import PATHS
from meshfuse import DataType, FusionDefinition, ParallelType, TensorView
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.ir.parser import parse_program
from meshfuse.ir.printer import print_program
from meshfuse.multidevice import DeviceMesh, simulate

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
DATA_TYPES = {
    F32: DataType.Float,
    F64: DataType.Double,
    F16: DataType.Half,
    BF16: DataType.BFloat16,
}
# S0.9 asks for the second pair of bfloat16; gradients are sums over queries.
TOLERANCES = {F32: (1e-5, 1e-5), F64: (1e-6, 1e-7), F16: (2e-3, 4e-3), BF16: (1.6e-2, 2e-2)}


def random_tensors(
    count: int, shape: Sequence[int], dtype: torch.dtype = F32, seed: int = 0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]


def reference(
    operands: Sequence[torch.Tensor],
    causal: bool = False,
    scale: float | None = None,
    added: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp, in float64, of query, key and value.

    `added` is -inf where nothing may be seen.
    """
    query, key, value = operands
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query.double() @ key.double().mT * scale
    if added is not None:
        scores = scores + added.double()
    if causal:
        hidden = ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.nan_to_num(scores.softmax(-1)) @ value.double(), scores.logsumexp(-1)


def define_three(
    fd: FusionDefinition, shape: Sequence[int], **keywords: Any
) -> tuple[TensorView, TensorView, TensorView]:
    """Query, key and value of one shape."""
    query, key, value = (fd.define_tensor(shape, **keywords) for _ in range(3))
    return query, key, value


def gradients(
    grad: torch.Tensor, inputs: Sequence[torch.Tensor], **arguments: Any
) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    out, _ = reference(leaves, **arguments)
    return torch.autograd.grad(out, leaves, grad.double())


def check(found: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(found, want.to(found.dtype), rtol=rtol, atol=atol)


def forward_and_backward(
    shape: Sequence[int], keys: Sequence[int], dtype: torch.dtype = F32, **arguments: Any
) -> FusionDefinition:
    """Inputs: query, key, value, the gradient of the output. Outputs: all seven."""
    with FusionDefinition() as fd:
        kind = {"dtype": DATA_TYPES[dtype], "contiguity": True}
        query = fd.define_tensor(shape, **kind)
        key, value = (fd.define_tensor(keys, **kind) for _ in range(2))
        grad = fd.define_tensor([*shape[:-1], keys[-1]], **kind)
        made = fd.ops.sdpfa_fwd(query, key, value, **arguments)
        given = {"dropout_p": 0.0, "is_causal": False, "scale": None, **arguments}
        back = fd.ops.sdpfa_bwd(
            grad,
            query,
            key,
            value,
            made[0],
            made[1],
            given["dropout_p"],
            given["is_causal"],
            made[2],
            made[3],
            given["scale"],
        )
        for output in (*made, *back):
            fd.add_output(output)
    return fd


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_values_and_gradients(dtype: torch.dtype, causal: bool, scale: float | None) -> None:
    shape = (2, 3, 5, 16)
    fd = forward_and_backward(shape, shape, dtype, is_causal=causal, scale=scale)
    inputs = random_tensors(4, shape, dtype)
    outputs = fd.execute(inputs)
    out, logsumexp = reference(inputs[:3], causal, scale)
    check(outputs[0], out, dtype)
    assert outputs[0].dtype == dtype
    assert outputs[1].dtype == F32
    torch.testing.assert_close(outputs[1], logsumexp.float(), rtol=1e-4, atol=1e-4)
    assert outputs[2].tolist() == [0, 0]
    assert outputs[3].item() == 0
    wanted = gradients(inputs[3], inputs[:3], causal=causal, scale=scale)
    for found, want in zip(outputs[4:], wanted, strict=True):
        assert found.is_contiguous()
        check(found, want, dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5), (1, 4), (0, 3), (3, 0)])
def test_other_numbers_of_queries_than_of_keys(queries: int, keys: int, causal: bool) -> None:
    """Empty ones, too: torch's flash kernel ends the process there."""
    fd = forward_and_backward([-1, 2, -1, 8], [-1, 2, -1, 8], is_causal=causal)
    inputs = [
        *random_tensors(1, (3, 2, queries, 8), seed=1),
        *random_tensors(2, (3, 2, keys, 8), seed=2),
        *random_tensors(1, (3, 2, queries, 8), seed=3),
    ]
    outputs = fd.execute(inputs)
    out, logsumexp = reference(inputs[:3], causal)
    check(outputs[0], out, F32)
    torch.testing.assert_close(outputs[1], logsumexp.float())
    for found, want in zip(
        outputs[4:], gradients(inputs[3], inputs[:3], causal=causal), strict=True
    ):
        check(found, want, F32)


@pytest.mark.parametrize("features", [7, 12, 300])
@pytest.mark.parametrize("values", [7, 16])
def test_any_number_of_features(features: int, values: int) -> None:
    fd = forward_and_backward([2, 2, 4, features], [2, 2, 4, features])
    inputs = random_tensors(4, (2, 2, 4, features))
    outputs = fd.execute(inputs)
    check(outputs[0], reference(inputs[:3])[0], F32)
    check(outputs[4], gradients(inputs[3], inputs[:3])[0], F32)
    with FusionDefinition() as fd:
        query, key = (fd.define_tensor([2, 2, 4, features]) for _ in range(2))
        value = fd.define_tensor([2, 2, 4, values])
        fd.add_output(fd.ops.sdpfa_fwd(query, key, value)[0])
    inputs[2] = random_tensors(1, (2, 2, 4, values))[0]
    check(fd.execute(inputs[:3])[0], reference(inputs[:3])[0], F32)


@pytest.mark.parametrize("path", PATHS)
def test_leading_axes_are_batch_axes_on_every_path(path: str) -> None:
    shape = (3, 2, 4, 5, 8)
    fd = forward_and_backward(shape, shape, is_causal=True)
    inputs = random_tensors(4, shape)
    outputs = PATHS[path](fd, inputs)
    out, logsumexp = reference(inputs[:3], causal=True)
    check(outputs[0], out, F32)
    check(outputs[1], logsumexp, F32)
    for found, want in zip(outputs[4:], gradients(inputs[3], inputs[:3], causal=True), strict=True):
        check(found, want, F32)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias_shape", [None, (2, 3, 5, 6), (1, 3, 1, 6), (2, 1, 5, 1)])
@pytest.mark.parametrize("mask_shape", [None, (2, 3, 5, 6), (2, 1, 1, 6)])
def test_bias_and_mask(
    bias_shape: tuple[int, ...] | None,
    mask_shape: tuple[int, ...] | None,
    causal: bool,
    dtype: torch.dtype,
) -> None:
    queries, keys = (2, 3, 5, 8), (2, 3, 6, 8)
    inputs = [*random_tensors(1, queries, dtype, 1), *random_tensors(2, keys, dtype, 2)]
    added = torch.zeros(2, 3, 5, 6)
    with FusionDefinition() as fd:
        query, key, value = (
            fd.define_tensor(list(x.shape), dtype=DATA_TYPES[dtype]) for x in inputs
        )
        bias = mask = None
        if bias_shape is not None:
            bias = fd.define_tensor(bias_shape, dtype=DATA_TYPES[dtype])
            inputs += random_tensors(1, bias_shape, dtype, 3)
            added = added + inputs[-1]
        if mask_shape is not None:
            mask = fd.define_tensor(mask_shape, dtype=DataType.Bool)
            kept = random_tensors(1, mask_shape, seed=4)[0] > 0
            kept[0] = False  # rows that may see nothing
            inputs.append(kept)
            added = added.masked_fill(~kept, -math.inf)
        made = fd.ops.sdpfa_fwd(query, key, value, bias, mask, is_causal=causal)
        fd.add_output(made[0])
        fd.add_output(made[1])
    out, logsumexp = reference(inputs[:3], causal, added=added)
    found = fd.execute(inputs)
    check(found[0], out, dtype)
    torch.testing.assert_close(found[1], logsumexp.float(), rtol=1e-4, atol=1e-4)


def test_it_is_what_torch_computes() -> None:
    inputs = random_tensors(3, (2, 4, 33, 64))
    fd = forward_and_backward((2, 4, 33, 64), (2, 4, 33, 64), is_causal=True)
    outputs = fd.execute([*inputs, torch.ones(2, 4, 33, 64)])
    leaves = [x.clone().requires_grad_() for x in inputs]
    query, key, value = leaves
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(outputs[0], out.detach())
    wanted = torch.autograd.grad(out.sum(), leaves)
    torch.testing.assert_close(outputs[4:], list(wanted))


def test_scalars_may_be_inputs() -> None:
    with FusionDefinition() as fd:
        tensors = define_three(fd, [2, 2, 4, 8])
        causal = fd.define_scalar(DataType.Bool)
        scale = fd.define_scalar(DataType.Double)
        dropout = fd.define_scalar(DataType.Double)
        fd.add_output(fd.ops.sdpfa_fwd(*tensors, None, None, dropout, causal, scale)[0])
    inputs = random_tensors(3, (2, 2, 4, 8))
    for is_causal, factor in ((True, 0.5), (False, 2.0)):
        (found,) = fd.execute([*inputs, is_causal, factor, 0.0])
        check(found, reference(inputs, is_causal, factor)[0], F32)
    with pytest.raises(UserError, match=r"dropout_p must lie in \[0, 1\)"):
        fd.execute([*inputs, True, 1.0, 1.5])


def bshe(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the heads inside the sequence in memory."""
    return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a step between features."""
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


@pytest.mark.parametrize("lay_out", [bshe, strided, lambda x: x.mT.contiguous().mT])
def test_inputs_with_other_strides_than_declared(
    lay_out: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    shape = (2, 3, 5, 8)
    with FusionDefinition() as fd:
        tensors = define_three(fd, shape)
        made = fd.ops.sdpfa_fwd(*tensors, is_causal=True)
        fd.add_output(made[0])
        fd.add_output(made[1])
    inputs = random_tensors(3, shape)
    outputs = fd.execute([lay_out(x) for x in inputs])
    out, logsumexp = reference(inputs, causal=True)
    check(outputs[0], out, F32)
    check(outputs[1], logsumexp, F32)
    assert outputs[0].is_contiguous()


@pytest.mark.parametrize("dropout_p", [0.25])
def test_dropout_drops_alike_forward_and_backward(dropout_p: float) -> None:
    shape = (2, 3, 16, 8)
    fd = forward_and_backward(shape, shape, dropout_p=dropout_p)
    inputs = random_tensors(4, shape)
    inputs[2] = torch.eye(16, 8).expand(shape).contiguous()
    torch.manual_seed(3)
    first = fd.execute(inputs)
    second = fd.execute(inputs)
    torch.manual_seed(3)
    again = fd.execute(inputs)
    assert first[2].tolist() == [3, 0]
    assert first[3].item() == 0
    assert second[3].item() == 1
    assert not torch.equal(first[0], second[0])
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    # value is the identity: the output has the weights of 8 keys, dropped or scaled.
    weights = (inputs[0] @ inputs[1].mT / math.sqrt(8)).softmax(-1)[..., :8]
    kept = first[0] != 0
    assert abs(kept.float().mean() - (1 - dropout_p)) < 0.06
    torch.testing.assert_close(first[0], weights * kept / (1 - dropout_p))
    # grad_value is the dropped weights, transposed, times what comes in.
    part = first[0].mT @ inputs[3]
    torch.testing.assert_close(first[6][..., :8, :], part, rtol=1e-4, atol=1e-5)


# On a mesh.

MeshAxes = dict[int, int]
"""Tensor axis -> the dimension of the mesh that shards it."""

MESHES: list[tuple[tuple[int, ...], MeshAxes]] = [
    ((1,), {1: 0}),
    ((2,), {1: 0}),
    ((3,), {1: 0}),
    ((4,), {1: 0}),
    ((2,), {0: 0}),
    ((3,), {0: 0}),
    ((2, 2), {0: 0, 1: 1}),
    ((2, 3), {1: 0, 0: 1}),
]
LAYOUTS = {"BHSE": (3, 2, 1, 0), "BSHE": (3, 1, 2, 0)}
OUTPUTS = ("out", "logsumexp", "seed", "offset", "grad_query", "grad_key", "grad_value")
BATCH, HEADS = 6, 12


def make_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh(torch.arange(math.prod(shape)).view(shape))


def place(mesh: DeviceMesh, axes: MeshAxes, *tensors: TensorView) -> None:
    """Blocks of the tensors' `axes`."""
    for tensor in tensors:
        tensor.set_device_mesh(mesh)
        for axis in sorted(axes, reverse=True):
            owner = mesh.axis(axes[axis])
            tensor.outer_split(axis, mesh.shape[axes[axis]])
            tensor.axis(axis).parallelize(owner)


def attention(
    sizes: Sequence[int], order: Sequence[int], dropout: float = 0.0
) -> tuple[FusionDefinition, list[TensorView], list[TensorView]]:
    """A definition with its inputs (query, key, value, gradient) and OUTPUTS."""
    with FusionDefinition() as fd:
        kind: dict[str, Any] = {"contiguity": True, "stride_order": order}
        inputs = [fd.define_tensor(sizes, **kind) for _ in range(4)]
        query, key, value, grad = inputs
        made = fd.ops.sdpfa_fwd(query, key, value, dropout_p=dropout, is_causal=True)
        out, logsumexp, seed, offset = made
        back = fd.ops.sdpfa_bwd(
            grad, query, key, value, out, logsumexp, dropout, True, seed, offset, None
        )
        for output in (*made, *back):
            fd.add_output(output)
    return fd, inputs, [*made, *back]


def local_part(tensor: torch.Tensor, mesh: DeviceMesh, axes: MeshAxes, rank: int) -> torch.Tensor:
    """What `rank` holds of a tensor that is cut in blocks."""
    for axis, dimension in axes.items():
        if axis < tensor.dim() and tensor.dim() > 2:
            ranks = mesh.shape[dimension]
            coordinate = torch.unravel_index(torch.tensor(rank), mesh.shape)[dimension]
            size = -(-tensor.shape[axis] // ranks)
            tensor = tensor.split(size, axis)[int(coordinate)]
    return tensor


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "axes"), MESHES)
def test_heads_and_batch_stay_where_they_are(
    shape: tuple[int, ...], axes: MeshAxes, layout: str, symbolic: bool
) -> None:
    mesh = make_mesh(shape)
    sizes = [-1, -1, -1, 8] if symbolic else [BATCH, HEADS, 5, 8]
    fd, inputs, _ = attention(sizes, LAYOUTS[layout])
    place(mesh, axes, *inputs)
    arrange = bshe if layout == "BSHE" else torch.clone
    data = [arrange(x) for x in random_tensors(4, (BATCH, HEADS, 5, 8))]
    whole = attention([BATCH, HEADS, 5, 8], LAYOUTS[layout])[0].execute(data)
    check(whole[0], reference(data[:3], causal=True)[0], F32)
    shards = [[arrange(local_part(x, mesh, axes, rank)) for x in data] for rank in range(mesh.size)]
    ranks = simulate(fd, shards, per_rank=True)
    assert fd.fec.communications() == ()
    for rank, outputs in enumerate(ranks):
        for name, found, want in zip(OUTPUTS, outputs, whole, strict=True):
            torch.testing.assert_close(found, local_part(want, mesh, axes, rank), msg=name)
            rows_first = found.transpose(1, 2) if layout == "BSHE" and found.dim() == 4 else found
            assert rows_first.is_contiguous(), name


def test_an_axis_of_devices_in_front() -> None:
    """[d, N, H, L, E], the first axis whole on the mesh, as models write it."""
    d = 3
    mesh = DeviceMesh(range(d))
    shape = (d, 2, 2, 5, 8)
    fd, inputs, _ = attention([d, -1, -1, -1, -1], (4, 3, 1, 2, 0))
    for tensor in inputs:
        tensor.set_device_mesh(mesh)
        tensor.axis(0).parallelize(ParallelType.mesh_x)
    data = random_tensors(4, shape)
    shards = [[bshe(x[rank : rank + 1]) for x in data] for rank in range(d)]
    ranks = simulate(fd, shards, per_rank=True)
    assert fd.fec.communications() == ()
    out = reference(data[:3], causal=True)[0]
    wanted = gradients(data[3], data[:3], causal=True)
    for rank, outputs in enumerate(ranks):
        assert outputs[0].shape == (1, *shape[1:])
        check(outputs[0], out[rank : rank + 1], F32)
        for found, want in zip(outputs[4:], wanted, strict=True):
            check(found, want[rank : rank + 1], F32)
        for found in (outputs[0], *outputs[4:]):
            assert found.transpose(2, 3).is_contiguous()


def test_heads_that_ranks_share_unevenly() -> None:
    mesh, axes = DeviceMesh(range(3)), {1: 0}
    fd, inputs, _ = attention([2, 5, 4, 8], LAYOUTS["BHSE"])
    place(mesh, axes, *inputs)
    data = random_tensors(4, (2, 5, 4, 8))
    whole = attention([2, 5, 4, 8], LAYOUTS["BHSE"])[0].execute(data)
    for rank, outputs in enumerate(simulate(fd, data)):
        assert outputs[0].shape[1] == (2, 2, 1)[rank]
        for found, want in zip(outputs, whole, strict=True):
            torch.testing.assert_close(found, local_part(want, mesh, axes, rank))
    assert fd.fec.communications() == ()


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("axis", [2, 3])
def test_what_it_works_along_is_gathered(axis: int, dropout: float) -> None:
    """Sequences and features: by value, whatever it costs; results may be sharded there, too."""
    mesh, axes = DeviceMesh(range(2)), {axis: 0}
    sizes = [2, 3, 4, 8]
    fd, inputs, outputs = attention(sizes, LAYOUTS["BHSE"], dropout)
    place(mesh, axes, *inputs, outputs[0], outputs[5])
    data = random_tensors(4, sizes)
    torch.manual_seed(5)
    whole = attention(sizes, LAYOUTS["BHSE"], dropout)[0].execute(data)
    torch.manual_seed(5)
    for rank, found in enumerate(simulate(fd, data)):
        for k, want in enumerate(whole):
            part = local_part(want, mesh, axes, rank) if k in (0, 5) else want
            torch.testing.assert_close(found[k], part, msg=OUTPUTS[k])
    assert fd.fec.communications() != ()


def test_dropout_does_not_depend_on_the_mesh() -> None:
    sizes = [2, 6, 5, 8]
    data = random_tensors(4, sizes)
    torch.manual_seed(5)
    whole = attention(sizes, LAYOUTS["BHSE"], 0.3)[0].execute(data)
    for shape, axes in MESHES[1:3] + MESHES[6:7]:
        mesh = make_mesh(shape)
        fd, inputs, _ = attention(sizes, LAYOUTS["BHSE"], 0.3)
        place(mesh, axes, *inputs)
        torch.manual_seed(5)
        for rank, outputs in enumerate(simulate(fd, data)):
            for found, want in zip(outputs, whole, strict=True):
                part = local_part(want, mesh, axes, rank)
                torch.testing.assert_close(found, part)
                assert torch.equal(found == 0, part == 0)
        assert fd.fec.communications() == ()


def test_operands_that_lie_otherwise_are_moved() -> None:
    """Key and value whole, the query in heads: a slice of what is there, and no message."""
    mesh, axes = DeviceMesh(range(3)), {1: 0}
    fd, inputs, _ = attention([2, 6, 4, 8], LAYOUTS["BHSE"])
    place(mesh, axes, inputs[0])
    place(mesh, {}, *inputs[1:])
    data = random_tensors(4, (2, 6, 4, 8))
    whole = attention([2, 6, 4, 8], LAYOUTS["BHSE"])[0].execute(data)
    ranks = simulate(fd, data)
    for rank, outputs in enumerate(ranks):
        torch.testing.assert_close(outputs[0], local_part(whole[0], mesh, axes, rank))


# Text, and what is refused.


def test_text_and_repr_define_it_again() -> None:
    with FusionDefinition() as fd:
        tensors = define_three(fd, [-1, 4, -1, 8])
        bias = fd.define_tensor([-1, 4, -1, -1])
        scale = fd.define_scalar(DataType.Double)
        made = fd.ops.sdpfa_fwd(*tensors, bias, dropout_p=0.5, is_causal=True, scale=scale)
        fd.add_output(made[0])
        back = fd.ops.sdpfa_bwd(
            made[0], *tensors, made[0], made[1], 0.5, False, made[2], made[3], scale
        )
        fd.add_output(back[2])
    text = repr(fd.fusion)
    assert "= sdpfa_fwd(T0, T1, T2, 0.5, true, scale=c0, bias=T3, rng_seed=c1" in text
    assert "= sdpfa_bwd(T4, T0, T1, T2, T4, T5, 0.5, false, T6, T7, scale=c0)" in text
    assert print_program(parse_program(text)) == text
    scope: dict[str, Any] = {}
    exec("from meshfuse import *\n" + repr(fd), scope)
    with FusionDefinition() as again:
        scope["nvfuser_fusion"](again)
    assert repr(again.fusion) == text


SHAPE = [2, 4, 5, 8]


@pytest.mark.parametrize(
    ("shapes", "dtypes", "message"),
    [
        ([SHAPE, [2, 2, 5, 8], [2, 2, 5, 8]], [F32] * 3, "batch and heads .* sizes 4 and 2"),
        ([SHAPE, [2, 1, 5, 8], [2, 1, 5, 8]], [F32] * 3, "batch and heads .* sizes 4 and 1"),
        ([SHAPE, [2, 4, 6, 8], [2, 4, 7, 8]], [F32] * 3, "sequences of key and value"),
        ([SHAPE, [2, 4, 5, 6], SHAPE], [F32] * 3, "features of query and key"),
        ([[4, 5, 8]] * 3, [F32] * 3, "one rank, 4 or more"),
        ([SHAPE, SHAPE, [1, 2, 4, 5, 8]], [F32] * 3, "one rank, 4 or more"),
        ([SHAPE] * 3, [F32, F32, BF16], "one floating type"),
        ([SHAPE] * 3 + [SHAPE[:3]], [F32] * 4, "bias must be f32 of 4 axes"),
        ([SHAPE] * 3 + [[2, 4, 5, 5]], [*[F32] * 3, BF16], "bias must be f32 of 4 axes"),
        ([SHAPE] * 3 + [[2, 4, 5, 7]], [F32] * 4, "sizes 7 and 5"),
    ],
)
def test_operands_that_do_not_fit_are_refused(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], message: str
) -> None:
    with FusionDefinition() as fd:
        tensors = [
            fd.define_tensor(shape, dtype=DATA_TYPES[dtype])
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        with pytest.raises(UserError, match=rf"^sdpfa_fwd\(T0 f32.*{message}"):
            bias = tensors[3] if len(tensors) > 3 else None
            fd.ops.sdpfa_fwd(tensors[0], tensors[1], tensors[2], bias)


def test_scalars_of_other_kinds_are_refused() -> None:
    with FusionDefinition() as fd:
        tensors = define_three(fd, SHAPE)
        with pytest.raises(UserError, match="dropout_p must be a real number"):
            fd.ops.sdpfa_fwd(*tensors, dropout_p=True)
        with pytest.raises(UserError, match=r"dropout_p must lie in \[0, 1\), got 1.0"):
            fd.ops.sdpfa_fwd(*tensors, dropout_p=1.0)
        with pytest.raises(UserError, match="is_causal must be a Bool"):
            fd.ops.sdpfa_fwd(*tensors, is_causal=1)
        with pytest.raises(UserError, match="scale must be a real number"):
            fd.ops.sdpfa_fwd(*tensors, scale=False)
        with pytest.raises(UserTypeError, match="takes a TensorView, got float"):
            fd.ops.sdpfa_fwd(tensors[0], tensors[1], 1.0)  # pyright: ignore[reportArgumentType]  # the point
        mask = fd.define_tensor([1, 1, 5, 5])
        with pytest.raises(UserError, match="mask must be bool of 4 axes"):
            fd.ops.sdpfa_fwd(*tensors, mask=mask)


def test_sizes_that_differ_when_run_are_refused() -> None:
    with FusionDefinition() as fd:
        tensors = define_three(fd, [-1, -1, -1, -1])
        fd.add_output(fd.ops.sdpfa_fwd(*tensors)[0])
    query, key, value = random_tensors(3, SHAPE)
    fd.execute([query, key, value])
    for wrong in (key[:, :2], key[:1], key[..., :6], key[..., :3, :]):
        with pytest.raises(UserError, match="of size"):
            fd.execute([query, wrong, value])
