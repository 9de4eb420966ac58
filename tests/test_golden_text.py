"""The golden fixture must fail when text changed, and say what changed."""

from pathlib import Path

import pytest

from golden_text import check_golden


def test_written_text_is_accepted_with_or_without_a_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "new" / "pass.txt"
    check_golden(path, "%a = set(%b)", update=True)
    assert path.read_text() == "%a = set(%b)\n"
    check_golden(path, "%a = set(%b)", update=False)
    check_golden(path, "%a = set(%b)\n", update=False)


def test_changed_text_fails_with_a_diff_and_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pass.txt"
    check_golden(path, "one\ntwo", update=True)
    with pytest.raises(AssertionError, match=r"(?s)pass\.txt differs.*\n-two\n\+three"):
        check_golden(path, "one\nthree", update=False)
    assert path.read_text() == "one\ntwo\n"


def test_an_extra_blank_line_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "pass.txt"
    check_golden(path, "one", update=True)
    with pytest.raises(AssertionError, match="differs"):
        check_golden(path, "one\n\n", update=False)


def test_a_missing_file_fails_and_shows_the_text(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"no golden file(.|\n)*%a = set"):
        check_golden(tmp_path / "absent.txt", "%a = set(%b)", update=False)
