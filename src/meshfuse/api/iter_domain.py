"""IterDomain: the handle of an axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from meshfuse.api.recording import Call, Handle
from meshfuse.base.errors import UserTypeError
from meshfuse.ir import axes, transforms
from meshfuse.ir.axes import AxisKind, AxisName
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.schedule import Merge, Split, Swizzle1d

if TYPE_CHECKING:
    from meshfuse.api.tensor_view import TensorView, Val


@final
class IterDomain(Handle):
    """An axis of a tensor: logical, or derived by a split or merge."""

    __slots__ = ("name", "tensor")
    tensor: TensorView
    name: AxisName

    def __init__(self, tensor: TensorView, name: AxisName) -> None:
        self.recording = tensor.recording
        self.tensor = tensor
        self.name = name

    def is_reduction(self) -> bool:
        return self._definition().kind is AxisKind.reduction

    def is_broadcast(self) -> bool:
        return self._definition().kind is AxisKind.broadcast

    def extent(self) -> Val:
        """Global extent."""
        return self.tensor.extent_of(self.name)

    def parallel_type(self) -> ParallelType:
        return self.recording.program.schedule(self.tensor.name).binding(self.name)

    def parallelize(self, parallel_type: ParallelType) -> None:
        """Bind this loop axis to a mesh axis, the stream loop, or a parallelism of the kernel.

        UserError for an axis that has been split or merged, one that is bound to another type, and
        for a mesh axis that the tensor has already spent on another iteration axis.
        """
        if not isinstance(parallel_type, ParallelType):
            raise UserTypeError(
                f"{self.to_text()}.parallelize({parallel_type!r}): takes a ParallelType, as "
                "ParallelType.mesh_x or mesh.axis(0)"
            )
        self.recording.change(
            Call("parallelize", (parallel_type,), receiver=self),
            lambda program: transforms.parallelize(
                program, self.tensor.name, self.name, parallel_type
            ),
        )

    def to_source(self) -> str:
        leaves = self.recording.program.schedule(self.tensor.name).leaves
        if self.name in leaves:
            return f"{self.tensor.to_source()}.axis({leaves.index(self.name)})"
        definition = self.recording.program.tensor(self.tensor.name)
        logical = [axis.name for axis in definition.logical]
        if self.name in logical:
            return f"{self.tensor.to_source()}.get_logical_domain()[{logical.index(self.name)}]"
        return self.name

    def to_text(self) -> str:
        return f"{self.tensor.name}'s axis {self.name}"

    def __repr__(self) -> str:
        definition, bound = self._definition(), self.parallel_type()
        kind = "" if definition.kind is AxisKind.iteration else f", {definition.kind.name}"
        where = "" if bound == ParallelType.serial else f", bound to {bound}"
        text = f"axis {self.name} of {self.tensor.name}: size {definition.extent}{kind}{where}"
        return text + self._describe_origin()

    def _describe_origin(self) -> str:
        """How the axis came about, if it is derived."""
        program, tensor = self.recording.program, self.tensor.name
        for step in (*program.tensor(tensor).root_steps, *program.schedule(tensor).steps):
            match step:
                case Split(source, self.name):
                    return f", the outer part of {source}"
                case Split(source, _, self.name):
                    return f", the inner part of {source}"
                case Merge(outer, inner, self.name):
                    return f", {outer} and {inner} merged"
                case Swizzle1d(source, self.name, mesh_axis):
                    return f", {source} from the rank's place along {mesh_axis}"
                case _:
                    pass
        return ""

    def _definition(self) -> axes.IterDomain:
        return self.recording.program.all_axes(self.tensor.name)[self.name]


@final
class TensorDomain:
    """The axes of a tensor as text: each loop axis with its extent and what it is bound to."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: TensorView) -> None:
        self.tensor = tensor

    def __repr__(self) -> str:
        program, name = self.tensor.recording.program, self.tensor.name
        schedule = program.schedule(name)
        leaves = program.leaf_domains(name)
        return (
            f"[{', '.join(_describe_axis(leaf, schedule.binding(leaf.name)) for leaf in leaves)}]"
        )


def iter_domain(tensor: TensorView, name: AxisName) -> IterDomain:
    """The handle of an axis."""
    return tensor.recording.handle((tensor.name, name), lambda: IterDomain(tensor, name))


def _describe_axis(axis: axes.IterDomain, binding: ParallelType) -> str:
    kind = "" if axis.kind.is_tensor_axis else f" {axis.kind.name}"
    bound = "" if binding == ParallelType.serial else f" {binding}"
    return f"{axis.extent}{kind}{bound}"
