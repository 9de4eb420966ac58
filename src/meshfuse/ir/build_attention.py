"""Verbs for scaled dot-product attention."""

from __future__ import annotations

from dataclasses import replace

from meshfuse.ir.axes import AxisKind, TensorName
from meshfuse.ir.build_random import next_draw
from meshfuse.ir.ops import Literal, Operand
from meshfuse.ir.ops_attention import SdpfaBwd, SdpfaFwd
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import define, fresh_tensor_name
from meshfuse.ir.schedule import Allocation


def sdpfa_fwd(
    program: Program,
    query: TensorName,
    key: TensorName,
    value: TensorName,
    bias: TensorName | None,
    mask: TensorName | None,
    dropout_p: Operand,
    is_causal: Operand,
    scale: Operand | None,
) -> tuple[Program, tuple[TensorName, ...]]:
    """Attention: output, logsumexp, and the seed and offset that dropout has used.

    The output lies in memory like the query: if that has the heads inside the sequence, so has it.
    Raises UserError for types, ranks and sizes that do not fit.
    """
    program, out = fresh_tensor_name(program)
    program, logsumexp = fresh_tensor_name(program)
    program, seed = fresh_tensor_name(program)
    program, offset = fresh_tensor_name(program)
    expr = SdpfaFwd(
        out,
        logsumexp,
        seed,
        offset,
        query,
        key,
        value,
        dropout_p,
        is_causal,
        scale,
        bias,
        mask,
    )
    if not _is_zero(dropout_p):
        program, (rng_seed, rng_offset, draw) = next_draw(program)
        expr = replace(expr, rng_seed=rng_seed, rng_offset=rng_offset, draw=draw)
    program = define(program, expr)
    return _lay_out_like(program, expr.out, query), expr.outs


def sdpfa_bwd(
    program: Program,
    grad_out: TensorName,
    query: TensorName,
    key: TensorName,
    value: TensorName,
    out: TensorName,
    logsumexp: TensorName,
    dropout_p: Operand,
    is_causal: Operand,
    seed: TensorName,
    offset: TensorName,
    scale: Operand | None,
) -> tuple[Program, tuple[TensorName, ...]]:
    """The gradients of query, key and value, each in the memory layout of what it belongs to.

    Raises UserError for types, ranks and sizes that do not fit.
    """
    program, grad_query = fresh_tensor_name(program)
    program, grad_key = fresh_tensor_name(program)
    program, grad_value = fresh_tensor_name(program)
    expr = SdpfaBwd(
        grad_query,
        grad_key,
        grad_value,
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        dropout_p,
        is_causal,
        seed,
        offset,
        scale,
    )
    program = define(program, expr)
    for gradient, like in zip(expr.outs, (query, key, value), strict=True):
        program = _lay_out_like(program, gradient, like)
    return program, expr.outs


def _is_zero(operand: Operand) -> bool:
    return isinstance(operand, Literal) and operand.value == 0


def _lay_out_like(program: Program, tensor: TensorName, like: TensorName) -> Program:
    """Give a new tensor the memory order of another of its rank, without gaps."""
    allocation = program.schedule(like).allocation
    own, theirs = program.tensor(tensor).tensor_axes, program.tensor(like).tensor_axes
    if allocation is None or allocation.order == tuple(axis.name for axis in theirs):
        return program
    places = {axis.name: place for place, axis in enumerate(theirs)}
    axes = [own[places[name]] for name in allocation.order]
    flags = tuple(None if axis.kind is AxisKind.broadcast else True for axis in axes)
    schedule = program.schedule(tensor)
    laid = replace(schedule, allocation=Allocation(tuple(axis.name for axis in axes), flags))
    return program.with_schedule(tensor, laid)
