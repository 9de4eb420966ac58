"""Every program, kernel and host program in the golden files parses back and prints the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from meshfuse.host.parser import parse_host_program
from meshfuse.host.printer import print_host_program
from meshfuse.ir.parser import parse_program
from meshfuse.ir.printer import print_program
from meshfuse.kernel.parser import parse_kernel
from meshfuse.kernel.printer import print_kernel

GOLDEN = Path(__file__).parent / "golden"
PARTS = ("host_ir_lowering",)
"""Files of parts of programs."""
OTHER_LANGUAGES = ("cpp_", "host_faults", "visualize")
"""Files of source text, which nothing of ours parses."""


def program_again(text: str) -> str:
    return print_program(parse_program(text))


def kernel_again(text: str) -> str:
    return print_kernel(parse_kernel(text))


def host_program_again(text: str) -> str:
    return print_host_program(parse_host_program(text))


AGAIN: dict[str, Callable[[str], str]] = {
    "program": program_again,
    "kernel": kernel_again,
    "host": host_program_again,
}

_TEXT = re.compile(r"^(program|kernel|host)\(.*?^}$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_golden_text_parses_back(path: Path) -> None:
    found = list(_TEXT.finditer(path.read_text(encoding="utf-8")))
    assert bool(found) != path.stem.startswith((*OTHER_LANGUAGES, *PARTS)), (
        "a file without any program"
    )
    for match in found:
        assert AGAIN[match[1]](match[0]) == match[0]
