"""Plans: bytes and memory against numbers found by hand, and against what runs do."""

from __future__ import annotations

import re

import pytest
import torch

from meshfuse import FusionDefinition, TensorView
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.host.memory_use import memory_use
from meshfuse.host.parser import parse_host_program
from meshfuse.multidevice import DeviceMesh, plan, simulate

SQUARE = DeviceMesh([[0, 1], [2, 3]], names=("dp", "tp"))


def block(mesh: DeviceMesh, tensor: TensorView, **axes: int) -> TensorView:
    """Put a tensor on a mesh with axes in blocks: `tp=0` binds axis 0 to the mesh axis tp."""
    tensor.set_device_mesh(mesh)
    for name, axis in sorted(axes.items(), key=lambda pair: -pair[1]):
        tensor.outer_split(axis, mesh.ranks.axis_size(mesh.axis(name)))
        tensor.axis(axis).parallelize(mesh.axis(name))
    return tensor


def parallel_mlp(mesh: DeviceMesh, rows: int = -1) -> FusionDefinition:
    """relu(x @ up) @ down, rows over dp, inner features over tp: one all-reduce."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([rows, 8], contiguity=True)
        up = fd.define_tensor([16, 8], contiguity=True)
        down = fd.define_tensor([8, 16], contiguity=True)
        fd.add_output(fd.ops.linear(fd.ops.relu(fd.ops.linear(x, up)), down))
        block(mesh, x, dp=0)
        block(mesh, up, tp=0)
        block(mesh, down, tp=1)
    return fd


def host_body(text: str) -> str:
    """The statements of a host program, but for the sizes that only a lowered kernel asks for."""
    body = text.partition("host() {")[2].partition("\n}")[0]
    return re.sub(r"(launch\(.*), sizes=\{.*\}\)", r"\1)", body)


TABLE = """\
plan for 4 ranks; bytes are those of the rank that holds or receives most
i0 = 6

count  communication  along  link    ranks  received  for
    1  all_reduce     tp     nvlink      2      96 B  linear

received over nvlink: 96 B in 1 communication, 2 ms
memory: 800 B at most, of which 608 B are inputs; 96 B are new outputs
kernels are planned, not lowered; what operations use inside is not counted"""


def test_numbers_by_hand() -> None:
    """A rank holds x [3, 8], up [8, 8], down [8, 8]: 96 + 256 + 256 bytes.

    Of the results, all [3, 8], two exist at once: what an operation reads and what it makes.
    """
    fd, links = parallel_mlp(SQUARE), {"tp": "nvlink"}
    found = plan(fd, [[6, 8], None, None], link_classes=links, bandwidths={"nvlink": 48e-6})
    [communication] = found.communications
    assert (communication.kind, communication.mesh_axes) == ("all_reduce", ("tp",))
    assert (communication.team, communication.bytes, communication.link) == (2, 96, "nvlink")
    assert communication.seconds == found.seconds == pytest.approx(96 / 48e3)
    assert communication.cause.endswith("linear(T4, T2)")
    assert found.links == {"nvlink": 96} and found.bytes == 96
    assert (found.memory.inputs, found.memory.outputs) == (608, 96)
    assert found.memory.peak == 608 + 2 * 96
    assert found.ranks == 4 and found.sizes == {"i0": 6} and found.nominal == ()
    assert not torch.distributed.is_initialized()


def test_the_table() -> None:
    fd = parallel_mlp(SQUARE)
    given = [torch.empty(6, 8, device="meta"), [16, 8], (8, 16)]
    found = plan(fd, given, link_classes={"tp": "nvlink"}, bandwidths={"nvlink": 48e-6})
    assert str(found) == TABLE


def test_a_run_does_what_was_planned() -> None:
    fd = parallel_mlp(SQUARE)
    planned = plan(fd)
    simulate(fd, [torch.ones(6, 8), torch.ones(16, 8), torch.ones(8, 16)])
    posted = fd.fec.communications()
    assert [c.kind for c in planned.communications] == [c.collective.value for c in posted]
    assert host_body(planned.program) == host_body(fd.explain())


def test_sizes_that_nothing_gives_are_nominal() -> None:
    found = plan(parallel_mlp(SQUARE))
    assert found.nominal == ("i0",) and found.sizes == {"i0": 1024}
    assert "i0 = 1024, taken for want of a size" in str(found)
    assert plan(parallel_mlp(SQUARE, rows=1024)).memory == found.memory


def test_uneven_blocks_count_for_the_first_rank() -> None:
    """7 rows over 2 ranks: 4 and 3. The second rank receives most when they are gathered: 4."""
    with FusionDefinition() as fd:
        x = block(SQUARE, fd.define_tensor([-1, 8], contiguity=True), dp=0)
        y = fd.ops.set(x)
        y.set_device_mesh(SQUARE)
        fd.add_output(y)
    found = plan(fd, [[7, 8]])
    [gather] = found.communications
    assert (gather.kind, gather.bytes, gather.link) == ("all_gather", 4 * 8 * 4, "dp")
    assert (found.memory.inputs, found.memory.outputs) == (4 * 8 * 4, 7 * 8 * 4)


def test_a_rank_has_what_its_own_mesh_has() -> None:
    """Two stages on two meshes: neither holds the other's weights."""
    first, second = DeviceMesh([[0, 1]], names=("", "tp")), DeviceMesh([[2, 3]], names=("", "tp"))
    with FusionDefinition() as fd:
        x = block(first, fd.define_tensor([4, 8], contiguity=True), tp=0)
        small = fd.define_tensor([8, 8], contiguity=True)
        small.set_device_mesh(first)
        large = fd.define_tensor([64, 8], contiguity=True)
        large.set_device_mesh(second)
        handed = block(second, fd.ops.set(fd.ops.linear(x, small)), tp=0)
        fd.add_output(block(second, fd.ops.linear(handed, large), tp=0))
    found = plan(fd)
    assert found.ranks == 4
    assert [c.link for c in found.communications] == ["between meshes"]
    assert found.memory.inputs == 64 * 8 * 4
    assert found.links == {"between meshes": 2 * 8 * 4}


