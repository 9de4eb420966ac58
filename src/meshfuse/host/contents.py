"""What ranks have in memory, and what of it is wrong: indices of which axes, terms of which sums.

Of a tensor that exists outside of loops it is known which global indices lie where. Of what an
iteration makes it is learned from what is written there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from meshfuse.expr import const, evaluate
from meshfuse.facts.digits import Digit, Digits, is_whole
from meshfuse.facts.holdings import held, rank_coordinates
from meshfuse.host.faults import Fault, FaultKind, node_text
from meshfuse.host.held import Held
from meshfuse.host.indices import ZERO, Indices, Twice, added, differ
from meshfuse.host.nodes import Chunk, ForLoop, HostProgram, Node, all_nodes
from meshfuse.host.pieces import Box, Pieces, Value
from meshfuse.ir.axes import TensorName


@final
@dataclass(slots=True, eq=False, repr=False)
class RankContents:
    """One rank's names, and the values of all symbols there."""

    rank: int
    values: Mapping[str, int] = field(default_factory=dict[str, int])
    held: dict[TensorName, Held] = field(default_factory=dict[TensorName, Held])


@final
class Contents:
    """What `ranks` of a program have, for some sizes, at some node of it."""

    def __init__(
        self, program: HostProgram, sizes: Mapping[str, int], ranks: Sequence[int]
    ) -> None:
        self.program = program
        loops = {node.index for node in all_nodes(program.body) if isinstance(node, ForLoop)}
        self.sizes = {name: size for name, size in sizes.items() if name not in loops}
        self.ranks = {rank: RankContents(rank) for rank in ranks}
        self.there: Mapping[str, int] = {}
        self._place: int | None = None
        self._node: Node | None = None
        self._faults: dict[tuple[FaultKind, TensorName], tuple[int | None, list[int], str]] = {}
        self._outside: dict[tuple[TensorName, int], tuple[Indices, ...]] = {}
        self.go_to(None, None, self.sizes)

    def go_to(self, place: int | None, node: Node | None, there: Mapping[str, int]) -> None:
        """On to a node; `there` has the values of all symbols but coordinates of ranks."""
        self._place, self._node = place, node
        if there is self.there:
            return
        self.there = there
        for rank, here in self.ranks.items():
            coordinates = {found.symbol: found.of(rank) for found in self.program.coordinates}
            here.values = {**there, **coordinates}

    # Faults.

    def tell(self, kind: FaultKind, here: RankContents, name: TensorName, why: str) -> None:
        """Each kind once for a name, with all ranks that find it."""
        if (kind, name) not in self._faults:
            inside = {n: k for n, k in self.there.items() if n not in self.sizes}
            what = "" if self._node is None else f"{node_text(self._node)}: "
            where = f", where {', '.join(f'{n} = {k}' for n, k in inside.items())}"
            text = f"{what}{why}{where if inside else ''}"
            self._faults[kind, name] = (self._place, [], text)
        ranks = self._faults[kind, name][1]
        if here.rank not in ranks:
            ranks.append(here.rank)

    def faults(self) -> Iterator[Fault]:
        """All that was told."""
        for (kind, name), (place, ranks, why) in self._faults.items():
            yield Fault(kind, place, tuple(ranks), name, why)

    # Names.

    def named(self, here: RankContents, name: TensorName) -> tuple[Indices, ...]:
        """Which indices of a tensor a rank has, as the tensor counts them: a chunk from 0 on."""
        is_outside = self.there is self.sizes
        key = (name, here.rank)
        if is_outside and key in self._outside:
            return self._outside[key]
        buffer = self.program.buffers[name]
        lengths = [evaluate(extent, here.values) for extent in buffer.shape]
        found = tuple(map(Indices.all_of, lengths))
        if buffer.sharding is not None and buffer.mesh is not None:
            place = rank_coordinates(buffer.mesh)[here.rank]
            found = tuple(
                Indices.all_of(size)
                if is_whole(digits)
                else Indices(size, held(_sized(digits, here.values), size, place))
                for digits, extent in zip(buffer.sharding.axes, buffer.extents, strict=True)
                for size in [evaluate(extent, here.values)]
            )
        if is_outside:
            self._outside[key] = found
        return found

    def is_here(self, here: RankContents, name: str) -> bool:
        """Whether a name is a tensor of which the rank has a part."""
        buffer = self.program.buffers.get(TensorName(name))
        return buffer is not None and buffer.is_on(here.rank)

    def make(self, here: RankContents, name: TensorName) -> Held:
        """New memory."""
        if self.there is self.sizes:
            memory = Pieces.placed(self.named(here, name))
        else:
            shape = self.program.buffers[name].shape
            memory = Pieces.learning([evaluate(extent, here.values) for extent in shape])
        here.held[name] = found = Held(memory, memory.whole)
        return found

    def cut(self, here: RankContents, node: Chunk) -> None:
        """A chunk, as far as there is something."""
        start = evaluate(node.start, here.values)
        length = evaluate(self.program.buffers[node.out].shape[node.cut_axis], here.values)
        count = None if node.pieces is None else evaluate(node.pieces, here.values)
        here.held[node.out] = here.held[node.src].cut(node.axis, start, length, count)

    # Uses.

    def read(
        self,
        here: RankContents,
        name: TensorName,
        kind: FaultKind = FaultKind.unwritten_read,
        *,
        for_sum: bool = False,
    ) -> Value:
        """What a name has. All of it must have been written, and be no part of a sum but where a
        rank's terms belong, or they are about to be added."""
        found = here.held[name]
        missing = found.unwritten()
        if missing is not None:
            places = _places_text(*missing)
            self.tell(kind, here, name, f"nothing has been written to {places} of {name}")
        value = found.value()
        if value.terms == ZERO and not for_sum:
            if found.has_terms_in_part():
                why = f"nothing has been added to a part of {name}"
                self.tell(FaultKind.terms_missing, here, name, why)
            value = Value(value.axes)
        sharding = self.program.buffers[name].sharding
        may_lack = for_sum or (sharding is not None and bool(sharding.partial))
        if value.terms and found.memory.is_placed and not may_lack:
            (terms, *_) = value.terms
            why = f"{name} is a sum over {terms} of {terms.extent} only"
            self.tell(FaultKind.terms_missing, here, name, why)
            value = Value(value.axes, None)
        return value

    def write(
        self, here: RankContents, name: TensorName, value: Value, *, adds: bool = False
    ) -> None:
        """Into what exists. Indices must be those that belong there."""
        held = here.held[name]
        given = held.in_memory(value)
        for axis, (wanted, indices) in enumerate(zip(held.wanted(), given.axes, strict=True)):
            if differ(wanted, indices):
                why = f"{name} is to have {wanted} along axis {axis}, and gets {indices}"
                self.tell(FaultKind.wrong_part, here, name, why)
        if adds:
            given = Value(given.axes, self.sum_of(here, name, [held.value(), given]))
        held.write(given)

    def check_lengths(self, here: RankContents, name: TensorName, value: Value) -> None:
        """What an operation makes of its operands must be as long as its result; but one place may
        stretch."""
        lengths = here.held[name].lengths
        for axis, (length, indices) in enumerate(zip(lengths, value.axes, strict=True)):
            if indices is not None and indices.extent > 1 and len(indices) != length:
                why = f"{name} has {length} places along axis {axis}, and gets {indices}"
                self.tell(FaultKind.wrong_part, here, name, why)

    def sum_of(
        self, here: RankContents, name: TensorName, values: Sequence[Value], *, once: bool = True
    ) -> tuple[Indices, ...] | None:
        """The terms of the sum that `name` becomes."""
        terms = added([value.terms for value in values], once=once)
        if isinstance(terms, Twice):
            why = f"terms {terms.indices} of {terms.indices.extent} are added to {name} again"
            self.tell(FaultKind.terms_twice, here, name, why)
            return None
        return terms


def _sized(digits: Digits, values: Mapping[str, int]) -> Digits:
    return tuple(Digit(const(evaluate(d.extent, values)), d.owner) for d in digits)


def _places_text(part: Box, whole: Box) -> str:
    """`places 4 to 7 of axis 0`, of the axes that are not there as a whole."""
    told = [
        f"places {low - first} to {high - first - 1} of axis {axis}"
        for axis, ((low, high), (first, end)) in enumerate(zip(part, whole, strict=True))
        if (low, high) != (first, end)
    ]
    return ", ".join(told) or "any place"
