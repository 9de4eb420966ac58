"""Names that nvFuser's interface has for kinds of things, where this package uses plain strings."""

from __future__ import annotations

from enum import Enum


class SchedulerType(Enum):
    """Who schedules a segment. Its text is the bare name."""

    none = "none"
    no_op = "no_op"
    pointwise = "pointwise"
    matmul = "matmul"
    reduction = "reduction"
    inner_persistent = "inner_persistent"
    inner_outer_persistent = "inner_outer_persistent"
    outer_persistent = "outer_persistent"
    transpose = "transpose"
    expr_eval = "expr_eval"
    resize = "resize"

    def __str__(self) -> str:
        return self.value


# Scripts for nvFuser list the members by the attribute that its binding library gives an enum:
# name -> (member, documentation). Set from outside, where Python does not rewrite the name.
setattr(SchedulerType, "__entries", {kind.name: (kind, None) for kind in SchedulerType})


class CommunicatorBackend(Enum):
    """What moves data between ranks. By default gloo for CPU tensors, NCCL for CUDA ones."""

    nccl = "nccl"
    ucc = "ucc"
    cuda = "cuda"
    gloo = "gloo"

    def __str__(self) -> str:
        return self.value
