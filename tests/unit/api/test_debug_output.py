"""What MESHFUSE_DUMP shows of host programs."""

from __future__ import annotations

import pytest
import torch

from golden_text import GoldenCheck
from host_loops import chunks, define, dense
from meshfuse import FusionDefinition, ParallelType
from meshfuse.host.parser import parse_host_program
from meshfuse.host.postings import postings_of
from meshfuse.host.printer import print_node
from meshfuse.multidevice import DeviceMesh, simulate
from sharded_runs import integers, mesh_of, place

X = ParallelType.mesh_x


def gathered_in_chunks(fd: FusionDefinition, ranks: int = 2) -> None:
    """[8, 4] @ [4, 5], rows gathered in two chunks; then the sum of what is sharded."""
    mesh = DeviceMesh(range(ranks))
    x, w = dense(fd, 8, 4), dense(fd, 4, 5)
    y = fd.ops.matmul(x, w)
    total = fd.ops.sum(x, [0])
    for tensor in (x, w, y, total):
        tensor.set_device_mesh(mesh)
    x.outer_split(0, 2)
    x.outer_split(1, ranks)
    x.axis(1).parallelize(X)
    chunks(y, 0, 2)
    fd.add_output(y)
    fd.add_output(total)


def sections(text: str) -> dict[str, str]:
    """What stands under each title."""
    parts = [part.partition(" --\n") for part in text.split("-- ")[1:]]
    return {title: body.rstrip("\n") for title, _, body in parts}


@pytest.mark.parametrize("variable", ["MESHFUSE_DUMP", "NVFUSER_DUMP"])
def test_host_programs_are_printed_once(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "host_ir")
    fd = define(lambda fd: fd.add_output(fd.ops.neg(dense(fd, 4))))
    fd.execute([torch.ones(4)])
    fd.execute([torch.ones(4)])
    [(title, text)] = sections(capsys.readouterr().out).items()
    assert title == "host_ir"
    assert parse_host_program(text).body == fd.fec.host_program().body


def test_a_program_without_communications_posts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_DUMP", "host_ir,communication")
    fd = define(lambda fd: fd.add_output(fd.ops.neg(dense(fd, 4))))
    fd.execute([torch.ones(4)], capture_debug_output=True)
    found = sections(fd.get_debug_output() or "")
    assert list(found) == ["host_ir", "communication"]
    assert found["communication"] == ""


def test_communications_are_shown_as_they_are_posted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESHFUSE_DUMP", "communication")
    simulate(define(gathered_in_chunks), [integers(8, 4), integers(4, 5)])
    text = sections(capsys.readouterr().out)["communication"]
    assert text.splitlines() == [
        "all_reduce number 0 over ranks (0, 1) (sum, 16 bytes, for T5 = sum(T0, [0]))",
        "all_gather number 1 over ranks (0, 1) (32 bytes, for T2_j0 = mat_mul(T4_j0, T1))",
        "all_gather number 3 over ranks (0, 1) (32 bytes, for T2_j0 = mat_mul(T4_j0, T1))",
    ]


def test_a_rank_shows_its_own_team() -> None:
    mesh = DeviceMesh([[0, 1], [2, 3]])
    with FusionDefinition() as fd:
        x = dense(fd, 4, 6)
        y = fd.ops.sum(x, [0])
        fd.add_output(y)
        for tensor in (x, y):
            tensor.set_device_mesh(mesh)
        x.outer_split(0, 2).axis(0).parallelize(ParallelType.mesh_y)
    simulate(fd, [integers(4, 6)])
    program = fd.fec.host_program()
    shown = [list(postings_of(program, {"x": 0}, rank)) for rank in range(5)]
    teams = [line.partition("ranks ")[2].partition(" (sum")[0] for [line] in shown[:4]]
    assert teams == ["(0, 2)", "(1, 3)", "(0, 2)", "(1, 3)"]
    assert shown[4] == []


def test_the_lowering_is_shown_step_by_step(
    golden: GoldenCheck, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those steps that change something: there is no loop here for streams."""
    monkeypatch.setenv("MESHFUSE_DUMP", "host_ir_lowering")
    with FusionDefinition() as fd:
        x = dense(fd, 4, 6)
        total = fd.ops.sum(x, [0])
        fd.add_output(fd.ops.neg(x))
        fd.add_output(total)
        place(mesh_of(2), {0: X}, x)
        place(mesh_of(2), {}, total)
    simulate(fd, [integers(4, 6)])
    text = sections(capsys.readouterr().out)["host_ir_lowering"]
    golden("host_ir_lowering", text)
    last = text.split(":\n")[-1]
    assert last.splitlines() == [
        line for node in fd.fec.host_program().body for line in print_node(node).splitlines()
    ]


def test_streams_are_a_step_of_the_lowering(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESHFUSE_DUMP", "host_ir_lowering")
    simulate(define(gathered_in_chunks), [integers(8, 4), integers(4, 5)])
    before, _, behind = capsys.readouterr().out.partition("\nstreams:\n")
    assert "for_loop(j0, 2)" in before and "on_stream" not in before
    assert "on_stream(j0)" in behind
