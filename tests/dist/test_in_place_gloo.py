"""All-reduces in place between processes: small sums, which ranks add up themselves, and large
ones, which gloo adds."""

from __future__ import annotations

import pytest
import torch

from gloo_run import run_ranks
from meshfuse.host.check import check_host_program
from meshfuse.host.nodes import Communicate, all_nodes
from reduced_in_place import CASES, in_chunks, own_shards, row_parallel


def run_cases(rank: int, world_size: int) -> str:
    d = world_size
    cases = [CASES[name](d) for name in CASES if name != "along_two_axes"]
    cases += [row_parallel(d, 130, 190), in_chunks(d, 260, 190)]
    for case in cases:
        for _ in range(2):
            [output] = case.fd.execute(own_shards(case, rank, d), overlap=case.form)
            assert torch.equal(output, case.wanted)
        host = case.fd.fec.host_program()
        posts = [node for node in all_nodes(host.body) if isinstance(node, Communicate)]
        assert posts and all(post.in_place for post in posts)
        assert check_host_program(host) == ()
    return "done"


@pytest.mark.parametrize("ranks", [2, 3])
def test_values(ranks: int) -> None:
    assert run_ranks(run_cases, ranks) == ["done"] * ranks
