"""The verifier: a sound program passes, and each broken invariant is named.

Programs are broken by editing their text, which the parser accepts without checking.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import InvariantError
from meshfuse.ir.axes import TensorName
from meshfuse.ir.parser import parse_program
from meshfuse.ir.printer import print_program
from meshfuse.ir.rewrite import add_tensor
from meshfuse.ir.verify import verify

SOUND = """\
program() {
  T0 = tensor(f32, [a0:i{i0}, a1:i{8}])
  schedule(T0, [a0, a2, a3], steps=[Split(a1, a2, a3, 2, false)], bindings={a2: mesh_x}, \
mesh=DeviceMesh{0 1}, allocation=Allocation([a1, a0], [true, false]))
  T1 = tensor(f32, [a4:i{i0}, a5:r{8}])
  T2 = tensor(f32, [a6:i{i0}, a7:b{1}])
  T3 = tensor(f32, [a8:i{i0}, a9:i{8}])
  T4 = tensor(f32, [a10:i{i0}, a11:p{2}, a12:r{4}], root=[a10:i{i0}, a13:r{8}], \
root_steps=[Split(a13, a11, a12, 2, false)])
  T5 = tensor(f32, [a14:i{i0}, a15:r{8}])
  c0 = scalar(f64)
  c1 = scalar(f64)
  input(T0, c0)
  c1 = neg(c0)
  T1 = sum(T0, [1])
  T2 = broadcast(T1, [false, true])
  T3 = mul(T2, T0)
  T4 = sum(T0, [1])
  T5 = all_reduce(T4, mesh_x)
  output(T3)
  output(T5, alias=T0)
}"""


def test_a_sound_program() -> None:
    program = parse_program(SOUND)
    assert print_program(program) == SOUND
    verify(program)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # Names.
        ("  output(T3)\n", "  output(T9)\n", "output T9 is no tensor"),
        ("alias=T0", "alias=T1", "alias T1 is no input"),
        ("input(T0, c0)", "input(T0, T0, c0)", "input T0 stands twice"),
        ("input(T0, c0)", "input(T0, c0, c9)", "input c9 is in no table"),
        ("input(T0, c0)", "input(T0)", "c1 = neg(c0): c0 is read before it is defined"),
        ("mul(T2, T0)", "mul(T2, T9)", "T3 = mul(T2, T9): T9 is in no table"),
        ("mul(T2, T0)", "mul(T2, T5)", "T5 is read before it is defined"),
        ("T4 = sum(T0", "T1 = sum(T0", "T1 = sum(T0, [1]): T1 is defined twice"),
        ("T4 = sum(T0", "T9 = sum(T0", "T9 = sum(T0, [1]): T9 is in no table"),
        ("  T4 = sum(T0, [1])\n", "", "T4 is read before it is defined"),
        # Results.
        ("T3 = tensor(f32", "T3 = tensor(f64", "T3 = mul(T2, T0): T3 has type f64, not f32"),
        ("c1 = scalar(f64)", "c1 = scalar(i64)", "c1 = neg(c0): c1 has type i64, not f64"),
        ("T3 = mul(T2, T0)", "T3 = mul(c0, c0)", "T3 should be a scalar"),
        ("c1 = neg(c0)", "c1 = neg(T0)", "c1 should be a tensor"),
        ("a9:i{8}", "a9:i{9}", "T3 has axes [i{i0}, i{9}], not [i{i0}, i{8}]"),
        ("a9:i{8}", "a9:b{1}", "T3 has axes [i{i0}, b{1}], not"),
        ("a5:r{8}", "a5:r{4}", "T1 has axes [i{i0}, r{4}], not [i{i0}, r{8}]"),
        ("[a4:i{i0}, a5:r{8}]", "[a4:i{i0}]", "T1 has axes [i{i0}], not [i{i0}, r{8}]"),
        ("[a14:i{i0}, a15:r{8}]", "[a14:i{3}, a16:i{8}]", "T5 has axes [i{3}, i{8}], not [i{i0}]"),
        ("mul(T2, T0)", "mul(T2)", "takes 2 operands, got 1"),
        ("[false, true]", "[true, true, false]", "T2 = broadcast(T1, [true, true, false]): T2 has"),
        ("[false, true]", "[true, true]", "0 flags are false; the tensor has 1 axes"),
        # Loop nests.
        ("[a0, a2, a3], steps", "[a0, a2], steps", "T0: the leaves are [a0, a2], but the steps"),
        ("[a0, a2, a3], steps", "[a0, a2, a2], steps", "the leaves are [a0, a2, a2], but"),
        ("[a0, a2, a3], steps", "[a0, a1], steps", "the leaves are [a0, a1], but the steps leave"),
        ("Split(a1, a2, a3", "Split(a9, a2, a3", "takes a9, which is not there"),
        ("Split(a1, a2, a3", "Split(a1, a2, a2", "an axis is made twice among [a0, a1, a2, a2]"),
        (
            "[Split(a1, a2, a3, 2, false)]",
            "[Split(a1, a2, a3, 2, false), Split(a1, a20, a21, 2, false)]",
            "takes a1, which is not there (any more)",
        ),
        ("allocation=Alloc", "inline_depth=4, allocation=Alloc", "inline depth 4 of 3 leaves"),
        ("Split(a13, a11, a12", "Split(a13, a11, a22", "T4: the logical axes are [a10, a11, a12]"),
        ("root=[a10:i{i0}, a13:r{8}], ", "", "T4: root steps without root axes"),
        ("[a8:i{i0}, a9", "[a6:i{i0}, a9", "axis a6 belongs to T2 and to T3"),
        # Bindings.
        ("{a2: mesh_x}", "{a1: mesh_x}", "T0: mesh_x is bound to a1, which is no leaf"),
        ("{a2: mesh_x}", "{a0: mesh_x, a2: mesh_x}", "T0: mesh_x is bound to two tensor axes"),
        ("{a2: mesh_x}", "{a2: mesh_y}", "T0: DeviceMesh{0 1} has no mesh_y"),
        ("{0 1}", "{0 1 2}", "mesh_x of DeviceMesh{0 1 2} is bound to a2:i{2} of another size"),
        # Allocations.
        ("Allocation([a1, a0]", "Allocation([a1, a2]", "allocation [a1, a2] does not permute"),
        ("[true, false]", "[true]", "T0: 1 contiguity flags, 2 axes"),
        (
            "  T3 = tensor",
            "  schedule(T2, [a6, a7], allocation=Allocation([a6, a7], [true, true]))\n"
            "  T3 = tensor",
            "T2: broadcast axis a7:b{1} has a contiguity flag",
        ),
    ],
)
def test_a_broken_program(old: str, new: str, message: str) -> None:
    assert old in SOUND
    program = parse_program(SOUND.replace(old, new, 1))
    with pytest.raises(InvariantError) as caught:
        verify(program)
    assert message in str(caught.value)


def test_symbols_may_stand_for_equal_sizes() -> None:
    verify(parse_program(SOUND.replace("a8:i{i0}", "a8:i{i7}")))
    verify(parse_program(SOUND.replace("a8:i{i0}", "a8:i{3}")))


def test_a_reduced_axis_shares_the_mesh_axis_of_a_tensor_axis() -> None:
    bound = "  schedule(T1, [a4, a5], bindings={a4: mesh_x, a5: mesh_x})\n  T2 = tensor"
    verify(parse_program(SOUND.replace("  T2 = tensor", bound, 1)))


def test_what_is_shared_with_a_verified_program_is_not_looked_at_again() -> None:
    """But what has changed is, and expressions on it."""
    sound, reduced = parse_program(SOUND), TensorName("T1")
    half = replace(sound.tensor(reduced), dtype=DataType.Half)
    broken = add_tensor(sound, reduced, half, sound.schedule(reduced))
    with pytest.raises(InvariantError, match=r"T1 = sum\(T0, \[1\]\): T1 has type f16"):
        verify(broken, sound)
    verify(broken, broken)
