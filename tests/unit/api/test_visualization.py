"""Pictures of who holds what: their text, and the geometry of their SVG."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as torch_distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from golden_text import GoldenCheck
from meshfuse import FusionDefinition, TensorView
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.expr import const
from meshfuse.facts.digits import Digit, Sharding
from meshfuse.facts.ownership import ownership_of
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.multidevice import DeviceMesh, DistributedTensor, visualize

X, Y, Z = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z
SQUARE = DeviceMesh([[0, 1], [2, 3]], names=("dp", "tp"))
CUBE = DeviceMesh([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
NAMESPACE = "{http://www.w3.org/2000/svg}"


def define(mesh: DeviceMesh, shape: list[int], **blocks: int) -> TensorView:
    """A tensor of `shape` with these axes in blocks: `x=0` binds axis 0 to mesh_x."""
    with FusionDefinition() as fd:
        tensor = fd.define_tensor(shape)
        tensor.set_device_mesh(mesh)
        for letter, axis in sorted(blocks.items(), key=lambda pair: -pair[1]):
            mesh_axis = {"x": X, "y": Y, "z": Z}[letter]
            tensor.outer_split(axis, mesh.ranks.axis_size(mesh_axis))
            tensor.axis(axis).parallelize(mesh_axis)
    return tensor


def distributed(
    axes: list[list[tuple[int, ParallelType | None]]],
    local: list[int],
    partial: dict[ParallelType, str] | None = None,
) -> DistributedTensor:
    digits = tuple(tuple(Digit(const(n), owner) for n, owner in axis) for axis in axes)
    return DistributedTensor(torch.zeros(local), Sharding(SQUARE.ranks, digits, partial or {}))


PICTURES = {
    "blocks of both axes": (define(SQUARE, [-1, 8], y=0, x=1), None),
    "uneven blocks, a rank without any": (define(DeviceMesh(range(4)), [-1], x=0), [9]),
    "replicas": (define(SQUARE, [8], x=0), None),
    "whole everywhere": (define(SQUARE, [4, -1, 6]), None),
    "three axes": (define(CUBE, [7, 8, 6], y=0, z=1, x=2), None),
    "cyclic": (distributed([[(3, None), (2, X)], [(4, None)]], [3, 4]), None),
    "strided": (distributed([[(2, None), (2, X), (3, None)]], [6]), None),
    "two mesh axes, the last first": (distributed([[(2, X), (2, Y), (2, None)]], [2]), None),
    "terms of a sum": (distributed([[(2, X), (3, None)]], [3], {Y: "sum"}), None),
    "terms of a maximum": (distributed([[(2, None)]], [2], {Y: "max", X: "max"}), None),
    "a scalar": (distributed([], []), None),
    "no elements": (define(SQUARE, [-1, 2], x=0), [0, 2]),
    "many ranks and pieces": (
        define(DeviceMesh(torch.arange(1024).reshape(2, 512)), [4096], x=0),
        None,
    ),
}


def test_text(golden: GoldenCheck) -> None:
    parts = [
        f"-- {name} --\n{visualize(tensor, shape=shape)}"
        for name, (tensor, shape) in PICTURES.items()
    ]
    golden("visualize", "\n\n".join(parts))


@pytest.mark.parametrize("name", PICTURES)
def test_svg_is_xml_whose_boxes_stand_apart_and_inside(name: str) -> None:
    tensor, shape = PICTURES[name]
    root = ElementTree.fromstring(visualize(tensor, shape=shape).svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    boxes = [
        tuple(float(box.attrib[side]) for side in ("x", "y", "width", "height"))
        for box in root.iter(f"{NAMESPACE}rect")
        if "class" in box.attrib
    ]
    assert boxes
    for x, y, wide, high in boxes:
        assert x >= 0 and x + wide <= width and y >= 0 and y + high <= height
    for (x, y, wide, high), (u, v, w, h) in combinations(boxes, 2):
        beside = x + wide <= u + 0.01 or u + w <= x + 0.01
        assert beside or y + high <= v + 0.01 or v + h <= y + 0.01
    for text in root.iter(f"{NAMESPACE}text"):
        assert 0 <= float(text.attrib["x"]) <= width and 0 <= float(text.attrib["y"]) <= height


def test_svg_names_every_rank_and_the_sharding() -> None:
    picture = visualize(PICTURES["three axes"][0], format="svg")
    assert str(picture) == picture.svg == picture._repr_svg_()
    root = ElementTree.fromstring(picture.svg)
    texts = [text.text or "" for text in root.iter(f"{NAMESPACE}text")]
    assert "T0 f32[7, 8, 6]: [mesh_y{2} 4, mesh_z{2} 4, mesh_x{2} 3]" in texts[0]
    for rank in range(8):
        assert str(rank) in texts and f"rank {rank}" in texts
    colours = {box.attrib["fill"] for box in root.iter(f"{NAMESPACE}rect") if "class" in box.attrib}
    assert len(colours) == 8


@pytest.mark.parametrize("size", [0, 1, 5, 12, 23])
@pytest.mark.parametrize(
    "digits", [[(2, X), (6, None)], [(6, None), (2, X)], [(3, None), (2, X), (2, Y), (1, None)]]
)
def test_pieces_make_up_the_axis(digits: list[tuple[int, ParallelType | None]], size: int) -> None:
    axis = tuple(Digit(const(n), owner) for n, owner in digits)
    sharding = Sharding(make_mesh([[0, 1], [2, 3]]), (axis,))
    (pieces,) = ownership_of(sharding, [min(size, 12)], 100).pieces
    assert (pieces[0].start, pieces[-1].stop) == (0, min(size, 12))
    assert all(left.stop == right.start for left, right in pairwise(pieces))


def test_errors() -> None:
    tensor = define(SQUARE, [-1, 8], y=0)
    for shape in ([4], [4, 9], [-1, 8]):
        with pytest.raises(UserError, match=re.escape(f"visualize(T0, shape={shape})")):
            visualize(tensor, shape=shape)
    with pytest.raises(UserError, match="must be 'text' or 'svg'"):
        visualize(tensor, format="png")
    with pytest.raises(UserTypeError, match="takes a TensorView, a DistributedTensor or a DTensor"):
        visualize(torch.zeros(2))
    with pytest.raises(UserError, match=r"its global shape is \(8,\)"):
        visualize(PICTURES["two mesh axes, the last first"][0], shape=[4])


def test_a_dtensor_is_drawn_as_its_placements_say() -> None:
    """Over a group that is not there: drawing communicates nothing."""
    torch_distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        device_mesh = init_device_mesh("cpu", (2, 2))
        placements = [Shard(1), Replicate()]
        tensor = DTensor.from_local(torch.zeros(2, 3), device_mesh, placements, run_check=False)
        text = str(visualize(tensor))
    finally:
        torch_distributed.destroy_process_group()
    assert "DTensor float32[2, 6]: [2, mesh_y{2} 3] on DeviceMesh{{0 1} {2 3}}" in text
    assert "0:2 | 0, 1 | 2, 3 |" in text
