"""What C++ kernels ask of lanes, said in terms of the schedule that asks for them."""

from __future__ import annotations

from meshfuse.base.errors import ScheduleError
from meshfuse.ir.program import Program
from meshfuse.kernel.lower import nests_in
from meshfuse.kernel.nests import Nest


def check_tiles(program: Program) -> None:
    """Raise ScheduleError for lanes that a C++ kernel cannot have.

    tile-size: a number of lanes that is no power of two. tile-rank: lanes along two axes. What is
    left for `print_cpp` to refuse are values that meet from loop nests with other lanes.
    """
    for nest in nests_in(program):
        _check_nest(nest)


def _check_nest(nest: Nest) -> None:
    for group in nest.tiles:
        if group.size & (group.size - 1):
            raise ScheduleError(
                "tile-size",
                nest.tensor,
                group.leaves[-1],
                f"{group.size} lanes, and a C++ kernel has a power of two of them",
                "Split the axis by a power of two and bind the inner part.",
            )
    wide = [group for group in nest.tiles if group.size > 1]
    if len(wide) > 1:
        first, second = (group.leaves[0] for group in wide[:2])
        raise ScheduleError(
            "tile-rank",
            nest.tensor,
            second,
            f"lanes along it and along {first}, and a C++ kernel has them along one axis",
            "Merge the axes before splitting off lanes, or leave one of them serial.",
        )