def test_a_thousand_devices() -> None:
    mesh = DeviceMesh(torch.arange(1024).reshape(128, 8), names=("dp", "tp"))
    found = plan(parallel_mlp(mesh), [[1280, 8], None, None])
    assert found.ranks == 1024
    assert [(c.kind, c.team, c.bytes) for c in found.communications] == [
        ("all_reduce", 8, 2 * (80 - 10) * 4)
    ]
    assert len(found.program) < 4000


def test_errors() -> None:
    fd = parallel_mlp(SQUARE)
    with pytest.raises(UserTypeError, match="takes a FusionDefinition first"):
        plan(torch.ones(2))  # pyright: ignore[reportArgumentType]  # a user's mistake
    with pytest.raises(UserError, match="expected 3 entries, but got 1"):
        plan(fd, [[6, 8]])
    with pytest.raises(UserError, match=re.escape("size 9 must be 8; the extents are [i0, 8]")):
        plan(fd, [[6, 9], None, None])
    with pytest.raises(UserTypeError, match="a shape is a list of ints, got int"):
        plan(fd, [6, None, None])
    with pytest.raises(UserError, match="'pp' is no mesh axis; there are 'dp', 'mesh_y', 'tp'"):
        plan(fd, link_classes={"pp": "network"})


def test_views_keep_what_they_show_in_memory() -> None:
    program = parse_host_program(
        """\
host() {
  input(T0)
  output(T4)
  T0 = buffer(f32, [4, 4])
  T1 = buffer(f32, [4, 4])
  T2 = buffer(f32, [4, 4], order=[1, 0])
  T3 = buffer(f32, [4, 4])
  T4 = buffer(f32, [4, 4])
  evaluate() {
    T1 = neg(T0)
  }
  evaluate() {
    T2 = permute(T1, [1, 0])
  }
  free(T1)
  evaluate() {
    T3 = neg(T2)
  }
  free(T2)
  evaluate() {
    T4 = neg(T3)
  }
  free(T3)
}"""
    )
    use = memory_use(program, {}, 0)
    assert (use.inputs, use.outputs, use.peak) == (64, 64, 3 * 64)
    assert use.at == 3
