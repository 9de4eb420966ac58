"""Forms of overlap raced by two real processes: rank 0 decides, and everything stays as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gloo_run import observe_ranks, run_ranks
from meshfuse import DistributedTensor, FusionDefinition, ParallelType
from meshfuse.api import overlap_choice, overlap_race
from meshfuse.base.errors import Unsupported
from meshfuse.cache import FusionCache
from meshfuse.dist.communicator import Communicator
from meshfuse.facts.overlap_form import Overlap
from meshfuse.host.race import ROUNDS
from meshfuse.multidevice import DeviceMesh

X = ParallelType.mesh_x
TWO, FOUR, EIGHT = (Overlap.chunks(count) for count in (2, 4, 8))
PEERS = (Overlap.peers(), Overlap.peers(2))
MILLISECONDS = {TWO: 8.0, FOUR: 9.0, EIGHT: 12.0}


def row_parallel(
    *, updates: bool = False, draws: bool = False, contracts: bool = True
) -> FusionDefinition:
    """A product of which each rank has terms, added to, or with noise."""
    mesh = DeviceMesh(range(2))
    with FusionDefinition() as fd:
        x = fd.define_tensor([16, 8], contiguity=True)
        w = fd.define_tensor([4, 8], contiguity=True)
        z = fd.define_tensor([16, 4], contiguity=True)
        y = fd.ops.linear(x, w) if contracts else fd.ops.sum(x, [1])
        if updates:
            fd.add_output(fd.ops.add(z, y), z)
        if draws:
            fd.add_output(fd.ops.rand_like(z))
        fd.add_output(y)
        for tensor in (x, w):
            tensor.set_device_mesh(mesh)
            tensor.outer_split(1, 2)
            tensor.axis(1).parallelize(X)
        for tensor in (y, z):
            tensor.set_device_mesh(mesh)
    return fd


def inputs_of(rank: int) -> list[torch.Tensor]:
    x, w, z = whole_inputs()
    return [x.chunk(2, 1)[rank].contiguous(), w.chunk(2, 1)[rank].contiguous(), z]


def whole_inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = ((16, 8), (4, 8), (16, 4))
    return [torch.randint(-3, 4, shape, generator=generator).float() for shape in shapes]


def wanted() -> torch.Tensor:
    x, w, _ = whole_inputs()
    return x @ w.T


def local(value: torch.Tensor) -> torch.Tensor:
    assert isinstance(value, DistributedTensor)
    return value.local


def open_gate() -> None:
    """Small programs are raced, too."""
    overlap_choice.LEAST_BYTES, overlap_choice.LEAST_GAIN = 0, -1.0


def set_clock(milliseconds: dict[Overlap, float]) -> None:
    """Whatever runs, the forms that are left take these times; the plain one 10 ms, and peers 13
    where nothing else is said."""
    milliseconds = {**milliseconds, **{form: milliseconds.get(form, 13.0) for form in PEERS}}

    def slowest(self: overlap_race.Track, times: Sequence[int]) -> list[int]:
        if len(times) == 1:  # the plain form, warm
            return [10_000_000]
        left = [form for form in milliseconds if form in self.executables]
        left = left[: len(times) // ROUNDS - 1]
        taken = (10.0, *(milliseconds[form] for form in left))
        return [round(each * 1e6) for each in taken for _ in range(ROUNDS)]

    overlap_race.Track.slowest = slowest


def told(fd: FusionDefinition) -> tuple[str, str]:
    choice = fd.fec.overlap()
    assert choice is not None
    return str(choice.form), choice.source


def runs_of(call: Callable[[], Any]) -> int:
    """How often programs run meanwhile in races."""
    count = 0
    before = overlap_race.Track.run

    def run(track: overlap_race.Track, form: Overlap, calls: int) -> int:
        nonlocal count
        count += 1
        return before(track, form, calls)

    with patch.object(overlap_race.Track, "run", run):
        call()
    return count


def choose(rank: int, size: int, folder: str) -> list[Any]:
    found: list[Any] = []
    inputs = inputs_of(rank)
    small = row_parallel()
    [y] = small.execute(inputs)
    found.append((told(small), torch.equal(local(y), wanted())))
    open_gate()
    set_clock(MILLISECONDS if rank == 0 else {TWO: 9.9, FOUR: 9.9, EIGHT: 1.0})

    fd = row_parallel()
    [y] = fd.execute(inputs)
    found.append((told(fd), torch.equal(local(y), wanted())))
    found.append(runs_of(lambda: fd.execute(inputs)))
    found.append((told(fd), len(fd.fec._hot_calls)))
    again = row_parallel()
    found.append((runs_of(lambda: again.execute(inputs)), told(again)))
    FusionCache.instance().reset()
    later = row_parallel()
    found.append((runs_of(lambda: later.execute(inputs)), told(later)))
    found.append(later.explain().split("-- overlap --\n")[1].split("\n\n")[0])
    off = row_parallel()
    [y] = off.execute(inputs, overlap="off")
    found.append((off.fec.overlap(), torch.equal(local(y), wanted())))
    asked = row_parallel()
    [y] = asked.execute(inputs, overlap=Overlap.chunks(3))
    found.append((told(asked), torch.equal(local(y), wanted())))
    return found


def test_rank_0_s_choice_is_everybody_s_and_is_remembered(tmp_path: Path) -> None:
    first, second = run_ranks(choose, 2, str(tmp_path), environ=cache_in(tmp_path))
    assert first[:6] == [
        (("plain", "rule"), True),
        (("2 chunks", "race"), True),
        0,
        (("2 chunks", "race"), 1),
        (0, ("2 chunks", "memory")),
        (0, ("2 chunks", "disk")),
    ]
    assert first[6].splitlines()[:5] == [
        "2 chunks: 2 chunks takes 0.800 of the plain form's time, as an earlier process found",
        "form                 ms  of plain  at most",
        "plain            10.000",
        "2 chunks          8.000     0.800    0.800  chosen",
        "4 chunks          9.000     0.900    0.900",
    ]
    assert first[7:] == [(None, True), (("3 chunks", "asked"), True)]
    assert second[:5] == first[:5] and second[5] == (0, ("2 chunks", "memory"))
    assert second[7:] == first[7:]


def spoil(rank: int, size: int, folder: str) -> list[Any]:
    open_gate()
    set_clock(MILLISECONDS)
    inputs, found = inputs_of(rank), list[Any]()
    row_parallel().execute(inputs)
    for path in Path(folder).rglob("*.json") if rank == 0 else ():
        path.write_text("{")
    FusionCache.instance().reset()
    set_clock({TWO: 12.0, FOUR: 9.0, EIGHT: 12.0})
    fd = row_parallel()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fd.execute(inputs)
    found.append((told(fd), [str(w.message) for w in caught if "passed over" in str(w.message)]))
    FusionCache.instance().reset()
    set_clock({TWO: 12.0, FOUR: 12.0, EIGHT: 12.0})
    fd = row_parallel()
    with patch.object(overlap_choice, "VERSION", "another"):
        fd.execute(inputs)
    found.append(told(fd))
    required = row_parallel()
    [y] = required.execute(inputs, overlap="require")
    found.append((told(required), torch.equal(local(y), wanted())))
    with pytest.raises(Unsupported, match="no contraction next to all_reduce") as error:
        row_parallel(contracts=False).execute(inputs, overlap="require")
    found.append("overlap='require'" in str(error.value))
    return found


def test_spoilt_files_and_other_versions_are_raced_anew(tmp_path: Path) -> None:
    first, second = run_ranks(spoil, 2, str(tmp_path), environ=cache_in(tmp_path))
    assert first[0][0] == second[0][0] == ("4 chunks", "race")
    assert len(first[0][1]) == 1 and not second[0][1]
    assert first[1:] == second[1:] == [("plain", "race"), (("2 chunks", "race"), True), True]


def fail(rank: int, size: int) -> list[Any]:
    """Two chunks do not compile on rank 1; four chunks fail there amid the communications."""
    open_gate()
    set_clock({EIGHT: 8.0})
    prepare, run = overlap_race.Track.prepare, overlap_race.Track.run

    def prepare_or_fail(track: overlap_race.Track, form: Overlap) -> None:
        if form == TWO and rank == 1:
            raise ValueError("planted in a compiler")
        prepare(track, form)

    def run_or_fail(track: overlap_race.Track, form: Overlap, calls: int) -> int:
        if form == FOUR and rank == 1:
            track.communicator.gather(track.contest.team, [0], "a barrier")
            track.communicator.give_up("planted")
            raise MemoryError("planted in a run")
        return run(track, form, calls)

    inputs, fd = inputs_of(rank), row_parallel()
    with (
        patch.object(overlap_race.Track, "prepare", prepare_or_fail),
        patch.object(overlap_race.Track, "run", run_or_fail),
    ):
        [y] = fd.execute(inputs)
    choice = fd.fec.overlap()
    assert choice is not None
    [again] = fd.execute(inputs)
    is_right = torch.equal(local(y), wanted()) and torch.equal(local(again), wanted())
    return [told(fd), [row.error for row in choice.rows], is_right]


def test_a_form_that_fails_on_one_rank_is_dropped_on_all() -> None:
    first, second = run_ranks(fail, 2, environ=no_cache)
    assert first == second
    assert first == [
        ("8 chunks", "race"),
        [
            None,
            "ValueError: planted in a compiler (rank 1)",
            "MemoryError: planted in a run (rank 1)",
            None,
            None,
            None,
        ],
        True,
    ]


def keep(rank: int, size: int) -> list[Any]:
    open_gate()
    set_clock(MILLISECONDS)
    found: list[Any] = []
    for overlap in ("off", "auto"):
        torch.manual_seed(3)
        inputs = inputs_of(rank)
        fd = row_parallel(updates=True, draws=True)
        numbers, y = fd.execute(inputs, overlap=overlap)
        found.append((local(numbers), local(y), inputs[2], torch.get_rng_state()))
    assert told(fd)[1] == "race"
    same = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return [same, torch.equal(found[1][2], whole_inputs()[2] + wanted())]


def test_a_race_leaves_inputs_and_random_numbers_alone() -> None:
    assert run_ranks(keep, 2, environ=no_cache) == [[True, True]] * 2


def column_parallel() -> FusionDefinition:
    """Rows that are gathered, by the columns that a rank has."""
    mesh = DeviceMesh(range(2))
    with FusionDefinition() as fd:
        x = fd.define_tensor([16, 8], contiguity=True)
        w = fd.define_tensor([4, 8], contiguity=True)
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        for tensor, axis in ((x, 0), (w, 0), (y, 1)):
            tensor.set_device_mesh(mesh)
            tensor.outer_split(axis, 2).axis(axis).parallelize(X)
    return fd


def for_graphs(rank: int, size: int) -> list[str]:
    open_gate()
    set_clock({TWO: 9.0, FOUR: 8.0, EIGHT: 9.0, Overlap.peers(): 7.0, Overlap.peers(2): 6.0})
    x, w, _ = whole_inputs()
    inputs, cache = [x.chunk(2)[rank], w.chunk(2)[rank]], column_parallel().fec
    found: list[str] = []
    for is_captured in (False, True, False):
        bound = cache.bind(inputs, rank)
        communicator = Communicator.instance()
        chosen = cache.in_chosen_form(bound, None, communicator, None, is_captured)
        found.append(str(chosen.key.form))
    return found


def test_what_a_graph_cannot_repeat_is_not_chosen_for_it(tmp_path: Path) -> None:
    for _ in range(2):  # by races, then by what is on disk
        for found in run_ranks(for_graphs, 2, environ=cache_in(tmp_path)):
            assert found == ["peers, 2 pieces", "4 chunks", "peers, 2 pieces"]


def differ(rank: int, size: int) -> None:
    open_gate()
    row_parallel().execute(inputs_of(rank), overlap="auto" if rank == 0 else "off")


def test_ranks_that_ask_for_different_things_are_told() -> None:
    for outcome in observe_ranks(differ, 2, environ=no_cache):
        assert "run different programs" in (outcome.error or "")
        assert "a race of forms of overlap of program" in (outcome.error or "")


def cache_in(folder: Path) -> Callable[[int], dict[str, str]]:
    return lambda rank: {"MESHFUSE_CACHE_DIR": str(folder)}


def no_cache(rank: int) -> dict[str, str]:
    return {"MESHFUSE_CACHE_DIR": ""}
