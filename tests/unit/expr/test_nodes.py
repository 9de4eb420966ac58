"""Interning, immutability, substitution and evaluation."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from meshfuse.expr import (
    IntExpr,
    MissingSymbolError,
    Symbol,
    add,
    as_expr,
    const,
    const_value,
    evaluate,
    free_symbols,
    is_const,
    maximum,
    minimum,
    mul,
    nodes,
    parse,
    substitute,
    symbol,
)

x, y = symbol("x"), symbol("y")


def test_equal_structure_is_the_same_object() -> None:
    assert symbol("x") is x
    assert symbol("x", high=9) is not x
    assert symbol("x", 1, 9, multiple=4) is symbol("x", 4, 8, multiple=4)
    assert x + y is y + x
    assert (x + 1) * (y - 1) is x * y - x + y - 1
    assert const(True) is const(1)
    assert x != y
    assert len({x + 1, 1 + x, x}) == 2


def test_operators_take_integers_on_either_side() -> None:
    assert 3 + x is x + 3
    assert 3 - x is -(x - 3)
    assert 2 * x is x * 2
    assert evaluate(17 // (x + 1), {"x": 4}) == 3
    assert evaluate(17 % (x + 1), {"x": 4}) == 2
    assert add() is const(0)
    assert mul() is const(1)


@pytest.mark.parametrize("e", [const(3), x, x + y, x * y, x // 3, x % 3, minimum(x, y), 3 * x])
def test_copies_are_the_node_itself(e: IntExpr) -> None:
    assert copy.copy(e) is e
    assert copy.deepcopy({"a": [e]})["a"][0] is e
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(e, protocol)) is e


def test_a_pickle_of_another_process_is_this_process_s_node() -> None:
    program = (
        "import pickle, sys; from meshfuse.expr import parse;"
        "sys.stdout.buffer.write(pickle.dumps(parse('x // 3 * 7 + min(x, y) % 5')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert pickle.loads(done.stdout) is parse("x // 3 * 7 + min(x, y) % 5")


def test_threads_intern_one_node() -> None:
    workers = 8
    barrier = Barrier(workers)

    def build(_: int) -> list[IntExpr]:
        barrier.wait()
        return [(symbol(f"race{i}") * 4 + y) // 8 for i in range(300)]

    with ThreadPoolExecutor(workers) as pool:
        first, *others = pool.map(build, range(workers))
    for other in others:
        assert all(a is b for a, b in zip(first, other, strict=True))


def test_unused_nodes_are_collected() -> None:
    kept = [symbol("transient") + i for i in range(100)]
    alive = [weakref.ref(node) for node in kept]
    del kept
    for i in range(nodes.MEMO_SIZE):  # after which the first sums are remembered no longer
        assert symbol("other") + i is not None
    gc.collect()
    assert not any(node() for node in alive)


def test_nodes_are_immutable_and_have_no_truth_value() -> None:
    with pytest.raises(AttributeError, match="Symbol is immutable: cannot set low"):
        x.low = 3
    with pytest.raises(TypeError, match="truth value of x is unknown"):
        bool(x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a b", 0, None, 1), "a name is an identifier"),
        (("min", 0, None, 1), "not min or max"),
        (("a", 3, 2, 1), "no such integer"),
        (("a", 1, 3, 4), "no such integer"),
        (("a", 0, None, 0), "multiple must be at least 1"),
    ],
)
def test_impossible_symbols_are_refused(
    arguments: tuple[str, int, int | None, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        symbol(*arguments)


def test_evaluation_names_the_missing_symbol() -> None:
    with pytest.raises(MissingSymbolError, match="no value for symbol y; given: a, x"):
        evaluate(x + y, {"x": 1, "a": 2})
    assert issubclass(MissingSymbolError, LookupError)
    assert evaluate(7, {}) == 7


def test_constants() -> None:
    assert (is_const(3), is_const(const(3)), is_const(x)) == (True, True, False)
    assert (const_value(3), const_value(const(3)), const_value(x)) == (3, 3, None)
    assert const(3).value == 3
    assert as_expr(3) is const(3)
    assert as_expr(x) is x
    with pytest.raises(TypeError, match="at least one operand"):
        minimum()
    assert maximum(x) is x


def test_substitution() -> None:
    assert substitute(x * 4 + y, {"x": 2, y: x}) is x + 8
    assert substitute(x + y, {"x": y, "y": x}) is x + y  # at once, not one after the other
    assert substitute(x // 4 + y, {x // 4: y}) is 2 * y
    assert substitute(x * y + 3, {x * y: 5}) is const(8)
    assert substitute(x % 8, {"x": symbol("lane", 0, 7)}) is symbol("lane", 0, 7)
    with pytest.raises(ZeroDivisionError):
        substitute(x // y, {"y": 0})


def test_free_symbols_come_sorted_by_name() -> None:
    names = [f"i{n}" for n in (10, 2, 1)]
    e = add(*(symbol(name) for name in names)) + symbol("i2") // symbol("a", 1)
    assert [s.name for s in free_symbols(e)] == ["a", "i1", "i2", "i10"]
    assert all(isinstance(s, Symbol) for s in free_symbols(e))
    assert free_symbols(3) == ()


def test_deep_sharing_keeps_sort_keys_short() -> None:
    e: IntExpr = x
    for level in range(2, 40):
        e = minimum(e // level + y, e % level + 2 * y)
    assert len(e.order[1]) < 2000
