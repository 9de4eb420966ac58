"""Programs of every form of communication on three processes, by value and by what they post.

All run in one start of processes. A program says what the whole of each result is; every rank
checks that it has its own part of it, and nothing where it has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch.nn import functional

from gloo_run import run_ranks
from meshfuse import DataType, DistributedTensor, FusionDefinition, ParallelType, TensorView
from meshfuse.multidevice import DeviceMesh, shard_tensor
from sharded_cases import block, integers, replicate, whole_axis
from sharded_runs import kinds, own_part, without_kernels

X = ParallelType.mesh_x
ALL = (0, 1, 2)


@dataclass(frozen=True)
class Form:
    """`inputs` and `wanted` are whole; `posted` the kinds of the collectives, in order.

    Where sizes are symbolic, `others` are more inputs and what they give.
    """

    fd: FusionDefinition
    inputs: Sequence[torch.Tensor]
    wanted: Sequence[torch.Tensor]
    posted: tuple[str, ...]
    others: Sequence[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = ()
    given: Sequence[int] = ()
    tolerance: float = 0.0
    updates: Mapping[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])


def moved(
    shape: Sequence[int],
    size: Sequence[int],
    place: Callable[[TensorView], object],
    then: Callable[[TensorView], object],
    posted: str,
    more: Sequence[Sequence[int]] = (),
) -> Form:
    """A tensor of a size from one place to another; with given global sizes where symbolic."""
    with FusionDefinition() as fd:
        x = fd.define_tensor(list(shape), contiguity=True)
        y = fd.ops.set(x)
        fd.add_output(y)
        place(x)
        then(y)
    wholes = [integers(*sizes) for sizes in (size, *more)]
    first, *rest = wholes
    others = [([whole], [whole]) for whole in rest]
    return Form(fd, [first], [first], (posted,), others, [0] if -1 in shape else [])


def in_blocks(axis: int, *ranks: int) -> Callable[[TensorView], object]:
    return lambda tensor: block(DeviceMesh(ranks), tensor, axis)


def whole_on(*ranks: int) -> Callable[[TensorView], object]:
    return lambda tensor: replicate(DeviceMesh(ranks), tensor)


def cyclic(tensor: TensorView) -> None:
    """Every third row."""
    tensor.set_device_mesh(DeviceMesh(ALL))
    tensor.split(0, 3)
    tensor.axis(1).parallelize(X)


def strided(tensor: TensorView) -> None:
    """Two pieces of rows, each in blocks."""
    tensor.set_device_mesh(DeviceMesh(ALL))
    tensor.outer_split(0, 2)
    tensor.outer_split(1, 3)
    tensor.axis(1).parallelize(X)


def axis_to_axis() -> Form:
    return moved([6, 9], [6, 9], in_blocks(0, *ALL), in_blocks(1, *ALL), "exchange")


def uneven_axis_to_axis() -> Form:
    return moved(
        [-1, -1], [7, 5], in_blocks(0, *ALL), in_blocks(1, *ALL), "exchange", [[2, 4], [1, 7]]
    )


def cyclic_to_blocks() -> Form:
    return moved([-1, 2], [6, 2], cyclic, in_blocks(0, *ALL), "exchange", [[8, 2], [1, 2]])


def strided_to_whole() -> Form:
    return moved([12, 2], [12, 2], strided, whole_on(*ALL), "all_gather")


def uneven_to_whole() -> Form:
    return moved([-1, 3], [7, 3], in_blocks(0, *ALL), whole_on(*ALL), "all_gather", [[2, 3]])


def to_a_mesh_that_overlaps() -> Form:
    return moved([7, 3], [7, 3], in_blocks(0, 0, 1), in_blocks(0, 1, 2), "exchange")


def from_one_rank_to_all() -> Form:
    return moved([5, 3], [5, 3], whole_on(1), whole_on(*ALL), "exchange")


def scattered_by_one_rank() -> Form:
    return moved([5, 3], [5, 3], whole_on(2), in_blocks(0, *ALL), "exchange")


def gathered_on_one_rank() -> Form:
    return moved([7, 3], [7, 3], in_blocks(0, *ALL), whole_on(2), "exchange")


def to_ranks_in_another_order() -> Form:
    return moved([6, 3], [6, 3], in_blocks(0, *ALL), in_blocks(0, 2, 0, 1), "exchange")


def handed_over_twice() -> Form:
    """Stages of a pipeline: rank 0 has no part in the second hand-over, nor rank 2 in the first."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 6], contiguity=True)
        weights = [fd.define_tensor([6, 6], contiguity=True) for _ in ALL]
        for rank, weight in enumerate(weights):
            replicate(DeviceMesh([rank]), weight)
        replicate(DeviceMesh([0]), x)
        y = x
        for weight in weights:
            y = fd.ops.relu(fd.ops.linear(y, weight))
        fd.add_output(y)
    inputs = [integers(4, 6), *(integers(6, 6) for _ in ALL)]
    value = inputs[0]
    for weight in inputs[1:]:
        value = functional.linear(value, weight).relu()
    return Form(fd, inputs, [value], ("exchange", "exchange"))


