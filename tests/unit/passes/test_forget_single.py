"""Reduced axes of one element are whole on every rank."""

from meshfuse import FusionDefinition
from meshfuse.facts.sharding import reduced_mesh_axes
from meshfuse.multidevice import DeviceMesh
from meshfuse.passes.forget_single import forget_single


def sums(size: int) -> FusionDefinition:
    """Of rows of `size`, over the ranks."""
    mesh = DeviceMesh(range(2))
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, size], contiguity=[True, None if size == 1 else True])
        y = fd.define_tensor([3, size], contiguity=[True, None if size == 1 else True])
        out = fd.ops.linear(x, y)
        fd.add_output(out)
        for tensor in (x, y, out):
            tensor.set_device_mesh(mesh)
        out.outer_split(2, 2).axis(2).parallelize(mesh.axis(0))
    return fd


def test_one_term_crosses_no_ranks() -> None:
    program = sums(1).fusion.recording.program
    (out,) = [output.tensor for output in program.fusion.outputs]
    assert reduced_mesh_axes(program, out)
    after, notes = forget_single(program)
    assert not reduced_mesh_axes(after, out)
    assert after.schedule(out).leaves == tuple(a.name for a in after.tensor(out).logical)
    assert [(note.subject, note.kind) for note in notes] == [(out, "forgotten")]


def test_several_terms_do() -> None:
    program = sums(6).fusion.recording.program
    assert forget_single(program) == (program, ())
