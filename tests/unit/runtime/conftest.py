"""One compiler for all tests of this folder."""

import pytest

from meshfuse.runtime.compile import KernelCompiler


@pytest.fixture(scope="session")
def compiler() -> KernelCompiler:
    return KernelCompiler()
