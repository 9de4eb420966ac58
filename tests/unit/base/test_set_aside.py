"""Importing meshfuse does not have the collector walk all that torch has made."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import gc, sys
import torch
if "frozen" in sys.argv:
    gc.freeze()
before, full = gc.get_freeze_count(), []
gc.callbacks.append(lambda phase, info: full.append(info) if info["generation"] == 2 else None)
import meshfuse
print(len(full), before, gc.get_freeze_count(), gc.isenabled())
"""


@pytest.mark.parametrize("state", ["plain", "frozen"])
def test_importing_collects_nothing_of_torch_and_leaves_the_collector_as_it_was(
    state: str,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, state],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    collections, before, after, is_enabled = done.stdout.split()
    assert (collections, is_enabled) == ("0", "True")
    if state == "plain":
        assert before == after  # some Pythons set a few hundred of their own aside
    else:  # a few of them have died since
        assert int(before) > int(after) > int(before) // 2
