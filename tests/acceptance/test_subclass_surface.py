"""Definitions as subclasses: their hooks, the options of `execute`, and what it leaves to ask for.

Results know their own shardings (S0 of the contract); user schedules are kept by signature.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import meshfuse
from gloo_run import run_ranks
from meshfuse import DistributedTensor, FusionCache, FusionDefinition, ParallelType, TensorView
from meshfuse.multidevice import DeviceMesh, Sharding, shard_tensor, simulate
from sharded_cases import CASES

X = torch.arange(12.0).reshape(3, 4)
MESH_X = ParallelType.mesh_x


class RowSums(FusionDefinition):
    """Sums of rows; counts how often each hook runs."""

    def __init__(self) -> None:
        super().__init__()
        self.defined = 0

    def definition(self) -> None:
        self.defined += 1
        self.x = self.define_tensor([-1, -1])
        self.e = self.ops.mul(self.x, 2.0)
        self.y = self.ops.sum(self.e, [1])
        self.add_output(self.y)


class ScheduledRowSums(RowSums):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def schedule(self) -> None:
        self.seen.append(repr(self.y))
        self.y.split(0, 2)
        self.y.axis(0).parallelize(ParallelType.grid_x)


class ShardedRowSums(RowSums):
    def multidevice_schedule(self) -> None:
        mesh = DeviceMesh(range(3))
        for tensor in (self.x, self.y):
            tensor.set_device_mesh(mesh)
            tensor.outer_split(0, 3)
            tensor.axis(0).parallelize(MESH_X)


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    FusionCache.instance().reset()
    yield


# The hooks.


def test_definition_runs_once_and_its_handles_stay() -> None:
    fd = RowSums()
    for x in (X, X[:2], X.mT):
        assert torch.equal(fd.execute([x])[0], 2 * x.sum(1))
    assert fd.defined == 1
    assert fd.fusion.outputs() == [fd.y]
    assert "tv1 = fd.ops.mul(tv0, 2.0)" in repr(fd)


def test_multidevice_schedule_runs_once_and_shards() -> None:
    fd = ShardedRowSums()
    for _ in range(2):
        results = simulate(fd, [X])
    assert [out.tolist() for [out] in results] == [[12.0], [44.0], [76.0]]
    assert fd.defined == 1
    [first] = results[0]
    assert isinstance(first, DistributedTensor)
    assert first.axis_sharded_on(MESH_X) == 0


def test_schedule_runs_once_for_each_signature() -> None:
    fd = ScheduledRowSums()
    for x in (X, X[:2], torch.randn(64, 5), X.mT, X.mT, X[:, :1]):
        torch.testing.assert_close(fd.execute([x])[0], 2 * x.sum(1))
    assert len(fd.seen) == 3  # row-major, column-major, a row of one element
    assert fd.defined == 1


def test_schedule_works_on_a_copy() -> None:
    fd = ScheduledRowSums()
    fd.execute([X])
    fd.execute([X.mT])
    assert fd.seen[0] == fd.seen[1] == repr(fd.y)
    assert "split" not in repr(fd)
    with pytest.raises(RuntimeError, match="has been executed, and its program is fixed"):
        fd.y.split(0, 2)


def test_schedule_is_what_runs(nothing_compiled: None) -> None:
    fd = ScheduledRowSums()
    fd.execute([X], profile=True)
    assert [k.scheduler for k in fd.profile().kernel_profiles] == ["user"]
    assert "Split(a4, a6, a7, 2, true)" in fd.fec.get_scheduled_ir([X])
    fd.execute([X], override_user_schedule=True, profile=True)
    assert [k.scheduler for k in fd.profile().kernel_profiles] == ["reduction"]


def test_profile_schedules_again() -> None:
    fd = ScheduledRowSums()
    fd.execute([X])
    fd.execute([X])
    assert len(fd.seen) == 1
    fd.execute([X], profile=True)
    assert len(fd.seen) == 2


def test_overriding_never_schedules() -> None:
    fd = ScheduledRowSums()
    assert torch.equal(fd.execute([X], override_user_schedule=True)[0], 2 * X.sum(1))
    assert fd.seen == []


def test_schedule_sees_one_symbol_for_one_size() -> None:
    class Sum(FusionDefinition):
        seen = ""

        def definition(self) -> None:
            self.a, self.b = self.define_tensor([-1]), self.define_tensor([-1])
            self.c = self.ops.add(self.a, self.b)
            self.add_output(self.c)

        def schedule(self) -> None:
            self.seen = repr(self.b)

    fd = Sum()
    assert torch.equal(fd.execute([X[0], X[1]])[0], X[0] + X[1])
    assert (fd.seen, repr(fd.b)) == ("T1 f32[i0]", "T1 f32[i1]")


def test_both_schedules_are_an_error() -> None:
    class Both(ShardedRowSums):
        def schedule(self) -> None:
            """Anything."""

    with pytest.raises(AssertionError, match=r"both schedule\(\) and multidevice_schedule\(\)"):
        Both().execute([X])


def test_a_schedule_defines_no_outputs() -> None:
    class Defines(RowSums):
        def schedule(self) -> None:
            self.add_output(self.e)

    with pytest.raises(RuntimeError, match="a schedule may not define inputs or outputs"):
        Defines().execute([X])


def test_a_schedule_of_what_no_kernel_computes() -> None:
    class Product(FusionDefinition):
        def definition(self) -> None:
            x = self.from_pytorch(X)
            self.add_output(self.ops.matmul(x, self.ops.permute(x, [1, 0])))

        def schedule(self) -> None:
            """Nothing: one serial kernel."""

    with pytest.raises(RuntimeError, match="is one kernel: kernel: T2: runs no MatMul"):
        Product().execute([X])


def test_a_definition_that_raises_leaves_nothing_behind() -> None:
    class Fails(RowSums):
        fail = True

        def definition(self) -> None:
            super().definition()
            if self.fail:
                raise ValueError("not yet")

    fd = Fails()
    with pytest.raises(ValueError, match="not yet"):
        fd.execute([X])
    fd.fail = False
    assert torch.equal(fd.execute([X])[0], 2 * X.sum(1))
    assert len(fd.fusion.inputs()) == 1


def test_an_empty_subclass_has_nothing_to_run() -> None:
    class Empty(FusionDefinition):
        pass

    with pytest.raises(NotImplementedError, match="Fusion is empty!"):
        Empty().execute([])


# Shardings of results.


def test_impossible_shardings() -> None:
    mesh = DeviceMesh(range(2))
    with pytest.raises(RuntimeError, match="already used to shard axis 0"):
        Sharding(mesh, [(MESH_X, 0), (MESH_X, 1)])
    with pytest.raises(RuntimeError, match="is no device type"):
        Sharding(mesh, {ParallelType.block_x: 0})
    not_distributed: Any = None
    with pytest.raises(RuntimeError, match="a sharding needs a mesh"):
        Sharding(not_distributed, {MESH_X: 0})


def test_a_user_scheduled_run_returns_plain_tensors() -> None:
    class Local(ScheduledRowSums):
        def definition(self) -> None:
            super().definition()
            mesh = DeviceMesh(range(3))
            for tensor in (self.x, self.e, self.y):
                tensor.set_device_mesh(mesh)
                tensor.outer_split(0, 3)
                tensor.axis(0).parallelize(MESH_X)

        def schedule(self) -> None:
            self.y.split(1, 2)

    x = torch.arange(24.0).reshape(6, 4)
    fd = Local()
    results = simulate(fd, [x])
    assert [type(out) for [out] in results] == [torch.Tensor] * 3
    assert torch.equal(torch.cat([out for [out] in results]), 2 * x.sum(1))
    assert fd.fec.get_output_shardings() == []


def test_results_keep_their_own_shardings() -> None:
    """A later call through the same definition, of another size or program, changes none."""
    fd = ShardedRowSums()
    [[early], *_] = simulate(fd, [X])
    [[late], *_] = simulate(fd, [torch.zeros(6, 2)])
    plain = RowSums().execute([X])[0]
    assert isinstance(early, DistributedTensor)
    assert isinstance(late, DistributedTensor)
    assert type(plain) is torch.Tensor
    assert (early.axis_sharded_on(MESH_X), late.axis_sharded_on(MESH_X)) == (0, 0)
    assert (early.shape, late.shape) == ((1,), (2,))


# What `execute` leaves to ask for.


def test_debug_output_is_captured_or_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dumps = "fusion_ir_original,fusion_ir_preseg,segmented_fusion,kernel_ir,cuda_kernel,host_ir"
    monkeypatch.setenv("MESHFUSE_DUMP", dumps)
    fd = RowSums()
    fd.execute([X], capture_debug_output=True)
    text = fd.get_debug_output()
    assert text is not None
    assert [line for line in text.splitlines() if line.startswith("-- ")] == [
        f"-- {name} --" for name in dumps.split(",")
    ]
    assert 'extern "C" void meshfuse_S0' in text
    assert capsys.readouterr().out == ""
    other = RowSums()
    other.execute([X])
    assert capsys.readouterr().out == text
    other.execute([X])
    assert capsys.readouterr().out == ""
    assert other.get_debug_output() is None
    fd.execute([X])
    assert fd.get_debug_output() is None


def test_repro_scripts_run(capsys: pytest.CaptureFixture[str]) -> None:
    fd = RowSums()
    with pytest.raises(AssertionError, match=r"fd\.last_repro_script\(\).*save_repro_inputs=True"):
        fd.last_repro_script()
    fd.execute([X.mT], save_repro_inputs=True, print_repro=True)
    script = fd.last_repro_script()
    assert capsys.readouterr().out == script + "\n"
    assert "torch.randn(12, dtype=torch.float32, device='cpu').as_strided((4, 3), (1, 4))" in script
    scope: dict[str, Any] = {}
    exec(script, scope)
    assert repr(scope["fd"]) == repr(fd)
    assert [type(value).__name__ for value in fd.fake_inputs or []] == ["FakeTensor"]


def test_repro_scripts_take_scalars_and_meshes() -> None:
    with FusionDefinition() as fd:
        x = fd.from_pytorch(X.int())
        fd.add_output(fd.ops.where(fd.ops.lt(x, 3), x, fd.define_scalar(meshfuse.DataType.Double)))
        x.set_device_mesh(DeviceMesh([0]))
    fd.execute([X.int(), float("inf")], save_repro_inputs=True)
    script = fd.last_repro_script()
    assert 'float("inf")' in script
    assert "from meshfuse import FusionDefinition, DataType, multidevice" in script
    scope: dict[str, Any] = {}
    exec(script, scope)
    assert fd.fake_inputs is not None
    assert fd.fake_inputs[1] == float("inf")
    assert "inputs" not in fd.repro_script_for()


def test_segments_run_one_by_one(nothing_compiled: None) -> None:
    with FusionDefinition() as fd:
        x, w = fd.from_pytorch(X), fd.define_tensor([-1, -1])
        y = fd.ops.linear(fd.ops.exp(x), w)
        fd.add_output(fd.ops.sum(y, [0]))
        fd.add_output(y)
    inputs = [X / 12, X + 1]
    whole = fd.execute(inputs)
    fd.segment(inputs)
    assert [(s.name, s.scheduler) for s in fd.segments] == [
        ("S0", "pointwise"),
        ("S1", "expr_eval"),
        ("S2", "reduction"),
    ]
    parts = fd.execute(inputs, device="cpu", profile=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert [k.name for k in fd.profile().kernel_profiles] == ["S0", "linear T3", "S2"]
    torch.testing.assert_close(fd.segments[0].execute([X])[0], X.exp())
    assert repr(fd.segments[1]).startswith("# S1: expr_eval\nprogram")


def run_in_segments(rank: int, size: int, name: str) -> list[tuple[bool, bool]]:
    """For each output, whether segments give what the whole program gives, and is sharded alike."""
    built = CASES[name](size)
    sharded = zip(built.inputs, built.fd.fusion.inputs(), strict=True)
    inputs = [shard_tensor(x, tv) for x, tv in sharded if isinstance(tv, TensorView)]
    whole = built.fd.execute(inputs)
    built.fd.segment(inputs)
    parts = built.fd.execute(inputs)
    results: list[tuple[bool, bool]] = []
    for a, b in zip(whole, parts, strict=True):
        assert isinstance(a, DistributedTensor)
        assert isinstance(b, DistributedTensor)
        results.append((torch.equal(a.local, b.local), str(a.sharding) == str(b.sharding)))
    return results


def test_segments_run_one_by_one_on_a_mesh() -> None:
    """Between them lie partial results, one of them copied by a segment of its own."""
    expected = [(True, True)]
    assert run_ranks(run_in_segments, 2, "sequence_parallel_mlp") == [expected, expected]


def test_updates_in_place_have_no_segments() -> None:
    with FusionDefinition() as fd:
        x = fd.from_pytorch(X)
        fd.add_output(fd.ops.exp(x), x)
    with pytest.raises(RuntimeError, match="T1 updates input T0 in place"):
        fd.segment([X])


def test_what_is_compiled_for_inputs(nothing_compiled: None) -> None:
    fd = RowSums()
    assert not fd.fec.is_compiled([X])
    with pytest.raises(RuntimeError, match="Fusion is not compiled!"):
        fd.fec.get_cuda_kernel([X])
    fd.execute([X])
    assert fd.fec.is_compiled([X[:2]])
    assert not fd.fec.is_compiled([X.mT])
    assert fd.fec.get_cuda_kernel([X]).startswith('extern "C"')
    assert len(fd.fec.get_cuda_kernel([X], intrinsic_code=True)) > 10_000
    assert fd.fec.get_scheduled_ir([X]) == fd.fec.get_most_recent_scheduled_ir()
    assert 'kernel("S0")' in fd.fec.get_most_recent_scheduled_ir(tensor_transforms=True)


def test_an_executor_cache_of_its_own() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        y = fd.ops.exp(x)
        fd.add_output(y)
        y.split(0, 2)
    fec = meshfuse.FusionExecutorCache(fd.fusion, auto_schedule=False)
    torch.testing.assert_close(fec.execute([X])[0], X.exp())
    assert "Split(a2, a4, a5, 2, true)" in fec.get_most_recent_scheduled_ir()
