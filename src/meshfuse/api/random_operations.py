"""Operations of `fd.ops` that make random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshfuse.api.indexing_operations import IndexingOperations
from meshfuse.api.operation_calls import ScalarValue, require, size_argument, tensor_argument
from meshfuse.api.recording import Call
from meshfuse.api.tensor_view import TensorView, Val, recording_of, tensor_view, to_scalar_operand
from meshfuse.base.dtypes import DataType, is_floating
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.ir import build
from meshfuse.ir.ops import Literal
from meshfuse.ir.program import Program


class RandomOperations(IndexingOperations):
    """Abstract. Numbers depend on seed, offset and global index: no sharding changes any."""

    def uniform(
        self,
        minval: ScalarValue,
        maxval: ScalarValue,
        shape: Sequence[int | Val],
        *,
        rng_seed: ScalarValue | None = None,
        rng_offset: ScalarValue | None = None,
        dtype: DataType = DataType.Float,
    ) -> TensorView:
        """Random numbers from `minval` on and below `maxval`, in any type of floats.

        With `rng_seed` and `rng_offset` they are those of that seed at that offset. Without, each
        call draws from torch's default generator of the device: after torch.manual_seed(s) the
        first draw is that of seed s at offset 0, the next that at 1, and so on. All ranks of a mesh
        must draw from equal generators.
        """
        return self._random("uniform", minval, maxval, shape, rng_seed, rng_offset, dtype)

    def normal(
        self,
        mean: ScalarValue,
        std: ScalarValue,
        shape: Sequence[int | Val],
        *,
        rng_seed: ScalarValue | None = None,
        rng_offset: ScalarValue | None = None,
        dtype: DataType = DataType.Float,
    ) -> TensorView:
        """Normally distributed numbers; seed and offset as in `uniform`."""
        return self._random("normal", mean, std, shape, rng_seed, rng_offset, dtype)

    def rand_like(self, x: TensorView, /) -> TensorView:
        """`uniform` on [0, 1), of the shape and type of `x`, which must be of floats."""
        return self._random_like("rand_like", "uniform", x, (0.0, 1.0))

    def randn_like(self, x: TensorView, /) -> TensorView:
        """`normal` of mean 0 and deviation 1, of the shape and type of `x`, which must be of
        floats.
        """
        return self._random_like("randn_like", "normal", x, (0.0, 1.0))

    def _random(
        self,
        distribution: str,
        first: ScalarValue,
        second: ScalarValue,
        shape: Sequence[int | Val],
        rng_seed: ScalarValue | None,
        rng_offset: ScalarValue | None,
        dtype: DataType,
    ) -> TensorView:
        given = {"rng_seed": rng_seed, "rng_offset": rng_offset}
        keywords: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        keywords |= {} if dtype is DataType.Float else {"dtype": dtype}
        call = Call(f"fd.ops.{distribution}", (first, second, shape), keywords)
        require(call, "dtype", dtype, DataType)
        if not isinstance(shape, Sequence) or isinstance(shape, str | bytes):
            raise UserTypeError(f"{call}: shape must be a list, got {type(shape).__name__}")
        values = [first, second, *shape, *(v for v in given.values() if v is not None)]
        recording = recording_of(call, values, self._recording)
        sizes = [size_argument(call, size) for size in shape]
        limits = [to_scalar_operand(call, value) for value in (first, second)]
        seed, offset = (
            None if value is None else to_scalar_operand(call, value) for value in given.values()
        )

        def define(program: Program) -> tuple[Program, tuple[str]]:
            program, name = build.random(
                program, distribution, limits[0], limits[1], sizes, dtype, seed, offset
            )
            return program, (name,)

        (name,) = recording.define(call, define)
        return tensor_view(recording, name)

    def _random_like(
        self, function: str, distribution: str, x: TensorView, numbers: tuple[float, float]
    ) -> TensorView:
        call = Call(f"fd.ops.{function}", (x,))
        dtype = tensor_argument(call, x).dtype()
        if not is_floating(dtype):
            raise UserError(f"{call}: takes floating types; cast the operand first")
        first, second = (Literal(number, DataType.Double) for number in numbers)

        def define(program: Program) -> tuple[Program, str]:
            sizes = [axis.extent for axis in program.tensor(x.name).tensor_axes]
            return build.random(program, distribution, first, second, sizes, dtype)

        return self._tensor(call, x, define)
