"""Programs for tests, built step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshfuse.base.dtypes import DataType
from meshfuse.ir import build, transforms
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import DeviceMesh, ParallelType
from meshfuse.ir.program import Program


class Recorder:
    """A Program that grows: each call replaces `program` and returns the new tensor's name."""

    def __init__(self) -> None:
        self.program = Program()

    def add(self, verb: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Apply a verb of ir/build.py: its one new name, or all of them."""
        self.program, *names = verb(self.program, *args, **keywords)
        return names[0] if len(names) == 1 else names

    def input(
        self, shape: Sequence[int], dtype: DataType = DataType.Float, contiguity: bool = True
    ) -> TensorName:
        """An input, contiguous unless said otherwise."""
        name = self.add(build.define_tensor, shape, dtype, contiguity=contiguity)
        self.program = build.add_input(self.program, name)
        return name

    def pointwise(self, function: str, *operands: Any) -> TensorName:
        return self.add(build.pointwise, function, operands)

    def output(self, *tensors: TensorName) -> None:
        for tensor in tensors:
            self.program = build.add_output(self.program, tensor)

    # Placing.

    def replicate(self, mesh: DeviceMesh, *tensors: TensorName) -> None:
        for tensor in tensors:
            self.program = transforms.set_device_mesh(self.program, tensor, mesh)

    def block(
        self,
        mesh: DeviceMesh,
        tensor: TensorName,
        axis: int,
        mesh_axis: ParallelType = ParallelType.mesh_x,
    ) -> None:
        """Shard loop axis `axis` in equal blocks."""
        position = axis % len(self.program.schedule(tensor).leaves)
        ranks = mesh.axis_size(mesh_axis)
        self.program = transforms.set_device_mesh(self.program, tensor, mesh)
        self.program = transforms.split(self.program, tensor, position, ranks, inner_split=False)
        self.bind(tensor, position, mesh_axis)

    def whole(
        self,
        mesh: DeviceMesh,
        tensor: TensorName,
        axis: int,
        mesh_axis: ParallelType = ParallelType.mesh_x,
    ) -> None:
        """Bind all of loop axis `axis`."""
        self.program = transforms.set_device_mesh(self.program, tensor, mesh)
        self.bind(tensor, axis, mesh_axis)

    def bind(self, tensor: TensorName, axis: int, mesh_axis: ParallelType) -> None:
        leaf = self.program.schedule(tensor).leaves[axis]
        self.program = transforms.parallelize(self.program, tensor, leaf, mesh_axis)
