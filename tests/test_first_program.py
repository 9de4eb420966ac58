"""The first programs that a newcomer runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import meshfuse as nvfuser
from page_examples import programs

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def test_the_smallest_program() -> None:
    with nvfuser.FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.sum(fd.ops.exp(x), [1]))
    data = torch.randn(4, 8)
    [y] = fd.execute([data])
    torch.testing.assert_close(y, data.exp().sum(1))


def test_a_script_in_nvfusers_words() -> None:
    """`import meshfuse as nvfuser` is all that changes."""
    with nvfuser.FusionDefinition() as fd:
        t0 = fd.define_tensor(
            shape=[-1, 1, -1],
            contiguity=[True, None, True],
            dtype=nvfuser.DataType.Float,
            is_cpu=False,
        )
        s0 = fd.define_scalar(3.0)
        t1 = fd.ops.add(t0, s0)
        t2 = fd.ops.sum(t1, dims=[-1], keepdim=False, dtype=nvfuser.DataType.Null)
        fd.add_output(t1)
        fd.add_output(t2)
    data = torch.randn(3, 1, 5)
    added, total = fd.execute([data])
    torch.testing.assert_close(added, data + 3)
    torch.testing.assert_close(total, (data + 3).sum(-1))


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    runpy.run_path(str(EXAMPLES / "mlp.py"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" ")[0] for line in lines] == [
        "rank 0: largest error against torch",
        "rank 1: largest error against torch",
    ]
    assert all(float(line.rpartition(" ")[2]) < 1e-5 for line in lines)


def test_the_programs_of_the_readme_are_short() -> None:
    """That they run as printed is tested with the other pages."""
    first, sharded, *_ = programs((ROOT / "README.md").read_text(encoding="utf-8"))
    assert "FusionDefinition" in first and "simulate" in sharded
    for program in (first, sharded):
        assert len([line for line in program.splitlines() if line]) <= 11
