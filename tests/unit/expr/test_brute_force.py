"""Random expressions agree with an oracle that never simplifies, on every assignment in range."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping

import pytest
from hypothesis import given, settings

from meshfuse.expr import (
    IntExpr,
    Symbol,
    evaluate,
    free_symbols,
    known_equal,
    known_less,
    known_less_equal,
    parse,
    render,
    substitute,
)

from .naive import SYMBOLS, UNBOUNDED, Naive, assignments, build, evaluate_tree, names_in, trees

EXAMPLES = 300


def values_of(tree: Naive) -> list[tuple[dict[str, int], int]]:
    """Each assignment for which the tree has a value, with that value."""
    result: list[tuple[dict[str, int], int]] = []
    for env in assignments(names_in(tree)):
        try:
            result.append((env, evaluate_tree(tree, env)))
        except ZeroDivisionError:
            continue
    return result


def build_or_none(tree: Naive, symbols: Mapping[str, Symbol]) -> IntExpr | None:
    try:
        return build(tree, symbols)
    except ZeroDivisionError:
        assert values_of(tree) == [], "only a division by constant zero may refuse to build"
        return None


@pytest.mark.parametrize("symbols", [SYMBOLS, UNBOUNDED], ids=["bounded", "unbounded"])
def test_simplification_keeps_every_value_and_its_facts(symbols: dict[str, Symbol]) -> None:
    @settings(max_examples=EXAMPLES, deadline=None)
    @given(trees)
    def check(tree: Naive) -> None:
        e = build_or_none(tree, symbols)
        if e is None:
            return
        for env, value in values_of(tree):
            assert evaluate(e, env) == value, (tree, e, env)
            assert e.low is None or e.low <= value, (tree, e, env)
            assert e.high is None or value <= e.high, (tree, e, env)
            assert value == 0 if e.divisor == 0 else value % e.divisor == 0, (tree, e, env)

    check()


@pytest.mark.parametrize("symbols", [SYMBOLS, UNBOUNDED], ids=["bounded", "unbounded"])
def test_text_and_copies_lead_back_to_the_same_node(symbols: dict[str, Symbol]) -> None:
    @settings(max_examples=EXAMPLES, deadline=None)
    @given(trees)
    def check(tree: Naive) -> None:
        e = build_or_none(tree, symbols)
        if e is None:
            return
        assert parse(render(e), symbols) is e, (tree, e)
        assert substitute(e, {s.name: s for s in free_symbols(e)}) is e, (tree, e)
        assert pickle.loads(pickle.dumps(e)) is e
        assert copy.deepcopy(e) is e

    check()


@pytest.mark.parametrize("symbols", [SYMBOLS, UNBOUNDED], ids=["bounded", "unbounded"])
def test_what_is_known_holds_everywhere(symbols: dict[str, Symbol]) -> None:
    @settings(max_examples=EXAMPLES, deadline=None)
    @given(trees, trees)
    def check(left: Naive, right: Naive) -> None:
        a, b = build_or_none(left, symbols), build_or_none(right, symbols)
        if a is None or b is None:
            return
        less, less_equal, equal = known_less(a, b), known_less_equal(a, b), known_equal(a, b)
        for env in assignments(sorted({*names_in(left), *names_in(right)})):
            try:
                x, y = evaluate_tree(left, env), evaluate_tree(right, env)
            except ZeroDivisionError:
                continue
            assert not less or x < y, (a, b, env)
            assert not less_equal or x <= y, (a, b, env)
            assert not equal or x == y, (a, b, env)

    check()


@settings(max_examples=EXAMPLES, deadline=None)
@given(trees, trees)
def test_substitution_commutes_with_evaluation(tree: Naive, value: Naive) -> None:
    unrestricted = {name: Symbol(name, None, None, 1) for name in SYMBOLS}
    e, replacement = build_or_none(tree, unrestricted), build_or_none(value, unrestricted)
    if e is None or replacement is None:
        return
    try:
        replaced = substitute(e, {"x": replacement})
    except ZeroDivisionError:
        return
    for env in assignments(sorted({*names_in(tree), *names_in(value)}))[:50]:
        try:
            expected = evaluate_tree(tree, {**env, "x": evaluate_tree(value, env)})
        except ZeroDivisionError:
            continue
        assert evaluate(replaced, env) == expected, (e, replacement, env)
