"""Random numbers: which a call draws (seed and offset), and what they are (Philox).

A number depends on seed, offset and the global index of its element alone, so that every rank
computes those that it holds, and no schedule changes any. The generator is Philox4x32-10 (Salmon,
Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11): four words of 32 bits
for each counter (block of elements, offset) under a key (seed). Words are held in int64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from threading import Lock
from typing import Final, final

import torch

_WORD: Final = 0xFFFFFFFF
_ROUNDS: Final = 10
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)

_COUNTERS_AT_ONCE: Final = 1 << 14
"""What is worked on at a time stays in the cache."""

Ranges = Sequence[range]
"""The global indices of an axis, in order."""


# What a call draws.


@final
@dataclass(slots=True)
class RandomState:
    """Where the numbers of one call begin; whoever runs it fills this before its first step."""

    seed: int = 0
    offset: int = 0

    def take(self, other: RandomState) -> None:
        self.seed, self.offset = other.seed, other.offset


_DRAWING: Final = Lock()
"""Two threads may not draw the same numbers: reading a generator and moving it on are one step."""

_STATE_WORDS: Final = 624
_STATE_START: Final = 24
"""A CPU generator's state in bytes: seed (8), words left (4), whether seeded (4), words taken of
this block (8), then the block: 624 words of the Mersenne twister, in 8 bytes each."""

_MOST_BLOCKS: Final = 64
"""Blocks after seeding that are recognised: 39,936 draws."""

_CUDA_STEP: Final = 4
"""CUDA generators count their offset in words, and move on in whole counters."""


def draw_state(device: torch.device, draws: int) -> RandomState:
    """The state of torch's default generator of `device`, which moves on by `draws`.

    After torch.manual_seed(s) it is (s, 0), then (s, draws) and so on. On a CPU it is a function of
    the generator's state: what a program, torch.randn or set_state did before counts, and nothing
    else. Past 39,936 draws, and for a state that was made otherwise, the seed is a digest of it.
    """
    with _DRAWING:
        if device.type == "cuda":
            return _draw_cuda(device, draws)
        generator = torch.default_generator
        state = _read_cpu(generator)
        torch.empty(draws, dtype=torch.int32).random_(generator=generator)  # one word each
        return state


def _draw_cuda(device: torch.device, draws: int) -> RandomState:
    torch.cuda.init()  # until then there are no generators
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    offset = generator.get_offset()
    generator.set_offset(offset + _CUDA_STEP * draws)
    return RandomState(as_int64(generator.initial_seed()), offset // _CUDA_STEP)


def _read_cpu(generator: torch.Generator) -> RandomState:
    state: bytes = generator.get_state().numpy().tobytes()
    seed = generator.initial_seed()
    taken = int.from_bytes(state[16:_STATE_START], "little")
    block = _digest_of_block(state)
    number = _first_blocks(seed).get(block)
    if number is None:
        return RandomState(int.from_bytes(block[:8], "little", signed=True), taken)
    return RandomState(as_int64(seed), max(number - 1, 0) * _STATE_WORDS + taken)


@lru_cache(maxsize=16)
def _first_blocks(seed: int) -> dict[bytes, int]:
    """Digests of a generator's blocks after seeding -> their number; 0 is the seeded state."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[bytes, int] = {}
    for number in range(_MOST_BLOCKS + 1):
        found[_digest_of_block(generator.get_state().numpy().tobytes())] = number
        torch.empty(_STATE_WORDS if number else 1, dtype=torch.int32).random_(generator=generator)
    return found


def _digest_of_block(state: bytes) -> bytes:
    block = state[_STATE_START : _STATE_START + 8 * _STATE_WORDS]
    return blake2b(block, digest_size=16).digest()


