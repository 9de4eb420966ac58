"""What every host program obeys: names exist when used, posts are awaited, frees come last."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from meshfuse.base.errors import InvariantError
from meshfuse.host.nodes import (
    Allocate,
    Communicate,
    Evaluate,
    ForLoop,
    Free,
    HostProgram,
    Launch,
    Node,
    Wait,
)
from meshfuse.host.printer import print_node
from meshfuse.host.uses import names_defined, names_needed
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.kernel.nodes import IndexName


def verify_host_program(program: HostProgram) -> None:
    """Raise InvariantError, quoting the node, at the first thing that is wrong."""
    alive: set[TensorName | ScalarName] = set(program.inputs)
    alive.update(() if program.random is None else program.random.outs)
    _verify_body(program, program.body, alive, set(), ())
    for output in program.outputs:
        if output.buffer not in alive and output.alias is None:
            raise InvariantError(f"output {output.buffer} does not exist at the end")


def _verify_body(
    program: HostProgram,
    body: Sequence[Node],
    alive: set[TensorName | ScalarName],
    numbers: set[int],
    indices: tuple[IndexName, ...],
) -> None:
    """Check nodes in a row; `alive` becomes what exists behind them, `numbers` the posted ones.

    `indices` are those of the loops around them.
    """
    pending: dict[int, Communicate] = {}
    for node in body:
        _check_names(program, node, alive)
        if isinstance(node, ForLoop):
            inside = set(alive)
            _verify_body(program, node.body, inside, numbers, (*indices, node.index))
            _check_iteration(node, alive, inside)
        _check_communication(node, pending, numbers)
        if isinstance(node, Evaluate):
            _check_sum(node, indices)
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


def _check_sum(node: Evaluate, indices: tuple[IndexName, ...]) -> None:
    if node.sum_over is not None and (node.into is None or node.sum_over not in indices):
        raise InvariantError(
            f"{print_node(node)}: sum_over={node.sum_over} wants a buffer to add to, and that loop "
            "around it"
        )


def _check_iteration(
    loop: ForLoop, before: set[TensorName | ScalarName], after: set[TensorName | ScalarName]
) -> None:
    """An iteration leaves what it found: the next one begins with the same."""
    for name in sorted(before ^ after):
        verb = "makes and does not free" if name in after else "frees what it did not make,"
        raise InvariantError(f"loop {loop.index}: an iteration {verb} {name}")


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
    if isinstance(node, Communicate) and node.number in numbers:
        raise InvariantError(f"{print_node(node)}: number {node.number} stands twice")
    if isinstance(node, Wait) and node.number not in pending:
        raise InvariantError(f"{print_node(node)}: no collective of this number is under way")
    if isinstance(node, Wait | Allocate):
        return
    for posted in pending.values():
        busy = {posted.out}
        if isinstance(node, Free):
            busy.add(posted.src)
        if isinstance(node, Evaluate) and node.into == posted.src:
            busy.add(posted.src)
        for name in names_needed(node):
            if name in busy:
                raise InvariantError(
                    f"{print_node(node)}: {name} is under way in number {posted.number}"
                )
