"""Random programs of pointwise operations, views and reductions on small whole numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from meshfuse.ir import build
from meshfuse.ir.axes import TensorName
from program_recorder import Recorder

SIZES = {1: (0, 1, 5, 16, 17, 33), 2: (0, 1, 2, 5, 17), 3: (0, 1, 2, 3), 4: (0, 1, 2, 3)}
"""By rank: an evaluated kernel takes a millisecond for each vector."""
Draw = Callable[..., Any]


@dataclass
class Growing:
    """A program that grows around rows: tensors that run over all axes, and one value a row."""

    recorder: Recorder
    shape: tuple[int, ...]
    inputs: list[torch.Tensor] = field(default_factory=list)
    full: list[TensorName] = field(default_factory=list)
    rows: list[TensorName] = field(default_factory=list)


def add_input(g: Growing, draw: Draw, flags: list[bool]) -> None:
    """An input that has size 1 where `flags` are false, in some memory order."""
    rank = len(flags)
    order = draw(st.permutations(range(rank)))
    contiguous = draw(st.booleans())
    declared = [-1 if flag else 1 for flag in flags]
    name = g.recorder.add(build.define_tensor, declared, contiguity=contiguous, stride_order=order)
    g.recorder.program = build.add_input(g.recorder.program, name)
    sizes = [n if flag else 1 for n, flag in zip(g.shape, flags, strict=True)]
    by_speed = sorted(range(rank), key=lambda axis: -order[axis])
    memory = torch.randint(-4, 5, [sizes[axis] for axis in by_speed]).float()
    g.inputs.append(memory.permute([by_speed.index(axis) for axis in range(rank)]))
    g.full.append(name)


def some(draw: Draw, tensors: list[TensorName]) -> TensorName:
    return tensors[draw(st.integers(0, len(tensors) - 1))]


def add_pointwise(g: Growing, draw: Draw, tensors: list[TensorName]) -> None:
    """An operation that is exact on small numbers."""
    function = draw(st.sampled_from(("add", "sub", "relu", "neg", "where", "half")))
    a, b = some(draw, tensors), some(draw, tensors)
    r = g.recorder
    if function == "where":
        tensors.append(r.pointwise("where", r.pointwise("lt", a, b), a, build.literal(2.0)))
    elif function == "half":
        tensors.append(r.pointwise("mul", a, build.literal(0.5)))
    elif function in ("relu", "neg"):
        tensors.append(r.pointwise(function, a))
    else:
        tensors.append(r.pointwise(function, a, b))


def add_view_pair(g: Growing, draw: Draw) -> None:
    """A permutation, and its inverse after an operation."""
    dims = draw(st.permutations(range(len(g.shape))))
    r = g.recorder
    turned = r.pointwise("neg", r.add(build.permute, some(draw, g.full), dims))
    g.full.append(r.add(build.permute, turned, [dims.index(k) for k in range(len(dims))]))


def add_reduction(g: Growing, draw: Draw, dims: list[int]) -> None:
    """A reduction to rows, and the rows stretched back."""
    everything = g.recorder.pointwise("add", some(draw, g.full), g.full[0])
    function = draw(st.sampled_from(("sum", "max")))
    if function == "max" and any(g.shape[dim] == 0 for dim in dims):
        function = "sum"
    kept = g.recorder.add(build.reduction, function, everything, dims, True)
    g.rows.append(kept)
    g.full.append(g.recorder.pointwise("sub", g.full[0], kept))


@st.composite
def programs(draw: Draw, reducing: bool) -> Growing:
    rank = draw(st.integers(1, 4))
    shape = tuple(draw(st.sampled_from(SIZES[rank])) for _ in range(rank))
    g = Growing(Recorder(), shape)
    add_input(g, draw, [True] * rank)
    for _ in range(draw(st.integers(0, 2))):
        add_input(g, draw, [draw(st.booleans()) for _ in range(rank)])
    g.full = [g.full[0], *(g.recorder.pointwise("add", g.full[0], x) for x in g.full[1:])]
    count = draw(st.integers(1, rank))
    dims = sorted(draw(st.permutations(range(rank)))[:count])
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(
            st.sampled_from(("pointwise", "view", "reduction" if reducing else "pointwise"))
        )
        if kind == "pointwise":
            add_pointwise(g, draw, g.rows if g.rows and draw(st.booleans()) else g.full)
        elif kind == "view":
            add_view_pair(g, draw)
        else:
            add_reduction(g, draw, dims)
    outputs = [g.full[-1], *(g.rows[-1:] if draw(st.booleans()) else [])]
    g.recorder.output(*outputs)
    return g
