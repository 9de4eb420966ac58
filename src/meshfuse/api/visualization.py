"""`multidevice.visualize`: who holds what of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from meshfuse.api.drawing import MOST_PIECES, Picture, draw_text
from meshfuse.api.drawing_svg import draw_svg
from meshfuse.api.known_sizes import bind_sizes
from meshfuse.api.tensor_view import TensorView
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.dtensor import is_dtensor, sharding_of_dtensor
from meshfuse.dist.shard import number_digits
from meshfuse.dist.tensor import DistributedTensor
from meshfuse.expr import evaluate, free_symbols
from meshfuse.facts.digits import Sharding
from meshfuse.facts.nominal import nominal_size
from meshfuse.facts.ownership import ownership_of
from meshfuse.facts.sharding import describe, sharding_of

FORMATS = ("text", "svg")


@final
@frozen_dataclass
class ShardingPicture:
    """Who holds what, as text and as SVG. `str` gives the one that was asked for."""

    text: str
    svg: str
    format: str = "text"

    def __str__(self) -> str:
        return self.svg if self.format == "svg" else self.text

    def __repr__(self) -> str:
        return str(self)

    def _repr_svg_(self) -> str:
        """What notebooks show."""
        return self.svg


def visualize(
    x: object, *, shape: Sequence[int] | None = None, format: str = "text"
) -> ShardingPicture:
    """Draw which rank holds which indices of a TensorView, a DistributedTensor or a DTensor.

    Sizes that a TensorView does not know are those of `shape`, the global one, else small ones that
    the ranks divide, which the picture says. Needs no processes and communicates nothing. UserError
    for a shape that does not fit.
    """
    if format not in FORMATS:
        raise UserError(f"visualize(format={format!r}): must be 'text' or 'svg'")
    picture = _picture_of(x, shape)
    return ShardingPicture(draw_text(picture), draw_svg(picture), format)


def _picture_of(x: object, shape: Sequence[int] | None) -> Picture:
    if isinstance(x, TensorView):
        return _picture_of_view(x, shape)
    if isinstance(x, DistributedTensor):
        return _picture_of_tensor("DistributedTensor", x, x.sharding, x.global_shape, shape)
    if is_dtensor(x):
        assert isinstance(x, torch.Tensor)
        return _picture_of_tensor("DTensor", x, sharding_of_dtensor(x), tuple(x.shape), shape)
    raise UserTypeError(
        f"visualize({type(x).__name__}): takes a TensorView, a DistributedTensor or a DTensor"
    )


def _picture_of_tensor(
    name: str,
    tensor: torch.Tensor,
    sharding: Sharding,
    sizes: tuple[int, ...],
    shape: Sequence[int] | None,
) -> Picture:
    if shape is not None and tuple(shape) != sizes:
        raise UserError(f"visualize({name}, shape={list(shape)}): its global shape is {sizes}")
    title = f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(sizes)}: {describe(sharding)}"
    return Picture(title, ownership_of(sharding, sizes, MOST_PIECES))


def _picture_of_view(view: TensorView, shape: Sequence[int] | None) -> Picture:
    program = view.recording.program
    sharding, definition = sharding_of(program, view.name), program.tensor(view.name)
    extents = tuple(axis.extent for axis in definition.tensor_axes)
    known: dict[str, int] = {}
    if shape is not None:
        call = f"visualize({view.name}, shape={list(shape)})"
        known = bind_sizes(call, ((extents, shape),))
    ranks = 1 if sharding.mesh is None else sharding.mesh.size
    chosen = {
        symbol.name: nominal_size(symbol, 2 * ranks)
        for extent in extents
        for symbol in free_symbols(extent)
        if symbol.name not in known
    }
    sizes = {**chosen, **known}
    remarks = (f"drawn with {', '.join(f'{n} = {k}' for n, k in chosen.items())}",)
    title = (
        f"{view.name} {definition.dtype.value}[{', '.join(map(str, extents))}]: "
        f"{describe(sharding)}"
    )
    numbers = [evaluate(extent, sizes) for extent in extents]
    ownership = ownership_of(number_digits(sharding, numbers), numbers, MOST_PIECES)
    return Picture(title, ownership, remarks if chosen else ())
