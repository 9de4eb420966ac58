"""A mixture of experts: tokens go to the ranks that have their experts, and come back.

Each rank sorts its tokens into `capacity` places for each expert; two exchanges move these, and
nothing else moves. On whole numbers, exactly.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from meshfuse import DataType, FusionDefinition, TensorView
from sharded_runs import X, integers, mesh_of, place, posted, run, without_kernels


class Routes(NamedTuple):
    """Of the tokens of each rank [d, n]: their place among all places, and how they are weighed."""

    slot: TensorView
    fits: TensorView
    gate: TensorView


@dataclass(frozen=True)
class Experts:
    """Tokens [d * n, e] in blocks over d ranks; experts are MLPs, also in blocks.

    Each token goes to the expert that `router` [E, e] likes best. Tokens beyond the capacity of
    their rank's places for it give zeros.
    """

    d: int
    experts: int
    tokens: int = 6
    capacity: int = 6
    features: int = 4
    inner: int = 5

    def __str__(self) -> str:
        return f"d{self.d}-e{self.experts}-c{self.capacity}"

    def define(self) -> FusionDefinition:
        """Inputs: tokens, router, and the experts' weights [E, e, f] and [E, f, e]."""
        d, n, e, f = self.d, self.tokens, self.features, self.inner
        mesh = mesh_of(d)
        with FusionDefinition() as fd:
            x = fd.define_tensor([d * n, e], contiguity=True)
            router = fd.define_tensor([self.experts, e], contiguity=True)
            up = fd.define_tensor([self.experts, e, f], contiguity=True)
            down = fd.define_tensor([self.experts, f, e], contiguity=True)
            place(mesh, {0: X}, x, up, down)
            place(mesh, {}, router)
            routes = self.route(fd, fd.ops.linear(x, router))
            there = self.dispatch(fd, fd.ops.reshape(x, [d, n, e]), routes)
            place(mesh, {1: X}, there)
            done = self.mlps(fd, there, up, down)
            back = fd.ops.set(done)
            place(mesh, {0: X}, back)
            fd.add_output(self.combine(fd, back, routes))
        return fd

    def route(self, fd: FusionDefinition, logits: TensorView) -> Routes:
        """Of logits [d * n, E]."""
        ops, shape = fd.ops, [self.d, self.tokens]
        gate, index = ops.topk(logits, 1, sorted=True)
        gate, index = ops.reshape(gate, shape), ops.reshape(index, shape)
        chosen = ops.eq(ops.broadcast(index, [False, False, True]), ops.iota(self.experts))
        chosen = ops.cast(chosen, DataType.Int)
        place_among = ops.sum(ops.cumsum(chosen, 1) * chosen, [2]) - 1
        fits = ops.lt(place_among, self.capacity)
        slot = index * self.capacity + ops.where(fits, place_among, 0)
        return Routes(slot, fits, gate)

    def dispatch(self, fd: FusionDefinition, x: TensorView, routes: Routes) -> TensorView:
        """[d, n, e] -> [d, E, capacity, e], with zeros in places that no token takes."""
        ops, places = fd.ops, self.experts * self.capacity
        last = [False, False, True]
        goes = ops.eq(ops.broadcast(routes.slot, last), ops.iota(places))
        goes = ops.where(ops.broadcast(routes.fits, last), ops.cast(goes, DataType.Float), 0.0)
        sent = ops.matmul(ops.permute(goes, [0, 2, 1]), x)
        return ops.set(ops.reshape(sent, [self.d, self.experts, self.capacity, self.features]))

    def mlps(
        self, fd: FusionDefinition, x: TensorView, up: TensorView, down: TensorView
    ) -> TensorView:
        """Each expert's, on its rows of all ranks."""
        ops, n = fd.ops, self.d * self.capacity
        rows = ops.reshape(ops.permute(x, [1, 0, 2, 3]), [self.experts, n, self.features])
        rows = ops.matmul(ops.relu(ops.matmul(rows, up)), down)
        rows = ops.reshape(rows, [self.experts, self.d, self.capacity, self.features])
        return ops.permute(rows, [1, 0, 2, 3])

    def combine(self, fd: FusionDefinition, x: TensorView, routes: Routes) -> TensorView:
        """[d, E, capacity, e] -> [d * n, e]"""
        ops, last = fd.ops, [False, False, True]
        rows = ops.reshape(x, [self.d, self.experts * self.capacity, self.features])
        own = ops.take_along_axis(rows, ops.broadcast(routes.slot, last), 1)
        own = own * ops.broadcast(routes.gate, last)
        own = ops.where(ops.broadcast(routes.fits, last), own, 0.0)
        return ops.reshape(own, [self.d * self.tokens, self.features])

    def inputs(self) -> list[torch.Tensor]:
        e, f = self.features, self.inner
        shapes = [(self.d * self.tokens, e), (self.experts, e), (self.experts, e, f)]
        x, router, up = (integers(*shape) for shape in shapes)
        # The logit of expert i is i modulo E: no token likes two experts alike.
        x[:, 0] = 1.0
        router *= self.experts
        router[:, 0] += torch.arange(self.experts)
        return [x, router, up, integers(self.experts, f, e)]

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token by token; and how many tokens each rank has for each expert."""
        x, router, up, down = self.inputs()
        logits = x @ router.T
        top = logits.sort(1).values
        assert bool((top[:, -1] > top[:, -2]).all())
        load = torch.zeros(self.d, self.experts, dtype=torch.int64)
        found = torch.zeros_like(x)
        for token, row in enumerate(x):
            rank, expert = token // self.tokens, int(logits[token].argmax())
            if load[rank, expert] < self.capacity:
                found[token] = (row @ up[expert]).relu() @ down[expert] * logits[token].max()
            load[rank, expert] += 1
        return found, load


@pytest.mark.parametrize(
    "model",
    [
        Experts(1, 3),
        Experts(2, 2),
        Experts(2, 4),
        Experts(2, 3),
        Experts(4, 4),
        Experts(4, 8, capacity=2),
        Experts(4, 6, capacity=1),
        Experts(4, 3),
    ],
    ids=str,
)
def test_dispatch_and_combine(model: Experts) -> None:
    fd = model.define()
    value, load = model.wanted()
    assert int((load > 0).sum()) > model.d
    with nullcontext() if (model.d, model.experts) == (2, 4) else without_kernels():
        run(fd, model.inputs(), [value])
    places = 4 * model.capacity * model.features
    mine = -(-model.experts // model.d)
    there, back = model.experts * places, mine * model.d * places
    exchanges = [("exchange", None, there), ("exchange", None, back)]
    assert posted(fd) == (exchanges if model.d > 1 else [])


def test_some_tokens_do_not_fit() -> None:
    assert any(bool((Experts(4, e, capacity=c).wanted()[1] > c).any()) for e, c in ((8, 2), (6, 1)))
