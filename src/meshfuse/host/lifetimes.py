"""Where posts, waits and frees stand: a post as soon as its source is ready, a wait at the first
use, a free after the last one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from meshfuse.host.nodes import (
    Communicate,
    Evaluate,
    ForLoop,
    Free,
    KernelName,
    Node,
    Wait,
    all_nodes,
)
from meshfuse.host.uses import names_defined, names_needed, names_written, views_made
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.kernel.nodes import Kernel


def with_early_posts(body: Sequence[Node], kernels: Mapping[KernelName, Kernel]) -> list[Node]:
    """Each collective, with what makes its buffer before it, right behind what its source comes
    from. In loops as outside: nothing goes from one to the other.

    Work that stood between the two runs while the collective is under way. Collectives keep their
    order, which all ranks share, and so does all other work:

        T1 = launch; T2 = launch; T3 = communicate(T1)  ->  T1 = launch; T3 = communicate(T1);
                                                            T2 = launch
    """
    placed: list[Node] = []
    for node in body:
        if isinstance(node, ForLoop):
            placed.append(replace(node, body=tuple(with_early_posts(node.body, kernels))))
            continue
        if not isinstance(node, Communicate):
            placed.append(node)
            continue
        moved: list[Node] = [node] if node.is_transfer else [placed.pop(), node]
        place = len(placed)
        while place > 0 and not _must_precede(placed[place - 1], node, kernels):
            place -= 1
        placed[place:place] = moved
    return placed


def _must_precede(
    earlier: Node, collective: Communicate, kernels: Mapping[KernelName, Kernel]
) -> bool:
    is_made = collective.src in names_written(earlier, kernels)
    return is_made or any(isinstance(node, Communicate) for node in all_nodes([earlier]))


def with_waits(body: Sequence[Node]) -> Iterator[Node]:
    """Each collective's Wait, before the first node that reads its result or writes its source, be
    that by another name: a view of an input is sent, and the input updated in place.

    What nothing uses is awaited at the end, of the iteration if it is in a loop.
    """
    pending: dict[TensorName, Communicate] = {}
    roots: dict[TensorName, TensorName] = {}
    for node in body:
        into = node.into if isinstance(node, Evaluate) else None
        written = None if into is None else roots.get(into, into)
        for out, posted in tuple(pending.items()):
            if out in names_needed(node) or roots.get(posted.src, posted.src) == written:
                yield Wait(pending.pop(out).number)
        for view, source in views_made(node):
            roots[view] = roots.get(source, source)
        if isinstance(node, Communicate):
            pending[node.out] = node
        if isinstance(node, ForLoop):
            node = replace(node, body=tuple(with_waits(node.body)))
        yield node
    yield from (Wait(posted.number) for posted in pending.values())


def with_frees(body: Sequence[Node], kept: Collection[TensorName | ScalarName]) -> Iterator[Node]:
    """Buffers are freed after their last use; a collective uses its buffers until its Wait. What
    the body of a loop makes is freed there.

    Inputs, outputs and scalars stand in `kept`.
    """
    posted = {node.number: node for node in body if isinstance(node, Communicate)}

    def touched(node: Node) -> tuple[TensorName | ScalarName, ...]:
        if isinstance(node, Wait):
            return touched(posted[node.number])
        return (*names_needed(node), *names_defined(node))

    last = {name: place for place, node in enumerate(body) for name in touched(node)}
    for place, node in enumerate(body):
        yield _with_frees_inside(node) if isinstance(node, ForLoop) else node
        names = dict.fromkeys(touched(node))
        dead = tuple(TensorName(n) for n in names if last[n] == place and n not in kept)
        if dead:
            yield Free(dead)


def _with_frees_inside(loop: ForLoop) -> ForLoop:
    made = {name for node in loop.body for name in names_defined(node)}
    outside = [name for node in loop.body for name in names_needed(node) if name not in made]
    return replace(loop, body=tuple(with_frees(loop.body, outside)))
