"""Building kernels and calling them: what is shared, what is refused, what is left behind."""

from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread

import pytest
import torch

import hand_written_kernels as hand
from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import InvariantError, Unsupported, UserError
from meshfuse.codegen.cpp import print_cpp
from meshfuse.runtime.compile import (
    CompilationFailed,
    CompilerNotFound,
    KernelCompiler,
    find_compiler,
    loaded_openmp,
)
from meshfuse.runtime.launch import PARALLEL_ELEMENTS, choose_threads

NEG = print_cpp(hand.unary("neg", DataType.Float))


def test_the_same_source_is_compiled_once(compiler: KernelCompiler) -> None:
    first, second = compiler.compile_all([NEG, NEG])
    assert first.library is second.library


def test_several_sources_keep_their_order(compiler: KernelCompiler) -> None:
    kernels = [hand.unary(f, DataType.Float) for f in ("neg", "exp", "relu")]
    compiled = compiler.compile_all([print_cpp(k) for k in kernels])
    assert [c.source.kernel for c in compiled] == kernels


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() is None
    with pytest.raises(CompilerNotFound, match=r"looked for g\+\+") as refused:
        KernelCompiler()
    assert isinstance(refused.value, Unsupported)


def test_a_refused_source_is_kept_and_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    broken = replace(NEG, text="int f() { return undeclared; }")
    compiler = KernelCompiler()
    for _ in range(2):
        with pytest.raises(CompilationFailed, match="undeclared") as failed:
            compiler.compile_source(broken)
        kept = Path(str(failed.value).split("kept in ")[1].split(":\n")[0])
        assert kept.read_text() == broken.text


def test_no_file_outlasts_loading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not of a process that is killed either; and nobody's cleaning of old files is in the way."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    compiled = KernelCompiler().compile_source(NEG)
    assert list(tmp_path.iterdir()) == []
    out = torch.zeros(3)
    compiled([torch.ones(3), out], {}, {"columns": 3})
    assert out.tolist() == [-1, -1, -1]


def test_a_temporary_directory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")
    with pytest.raises(UserError, match=r"cannot be compiled .*/nonexistent.*; TMPDIR names one"):
        KernelCompiler().compile_source(NEG)


def test_kernels_use_the_openmp_that_torch_loaded(compiler: KernelCompiler) -> None:
    compiler.compile_source(NEG)
    maps = Path("/proc/self/maps").read_text()
    runtimes = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line}
    assert runtimes == {str(loaded_openmp())}


def test_a_missing_size_is_named(compiler: KernelCompiler) -> None:
    with pytest.raises(InvariantError, match="no value for size columns; given: rows"):
        compiler.compile_source(NEG)([torch.ones(3), torch.ones(3)], {}, {"rows": 3})


def test_tensors_of_another_number_or_type_are_refused(compiler: KernelCompiler) -> None:
    neg = compiler.compile_source(NEG)
    with pytest.raises(InvariantError, match="takes 2 buffers, not 1"):
        neg([torch.ones(3)], {}, {"columns": 3})
    with pytest.raises(InvariantError, match=r"t0 is DataType.Float on the CPU, the tensor is"):
        neg([torch.ones(3).double(), torch.ones(3)], {}, {"columns": 3})


def test_small_work_runs_on_one_thread() -> None:
    assert choose_threads([torch.empty(PARALLEL_ELEMENTS - 1)]) == 1
    big = torch.empty(PARALLEL_ELEMENTS)
    assert choose_threads([torch.empty(8), big]) == torch.get_num_threads()


def test_two_threads_call_one_kernel_at_once(compiler: KernelCompiler) -> None:
    kernel = compiler.compile_source(print_cpp(hand.row_reduction("sum", DataType.Int, 0)))
    inputs = [torch.full((200, 500), i) for i in (1, 2)]
    outputs = [torch.zeros(200, dtype=torch.int64) for _ in inputs]
    together = Barrier(2)

    def call(i: int) -> None:
        together.wait(timeout=10)
        for _ in range(20):
            outputs[i].zero_()
            kernel([inputs[i], outputs[i]], {}, {"rows": 200, "columns": 500})
            assert bool((outputs[i] == 500 * (i + 1)).all())

    failures: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            call(i)
        except AssertionError as failure:
            failures.append(failure)

    threads = [Thread(target=guarded, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert [int(out[0]) for out in outputs] == [500, 1000]
