"""Numbers for the sizes of a host program, where chunks are to be compared before any call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import lcm
from typing import Final

from meshfuse.expr import IntExpr, Symbol, evaluate, free_symbols
from meshfuse.facts.nominal import nominal_size
from meshfuse.host.nodes import (
    Chunk,
    Communicate,
    ForLoop,
    HostProgram,
    OnStream,
    Record,
    WaitEvent,
    all_nodes,
)
from meshfuse.host.symbols import (
    Covers,
    Demand,
    Divides,
    Equals,
)

_ODD: Final = 1021
"""A prime: chunks that are rounded up or down overlap, or leave something out, if they ever do."""
_OTHERS: Final = (120, 121, 119, 1100, 5, 1, 0)
"""What many numbers divide, what leaves a rest of one or all but one, more than is assumed first,
fewer than there are chunks, and none."""


def assumed_sizes(program: HostProgram) -> Mapping[str, int]:
    """A value for each symbol that regions and loops name, coordinates of ranks at 0.

    The sizes are such as a call might have: if demands are on them, a value that meets these.
    Indices of loops have values, too, which stand for nothing.
    """
    symbols = _symbols(_expressions(program))
    coordinates = dict.fromkeys((str(found.symbol) for found in program.coordinates), 0)
    found = [_with_sizes(symbols, wanted) for wanted in _candidates(program.demands)]
    fitting = (sizes for sizes in found if meets_demands(program, sizes))
    return {**next(fitting, found[0]), **coordinates}


def other_sizes(program: HostProgram) -> Iterator[Mapping[str, int]]:
    """More sizes that a call might have, where chunks depend on them: even and uneven, few, none.

    All symbols have one size first, then each its own, for what must be equal is said in demands.
    """
    base = assumed_sizes(program)
    fixed = {found.symbol for found in program.coordinates}
    fixed.update(node.index for node in all_nodes(program.body) if isinstance(node, ForLoop))
    sizes = [symbol for symbol in _symbols(_expressions(program)) if symbol.name not in fixed]
    is_open = not fixed.issuperset(symbol.name for symbol in _symbols(_chunk_sizes(program)))
    seen = [base]
    for wanted in _OTHERS if is_open else ():
        alike = dict.fromkeys(sizes, wanted)
        apart = {symbol: wanted + place for place, symbol in enumerate(sizes)}
        for chosen in (alike, apart):
            found = {**base, **{s.name: nominal_size(s, size) for s, size in chosen.items()}}
            if found not in seen and meets_demands(program, found):
                seen.append(found)
                yield found


def meets_demands(program: HostProgram, sizes: Mapping[str, int]) -> bool:
    """Whether a call may have these sizes."""
    return all(_holds(demand, sizes) for demand in program.demands)


def _symbols(expressions: Iterable[IntExpr]) -> tuple[Symbol, ...]:
    return tuple(dict.fromkeys(s for found in expressions for s in free_symbols(found)))


def _chunk_sizes(program: HostProgram) -> Iterator[IntExpr]:
    """How many chunks there are, where they begin and how long they are."""
    for node in all_nodes(program.body):
        if isinstance(node, ForLoop):
            yield node.count
        elif isinstance(node, Chunk):
            yield node.start
            yield program.buffers[node.out].shape[node.cut_axis]


def _expressions(program: HostProgram) -> Iterator[IntExpr]:
    for buffer in program.buffers.values():
        yield from (*buffer.shape, *buffer.whole)
        axes = () if buffer.sharding is None else buffer.sharding.axes
        yield from (digit.extent for digits in axes for digit in digits)
    for demand in program.demands:
        yield from demand.extents
    for node in all_nodes(program.body):
        match node:
            case ForLoop(count=count):
                yield count
            case OnStream(stream=stream):
                yield stream
            case Record(_, instance) | WaitEvent(_, instance):
                yield instance
            case Chunk(start=start, pieces=pieces):
                yield from (start,) if pieces is None else (start, pieces)
            case Communicate(owner=owner) if owner is not None:
                yield owner
            case _:
                pass


def _candidates(demands: Sequence[Demand]) -> list[int]:
    """Large and odd ones first."""
    divisor = lcm(*(demand.divisor for demand in demands if isinstance(demand, Divides)))
    most = [demand.most for demand in demands if isinstance(demand, Covers)]
    return [_ODD, divisor * 37, *sorted(most, reverse=True), divisor, 1]


def _with_sizes(symbols: Sequence[Symbol], wanted: int) -> dict[str, int]:
    return {symbol.name: nominal_size(symbol, wanted) for symbol in symbols}


def _holds(demand: Demand, sizes: Mapping[str, int]) -> bool:
    values = [evaluate(extent, sizes) for extent in demand.extents]
    match demand:
        case Divides(divisor=divisor):
            return values[0] % divisor == 0
        case Covers(most=most):
            return values[0] <= most
        case Equals():
            return values[0] == values[1]
        case _:
            return values[0] >= 0
