"""What tests on several GPUs share: where their processes meet."""

from __future__ import annotations

import os

PORT = "29571"


def environment(rank: int) -> dict[str, str]:
    """As a launcher sets it for the process of `rank` on this host."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    return {**os.environ, **address, "LOCAL_RANK": str(rank)}
