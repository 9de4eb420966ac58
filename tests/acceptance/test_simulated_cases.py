"""Every sharded case in the simulator, for meshes of 1 to 8 ranks."""

from __future__ import annotations

import pytest

from meshfuse.multidevice import simulate
from sharded_cases import CASES, check_outputs


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_case_by_value_and_by_collectives(name: str, d: int) -> None:
    built = CASES[name](d)
    results = simulate(built.fd, built.inputs)
    assert len(results) == d
    for rank, outputs in enumerate(results):
        check_outputs(built, d, rank, outputs)
    posted = tuple(step.collective.value for step in built.fd.fec.communications())
    assert posted == (built.collectives if d > 1 else ())
