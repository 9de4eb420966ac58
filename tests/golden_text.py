"""Golden text: what a printer said last time, kept in a file and compared line by line."""

import difflib
from collections.abc import Callable
from pathlib import Path

GoldenCheck = Callable[[str, str], None]
"""`golden(name, text)`: compare `text` with tests/golden/<name>.txt."""


def check_golden(path: Path, text: str, *, update: bool) -> None:
    """Assert that `text` is what the file at `path` holds, or write it there if `update`.

    One newline ends the file whether or not one ends `text`. Raises AssertionError with a unified
    diff, the file on the minus side, and the way to accept the change.
    """
    actual = text.removesuffix("\n") + "\n"
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(actual, encoding="utf-8")
        return
    advice = "If the new text is right: make goldens, then read the diff."
    if not path.exists():
        raise AssertionError(f"no golden file {path}. {advice} The text is:\n{actual}")
    expected = path.read_text(encoding="utf-8")
    if actual == expected:
        return
    diff = difflib.unified_diff(
        expected.splitlines(), actual.splitlines(), path.name, "this run", lineterm=""
    )
    raise AssertionError("\n".join([f"{path.name} differs. {advice}", *diff]))
