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
    Node,
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
_OTHERS: Final = ((120, 24), (121, 25), (119, 23), (1100, 40), (5,), (1,), (0,))
"""What many numbers divide, what leaves a rest of one or all but one, more than is assumed first,
fewer than there are chunks, and none. Of each row the first is taken for which loops in loops have
not too many iterations."""
_MOST_STEPS: Final = 20_000
"""Nodes that loops in loops may issue: to follow the data of as many takes seconds."""


def assumed_sizes(program: HostProgram) -> Mapping[str, int]:
    """A value for each symbol that regions and loops name, coordinates of ranks at 0.

    The sizes are such as a call might have: if demands are on them, a value that meets these; and
    one of which loops in loops have not too many iterations. Indices of loops have values, too,
    which stand for nothing.
    """
    symbols = _symbols(_expressions(program))
    coordinates = dict.fromkeys((str(found.symbol) for found in program.coordinates), 0)
    wanted = _candidates(program.demands)
    found = [{**_with_sizes(symbols, each), **coordinates} for each in wanted]
    fitting = [sizes for sizes in found if meets_demands(program, sizes)] or found
    return next((sizes for sizes in fitting if _is_followed(program, sizes)), fitting[0])


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
        for apart in (0, 1):
            several = ({**base, **_numbered(sizes, size, apart)} for size in wanted)
            found = next((sizes for sizes in several if _is_followed(program, sizes)), None)
            if found is not None and found not in seen and meets_demands(program, found):
                seen.append(found)
                yield found


def _numbered(symbols: Sequence[Symbol], wanted: int, apart: int) -> dict[str, int]:
    """About that number for the first symbol, and `apart` more for each that follows."""
    return {s.name: nominal_size(s, wanted + apart * n) for n, s in enumerate(symbols)}


def _is_followed(program: HostProgram, sizes: Mapping[str, int]) -> bool:
    """Whether all iterations can be followed in a time that tests have."""
    return _steps(program.body, sizes) <= _MOST_STEPS


def _steps(body: Iterable[Node], sizes: Mapping[str, int]) -> int:
    """About how many nodes are issued: loops in the first or last iteration of another count for
    all of its iterations."""
    total = 0
    for node in body:
        match node:
            case ForLoop(index, count, inside):
                times = evaluate(count, sizes)
                ends = {0, max(times - 1, 0)}
                total += times * max(_steps(inside, {**sizes, index: k}) for k in ends)
            case OnStream(body=inside):
                total += _steps(inside, sizes)
            case _:
                total += 1
    return total


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
    return [_ODD, divisor * 37, *sorted(most, reverse=True), divisor * 11, divisor, 1]


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
