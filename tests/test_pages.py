"""Every program on a page for readers runs as printed, and prints what the page says.

`make goldens` puts the present output into the pages.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from golden_text import check_golden
from meshfuse import FusionDefinition, multidevice
from page_examples import programs, regenerate

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "ARCHITECTURE.md",
    "docs/dtensor.md",
    "docs/errors.md",
    "docs/host_program.md",
    "docs/sharding.md",
)
PROSE = (*PAGES, "CONTRIBUTING.md", "benchmarks/README.md")
ARCHITECTURE_LINES = 150


@pytest.mark.parametrize("page", PAGES)
def test_programs_print_what_the_page_says(
    page: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    assert programs(text)
    update = bool(request.config.getoption("--update-goldens"))
    check_golden(path, regenerate(text), update=update)


@pytest.mark.parametrize("page", PROSE)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("page", PROSE)
def test_names_on_pages_exist(page: str) -> None:
    """Of definitions and of `multidevice`; and files, from any folder down."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fd = FusionDefinition()
    owners = {"fd": fd, "fd.ops": fd.ops, "fd.fec": fd.fec, "multidevice": multidevice}
    told = re.findall(r"(?<![\w.])(fd\.ops|fd\.fec|fd|multidevice)\.([a-zA-Z_]+)", text)
    assert [(owner, name) for owner, name in told if not hasattr(owners[owner], name)] == []
    named = set(re.findall(r"`([\w/]+\.[chp]+y?)`", text)) - {"program.py", "NAME.py"}
    files = [f"/{path.relative_to(ROOT)}" for path in ROOT.glob("[!.]*/**/*.*")]
    assert [name for name in named if not any(f.endswith(f"/{name}") for f in files)] == []


def test_architecture_is_one_sitting() -> None:
    lines = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= ARCHITECTURE_LINES


def test_outputs_are_replaced_in_place() -> None:
    page = "a\n```python\nx = 2\nprint(x)\n```\n\n```text\nold\n```\n```python\n1 / 0\n```\n"
    with pytest.raises(AssertionError, match="ZeroDivisionError: division by zero"):
        regenerate(page)
    shown = page + "\n```text\n```\nend\n"
    expected = shown.replace("old\n", "2\n").replace(
        "```text\n```", "```text\nZeroDivisionError: division by zero\n```"
    )
    assert regenerate(shown) == expected
