"""Choices on disk: what is written comes back, for that key alone, and only if it is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfuse.runtime import remembered_choices
from meshfuse.runtime.remembered_choices import cache_directory, read_choice, write_choice

KEY: dict[str, object] = {"program": "abc", "sizes": [("i0", 4)], "ranks": 2, "torch": "2.13"}
CHOICE = {"form": "4 chunks", "rows": [["plain", 1.5, None, None, None]]}


def test_a_choice_comes_back_and_leaves_one_file(tmp_path: Path) -> None:
    write_choice(tmp_path, KEY, CHOICE)
    write_choice(tmp_path, KEY, CHOICE)
    assert read_choice(tmp_path, KEY) == CHOICE
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


@pytest.mark.parametrize(
    "other", [{"torch": "2.14"}, {"ranks": 4}, {"program": "x"}, {"sizes": [("i0", 5)]}]
)
def test_another_key_has_no_choice(tmp_path: Path, other: dict[str, object]) -> None:
    write_choice(tmp_path, KEY, CHOICE)
    assert read_choice(tmp_path, {**KEY, **other}) is None


def test_another_schema_has_no_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_choice(tmp_path, KEY, CHOICE)
    monkeypatch.setattr(remembered_choices, "SCHEMA", remembered_choices.SCHEMA + 1)
    assert read_choice(tmp_path, KEY) is None


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"key": {}}', "\x00"])
def test_a_spoilt_file_is_passed_over_with_a_warning(tmp_path: Path, text: str) -> None:
    write_choice(tmp_path, KEY, CHOICE)
    [path] = tmp_path.rglob("*.json")
    path.write_text(text)
    with pytest.warns(UserWarning, match="passed over, and made again"):
        assert read_choice(tmp_path, KEY) is None
    write_choice(tmp_path, KEY, CHOICE)
    assert read_choice(tmp_path, KEY) == CHOICE


def test_where_nothing_can_be_written_a_warning_says_so(tmp_path: Path) -> None:
    (tmp_path / "choices").write_text("a file in place of the directory")
    with pytest.warns(UserWarning, match="MESHFUSE_CACHE_DIR"):
        write_choice(tmp_path, KEY, CHOICE)


def test_the_directory() -> None:
    assert cache_directory({"MESHFUSE_CACHE_DIR": "/a"}) == Path("/a")
    assert cache_directory({"MESHFUSE_CACHE_DIR": "", "XDG_CACHE_HOME": "/b"}) is None
    assert cache_directory({"XDG_CACHE_HOME": "/b"}) == Path("/b/meshfuse")
    assert cache_directory({}) == Path.home() / ".cache" / "meshfuse"
    assert read_choice(None, KEY) is None
    write_choice(None, KEY, CHOICE)
