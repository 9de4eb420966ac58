"""What ranks hold of a reduction, side by side in one tensor."""

from __future__ import annotations

from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.text import Out
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import UnaryExpr


@final
@frozen_dataclass
class Terms(UnaryExpr):
    """Each rank's term of `src`, which is partial, as its element of a new last axis of `out`.

    `count` terms, one for each place on the mesh axes along which `src` is partial. The new axis
    lies on those alone, so that nothing moves: a view. Or it is whole, for terms that are equal on
    all ranks: each repeats its own. Made by decomposition only, for reductions whose terms no
    collective combines.
    """

    out: Out[TensorName]
    src: TensorName
    count: int
