"""The mathematics of a program: tensors, scalars, expressions, inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import final

from meshfuse.base.dtypes import DataType
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.ir.axes import IterDomain, ScalarName, TensorName
from meshfuse.ir.ops import Expr
from meshfuse.ir.schedule import Step


@final
@frozen_dataclass
class TensorDef:
    """A tensor: element type and logical axes, in order, with reduced axes among them.

    `root` is the defining op's own view of the axes where it differs from the logical ones;
    `root_steps` lead from root to logical (rfactor, reshape). Producer.logical maps to
    consumer.root. `is_cpu`: a 0-dim CPU scalar of a GPU program.
    """

    dtype: DataType
    logical: tuple[IterDomain, ...]
    root: tuple[IterDomain, ...] = ()
    root_steps: tuple[Step, ...] = ()
    is_cpu: bool = False

    @property
    def maybe_root(self) -> tuple[IterDomain, ...]:
        """Root axes, else the logical ones: what the defining expression speaks of."""
        return self.root or self.logical

    @property
    def tensor_axes(self) -> tuple[IterDomain, ...]:
        """The logical axes that a torch tensor has: no reduction or partial axes."""
        return tuple(axis for axis in self.logical if axis.kind.is_tensor_axis)

    @property
    def ndim(self) -> int:
        return len(self.tensor_axes)


@final
@frozen_dataclass
class ScalarDef:
    """A scalar input or the result of scalar arithmetic."""

    dtype: DataType


@final
@frozen_dataclass
class Output:
    """A result. With `alias` the value is written into that input's memory and not returned."""

    tensor: TensorName
    alias: TensorName | None = None


@final
@frozen_dataclass
class Fusion:
    """Tensors and scalars by name, expressions in order of definition, inputs and outputs."""

    tensors: Mapping[TensorName, TensorDef] = field(default_factory=dict[TensorName, TensorDef])
    scalars: Mapping[ScalarName, ScalarDef] = field(default_factory=dict[ScalarName, ScalarDef])
    exprs: tuple[Expr, ...] = ()
    inputs: tuple[TensorName | ScalarName, ...] = ()
    outputs: tuple[Output, ...] = ()

    def definition(self, name: TensorName | ScalarName) -> Expr | None:
        """The expression that defines `name`, None for an input. Loops want `facts.definitions`."""
        return next((expr for expr in self.exprs if name in expr.outs), None)
