"""Constants and tables of the C++ printer."""

import math

import pytest

from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import Unsupported
from meshfuse.codegen.cpp import print_statement
from meshfuse.codegen.cpp_ops import (
    REDUCTION_FUNCTORS,
    SCALAR_EMITTERS,
    literal,
    value_type,
)
from meshfuse.ir.pointwise import REDUCTION_FUNCTIONS, SCALAR_FUNCTIONS
from meshfuse.kernel.nodes import STATEMENTS


def test_every_statement_and_function_is_printed() -> None:
    unknown = print_statement.dispatch(object)
    assert [s for s in STATEMENTS if print_statement.dispatch(s) is unknown] == []
    assert SCALAR_EMITTERS.keys() == SCALAR_FUNCTIONS.keys()
    assert REDUCTION_FUNCTORS.keys() == REDUCTION_FUNCTIONS.keys()


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (1, DataType.Float, "1.0f"),
        (0.1, DataType.Float, "0.10000000149011612f"),
        (0.1, DataType.Double, "0.1"),
        (-2.5, DataType.Float, "(-2.5f)"),
        (math.inf, DataType.Float, "__builtin_inff()"),
        (-math.inf, DataType.Double, "(-__builtin_inf())"),
        (math.nan, DataType.Float, '__builtin_nanf("")'),
        (1e300, DataType.Float, "__builtin_inff()"),
        (-0.0, DataType.Float, "(-0.0f)"),
        (7, DataType.Int, "7L"),
        (-(2**63), DataType.Int, "(-9223372036854775807L - 1)"),
        (-(2**31), DataType.Int32, "(-2147483647 - 1)"),
        (True, DataType.Bool, "true"),
    ],
)
def test_literals(value: float, dtype: DataType, text: str) -> None:
    assert literal(value, dtype) == text


def test_lanes_of_bool_are_masks() -> None:
    assert value_type(DataType.Bool, 1) == "bool"
    assert value_type(DataType.Bool, 16) == "mf_tile<int32_t, 16>"
    assert value_type(DataType.BFloat16, 16) == "mf_tile<float, 16>"


@pytest.mark.parametrize("function", ["neg", "sub", "div"])
def test_arithmetic_that_bool_lacks_is_refused(function: str) -> None:
    with pytest.raises(Unsupported, match="of bool; convert the operand"):
        SCALAR_EMITTERS[function](["a", "b"], DataType.Bool)


def test_a_function_of_floats_refuses_integers() -> None:
    with pytest.raises(Unsupported, match="no exp of DataType"):
        SCALAR_EMITTERS["exp"](["a"], DataType.Int)
