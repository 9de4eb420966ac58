"""Whether the right data comes to the right place: a program run without data, by all ranks.

In the order of its text, for all iterations of its loops. Of each piece of memory is followed which
global indices it has (contents.py); operations say which axes of what they read and make are one
(joints.py). So it shows

- what is read, or is a result, and was not written in all its parts,
- parts that come to the place of others, or meet others: what is one axis to an operation must have
  the same indices everywhere,
- sums over loops and ranks that lack terms, or have some twice.

It does not show what is wrong along an axis that an operation cuts, joins or picks from, or in a
kernel without a body: nothing is known of it then, and nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import final

from typing_extensions import assert_never

from meshfuse.base.errors import InvariantError
from meshfuse.expr import IntExpr, const_value, evaluate
from meshfuse.host.contents import Contents, RankContents
from meshfuse.host.faults import Fault, FaultKind
from meshfuse.host.indices import ZERO, Indices, Terms, differ, led_to, reduced, reshaped
from meshfuse.host.joints import UNKNOWN, Joint, Joints, joints_of
from meshfuse.host.kernel_joints import joints_of_kernel
from meshfuse.host.nodes import (
    Allocate,
    Chunk,
    Clear,
    Collective,
    Communicate,
    Evaluate,
    ForLoop,
    Free,
    HostProgram,
    KernelName,
    Launch,
    Node,
    OnStream,
    Pick,
    Record,
    View,
    Wait,
    WaitEvent,
)
from meshfuse.host.pieces import Value
from meshfuse.host.unroll import iterations
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import Expr, Reshape
from meshfuse.ir.rewrite import read_names
from meshfuse.kernel.nodes import BufferName

_COMBINING = (Collective.all_reduce, Collective.reduce_scatter)


def check_data_flow(
    program: HostProgram, sizes: Mapping[str, int], ranks: Sequence[int]
) -> tuple[Fault, ...]:
    """What is wrong with a program that is sound otherwise, for some sizes. What `ranks` get from
    others is not known."""
    return tuple(_Flow(program, sizes, ranks).run())


@final
class _Flow:
    """All that `ranks` do, in the order of the text, to what they have."""

    def __init__(
        self, program: HostProgram, sizes: Mapping[str, int], ranks: Sequence[int]
    ) -> None:
        self._program = program
        self._contents = Contents(program, sizes, ranks)
        self._joints: dict[int, Joints] = {}
        self._kernel_joints: dict[KernelName, Mapping[BufferName, Joints]] = {}

    def run(self) -> Iterator[Fault]:
        work, program = self._contents, self._program
        for here in work.ranks.values():
            for name in program.inputs:
                if work.is_here(here, name):
                    work.make(here, TensorName(name))
                    work.write(here, TensorName(name), Value((None,) * self._rank_of(name)))
        for place, (node, there) in enumerate(iterations(program.body, work.sizes)):
            work.go_to(place, node, there)
            self._do(node)
        work.go_to(None, None, work.sizes)
        for here in work.ranks.values():
            for output in program.outputs:
                if output.alias is None and output.buffer in here.held:
                    work.read(here, output.buffer, FaultKind.output_unwritten)
        return work.faults()

    def _rank_of(self, name: str) -> int:
        return len(self._program.buffers[TensorName(name)].shape)

    # Nodes.

    def _do(self, node: Node) -> None:
        match node:
            case Wait() | Record() | WaitEvent():
                pass
            case ForLoop() | OnStream():
                raise InvariantError("iterations have no loops in them")
            case Communicate():
                self._communicate(node)
            case _:
                for here in self._contents.ranks.values():
                    self._do_alone(node, here)

    def _do_alone(
        self,
        node: Allocate | Free | Launch | Evaluate | View | Pick | Chunk | Clear,
        here: RankContents,
    ) -> None:
        """What a rank does by itself, with names that it has."""
        work = self._contents
        match node:
            case Allocate(buffer):
                if work.is_here(here, buffer):
                    work.make(here, buffer)
            case Free(buffers):
                for name in buffers:
                    here.held.pop(name, None)
            case Chunk(_, src):
                if src in here.held:
                    work.cut(here, node)
            case Clear(buffer):
                if buffer in here.held:
                    zeros = Value((None,) * self._rank_of(buffer), ZERO)
                    work.write(here, buffer, zeros)
            case View(out, src) | Pick(out, src):
                if src in here.held and work.is_here(here, out):
                    self._take_part(out, src, here)
            case Launch():
                if all(name in here.held for name in node.buffers):
                    self._launch(node, here)
            case Evaluate():
                self._evaluate(node, here)
            case _:
                assert_never(node)

    def _take_part(self, out: TensorName, src: TensorName, here: RankContents) -> None:
        value = self._contents.read(here, src)
        axes = self._led(out, src, here, {here.rank: value})
        if out not in here.held:
            self._contents.make(here, out)
        self._contents.write(here, out, Value(axes, value.terms))

    # Operations.

    def _launch(self, node: Launch, here: RankContents) -> None:
        kernel = self._program.kernels[node.kernel]
        joints = self._kernel_joints.get(node.kernel)
        if joints is None:
            joints = self._kernel_joints[node.kernel] = joints_of_kernel(kernel)
        pairs = list(zip(node.buffers, kernel.buffers, strict=True))
        read = {TensorName(buffer.name): name for name, buffer in pairs if not buffer.written}
        written = {buffer.name: name for name, buffer in pairs if buffer.written}
        added_to = {
            (before, after)
            for before in read.values()
            for after in written.values()
            if here.held[before].is_where(here.held[after])
        }
        sums = {before for before, _ in added_to}
        given = {k: self._contents.read(here, v, for_sum=v in sums) for k, v in read.items()}
        for buffer, name in written.items():
            found = joints.get(buffer, UNKNOWN)
            operands = {k: given[k] for k in found.behind if (read[k], name) not in added_to}
            for joint in found.met:
                for k, axis in joint.read if joint.is_single else ():
                    if k in operands and not self._is_told_apart(read[k], name, axis, here):
                        operands[k] = operands[k].without(axis)
            value = self._result(found, operands, TensorName(buffer), name, here)
            adds = any(after == name for _, after in added_to)
            self._contents.write(here, name, value, adds=adds)

    def _is_told_apart(
        self, src: TensorName, out: TensorName, axis: int, here: RankContents
    ) -> bool:
        """Whether an axis of one place is the one that stands there in the result, and not another
        of one place, from which a kernel does not tell it: but by the extents of both."""
        source, result = here.held[src], here.held[out]
        single = [k for k, length in enumerate(source.lengths) if length == 1]
        if axis not in single or len(single) == 1:
            return axis in single  # a rank may have no place of it
        given, made = (
            [evaluate(extent, here.values) for extent in self._extents(n)] for n in (src, out)
        )
        have = {k: source.extent(k) for k in single}
        return _is_only(axis, {k: given[k] for k in single}, made[axis]) or _is_only(
            axis, have, result.extent(axis)
        )

    def _evaluate(self, node: Evaluate, here: RankContents) -> None:
        work = self._contents
        for expr in node.body:
            read = [TensorName(n) for n in read_names(expr) if n in self._program.buffers]
            outs = [TensorName(n) for n in expr.outs if work.is_here(here, n)]
            if not all(name in here.held for name in read):
                continue
            is_sum = node.sum_over is not None
            values = {name: work.read(here, name, for_sum=is_sum) for name in read}
            joints = self._joints_of(expr)
            for out in outs:
                value = self._result(joints, values, out, out, here)
                if isinstance(expr, Reshape):
                    value = self._reshaped(expr, values[expr.src], here)
                if out != node.into:
                    work.make(here, out)
                work.check_lengths(here, out, value)
                work.write(here, out, value, adds=out == node.into and node.adds(work.there))

    def _reshaped(self, expr: Reshape, value: Value, here: RankContents) -> Value:
        before = here.held[expr.src].lengths
        after = [evaluate(e, here.values) for e in self._program.buffers[expr.out].shape]
        return Value(reshaped(value.axes, before, after), value.terms)

    def _joints_of(self, expr: Expr) -> Joints:
        """The same on all ranks and in all iterations."""
        if id(expr) not in self._joints:
            self._joints[id(expr)] = joints_of(expr, self._extents)
        return self._joints[id(expr)]

    def _extents(self, name: str) -> Sequence[IntExpr]:
        buffer = self._program.buffers.get(TensorName(name))
        return () if buffer is None else buffer.extents

    def _result(
        self,
        joints: Joints,
        values: Mapping[TensorName, Value],
        out: TensorName,
        name: TensorName,
        here: RankContents,
    ) -> Value:
        """What an operation makes of these values. `out` is the result to it, and `name` here."""
        axes: list[Indices | None] = [None] * self._rank_of(name)
        over: list[Indices | None] = []
        for joint in joints.met:
            indices = self._met(joint, values, name, here)
            places = [axis for made, axis in joint.made if made == out]
            for axis in places:
                axes[axis] = indices
            over += [] if places else [indices]
        if not joints.sums:
            return Value(tuple(axes), None)
        return Value(tuple(axes), reduced([value.terms for value in values.values()], over))

    def _met(
        self,
        joint: Joint,
        values: Mapping[TensorName, Value],
        name: TensorName,
        here: RankContents,
    ) -> Indices | None:
        """The indices of what is one axis. Those of extent 1 stretch, also over an axis that may
        have more places and now has one, of which a rank may have none."""
        stretching = {each for each in joint.read if self._stretches(*each)}
        read = [each for each in joint.read if each not in stretching] or joint.read
        found = [(o, axis, values[o].axes[axis]) for o, axis in read if o in values]
        known = [(o, axis, i) for o, axis, i in found if i is not None]
        most = max((i.extent for _, _, i in known), default=1)
        if most == 1 and len(known) < len(read):
            return None
        long = [(o, axis, i) for o, axis, i in known if i.extent == most]
        for other, axis, indices in long[1:]:
            if differ(indices, long[0][2]):
                why = (
                    f"{other} has {indices} along axis {axis} where {long[0][0]} has {long[0][2]} "
                    f"along axis {long[0][1]}"
                )
                self._contents.tell(FaultKind.wrong_part, here, name, why)
        return long[0][2] if long else None

    def _stretches(self, name: str, axis: int) -> bool:
        """Whether an axis has one place for all sizes."""
        extents = self._extents(name)
        return bool(extents) and const_value(extents[axis]) == 1

    # Communications.

    def _communicate(self, node: Communicate) -> None:
        work = self._contents
        holders = [here for here in work.ranks.values() if node.src in here.held]
        values = {here.rank: work.read(here, node.src) for here in holders}
        for here in [h for h in work.ranks.values() if work.is_here(h, node.out)]:
            if node.in_place:
                here.held[node.out] = here.held[node.src]
            if not node.is_transfer:
                if node.out in here.held:
                    work.write(here, node.out, self._collected(node, here, values))
                continue
            sender = self._sender(node, here)
            if sender == here.rank:
                here.held[node.out] = here.held[node.src]
                continue
            unknown = Value((None,) * self._rank_of(node.out), None)
            if node.into is not None and node.arrives_there(work.there):
                here.held[node.out] = here.held[node.into]
            else:
                work.make(here, node.out)
            work.write(here, node.out, values.get(sender, unknown))

    def _sender(self, node: Communicate, here: RankContents) -> int:
        """Of a fetch or a delivery: whose part the rank gets."""
        assert node.mesh_axis is not None and node.owner is not None
        team = node.mesh.team(here.rank, node.mesh_axis)
        if node.collective is Collective.fetch:
            return team[evaluate(node.owner, here.values)]
        place = team.index(here.rank)
        values = self._contents.there
        owners = [node.owner_at(k, {**here.values, **values}) for k in range(len(team))]
        return team[owners.index(place)]

    def _collected(
        self, node: Communicate, here: RankContents, values: Mapping[int, Value]
    ) -> Value:
        """What a rank gets of what its team has."""
        if node.mesh_axis is None:
            team: Sequence[int] = tuple(self._contents.ranks)
        else:
            team = node.mesh.team(here.rank, node.mesh_axis)
        theirs = {rank: values[rank] for rank in team if rank in values}
        if node.mesh_axis is not None and len(theirs) < len(team):
            return Value((None,) * self._rank_of(node.out), None)
        axes = self._led(node.out, node.src, here, theirs)
        terms: Terms | None
        if node.collective in _COMBINING:
            terms = self._contents.sum_of(
                here, node.out, list(theirs.values()), once=node.function == "sum"
            )
        else:
            sums = [value.terms for value in theirs.values()]
            terms = sums[0] if sums and all(found == sums[0] for found in sums) else None
        return Value(axes, terms)

    def _led(
        self,
        out: TensorName,
        src: TensorName,
        here: RankContents,
        values: Mapping[int, Value],
    ) -> tuple[Indices | None, ...]:
        """The indices that `out` gets of `src`, of which ranks have these values: both count their
        own from 0 alike."""
        work, axes = self._contents, list[Indices | None]()
        names = {rank: work.named(work.ranks[rank], src) for rank in values}
        for axis, wanted in enumerate(work.named(here, out)):
            pairs = [(names[rank][axis], value.axes[axis]) for rank, value in values.items()]
            known = [(name, indices) for name, indices in pairs if indices is not None]
            found = led_to(known, wanted) if len(known) == len(pairs) else None
            if isinstance(found, str):
                why = f"ranks have different parts of axis {axis} of {src}: {found}"
                work.tell(FaultKind.wrong_part, here, out, why)
                found = None
            axes.append(found)
        return tuple(axes)


def _is_only(axis: int, extents: Mapping[int, int | None], wanted: int | None) -> bool:
    """Whether of some axes, whose extents are known, one alone has the extent that is wanted."""
    found = list(extents.values())
    is_known = wanted is not None and None not in found
    return is_known and extents[axis] == wanted and found.count(wanted) == 1
