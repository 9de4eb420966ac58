"""Devices as users name them."""

from __future__ import annotations

import torch

from meshfuse.base.errors import UserError, UserTypeError

Device = torch.device | str | int

_MOST_DEVICES = 128
"""torch numbers devices by int8."""


def read_device(device: Device | None) -> torch.device | None:
    """The device that a call names. An int is the number of a GPU."""
    match device:
        case None:
            return None
        case torch.device():
            return _numbered(device)
        case int() if not isinstance(device, bool) and 0 <= device < _MOST_DEVICES:
            return torch.device("cuda", device)
        case str():
            return _numbered(_parse_device(device))
        case _:
            raise UserTypeError(
                f"execute(device={device!r}): takes a torch.device, its name, or a GPU's number"
            )


def _numbered(device: torch.device) -> torch.device:
    """`cuda` is the current GPU."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


def _parse_device(device: str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise UserError(f"execute(device={device!r}): {str(error).splitlines()[0]}") from None
