"""MultiDeviceExecutor: what each parameter does, what is refused, and the host program as text."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from host_loops import chunks, define, dense
from meshfuse import CommunicatorBackend, FusionDefinition
from meshfuse.base.errors import Unsupported, UserError, UserTypeError, UserValueError
from meshfuse.host.nodes import HostProgram, OnStream, all_nodes
from meshfuse.host.parser import parse_host_program
from meshfuse.ir.axes import TensorName
from meshfuse.ir.schedule import Swizzle1d
from meshfuse.multidevice import (
    DeviceMesh,
    MultiDeviceExecutor,
    MultiDeviceExecutorParams,
    Overlap,
)
from meshfuse.passes.rotate_streams import rotate_streams
from sharded_runs import integers


def in_chunks(fd: FusionDefinition) -> None:
    """[6, 4] @ [4, 5] in three chunks of rows."""
    x, w = dense(fd, 6, 4), dense(fd, 4, 5)
    y = fd.ops.matmul(x, w)
    chunks(y, 0, 3)
    fd.add_output(y)


def on_mesh(fd: FusionDefinition, *shape: int) -> None:
    """As `in_chunks`, on a mesh where every rank has all."""
    in_chunks(fd)
    mesh = DeviceMesh(torch.arange(torch.Size(shape).numel()).view(shape))
    for tensor in fd.fusion.vals():
        cast(Any, tensor).set_device_mesh(mesh)


X, W = integers(6, 4), integers(4, 5)


def program_of(executor: MultiDeviceExecutor) -> HostProgram:
    return parse_host_program(str(executor))


def test_a_copy_of_the_program_runs() -> None:
    fd = define(in_chunks)
    executor = MultiDeviceExecutor(fd.fusion, MultiDeviceExecutorParams())
    fd.add_output(fd.ops.neg(fd.fusion.outputs()[0]))  # the definition is still open
    found = executor.run([X, W])
    assert len(found) == 1
    assert torch.equal(found[0], X @ W)
    assert len(fd.execute([X, W])) == 2


def test_its_text_is_the_host_program_before_and_after_a_run() -> None:
    executor = MultiDeviceExecutor(define(in_chunks).fusion)
    planned = program_of(executor)
    executor.run([X, W])
    assert [type(node) for node in all_nodes(planned.body)] == [
        type(node) for node in all_nodes(program_of(executor).body)
    ]
    assert any(isinstance(node, OnStream) for node in all_nodes(planned.body))


@pytest.mark.parametrize("streams", [1, 2])
def test_the_number_of_streams(streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_ENABLE", "number_of_streams(3)")
    params = MultiDeviceExecutorParams()
    params.number_of_streams = streams
    executor = MultiDeviceExecutor(define(in_chunks).fusion, params)
    used = {str(n.stream) for n in all_nodes(program_of(executor).body) if isinstance(n, OnStream)}
    assert used == ({"j0 % 2"} if streams == 2 else set())
    assert torch.equal(executor.run([X, W])[0], X @ W)


def test_ordered_iterations_have_one_stream() -> None:
    params = MultiDeviceExecutorParams(inter_stream_synchronization=True)
    executor = MultiDeviceExecutor(define(in_chunks).fusion, params)
    assert "on_stream" not in str(executor)
    assert "number_of_streams 4: 1 for loops over chunks, as inter_stream" in executor.explain()


def test_an_allocation_cache_changes_nothing_and_says_so() -> None:
    params = MultiDeviceExecutorParams(use_allocation_cache=True)
    executor = MultiDeviceExecutor(define(in_chunks).fusion, params)
    assert "use_allocation_cache True: changes nothing: " in executor.explain()
    first, second = executor.run([X, W]), executor.run([2 * X, W])
    assert torch.equal(first[0], X @ W)
    assert torch.equal(second[0], 2 * X @ W)


def test_loops_begin_with_the_ranks_own_chunk() -> None:
    fd = define(lambda fd: on_mesh(fd, 3))
    params = MultiDeviceExecutorParams(offset_stream_indexing_by_rank=True)
    assert "chunk(T0, 0, 2*((j0 + x_3_0) % 3))" in str(MultiDeviceExecutor(fd.fusion, params))
    assert "chunk(T0, 0, 2*j0)" in str(MultiDeviceExecutor(fd.fusion))
    rotated = rotate_streams(rotate_streams(fd.fusion.recording.program))
    steps = rotated.schedule(TensorName(fd.fusion.outputs()[0].name)).steps
    assert sum(isinstance(step, Swizzle1d) for step in steps) == 1
    with pytest.raises(Unsupported, match=r"lies on no mesh.*set_device_mesh"):
        MultiDeviceExecutor(define(in_chunks).fusion, params)
    with pytest.raises(Unsupported, match=r"along each of mesh_y, mesh_x; .*swizzle1d\(0, "):
        MultiDeviceExecutor(define(lambda fd: on_mesh(fd, 2, 2)).fusion, params)


def test_backends_that_do_not_fit_the_device_are_refused() -> None:
    fusion = define(in_chunks).fusion
    for backend in (CommunicatorBackend.nccl, CommunicatorBackend.cuda):
        executor = MultiDeviceExecutor(fusion, MultiDeviceExecutorParams(backend_type=backend))
        with pytest.raises(UserError, match=f"{backend}, which does not move tensors on cpu"):
            executor.run([X, W])
    gloo = MultiDeviceExecutorParams(backend_type=CommunicatorBackend.gloo)
    executor = MultiDeviceExecutor(fusion, gloo)
    assert torch.equal(executor.run([X, W])[0], X @ W)
    assert "backend_type gloo: changes nothing" in executor.explain()
    with pytest.raises(Unsupported, match="UCC is not built in"):
        MultiDeviceExecutor(fusion, MultiDeviceExecutorParams(backend_type=CommunicatorBackend.ucc))


def test_the_number_of_inputs_is_checked() -> None:
    executor = MultiDeviceExecutor(define(in_chunks).fusion)
    with pytest.raises(UserError, match=r"MultiDeviceExecutor\.run: .* has 2 inputs .*but got 1"):
        executor.run([X])


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("use_allocation_cache", 1, UserTypeError, "True or False, got 1"),
        ("number_of_streams", True, UserTypeError, "is an int, got True"),
        ("number_of_streams", 0, UserError, "1 or more, got 0"),
        ("backend_type", "nccl", UserTypeError, "is a CommunicatorBackend, got 'nccl'"),
        ("overlap", "maybe", UserValueError, "takes 'auto', 'off', 'require'"),
    ],
)
def test_parameters_are_checked(
    name: str, value: object, error: type[Exception], text: str
) -> None:
    params = MultiDeviceExecutorParams()
    setattr(params, name, value)
    with pytest.raises(error, match=text):
        MultiDeviceExecutor(define(in_chunks).fusion, params)


def test_what_is_no_program_is_refused() -> None:
    with pytest.raises(UserTypeError, match=r"as fd\.fusion"):
        MultiDeviceExecutor(cast(Any, define(in_chunks)))
    with pytest.raises(UserTypeError, match="MultiDeviceExecutorParams"):
        MultiDeviceExecutor(define(in_chunks).fusion, cast(Any, {}))
    with pytest.raises(UserError, match="no outputs"):
        MultiDeviceExecutor(FusionDefinition().fusion)
    with pytest.raises(AttributeError):
        cast(Any, MultiDeviceExecutorParams()).streamz = 3


def test_a_form_of_overlap_is_in_its_text() -> None:
    mesh = DeviceMesh(range(2))
    with FusionDefinition() as fd:
        x, w = dense(fd, 8, 4), dense(fd, 6, 4)
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        for tensor in (x, w):
            tensor.set_device_mesh(mesh)
            tensor.outer_split(1, 2).axis(1).parallelize(mesh.axis(0))
        y.set_device_mesh(mesh)
    params = MultiDeviceExecutorParams(overlap=Overlap.chunks(4))
    assert "for_loop(j0, 4)" in str(MultiDeviceExecutor(fd.fusion, params))
    assert "for_loop" not in str(MultiDeviceExecutor(fd.fusion))


def test_host_ir_lowering_changes_nothing() -> None:
    fd = define(in_chunks)
    fd.execute([X, W])
    before = fd.fec.host_program()
    fd.execute([X, W], _enable_options=["host_ir_lowering"])
    assert fd.fec.host_program() == before
