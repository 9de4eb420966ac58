"""The door to optional modules."""

import sys

import pytest

from meshfuse.base.errors import Unsupported
from meshfuse.base.optional import is_available, load


def test_loads_a_module_and_its_submodules() -> None:
    assert load("rich") is sys.modules["rich"]
    assert load("rich.console") is sys.modules["rich.console"]
    assert is_available("rich")


def test_a_missing_module_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(Unsupported, match=r"module triton cannot be imported .*pip install triton"):
        load("triton")
    assert not is_available("triton")


@pytest.mark.parametrize("name", ["json", "richer", "torch"])
def test_other_modules_do_not_pass(name: str) -> None:
    with pytest.raises(KeyError, match="is no optional module"):
        load(name)
