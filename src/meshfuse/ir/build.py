"""Every verb that extends a Program: each takes a Program and returns it with the new names."""

from meshfuse.ir.build_contraction import linear, matmul
from meshfuse.ir.build_definitions import (
    add_input,
    add_output,
    define_scalar,
    define_tensor,
    literal,
    size,
)
from meshfuse.ir.build_pointwise import cast, pointwise
from meshfuse.ir.build_reduction import mean, reduction, var_mean, welford
from meshfuse.ir.build_reshape import reshape
from meshfuse.ir.build_shape import broadcast, broadcast_in_dim, expand, permute, set_, squeeze

__all__ = [
    "add_input",
    "add_output",
    "broadcast",
    "broadcast_in_dim",
    "cast",
    "define_scalar",
    "define_tensor",
    "expand",
    "linear",
    "literal",
    "matmul",
    "mean",
    "permute",
    "pointwise",
    "reduction",
    "reshape",
    "set_",
    "size",
    "squeeze",
    "var_mean",
    "welford",
]
