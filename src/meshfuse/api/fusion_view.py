"""`fd.fusion`: the program behind a definition, read-only."""

from __future__ import annotations

from typing import final

from meshfuse.api.recording import Handle, Recording
from meshfuse.api.tensor_view import TensorView, Val, scalar, tensor_view
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.printer import print_program


@final
class FusionView(Handle):
    """Inputs, outputs and values of a definition: the same handles that defining it gave."""

    __slots__ = ()

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def inputs(self) -> list[TensorView | Val]:
        """In the order of `execute`'s arguments."""
        return [self._handle(name) for name in self.recording.program.fusion.inputs]

    def outputs(self) -> list[TensorView]:
        """In the order of `add_output`, hidden ones (in-place updates) included."""
        outputs = self.recording.program.fusion.outputs
        return [tensor_view(self.recording, output.tensor) for output in outputs]

    def vals(self) -> list[TensorView | Val]:
        """All tensors, then all named scalars, in order of definition."""
        fusion = self.recording.program.fusion
        return [self._handle(name) for name in (*fusion.tensors, *fusion.scalars)]

    def print_math(self) -> None:
        """Print the program's text."""
        print(self)

    def to_source(self) -> str:
        return "fd.fusion"

    def to_text(self) -> str:
        return "fusion"

    def __repr__(self) -> str:
        return print_program(self.recording.program)

    def _handle(self, name: TensorName | ScalarName) -> TensorView | Val:
        if name in self.recording.program.fusion.tensors:
            return tensor_view(self.recording, name)
        return scalar(self.recording, ScalarName(name))
