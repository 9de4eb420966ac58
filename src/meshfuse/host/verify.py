"""What every host program obeys: names exist when used, posts are awaited, frees come last."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from meshfuse.base.errors import InvariantError
from meshfuse.host.nodes import (
    Allocate,
    Collective,
    Communicate,
    Evaluate,
    ForLoop,
    Free,
    HostProgram,
    Launch,
    Node,
    OnStream,
    Record,
    Wait,
    WaitEvent,
    all_nodes,
)
from meshfuse.host.printer import print_node
from meshfuse.host.uses import names_defined, names_needed
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.kernel.nodes import IndexName


def verify_host_program(program: HostProgram) -> None:
    """Raise InvariantError, quoting the node, at the first thing that is wrong."""
    alive: set[TensorName | ScalarName] = set(program.inputs)
    alive.update(() if program.random is None else program.random.outs)
    _verify_body(program, program.body, alive, set())
    _check_events(program.body)
    _check_sums(program.body, ())
    for output in program.outputs:
        if output.buffer not in alive and output.alias is None:
            raise InvariantError(f"output {output.buffer} does not exist at the end")


def _verify_body(
    program: HostProgram,
    body: Sequence[Node],
    alive: set[TensorName | ScalarName],
    numbers: set[int],
) -> None:
    """Check nodes in a row; `alive` becomes what exists behind them, `numbers` the posted ones."""
    pending: dict[int, Communicate] = {}
    for node in body:
        _check_names(program, node, alive)
        if isinstance(node, ForLoop | OnStream):
            inside = set(alive)
            _verify_body(program, node.body, inside, numbers)
            _check_iteration(node, alive, inside)
        _check_communication(node, pending, numbers)
        alive.update(names_defined(node))
        if isinstance(node, Free):
            alive.difference_update(node.buffers)
        if isinstance(node, Communicate):
            pending[node.number] = node
            numbers.add(node.number)
        if isinstance(node, Wait):
            del pending[node.number]
    if pending:
        raise InvariantError(f"never awaited: {print_node(next(iter(pending.values())))}")


def _check_events(body: Sequence[Node]) -> None:
    """Each event is recorded in one place; what is waited for is recorded somewhere. No stream is
    switched to from another than the caller's."""
    recorded: set[int] = set()
    for node in all_nodes(body):
        inside = all_nodes(node.body) if isinstance(node, OnStream) else ()
        if any(isinstance(found, OnStream) for found in inside):
            raise InvariantError(f"{print_node(node)}: there is another stream in it")
        if isinstance(node, Record):
            if node.event in recorded:
                raise InvariantError(f"{print_node(node)}: event {node.event} stands twice")
            recorded.add(node.event)
    for node in all_nodes(body):
        if isinstance(node, WaitEvent) and node.event not in recorded:
            raise InvariantError(f"{print_node(node)}: nothing records this event")


def _check_sums(body: Sequence[Node], indices: tuple[IndexName, ...]) -> None:
    """What is added to is a buffer, over a loop among those around it, which have `indices`."""
    for node in body:
        match node:
            case ForLoop(index, _, inside):
                _check_sums(inside, (*indices, index))
            case OnStream(body=inside):
                _check_sums(inside, indices)
            case Evaluate(into, _, sum_over) if sum_over is not None:
                if into is None or sum_over not in indices:
                    raise InvariantError(f"{print_node(node)}: no such loop, or nothing to add to")
            case _:
                pass


def _check_iteration(
    node: ForLoop | OnStream,
    before: set[TensorName | ScalarName],
    after: set[TensorName | ScalarName],
) -> None:
    """An iteration leaves what it found: the next one begins with the same. So does a stream."""
    is_loop = isinstance(node, ForLoop)
    subject = f"loop {node.index}: an iteration" if is_loop else f"on_stream({node.stream})"
    for name in sorted(before ^ after):
        verb = "makes and does not free" if name in after else "frees what it did not make,"
        raise InvariantError(f"{subject} {verb} {name}")


def _check_names(
    program: HostProgram, node: Node, alive: Collection[TensorName | ScalarName]
) -> None:
    text = print_node(node)
    for name in names_needed(node):
        if name not in alive:
            raise InvariantError(f"{text}: {name} does not exist here")
    for name in names_defined(node):
        if name in alive and name in program.buffers:
            raise InvariantError(f"{text}: {name} exists already")
        if name not in program.buffers and name not in program.scalars:
            raise InvariantError(f"{text}: {name} is neither a buffer nor a scalar")
    if isinstance(node, Free) and not set(program.inputs).isdisjoint(node.buffers):
        raise InvariantError(f"{text}: an input belongs to the caller")
    if isinstance(node, Launch) and node.kernel not in program.kernels:
        raise InvariantError(f"{text}: there is no such kernel")


def _check_communication(
    node: Node, pending: dict[int, Communicate], numbers: Collection[int]
) -> None:
    """Numbers are used once, and buffers under way are left alone until the Wait."""
    if isinstance(node, Communicate):
        if node.number in numbers:
            raise InvariantError(f"{print_node(node)}: number {node.number} stands twice")
        if node.in_place and node.collective is not Collective.all_reduce:
            raise InvariantError(f"{print_node(node)}: only an all-reduce runs in place")
    if isinstance(node, Wait) and node.number not in pending:
        raise InvariantError(f"{print_node(node)}: no collective of this number is under way")
    if isinstance(node, Wait | Allocate):
        return
    for posted in pending.values():
        busy = {posted.out}
        if isinstance(node, Free) or posted.in_place:
            busy.add(posted.src)
        if isinstance(node, Evaluate) and node.into == posted.src:
            busy.add(posted.src)
        for name in names_needed(node):
            if name in busy:
                raise InvariantError(
                    f"{print_node(node)}: {name} is under way in number {posted.number}"
                )
