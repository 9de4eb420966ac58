"""What `make demo` runs: two processes, which end well only if they agree with torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SECONDS = 100


def test_the_demo() -> None:
    script = Path(__file__).parents[2] / "examples" / "demo.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "checked: 2 gloo processes agree with one-device torch within 1e-05" in done.stdout
