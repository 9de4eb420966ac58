"""Runs the programs that a page of prose shows, and puts what they print back into the page.

A fence marked `python` is a program. A page's programs share their names, from the top down. A
fence marked `text` that follows a program, with nothing but blank lines between, is what that
prints; an error that ends a program counts as printed: its class and message, wrapped. A program
marked `python torchrun=2` runs as two processes instead, by itself. Other fences are left alone.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
import textwrap
from contextlib import redirect_stdout
from pathlib import Path

PROGRAM = re.compile(
    r"^```python(?: torchrun=(?P<ranks>\d+))?\n(?P<program>.*?)^```\n"
    r"(?:(?P<gap>\n*)```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
WIDTH = 98
TORCHRUN_SECONDS = 60


def programs(page: str) -> list[str]:
    """The programs of a page, in order."""
    return [found["program"] for found in PROGRAM.finditer(page)]


def regenerate(page: str) -> str:
    """The page with the output of its programs as they print it now.

    Raises AssertionError for a program that prints something, or ends with an error, where the page
    shows no output.
    """
    namespace: dict[str, object] = {}

    def run(found: re.Match[str]) -> str:
        program = found["program"]
        printed = (
            _run_by_torchrun(program, int(found["ranks"]))
            if found["ranks"]
            else _run_here(program, namespace)
        )
        if found["output"] is None:
            assert not printed, f"the page shows no output of\n{program}\nwhich is\n{printed}"
            return found[0]
        start = found.start("output") - found.start()
        end = found.end("output") - found.start()
        return found[0][:start] + printed + found[0][end:]

    return PROGRAM.sub(run, page)


def _run_here(program: str, namespace: dict[str, object]) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        try:
            exec(compile(program, "<page>", "exec"), namespace)
        except Exception as error:  # noqa: BLE001  # an error is what some programs are there for
            text = f"{type(error).__name__}: {error}"
            lines = textwrap.wrap(
                text,
                WIDTH,
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            print("\n".join(lines))
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def _run_by_torchrun(program: str, ranks: int) -> str:
    """What the ranks print, in the order of ranks. Each writes to a file of its own."""
    with tempfile.TemporaryDirectory() as folder:
        script, logs = Path(folder, "program.py"), Path(folder, "logs")
        script.write_text(program, encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", "--redirects=1", f"--log-dir={logs}", str(script)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TORCHRUN_SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr
        printed = {int(path.parent.name): path.read_text() for path in logs.rglob("stdout.log")}
    assert sorted(printed) == list(range(ranks))
    return "".join(printed[rank] for rank in range(ranks))
