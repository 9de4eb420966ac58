"""Every schedule verb: each takes a Program and returns one with a tensor's schedule extended.

Those that make tensors (rfactor, cache_before, cache_after) return their names, too.
"""

from meshfuse.ir.bindings import parallelize, set_device_mesh
from meshfuse.ir.caching import cache_after, cache_before
from meshfuse.ir.loop_nests import (
    merge,
    reorder,
    set_inline_depth,
    set_loop_domain,
    split,
    swizzle1d,
)
from meshfuse.ir.memory_layout import (
    set_allocation_as_loop,
    set_allocation_domain,
    set_memory_type,
)
from meshfuse.ir.replay import clear_reductions, self_replay
from meshfuse.ir.rfactor import rfactor

__all__ = [
    "cache_after",
    "cache_before",
    "clear_reductions",
    "merge",
    "parallelize",
    "reorder",
    "rfactor",
    "self_replay",
    "set_allocation_as_loop",
    "set_allocation_domain",
    "set_device_mesh",
    "set_inline_depth",
    "set_loop_domain",
    "set_memory_type",
    "split",
    "swizzle1d",
]
