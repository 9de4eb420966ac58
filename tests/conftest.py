"""Options, fixtures and profiles that every test shares."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from golden_text import GoldenCheck, check_golden
from meshfuse import pipeline
from meshfuse.host.check import require_sound
from meshfuse.host.nodes import HostProgram
from meshfuse.host.verify import verify_host_program

TESTS = Path(__file__).parent

# `make test` gives the same verdict twice; `make nightly` looks for new counter-examples.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=2000)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-goldens",
        action="store_true",
        help="write tests/golden from this run instead of comparing with it",
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark every test under tests/gpu, so that none runs where there is no device by oversight."""
    if item.path.is_relative_to(TESTS / "gpu"):
        item.add_marker("gpu")


@pytest.fixture(scope="session", autouse=True)
def _host_programs_are_checked() -> Iterator[None]:
    """Every host program that a test compiles is run on devices without data, on all its ranks."""

    def verify(program: HostProgram) -> None:
        verify_host_program(program)
        require_sound(program)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "verify_host_program", verify)
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> GoldenCheck:
    """`golden(name, text)` compares `text` with tests/golden/<name>.txt, see golden_text.py."""
    update = bool(request.config.getoption("--update-goldens"))

    def check(name: str, text: str) -> None:
        check_golden(TESTS / "golden" / f"{name}.txt", text, update=update)

    return check
