"""Every verb that extends a Program: each takes a Program and returns it with the new names."""

from meshfuse.ir.build_attention import sdpfa_bwd, sdpfa_fwd
from meshfuse.ir.build_contraction import linear, matmul
from meshfuse.ir.build_definitions import (
    add_input,
    add_output,
    define_scalar,
    define_tensor,
    literal,
    size,
)
from meshfuse.ir.build_indexing import (
    cat,
    embedding,
    index_select,
    iota,
    pad,
    scan,
    slice_,
    take_along_axis,
    topk,
)
from meshfuse.ir.build_pointwise import cast, pointwise
from meshfuse.ir.build_random import random
from meshfuse.ir.build_reduction import mean, reduction, var_mean, welford
from meshfuse.ir.build_reshape import reshape
from meshfuse.ir.build_shape import broadcast, broadcast_in_dim, expand, permute, set_, squeeze

__all__ = [
    "add_input",
    "add_output",
    "broadcast",
    "broadcast_in_dim",
    "cast",
    "cat",
    "define_scalar",
    "define_tensor",
    "embedding",
    "expand",
    "index_select",
    "iota",
    "linear",
    "literal",
    "matmul",
    "mean",
    "pad",
    "permute",
    "pointwise",
    "random",
    "reduction",
    "reshape",
    "scan",
    "sdpfa_bwd",
    "sdpfa_fwd",
    "set_",
    "size",
    "slice_",
    "squeeze",
    "take_along_axis",
    "topk",
    "var_mean",
    "welford",
]
