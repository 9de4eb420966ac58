"""What is compiled again, and what is not."""

from __future__ import annotations

import threading

import pytest
import torch

from meshfuse import DistributedTensor, FusionDefinition, ParallelType
from meshfuse import cache as cache_module
from meshfuse.base.options import Option, Options
from meshfuse.cache import CacheStatistics, CompiledProgram, FusionCache, fingerprint
from meshfuse.dist.communicator import Communicator
from meshfuse.ir.program import Program
from meshfuse.multidevice import DeviceMesh, simulate
from meshfuse.runtime.arguments import signature_of
from small_programs import sequence_parallel_mlp, softplus_rows, tensor_input

CPU = torch.device("cpu")


def find(cache: FusionCache, x: torch.Tensor, options: Options | None = None) -> CompiledProgram:
    program = softplus_rows()
    return cache.find(program, fingerprint(program), signature_of([x]), CPU, options or Options())


def test_other_sizes_and_an_equal_program_reuse_what_was_compiled() -> None:
    cache = FusionCache()
    first = find(cache, torch.randn(4, 5))
    second = find(cache, torch.randn(7, 300))
    assert first is second
    assert cache.statistics() == CacheStatistics(compilations=1, hits=1)
    y, total = second.executor.run([torch.zeros(7, 300)], Communicator({}))
    assert torch.equal(y, torch.full((7, 300), 2.0))
    assert torch.equal(total, torch.full((7,), 600.0))


def test_strides_sizes_of_one_and_options_tell_apart() -> None:
    cache, x = FusionCache(), torch.randn(4, 5)
    made = [
        find(cache, x),
        find(cache, x.T),
        find(cache, x[:1]),
        find(cache, x, options=Options(disable=(Option("fma"),))),
    ]
    assert len(set(map(id, made))) == 4
    assert cache.statistics().compilations == 4


def test_fingerprints_tell_programs_apart() -> None:
    one, other = tensor_input(Program(), [-1])[0], tensor_input(Program(), [2])[0]
    meshes = {fingerprint(sequence_parallel_mlp(ranks).program) for ranks in (1, 2)}
    assert fingerprint(softplus_rows()) == fingerprint(softplus_rows())
    assert len({fingerprint(one), fingerprint(other), *meshes}) == 4


def test_reset_forgets() -> None:
    cache, x = FusionCache(), torch.randn(4, 5)
    first = find(cache, x)
    cache.reset()
    assert cache.statistics() == CacheStatistics()
    assert find(cache, x) is not first


def test_threads_that_ask_at_once_compile_once() -> None:
    cache, x = FusionCache(), torch.randn(4, 5)
    found: list[CompiledProgram] = []
    threads = [threading.Thread(target=lambda: found.append(find(cache, x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert cache.statistics().compilations == 1


def test_ranks_with_parts_alike_share_what_is_compiled() -> None:
    """Of 9 rows over 8 ranks, 4 have two each, one has one, and three none: two signatures."""
    mesh = DeviceMesh(range(8))
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.sum(fd.ops.tanh(x), [1]))
        x.set_device_mesh(mesh)
        x.outer_split(0, 8).axis(0).parallelize(ParallelType.mesh_x)
    value = torch.randn(9, 4)
    before = FusionCache.instance().statistics().compilations
    results = simulate(fd, [value])
    assert FusionCache.instance().statistics().compilations - before == 2
    parts = [result.local for (result,) in results if isinstance(result, DistributedTensor)]
    assert [len(part) for part in parts] == [2, 2, 2, 2, 1, 0, 0, 0]
    torch.testing.assert_close(torch.cat(parts), value.tanh().sum(1))


def test_without_a_compiler_programs_run_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(cache_module, "find_compiler", lambda: None)
    cache, x = FusionCache(), torch.randn(4, 5)
    compiled = find(cache, x)
    find(cache, x.T)
    assert [str(warning.message) for warning in recwarn] == [
        "meshfuse: no C++ compiler is on the PATH; install g++ to have kernels: "
        "programs run op by op through torch"
    ]
    assert compiled.compilation.host.kernels == {}
    assert [note.kind for note in compiled.compilation.notes] == ["op_by_op"]
    [y, _] = compiled.executor.run([x], Communicator({}))
    torch.testing.assert_close(y, x.exp() + 1)


def test_a_failure_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no")

    cache, x = FusionCache(), torch.randn(4, 5)
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "compile", fail)
        with pytest.raises(RuntimeError, match="no"):
            find(cache, x)
    assert find(cache, x).compilation.host.kernels