def teams_that_overlap() -> Form:
    """Pairs of ranks exchange, made when first used: {1, 2}, {0, 1}, {0, 2}, then {0, 1} again."""
    pairs = ((1, 2), (0, 1), (2, 0), (0, 1))
    with FusionDefinition() as fd:
        for pair in pairs:
            x = fd.define_tensor([5, 4], contiguity=True)
            y = fd.ops.set(x)
            fd.add_output(y)
            block(DeviceMesh(pair), x, 0)
            block(DeviceMesh(pair), y, 1)
    inputs = [integers(5, 4) + k for k in range(len(pairs))]
    return Form(fd, inputs, inputs, ("exchange",) * len(pairs))


def sum_scattered_unevenly() -> Form:
    with FusionDefinition() as fd:
        x = fd.define_tensor([3, -1], contiguity=True)
        y = fd.ops.sum(x, [0])
        fd.add_output(y)
        whole_axis(DeviceMesh(ALL), x, 0)
        block(DeviceMesh(ALL), y, -1)
        y.axis(0).parallelize(X)
    first, second = integers(3, 7), integers(3, 2)
    others = [([second], [second.sum(0)])]
    return Form(fd, [first], [first.sum(0)], ("reduce_scatter",), others, [0])


def updated_in_place() -> Form:
    """The update of a tensor in blocks by a sum over ranks, which is not returned."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([6, 5], contiguity=True)
        total = fd.define_tensor([5], contiguity=True)
        fd.add_output(fd.ops.add(total, fd.ops.sum(x, [0])), total)
        block(DeviceMesh(ALL), x, 0)
        block(DeviceMesh(ALL), total, 0)
    inputs = [integers(6, 5), integers(5)]
    updates = {1: inputs[1] + inputs[0].sum(0)}
    return Form(fd, inputs, [], ("reduce_scatter",), updates=updates)


def vocabulary_parallel_loss() -> Form:
    """Logits of classes that ranks share unevenly are never gathered."""
    rows, classes = 4, 10
    with FusionDefinition() as fd:
        x = fd.define_tensor([rows, 6], contiguity=True)
        weight = fd.define_tensor([classes, 6], contiguity=True)
        target = fd.define_tensor([rows], dtype=DataType.Int, contiguity=True)
        logits = fd.ops.linear(x, weight)
        shifted = logits - fd.ops.max(logits, [1], keepdim=True)
        total = fd.ops.sum(fd.ops.exp(shifted), [1])
        picked = fd.ops.take_along_axis(shifted, fd.ops.broadcast(target, [False, True]), 1)
        fd.add_output(fd.ops.log(total) - fd.ops.squeeze(picked, [1]))
        replicate(DeviceMesh(ALL), x, target)
        block(DeviceMesh(ALL), weight, 0)
    inputs = [integers(rows, 6) / 4, integers(classes, 6) / 4, torch.tensor([0, 9, 4, 7])]
    logits_value = functional.linear(inputs[0], inputs[1])
    want = functional.cross_entropy(logits_value, inputs[2], reduction="none")
    return Form(fd, inputs, [want], ("all_reduce",) * 3, tolerance=1e-5)


def tokens_to_experts_and_back() -> Form:
    """Tokens [ranks, experts, places, e] in blocks of ranks; each expert's go to the rank that has
    it, and return."""
    e = 4
    with FusionDefinition() as fd:
        tokens = fd.define_tensor([3, 3, -1, e], contiguity=True)
        weight = fd.define_tensor([3, e, e], contiguity=True)
        there = fd.ops.set(tokens)
        merged = fd.ops.permute(there, [1, 0, 2, 3])
        done = fd.ops.matmul(merged, fd.ops.broadcast(weight, [False, True, False, False]))
        back = fd.ops.set(fd.ops.permute(done, [1, 0, 2, 3]))
        fd.add_output(back)
        block(DeviceMesh(ALL), tokens, 0)
        block(DeviceMesh(ALL), weight, 0)
        block(DeviceMesh(ALL), there, 1)
        block(DeviceMesh(ALL), back, 0)
    weight_value = integers(3, e, e)
    values = [integers(3, 3, places, e) for places in (2, 5)]
    wanted = [torch.einsum("resk,ekn->resn", value, weight_value) for value in values]
    others = [([values[1], weight_value], [wanted[1]])]
    return Form(fd, [values[0], weight_value], [wanted[0]], ("exchange", "exchange"), others)


FORMS: dict[str, Callable[[], Form]] = {
    form.__name__: form
    for form in (
        axis_to_axis,
        uneven_axis_to_axis,
        cyclic_to_blocks,
        strided_to_whole,
        uneven_to_whole,
        to_a_mesh_that_overlaps,
        from_one_rank_to_all,
        scattered_by_one_rank,
        gathered_on_one_rank,
        to_ranks_in_another_order,
        handed_over_twice,
        teams_that_overlap,
        sum_scattered_unevenly,
        updated_in_place,
        vocabulary_parallel_loss,
        tokens_to_experts_and_back,
    )
}


def check_form(form: Form, rank: int) -> None:
    """Twice each: the second call of one size is a hot one."""
    for inputs, wanted in ((form.inputs, form.wanted), *form.others):
        for _ in range(2):
            views = [v for v in form.fd.fusion.inputs() if isinstance(v, TensorView)]
            shards = [shard_tensor(t.clone(), v) for t, v in zip(inputs, views, strict=True)]
            given = {k: tuple(inputs[k].shape) for k in form.given} or None
            outputs = form.fd.execute(shards, global_sizes=given)
            assert len(outputs) == len(wanted)
            for output, value in zip(outputs, wanted, strict=True):
                assert isinstance(output, DistributedTensor)
                if rank not in output.mesh.ids:
                    assert output.local.numel() == 0
                    continue
                part = own_part(output, value, rank)
                torch.testing.assert_close(
                    output.local, part, rtol=form.tolerance, atol=form.tolerance
                )
            for position, value in form.updates.items():
                assert torch.equal(shards[position], shard_tensor(value, views[position]))
    assert tuple(kind for kind, _ in kinds(form.fd)) == form.posted


def run_forms(rank: int, world_size: int) -> list[str]:
    done: list[str] = []
    with without_kernels():
        for name, make in FORMS.items():
            try:
                check_form(make(), rank)
            except AssertionError as error:
                done.append(f"{name}: {error}")
            else:
                done.append(name)
    return done


@pytest.fixture(scope="module")
def done() -> list[list[str]]:
    return run_ranks(run_forms, len(ALL), deadline=110)


@pytest.mark.parametrize("name", list(FORMS))
def test_form(done: list[list[str]], name: str) -> None:
    place = list(FORMS).index(name)
    assert [names[place] for names in done] == [name] * len(ALL)
