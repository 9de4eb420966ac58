"""Compile C++ kernels with g++ and load them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from itertools import repeat
from pathlib import Path
from threading import Lock
from typing import final

from meshfuse.base.errors import InvariantError, Unsupported, UserError
from meshfuse.base.trace import Activity, Trace, Work
from meshfuse.codegen.source import KernelSource
from meshfuse.runtime.launch import CompiledKernel

# No -ffast-math, not even at link time: its start-up code makes the whole process flush subnormal
# numbers to zero. Without -fno-math-errno a square root is a call.
FLAGS = (
    "-std=c++17 -O3 -march=native -fno-math-errno -fno-trapping-math -ffp-contract=off -fwrapv "
    "-fopenmp -fPIC -shared -Wno-psabi -Wl,--as-needed"
).split()
COMPILER_NAMES = ("g++",)
TIMEOUT_SECONDS = 120
_ERROR_LINES = 12


@final
class CompilerNotFound(Unsupported):
    """This machine has no C++ compiler. The caller can run the program op by op instead."""


@final
class CompilationFailed(InvariantError):
    """g++ refused a kernel: a bug in the printer, or a compiler too old. The source is kept."""


def find_compiler() -> Path | None:
    """The C++ compiler on the PATH, None if there is none."""
    found = (shutil.which(name) for name in COMPILER_NAMES)
    return next((Path(path) for path in found if path is not None), None)


def loaded_openmp() -> Path | None:
    """The libgomp that this process has loaded already, by torch as a rule.

    Kernels link to that very file: a second OpenMP runtime would put a second team of threads on
    the same cores. torch's CUDA wheels carry it under a name of their own.
    """
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libgomp") and Path(path).exists():
            return Path(path)
    return None


@final
class KernelCompiler:
    """Compiles each distinct source once. Files last no longer than it takes to load them.

    Safe to use from several threads; compiling the same source at once compiles it once.
    """

    def __init__(self, compiler: Path | None = None) -> None:
        """Raises CompilerNotFound if `compiler` is None and there is none on the PATH."""
        found = compiler or find_compiler()
        if found is None:
            names = ", ".join(COMPILER_NAMES)
            raise CompilerNotFound(f"no C++ compiler on the PATH (looked for {names})")
        self._compiler = found
        self._lock = Lock()
        self._libraries: dict[str, Future[ctypes.CDLL]] = {}

    def compile_source(self, source: KernelSource, trace: Trace | None = None) -> CompiledKernel:
        """The kernel, ready to call; building it is a span of `trace`.

        Raises CompilationFailed with the compiler's first errors.
        """
        digest = blake2b(source.text.encode(), digest_size=16).hexdigest()
        with self._lock:
            promised = self._libraries.get(digest)
            mine: Future[ctypes.CDLL] = Future()
            if promised is None:
                self._libraries[digest] = mine
        if promised is not None:
            return CompiledKernel(source, promised.result())
        try:
            mine.set_result(self._build_traced(source, digest, trace))
        except BaseException as error:
            mine.set_exception(error)  # for those who wait; later calls try again
            with self._lock:
                del self._libraries[digest]
            raise
        return CompiledKernel(source, mine.result())

    def compile_all(
        self, sources: Sequence[KernelSource], trace: Trace | None = None
    ) -> tuple[CompiledKernel, ...]:
        """Compile several kernels, as many at once as this process may use cores."""
        if len(sources) < 2:
            return tuple(self.compile_source(source, trace) for source in sources)
        workers = min(len(sources), len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(workers, thread_name_prefix="meshfuse-compile") as pool:
            return tuple(pool.map(self.compile_source, sources, repeat(trace)))

    def _build_traced(self, source: KernelSource, digest: str, trace: Trace | None) -> ctypes.CDLL:
        if trace is None:
            return self._build(source, digest)
        with trace.span(Activity.compile, Work(source.kernel.name, "none", 0)):
            return self._build(source, digest)

    def _build(self, source: KernelSource, digest: str) -> ctypes.CDLL:
        """Compile in a directory of its own; once it is loaded the library needs no file."""
        try:
            with tempfile.TemporaryDirectory(prefix="meshfuse-") as folder:
                return ctypes.CDLL(str(self._compile_file(source, digest, Path(folder))))
        except OSError as error:
            raise UserError(
                f"{source.entry} cannot be compiled in the temporary directory: {error}; "
                "TMPDIR names one that has room and lets programs run"
            ) from error

    def _compile_file(self, source: KernelSource, digest: str, folder: Path) -> Path:
        text, library = folder / f"{digest}.cpp", folder / f"{digest}.so"
        text.write_text(source.text, encoding="utf-8")
        openmp = loaded_openmp()
        command = [str(self._compiler), *FLAGS, str(text), "-o", str(library)]
        command += [] if openmp is None else [str(openmp)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompilationFailed(f"{source.entry}: {error}") from error
        if done.returncode:
            raise CompilationFailed(_explain_failure(source, command, done.stderr))
        return library


def _explain_failure(source: KernelSource, command: Sequence[str], errors: str) -> str:
    kept = Path(tempfile.mkdtemp(prefix="meshfuse-failed-")) / f"{source.entry}.cpp"
    kept.write_text(source.text, encoding="utf-8")
    first = [line for line in errors.splitlines() if "error" in line] or errors.splitlines()
    reason = "\n  ".join(first[:_ERROR_LINES])
    return f"{command[0]} refused {source.entry}; its source is kept in {kept}:\n  {reason}"
