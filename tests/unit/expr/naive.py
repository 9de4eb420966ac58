"""Expressions that never simplify: the oracle for the ones that do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from hypothesis import strategies as st

from meshfuse.expr import (
    IntExpr,
    Symbol,
    add,
    ceildiv,
    const,
    floordiv,
    maximum,
    minimum,
    mod,
    mul,
    symbol,
)


@dataclass(frozen=True)
class Tree:
    """An operator over trees, or a leaf: a number or the name of a symbol."""

    operator: str
    operands: tuple[Tree | int | str, ...]


Naive = Tree | int | str


def evaluate_tree(tree: Naive, env: Mapping[str, int]) -> int:
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return env[tree]
    a, b = (evaluate_tree(operand, env) for operand in tree.operands)
    match tree.operator:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "//":
            return a // b
        case "ceildiv":
            return -(-a // b)
        case "%":
            return a % b
        case "min":
            return min(a, b)
        case "max":
            return max(a, b)
    raise AssertionError(tree.operator)


BUILDERS = {
    "+": add,
    "-": lambda a, b: add(a, mul(-1, b)),
    "*": mul,
    "//": floordiv,
    "ceildiv": ceildiv,
    "%": mod,
    "min": minimum,
    "max": maximum,
}


def build(tree: Naive, symbols: Mapping[str, Symbol]) -> IntExpr:
    if isinstance(tree, int):
        return const(tree)
    if isinstance(tree, str):
        return symbols[tree]
    return BUILDERS[tree.operator](*(build(operand, symbols) for operand in tree.operands))


SYMBOLS = {
    s.name: s
    for s in (
        symbol("x", 0, 9),
        symbol("y", -3, 4),
        symbol("s", 1, 5),
        symbol("m", 0, 12, multiple=4),
    )
}

UNBOUNDED = {
    s.name: s
    for s in (
        symbol("x"),
        symbol("y", None, None),
        symbol("s", 1),
        symbol("m", multiple=4),
    )
}

VALUES = {
    name: tuple(range(s.low or 0, (s.high or 0) + 1, s.multiple)) for name, s in SYMBOLS.items()
}


def assignments(names: list[str]) -> list[dict[str, int]]:
    """Every assignment within the ranges of SYMBOLS."""
    return [
        dict(zip(names, values, strict=True)) for values in product(*(VALUES[n] for n in names))
    ]


def names_in(tree: Naive) -> list[str]:
    if isinstance(tree, int):
        return []
    if isinstance(tree, str):
        return [tree]
    return sorted({name for operand in tree.operands for name in names_in(operand)})


def _extend(operands: st.SearchStrategy[Naive]) -> st.SearchStrategy[Naive]:
    any_two = st.builds(
        lambda operator, a, b: Tree(operator, (a, b)),
        st.sampled_from(sorted(BUILDERS)),
        operands,
        operands,
    )
    divided = st.builds(
        lambda operator, a, b: Tree(operator, (a, b)),
        st.sampled_from(["//", "%"]),
        operands,
        st.sampled_from([2, 3, 4, 6, 8, -2, "s"]),
    )
    scaled = st.builds(
        lambda k, a, b: Tree("+", (Tree("*", (k, a)), b)),
        st.sampled_from([-4, 2, 3, 4, 8, "s"]),
        operands,
        operands,
    )
    split_and_merged = st.builds(_split_and_merge, operands, st.sampled_from([2, 4, "s"]))
    return any_two | divided | scaled | split_and_merged


def _split_and_merge(a: Naive, k: Naive) -> Naive:
    return Tree("+", (Tree("*", (Tree("//", (a, k)), k)), Tree("%", (a, k))))


trees: st.SearchStrategy[Naive] = st.recursive(
    st.integers(-9, 9) | st.sampled_from(sorted(SYMBOLS)), _extend, max_leaves=8
)
