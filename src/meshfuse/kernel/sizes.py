"""The size symbols of a kernel: which it needs, and their plain form.

Lowering simplifies with what is known of a size or a loop variable. What is left after it does not
depend on that knowledge, and the text of a kernel does not show it, so a finished kernel has plain
symbols.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from meshfuse.expr import IntExpr, IntLike, free_symbols, substitute, symbol
from meshfuse.kernel.nodes import For, IndexName, Kernel, Statement

_Node = TypeVar("_Node")


def declare_sizes(kernel: Kernel) -> Kernel:
    """`kernel` with plain symbols and `sizes` filled: extents by first appearance, then strides."""
    kernel = map_expressions(kernel, plain)
    inside = {axis.name for axis in (*kernel.grid, *kernel.tiles)} | set(
        loop_variables(kernel.body)
    )
    shapes = (extent for buffer in kernel.buffers for extent in buffer.shape)
    elsewhere = expressions_of((kernel.grid, kernel.body))
    extents = dict.fromkeys(_symbol_names((*shapes, *elsewhere)))
    strides = dict.fromkeys(_symbol_names(s for b in kernel.buffers for s in b.strides))
    names = dict.fromkeys((*extents, *strides))
    return dataclasses.replace(
        kernel, sizes=tuple(IndexName(name) for name in names if name not in inside)
    )


def plain(e: IntExpr) -> IntExpr:
    """`e` in symbols of which no more is known than that they are no less than 0."""
    symbols: dict[str | IntExpr, IntLike] = {
        s: symbol(s.name) for s in free_symbols(e) if s.low is not None and s.low >= 0
    }
    return substitute(e, symbols)


def loop_variables(body: Iterable[Statement]) -> Iterator[IndexName]:
    """The variables of all loops in a body."""
    for statement in body:
        if isinstance(statement, For):
            yield statement.variable
            yield from loop_variables(statement.body)


def expressions_of(node: object) -> Iterator[IntExpr]:
    """The integer expressions in a tree of kernel nodes, in the order of its fields."""
    if isinstance(node, IntExpr):
        yield node
    elif isinstance(node, tuple):
        for item in node:  # type: ignore[reportUnknownVariableType]  # a tuple field of any node
            yield from expressions_of(item)  # type: ignore[reportUnknownArgumentType]  # likewise
    elif dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            yield from expressions_of(getattr(node, field.name))


def map_expressions(node: _Node, function: Callable[[IntExpr], IntExpr]) -> _Node:
    """The same tree of kernel nodes with `function` applied to its integer expressions."""
    return _mapped(node, function)


def _mapped(node: Any, function: Callable[[IntExpr], IntExpr]) -> Any:
    if isinstance(node, IntExpr):
        return function(node)
    if isinstance(node, tuple):
        return tuple(_mapped(item, function) for item in node)  # type: ignore[reportUnknownVariableType]  # a tuple field of any node
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        fields = {
            f.name: _mapped(getattr(node, f.name), function) for f in dataclasses.fields(node)
        }
        return type(node)(**fields)
    return node


def _symbol_names(expressions: Iterable[IntExpr]) -> Iterator[str]:
    for e in expressions:
        yield from (found.name for found in free_symbols(e))
