"""Scripts that repeat a call: the definition, and inputs like those that it had."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshfuse.runtime.arguments import flatten_inputs

IMPORTABLE = ("FusionDefinition", "DataType", "ParallelType", "multidevice")
"""What a definition's text may name; a script imports what its text does name."""


def fake_inputs(inputs: Iterable[object]) -> list[object]:
    """Tensors as FakeTensors, which have no data; scalars as they are.

    Raises UserError for what is no input.
    """
    mode = FakeTensorMode()
    return [
        mode.from_tensor(value.detach()) if isinstance(value, torch.Tensor) else value
        for value in flatten_inputs(inputs)
    ]


def repro_script(definition: str, inputs: Iterable[object] | None) -> str:
    """A script that makes the definition, and runs it on inputs like `inputs` if there are any."""
    text = _definition_and_call(definition, inputs)
    names = [name for name in IMPORTABLE if name in text]
    return "\n".join(
        [
            *_environment(),
            "import torch",
            f"from meshfuse import {', '.join(names)}",
            "",
            text,
        ]
    )


def _environment() -> list[str]:
    """Comments that say where the script was made."""
    devices = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    return [
        f"# CUDA devices: {', '.join(devices) or 'none'}",
        f"# torch version: {torch.__version__}",
        f"# CUDA version: {torch.version.cuda}",
    ]


def _definition_and_call(definition: str, inputs: Iterable[object] | None) -> str:
    lines = [definition, "with FusionDefinition() as fd:", "    nvfuser_fusion(fd)", ""]
    if inputs is not None:
        lines += ["inputs = ["]
        lines += [f"    {_source_of(value)}," for value in flatten_inputs(inputs)]
        lines += ["]", "fd.execute(inputs)", ""]
    return "\n".join(lines)


def _source_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return _tensor_source(value)
    if isinstance(value, complex):
        return f"complex({_float_source(value.real)}, {_float_source(value.imag)})"
    return _float_source(value) if isinstance(value, float) else repr(value)


def _float_source(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def _tensor_source(tensor: torch.Tensor) -> str:
    """Values of the same type, shape and strides, drawn anew."""
    where = f"dtype={tensor.dtype}, device='{tensor.device}'"
    sizes = tuple(tensor.shape)
    if tensor.is_contiguous():
        return f"torch.testing.make_tensor({sizes}, {where})"
    count = _elements_of_storage(sizes, tensor.stride())
    if tensor.dtype.is_floating_point:
        flat = f"torch.randn({count}, {where})"
    else:
        top = 2 if tensor.dtype == torch.bool else 10
        flat = f"torch.randint(0, {top}, ({count},), {where})"
    return f"{flat}.as_strided({sizes}, {tensor.stride()})"


def _elements_of_storage(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements lie from the first to the last of a tensor."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
