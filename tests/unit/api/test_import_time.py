"""`import meshfuse` stays light: no slow module, and little time on top of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshfuse.base import optional

LIMIT_SECONDS = 0.15
# Processor time, for the machine may be busy. Torch leaves a collection of its many objects due:
# that is done first, so that it falls to nobody.
PROBE = """
import gc, sys, time
import torch
gc.collect()
before = set(sys.modules)
start = time.process_time()
import meshfuse
seconds = time.process_time() - start
slow = "triton sympy torch.distributed.tensor typer rich torch._dynamo meshfuse.pipeline".split()
print(seconds, *[name for name in slow if name in set(sys.modules) - before])
"""


def test_import_is_fast_and_loads_nothing_slow(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    seconds: list[float] = []
    for _ in range(4):  # the first one writes byte code
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
            env=environment,
        )
        spent, *loaded = done.stdout.split()
        assert loaded == []
        seconds.append(float(spent))
    assert min(seconds) < LIMIT_SECONDS


def test_only_our_own_modules_are_the_compilers() -> None:
    with pytest.raises(KeyError, match="none of our own"):
        optional.load_compiler("triton")
