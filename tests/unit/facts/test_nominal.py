"""Sizes that nothing gives: the nearest value that a symbol can have."""

from __future__ import annotations

import pytest

from meshfuse.expr import const, symbol
from meshfuse.facts.nominal import nominal_bytes, nominal_size, nominal_value
from meshfuse.ir.axes import TensorName
from meshfuse.ir.parser import parse_program


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, 1024),
        ({"multiple": 3}, 1026),
        ({"multiple": 2048}, 2048),
        ({"low": 5000}, 5000),
        ({"high": 7}, 7),
    ],
)
def test_a_symbol_counts_as_the_nearest_size_it_can_have(
    facts: dict[str, int], expected: int
) -> None:
    size = symbol("n", **facts)
    assert nominal_size(size) == expected
    assert nominal_value(size * 2 + 1) == expected * 2 + 1


def test_the_size_wanted_can_be_another() -> None:
    assert nominal_size(symbol("n", multiple=4), 10) == 12
    assert nominal_value(symbol("n") // 3, 10) == 3 and nominal_value(const(5), 10) == 5


def test_bytes_are_those_of_one_rank() -> None:
    text = """program() {
  T0 = tensor(bf16, [a0:i{n}, a1:i{8}])
  schedule(T0, [a2, a3, a1], steps=[Split(a0, a2, a3, 4, false)], bindings={a2: mesh_x},
    mesh=DeviceMesh{0 1 2 3})
  input(T0)
}"""
    program = parse_program(text.replace(",\n   ", ","))
    assert nominal_bytes(program, TensorName("T0")) == 1024 // 4 * 8 * 2
