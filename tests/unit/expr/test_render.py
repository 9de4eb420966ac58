"""Text and C forms, and what the parser says about text that is no expression."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest

from meshfuse.expr import IntExpr, evaluate, maximum, minimum, parse, render, symbol

x, y = symbol("x"), symbol("y")
u, v = symbol("u", None, None), symbol("v", None, None)
s = symbol("s", 1)


@pytest.mark.parametrize(
    ("e", "text"),
    [
        (x - y - 3, "x - y - 3"),
        (-x - y + 3, "3 - x - y"),
        (-x - 3, "-x - 3"),
        (-x * y, "-x*y"),
        (-(x // 4), "-(x // 4)"),
        (-(7 // (y + 1)) - 1, "-(7 // (y + 1)) - 1"),
        (x - 7 // (y + 1), "x - 7 // (y + 1)"),
        (3 * x // 4, "3*x // 4"),
        (x * (y // 4), "x*(y // 4)"),
        ((x + 1) // 4 % 8, "(x + 1) // 4 % 8"),
        (x % (y + 1), "x % (y + 1)"),
        (minimum(x, 3 - y) * 2, "2*min(x, 3 - y)"),
        (symbol("T0.i2") + symbol("T0.i10"), "T0.i2 + T0.i10"),
    ],
)
def test_text(e: IntExpr, text: str) -> None:
    assert render(e) == repr(e) == text
    assert parse(text) is e


@pytest.mark.parametrize(
    ("e", "text"),
    [
        (x // 4 + x % s, "x % s + x / 4"),
        (u // 4, "mf_floordiv(u, 4)"),
        ((u + 1) % s, "mf_mod(u + 1, s)"),
        (x // u, "mf_floordiv(x, u)"),
        (minimum(u, v, 7), "mf_min(u, mf_min(v, 7))"),
        (maximum(u, v) * 2, "2*mf_max(u, v)"),
        (x + 2**31, "x + 2147483648LL"),
        (u - 2**63, "u + (-9223372036854775807LL - 1)"),
    ],
)
def test_c(e: IntExpr, text: str) -> None:
    assert render(e, "c") == text


def test_c_refuses_what_c_cannot_say() -> None:
    with pytest.raises(ValueError, match="does not fit an int64"):
        render(u + 2**63, "c")
    with pytest.raises(ValueError, match=r"symbol T0\.i: not a C identifier"):
        render(symbol("T0.i") + 1, "c")


PRELUDE = """
#include <cstdint>
static int64_t mf_floordiv(int64_t a, int64_t b) {
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
static int64_t mf_mod(int64_t a, int64_t b) { return a - b * mf_floordiv(a, b); }
static int64_t mf_min(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t mf_max(int64_t a, int64_t b) { return a > b ? a : b; }
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_compiled_c_computes_what_evaluate_does(tmp_path: Path) -> None:
    expressions = [
        x // 4 * 7 + x % 3 - y,
        (u - 5) // 3 + (v - x) % 4,
        (u * v + 1) % s - (7 - u) // s,
        -(x // 4) * u - 1 - y % s,
        minimum(u, v, x - 2) * maximum(u // 2, v % 5, -y),
        (x // s) % 3 * (u // (v * v + 1)) - u % -3,
    ]
    functions = "".join(
        f'extern "C" int64_t f{i}(int64_t x, int64_t y, int64_t u, int64_t v, int64_t s)'
        f" {{ return {render(e, 'c')}; }}\n"
        for i, e in enumerate(expressions)
    )
    source, library = tmp_path / "functions.cpp", tmp_path / "functions.so"
    source.write_text(PRELUDE + functions)
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-w", "-o", str(library), str(source)], check=True, timeout=60
    )
    loaded = ctypes.CDLL(str(library))
    for i, e in enumerate(expressions):
        function = loaded[f"f{i}"]
        function.argtypes, function.restype = [ctypes.c_int64] * 5, ctypes.c_int64
        for values in product((0, 5), (0, 3), (-7, 0, 4), (-2, 3), (1, 3)):
            env = dict(zip("xyuvs", values, strict=True))
            assert function(*values) == evaluate(e, env), (e, env)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column 1: expected an integer, a name, '-' or '(', found 'the end'"),
        ("x + ", "column 5: expected an integer, a name, '-' or '(', found 'the end'"),
        ("x + * y", r"column 5: expected an integer, a name, '-' or '\(', found '\*'"),
        ("(x + y", r"column 7: expected '\)', found 'the end'"),
        ("x y", "column 3: expected an operator or the end, found 'y'"),
        ("min x", r"column 5: expected '\(', found 'x'"),
        ("x / y", "column 3: expected an integer, a name or an operator, found '/'"),
        ("x // (3 - 3)", "column 6: expected a divisor other than 0"),
    ],
)
def test_parse_errors_name_the_column(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("'-' or '('", r"'-' or '\('")):
        parse(text)


def test_parse_prefers_the_given_symbols() -> None:
    bounded = symbol("x", 0, 3)
    assert parse("x + y", {"x": bounded}) is bounded + y
