"""The verifier passes a right kernel and names what is wrong with others."""

import pytest

from meshfuse.base.errors import InvariantError
from meshfuse.base.text import TextError
from meshfuse.kernel.nodes import Kernel
from meshfuse.kernel.parser import parse_kernel
from meshfuse.kernel.printer import print_kernel
from meshfuse.kernel.verify import verify_kernel

RIGHT = """kernel("row_sums") {
  T0 = buffer(bf16, [i0, i1], [i1, 1])
  T1 = buffer(f32, [i0], [1], written=true)
  c0 = scalar(f64)
  sizes(i0, i1)
  g0 = grid(i0)
  n0 = tile(16)
  v0 = convert(f32, c0)
  for(k0, (i1 + 15) // 16, [Carry(v1, f32, 0.0:f32, v4, tiles=[n0])]) {
    v2 = load(T0, [g0, 16*k0 + n0], mask=[Bound(16*k0 + n0, i1)])
    v3 = compute("mul", f32, v2, v0)
    v4 = combine("sum", v1, v3, mask=[Bound(16*k0 + n0, i1)])
  }
  v5 = reduce("sum", v1, [n0])
  store(T1, [g0], v5)
}"""


def kernel_with(old: str, new: str) -> Kernel:
    assert old in RIGHT
    return parse_kernel(RIGHT.replace(old, new))


def test_a_right_kernel_passes_and_prints_as_it_was_read() -> None:
    kernel = parse_kernel(RIGHT)
    verify_kernel(kernel)
    assert print_kernel(kernel) == RIGHT


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'v3 = compute("mul", f32, v2, v0)',
            'v3 = compute("mul", f32, v2, v9)',
            "v9 is not defined",
        ),
        ("v3 = compute", "v2 = compute", "v2 is defined twice"),
        ("v5 = reduce", "v4 = reduce", "v4 is defined twice"),
        ("store(T1, [g0], v5)", "store(T1, [g0], v3)", "v3 is not defined here"),
        ("store(T1, [g0], v5)", "store(T1, [g0], v1)", "lanes of n0 go to one element"),
        ("store(T1, [g0], v5)", "store(T1, [k0], v5)", "k0 is no size, loop or tile axis here"),
        ("store(T1, [g0], v5)", "store(T1, [g0, 0], v5)", "T1 has 1 axes"),
        ("store(T1, [g0], v5)", "store(T1, [g0], 1)", "is i64, not f32"),
        ("store(T1, [g0], v5)", "store(T2, [g0], v5)", "T2 is no buffer"),
        ("store(T1, [g0], v5)", "store(T0, [g0, 0], v5)", "T0 is not marked written"),
        ("v0 = convert(f32, c0)", "v0 = size(i0)", "operands of f32, i64"),
        ("Carry(v1, f32, 0.0:f32", "Carry(v1, f32, 0.0", "is f64, not f32"),
        ("v4, tiles=[n0]", "v4", "v4 varies over more tile axes"),
        ("v4, tiles=[n0]", "v4, tiles=[n1]", "n1 is no tile axis"),
        ('reduce("sum", v1, [n0])', 'reduce("sum", v0, [n0])', "v0 does not vary over all"),
        ('reduce("sum"', 'reduce("span"', "no such reduction"),
        ('compute("mul", f32, v2, v0)', 'compute("mul", f32, v2)', "no such function"),
        ('compute("mul", f32, v2, v0)', 'compute("where", f32, v2, v2, v0)', "is f32, not bool"),
        ("sizes(i0, i1)", "sizes(i0)", "i1 is no size"),
        ("sizes(i0, i1)", "sizes(i0, i1, g0)", "g0 is declared twice"),
        ("for(k0, (i1 + 15) // 16", "for(k0, n0", "a trip count cannot vary over lanes"),
        ("for(k0", "for(g0", "is a name that is taken here"),
        ("[i1, 1])", "[1])", "one stride for each axis"),
    ],
)
def test_wrong_kernels_are_named(old: str, new: str, message: str) -> None:
    with pytest.raises(InvariantError, match="kernel row_sums: ") as caught:
        verify_kernel(kernel_with(old, new))
    assert message in str(caught.value)


def test_welford_statements() -> None:
    text = """kernel("moments") {
  T0 = buffer(f32, [64], [1])
  T1 = buffer(f32, [], [], written=true)
  n0 = tile(16)
  for(k0, 4, [Carry(v0, f32, 0.0:f32, v4, tiles=[n0]), Carry(v1, f32, 0.0:f32, v5, tiles=[n0]), \
Carry(v2, i64, 0, v6, tiles=[n0])]) {
    v3 = load(T0, [16*k0 + n0])
    v4, v5, v6 = welford_step(v0, v1, v2, v3)
  }
  v7, v8, v9 = welford_reduce(v0, v1, v2, [n0])
  store(T1, [], v8)
}"""
    kernel = parse_kernel(text)
    verify_kernel(kernel)
    assert print_kernel(kernel) == text
    with pytest.raises(InvariantError, match="v2 is i64, not f32"):
        verify_kernel(parse_kernel(text.replace("step(v0, v1,", "step(v0, v2,")))
    uniform = text.replace("v7, v8, v9 = ", "v9 = convert(i64, 0)\n  v7, v8, v10 = ")
    with pytest.raises(InvariantError, match="its operands do not vary over all"):
        verify_kernel(parse_kernel(uniform.replace("reduce(v0, v1, v2", "reduce(v0, v1, v9")))


def test_text_that_is_no_kernel() -> None:
    with pytest.raises(TextError, match=r"expected kernel\(\.\.\.\), found"):
        parse_kernel("v0 = size(i0)")
