"""Programs say themselves in which type they compute: torch.autocast around a call changes nothing.

torch would cast the operands of products, and so give results of another type than the program's.
"""

# torch's own module is asked: the public way asks device by device.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

is_autocasting = torch._C._is_any_autocast_enabled
"""Whether torch casts operands here, on any type of device."""


@contextmanager
def without_autocast() -> Iterator[None]:
    """Operations have the types of their operands. Neither is the user's context changed, nor what
    is cached in it."""
    if not is_autocasting():
        yield
        return
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield
