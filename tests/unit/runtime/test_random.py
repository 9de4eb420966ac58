"""Philox against its published answers, numbers by global index, and generators' states."""

from __future__ import annotations

import math

import pytest
import torch

from meshfuse.runtime.random import (
    RandomState,
    as_int64,
    between,
    draw_state,
    philox,
    random_numbers,
)

CPU = torch.device("cpu")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# The known answers that come with Random123: counter, key, words.
ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("counter", "key", "words"), ANSWERS)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    low, high, offset_low, offset_high = counter
    state = RandomState(key[0] | key[1] << 32, offset_low | offset_high << 32)
    found = philox(torch.tensor([as_int64(low | high << 32)]), state)
    assert tuple(found[0].tolist()) == words


SIZES = (7, 10, 6)
HELD: tuple[tuple[tuple[range, ...] | None, ...], ...] = (
    (None, None, None),
    ((range(2, 5),), None, None),
    ((range(3, 4),), (range(1, 8),), None),
    (None, (range(5, 10),), None),
    (None, None, (range(1, 3),)),
    ((range(0, 7, 3),), None, (range(1, 6, 2),)),
    (None, (range(2), range(6, 9)), None),
    ((), None, None),
    ((range(4, 4),), (range(2),), None),
)


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("held", HELD)
def test_a_part_has_the_numbers_of_its_global_indices(
    held: tuple[tuple[range, ...] | None, ...], dtype: torch.dtype, distribution: str
) -> None:
    state = RandomState(3, 1)
    whole = random_numbers(distribution, SIZES, (None,) * 3, state, dtype, CPU)
    want = whole
    for axis, runs in enumerate(held):
        if runs is not None:
            index = [i for run in runs for i in run]
            want = want.index_select(axis, torch.tensor(index, dtype=torch.int64))
    found = random_numbers(distribution, SIZES, held, state, dtype, CPU)
    assert found.dtype == dtype
    assert torch.equal(found, want)


def test_more_numbers_than_are_made_at_once_are_those_one_by_one() -> None:
    state, count = RandomState(5, 0), 150_001
    whole = random_numbers("uniform", (count,), (None,), state, torch.float32, CPU)
    for start in (1, 65_535, 131_071, count - 3):
        part = random_numbers(
            "uniform", (count,), ((range(start, start + 3),),), state, torch.float32, CPU
        )
        assert torch.equal(part, whole[start : start + 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_distributions_are_what_they_say(dtype: torch.dtype) -> None:
    count = 200_000
    uniform = random_numbers("uniform", (count,), (None,), RandomState(1, 0), dtype, CPU).double()
    assert 0 <= uniform.min() < 1e-4
    assert 1 - 1e-4 < uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 5 / math.sqrt(12 * count)
    shares = torch.histc(uniform, 20, 0, 1) / count * 20
    assert (shares - 1).abs().max() < 0.06
    assert abs(torch.corrcoef(torch.stack((uniform[:-1], uniform[1:])))[0, 1]) < 0.01
    normal = random_numbers("normal", (count,), (None,), RandomState(1, 0), dtype, CPU).double()
    assert normal.isfinite().all()
    assert abs(normal.mean()) < 5 / math.sqrt(count)
    assert abs(normal.std() - 1) < 0.01
    assert abs((normal.abs() < 1).double().mean() - 0.6827) < 0.006
    assert abs((normal**4).mean() - 3) < 0.1


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (-1.1, 1.1), (0.3, 1.7), (-3.0, -1.0), (0.0, 0.1), (1000.0, 1001)]
)
def test_rounding_takes_no_number_to_the_upper_limit(
    low: float, high: float, dtype: torch.dtype
) -> None:
    ends = torch.tensor([0.0, 2**-24, 0.5, 1 - 2**-24])
    if dtype == torch.float64:
        ends = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=dtype)
    found = between(ends, low, high, dtype)
    assert found.dtype == dtype
    assert found.double().min() >= low
    assert found.double().max() < high


def test_without_room_between_the_limits_all_is_the_lower() -> None:
    assert between(torch.tensor([0.0, 0.7]), 2.0, 2.0, torch.float32).tolist() == [2.0, 2.0]


def test_a_state_is_the_seed_and_the_draws_since() -> None:
    torch.manual_seed(17)
    found = [draw_state(CPU, draws) for draws in (1, 3, 1)]
    assert found == [RandomState(17, 0), RandomState(17, 1), RandomState(17, 4)]
    torch.manual_seed(2**64 - 1)
    assert draw_state(CPU, 1) == RandomState(-1, 0)


def test_a_state_follows_from_the_generators_alone() -> None:
    torch.manual_seed(3)
    torch.randn(5)
    saved = torch.get_rng_state()
    first = draw_state(CPU, 2)
    assert first.seed == 3
    assert draw_state(CPU, 2) != first
    torch.set_rng_state(saved)
    assert draw_state(CPU, 2) == first


@pytest.mark.parametrize("words", [623, 624, 625, 39_935, 39_936, 39_937, 1_000_000])
def test_no_two_draws_begin_alike(words: int) -> None:
    torch.manual_seed(4)
    torch.empty(words, dtype=torch.int32).random_()
    saved = torch.get_rng_state()
    found = [draw_state(CPU, 1) for _ in range(4)]
    assert len({(state.seed, state.offset) for state in found}) == 4
    if words < 39_930:
        assert [state.offset for state in found] == list(range(words, words + 4))
    torch.set_rng_state(saved)
    assert [draw_state(CPU, 1) for _ in range(4)] == found
