"""Operations of `fd.ops` for scaled dot-product attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshfuse.api.operation_calls import ScalarValue, tensor_argument
from meshfuse.api.random_operations import RandomOperations
from meshfuse.api.recording import Call
from meshfuse.api.tensor_view import TensorView, recording_of, tensor_view, to_scalar_operand
from meshfuse.ir import build
from meshfuse.ir.ops import Operand
from meshfuse.ir.program import Program


class AttentionOperations(RandomOperations):
    """Abstract. Batch axes and heads may be sharded: attention is local there."""

    def sdpfa_fwd(
        self,
        query: TensorView,
        key: TensorView,
        value: TensorView,
        bias: TensorView | None = None,
        mask: TensorView | None = None,
        dropout_p: ScalarValue | None = None,
        is_causal: ScalarValue | None = None,
        scale: ScalarValue | None = None,
    ) -> tuple[TensorView, TensorView, TensorView, TensorView]:
        """softmax(query @ key^T * scale + bias, where mask is true) @ value.

        query [*batch, H, L, E], key [*batch, H, S, E], value [*batch, H, S, V], with one batch axis
        or more and one type of floats; `bias`, of that type, and `mask`, of Bool, [*batch, H, L, S]
        with any axis of size 1. By default nothing is dropped, all keys are seen, and the scale is
        1 / sqrt(E). Heads of keys that several queries share must be expanded.

        Returns the output, [*batch, H, L, V] in the memory order of `query`; logsumexp, Float
        [*batch, H, L]; and, Int [2] and Int, the seed and the offset of dropout, for `sdpfa_bwd`.
        """
        tensors = (query, key, value)
        named: dict[str, Any] = {
            "bias": bias,
            "mask": mask,
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
        }
        keywords = {name: given for name, given in named.items() if given is not None}
        call = Call("fd.ops.sdpfa_fwd", tensors, keywords)
        masks = [given for given in (bias, mask) if given is not None]
        dropout, causal, factor = self._scalars(
            call, (*tensors, *masks), dropout_p, is_causal, scale
        )
        names = [None if given is None else given.name for given in (bias, mask)]

        def define(program: Program) -> tuple[Program, tuple[str, ...]]:
            q, k, v = (tensor.name for tensor in tensors)
            return build.sdpfa_fwd(program, q, k, v, names[0], names[1], dropout, causal, factor)

        out, logsumexp, seed, offset = self._tensors(call, query, define)
        return out, logsumexp, seed, offset

    def sdpfa_bwd(
        self,
        grad_output: TensorView,
        query: TensorView,
        key: TensorView,
        value: TensorView,
        output: TensorView,
        logsumexp: TensorView,
        dropout_p: ScalarValue,
        is_causal: ScalarValue,
        philox_seed: TensorView,
        philox_offset: TensorView,
        scale: ScalarValue | None,
    ) -> tuple[TensorView, TensorView, TensorView]:
        """The gradients of `query`, `key` and `value`, of attention without bias and mask.

        All is what `sdpfa_fwd` was given, and what it returned.
        """
        tensors = (grad_output, query, key, value, output, logsumexp)
        state = (philox_seed, philox_offset)
        call = Call("fd.ops.sdpfa_bwd", (*tensors, dropout_p, is_causal, *state, scale))
        dropout, causal, factor = self._scalars(
            call, (*tensors, *state), dropout_p, is_causal, scale
        )

        def define(program: Program) -> tuple[Program, tuple[str, ...]]:
            grad, q, k, v, out, rows = (tensor.name for tensor in tensors)
            seed, offset = (tensor.name for tensor in state)
            return build.sdpfa_bwd(
                program, grad, q, k, v, out, rows, dropout, causal, seed, offset, factor
            )

        grad_query, grad_key, grad_value = self._tensors(call, query, define)
        return grad_query, grad_key, grad_value

    def _scalars(
        self,
        call: Call,
        tensors: tuple[TensorView, ...],
        dropout_p: ScalarValue | None,
        is_causal: ScalarValue | None,
        scale: ScalarValue | None,
    ) -> tuple[Operand, Operand, Operand | None]:
        """The operands that are no tensors, after a check that all belong to one definition."""
        for tensor in tensors:
            tensor_argument(call, tensor)
        dropout_p = 0.0 if dropout_p is None else dropout_p
        is_causal = False if is_causal is None else is_causal
        scalars = [dropout_p, is_causal, *(() if scale is None else (scale,))]
        recording_of(call, [*tensors, *scalars], self._recording)
        dropout, causal, *factor = (to_scalar_operand(call, value) for value in scalars)
        return dropout, causal, factor[0] if factor else None

    def _tensors(
        self,
        call: Call,
        first: TensorView,
        define: Callable[[Program], tuple[Program, tuple[str, ...]]],
    ) -> list[TensorView]:
        recording = self._recording_of(call, first)
        return [tensor_view(recording, name) for name in recording.define(call, define)]