def as_int64(value: int) -> int:
    """The int64 of the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


# What the numbers are.


def random_numbers(
    distribution: str,
    sizes: Sequence[int],
    held: Sequence[Ranges | None],
    state: RandomState,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Numbers of a tensor of global `sizes`: those of the indices in `held`, None being all.

    uniform: in [0, 1), multiples of 2**-24, for float64 of 2**-53. normal: of mean 0 and standard
    deviation 1, by Box and Muller. Of float64 for that `dtype`, else of float32.
    """
    per_counter = 2 if dtype == torch.float64 else 4
    shape = [
        size if ranges is None else sum(map(len, ranges))
        for size, ranges in zip(sizes, held, strict=True)
    ]
    made = torch.float64 if dtype == torch.float64 else torch.float32
    result = torch.empty(math.prod(shape), dtype=made, device=device)
    run = _one_run(sizes, held)
    if run is not None:
        _fill_run(result, run, per_counter, distribution, state)
    else:
        indices = _linear_indices(sizes, held, device)
        for part in _parts(len(result), _COUNTERS_AT_ONCE):
            index = indices[part.start : part.stop]
            numbers = _numbers(distribution, index // per_counter, state, made)
            lane = (index % per_counter).unsqueeze(1)
            result[part.start : part.stop] = numbers.gather(1, lane).squeeze(1)
    return result.view(shape)


def _one_run(sizes: Sequence[int], held: Sequence[Ranges | None]) -> range | None:
    """The linear indices, where they follow one another without a gap."""
    inner, whole = 1, True
    run = range(1)
    for size, ranges in reversed(list(zip(sizes, held, strict=True))):
        if not whole and size != 1:
            return None
        pieces = (range(size),) if ranges is None else tuple(r for r in ranges if len(r))
        if len(pieces) != 1 or (pieces[0].step != 1 and len(pieces[0]) > 1):
            return range(0) if not pieces else None
        piece = pieces[0]
        run = range(run.start + piece.start * inner, run.start + piece.start * inner)
        run = range(run.start, run.start + len(piece) * inner)
        whole = len(piece) == size
        inner *= size
    return run if sizes else range(1)


def _linear_indices(
    sizes: Sequence[int], held: Sequence[Ranges | None], device: torch.device
) -> torch.Tensor:
    """Row-major global indices of the held elements, in the order of the local tensor."""
    indices = torch.zeros(1, dtype=torch.int64, device=device)
    for size, ranges in zip(sizes, held, strict=True):
        pieces = (range(size),) if ranges is None else ranges
        axis = [torch.arange(r.start, r.stop, r.step, device=device) for r in pieces]
        own = torch.cat(axis) if axis else torch.empty(0, dtype=torch.int64, device=device)
        indices = (indices.unsqueeze(1) * size + own).view(-1)
    return indices


def _fill_run(
    result: torch.Tensor, run: range, per_counter: int, distribution: str, state: RandomState
) -> None:
    first, last = run.start // per_counter, -(-run.stop // per_counter)
    skipped = run.start - first * per_counter
    for part in _parts(last - first, _COUNTERS_AT_ONCE):
        counters = torch.arange(first + part.start, first + part.stop, device=result.device)
        numbers = _numbers(distribution, counters, state, result.dtype).view(-1)
        start = part.start * per_counter - skipped
        from_, to = max(start, 0), min(start + len(numbers), len(result))
        result[from_:to] = numbers[from_ - start : to - start]


def _parts(count: int, size: int) -> Iterator[range]:
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


def _numbers(
    distribution: str, counters: torch.Tensor, state: RandomState, dtype: torch.dtype
) -> torch.Tensor:
    """[counters, numbers of each]."""
    words = philox(counters, state)
    if dtype == torch.float64:
        high, low = words[:, ::2] >> 5, words[:, 1::2] >> 6
        uniform = ((high << 26) + low).to(torch.float64) * 2.0**-53
    else:
        uniform = (words >> 8).to(torch.float32) * 2.0**-24
    return uniform if distribution == "uniform" else _normal(uniform)


def _normal(uniform: torch.Tensor) -> torch.Tensor:
    """Pairs of uniform numbers to pairs of normal ones (Box and Muller, 1958), in float64."""
    wide = uniform.to(torch.float64)
    radius = torch.sqrt(-2.0 * torch.log(1.0 - wide[:, ::2].contiguous()))
    angle = wide[:, 1::2].contiguous() * (2.0 * math.pi)
    pairs = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), 2)
    return pairs.flatten(1).to(uniform.dtype)


def philox(counters: torch.Tensor, state: RandomState) -> torch.Tensor:
    """Philox4x32-10 of int64 `counters`: [counters, 4] words of 32 bits, as int64.

    The counter's other half is the offset.
    """
    keys = (state.seed & _WORD, (state.seed >> 32) & _WORD)
    x0, x1 = counters & _WORD, (counters >> 32) & _WORD
    x2 = torch.full_like(counters, state.offset & _WORD)
    x3 = torch.full_like(counters, (state.offset >> 32) & _WORD)
    p0, p1 = torch.empty_like(counters), torch.empty_like(counters)
    for number in range(_ROUNDS):
        k0, k1 = (k + number * step for k, step in zip(keys, _KEY_STEPS, strict=True))
        # Products wrap to 64 bits: the upper word is what an arithmetic shift leaves of them.
        torch.mul(x0, _MULTIPLIERS[0], out=p0)
        torch.mul(x2, _MULTIPLIERS[1], out=p1)
        torch.bitwise_right_shift(p1, 32, out=x0)
        torch.bitwise_right_shift(p0, 32, out=x2)
        x0.bitwise_xor_(x1).bitwise_xor_(k0 & _WORD).bitwise_and_(_WORD)
        x2.bitwise_xor_(x3).bitwise_xor_(k1 & _WORD).bitwise_and_(_WORD)
        x1, p1 = p1.bitwise_and_(_WORD), x1
        x3, p0 = p0.bitwise_and_(_WORD), x3
    return torch.stack((x0, x1, x2, x3), 1)


# Numbers between limits.


def between(uniform: torch.Tensor, low: float, high: float, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of [0, 1) moved to [low, high), in `dtype`: rounding takes none out of there.

    With `high` not above `low`, all are `low`, as near as `dtype` has it.
    """
    if not low < high:
        return torch.full_like(uniform, low, dtype=dtype)
    moved = (uniform * (high - low)).add_(low).to(dtype)
    lowest, highest = _first_at(low, dtype), _last_below(high, dtype)
    return moved.clamp_(lowest, max(lowest, highest))


def _first_at(limit: float, dtype: torch.dtype) -> float:
    """The smallest number of `dtype` that is not below `limit`."""
    return -_neighbour(-limit, dtype, inclusive=True)


def _last_below(limit: float, dtype: torch.dtype) -> float:
    """The largest number of `dtype` that is below `limit`."""
    return _neighbour(limit, dtype, inclusive=False)


def _neighbour(limit: float, dtype: torch.dtype, *, inclusive: bool) -> float:
    """The largest number of `dtype` below `limit`, or at it."""
    nearest = torch.tensor(limit, dtype=dtype)
    value = float(nearest)
    if value < limit or (inclusive and value == limit):
        return value
    return float(torch.nextafter(nearest, torch.tensor(-math.inf, dtype=dtype)))
