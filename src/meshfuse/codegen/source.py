"""The text of a kernel in a target language."""

from __future__ import annotations

from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.kernel.nodes import Kernel


@final
@frozen_dataclass
class KernelSource:
    """`text` is a whole translation unit; `entry` the function to call.

    `extern "C" void entry(void** buffers, const double* floats, const int64_t* integers,
    int threads)`. `buffers` are in the kernel's order; scalar parameters of floating type stand in
    `floats`, integer and bool ones first in `integers`, followed by the kernel's sizes.
    """

    entry: str
    text: str
    kernel: Kernel
