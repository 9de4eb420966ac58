"""FusionCache: the process's store of compiled programs. The only caller of pipeline.compile."""

from __future__ import annotations

import warnings
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock
from typing import ClassVar, final

import torch

from meshfuse.base.options import Options
from meshfuse.host.executors import HostIrExecutor
from meshfuse.ir.printer import print_program
from meshfuse.ir.program import Program
from meshfuse.pipeline import Compilation, compile
from meshfuse.runtime.arguments import Signature
from meshfuse.runtime.compile import KernelCompiler, find_compiler

KERNEL_DEVICES = ("cpu",)
"""Device types that kernels are generated for. Elsewhere programs run op by op through torch."""


@final
@dataclass(frozen=True, slots=True)
class CacheKey:
    """What compiled code depends on. `program` is a fingerprint."""

    program: str
    signature: Signature
    options: Options
    device: str


@final
@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A program compiled for a signature: how it was done, and what runs it."""

    compilation: Compilation
    executor: HostIrExecutor


@final
@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Counted since the process began or the last reset."""

    compilations: int = 0
    hits: int = 0


def fingerprint(program: Program) -> str:
    """A hash of the program's text: equal programs, equal fingerprints, in every process."""
    return blake2b(print_program(program).encode(), digest_size=16).hexdigest()


@final
class FusionCache:
    """Compiled programs by key. Safe to use from several threads: each key is compiled once."""

    _instance: ClassVar[FusionCache | None] = None
    _instance_lock: ClassVar[Lock] = Lock()

    def __init__(self) -> None:
        self._lock = Lock()
        self._entries: dict[CacheKey, Future[CompiledProgram]] = {}
        self._statistics = CacheStatistics()
        self._compiler: KernelCompiler | None = None
        self._has_warned = False

    @classmethod
    def instance(cls) -> FusionCache:
        """The store of this process, made at the first call."""
        with cls._instance_lock:
            if cls._instance is None:
                cls._instance = FusionCache()
            return cls._instance

    def reset(self) -> None:
        """Forget everything that was compiled, and the counts."""
        with self._lock:
            self._entries.clear()
            self._statistics = CacheStatistics()

    def statistics(self) -> CacheStatistics:
        return self._statistics

    def find(
        self,
        program: Program,
        key: str,
        signature: Signature,
        device: torch.device,
        options: Options,
    ) -> CompiledProgram:
        """The program compiled for arguments of this signature, now or before.

        `key` is the program's fingerprint, which callers keep. Sizes are no part of the signature:
        others reuse what was compiled. Raises what `pipeline.compile` does; a failure is not kept.
        """
        wanted = CacheKey(key, signature, options, str(device))
        with self._lock:
            promised = self._entries.get(wanted)
            if promised is None:
                mine = self._entries[wanted] = Future()
                self._count(compilations=1)
            else:
                self._count(hits=1)
        if promised is not None:
            return promised.result()
        try:
            mine.set_result(self._compile(program, signature, device))
        except BaseException as error:
            mine.set_exception(error)  # for those who wait; later calls try again
            with self._lock:
                self._entries.pop(wanted, None)
            raise
        return mine.result()

    def _count(self, compilations: int = 0, hits: int = 0) -> None:
        self._statistics = CacheStatistics(
            self._statistics.compilations + compilations, self._statistics.hits + hits
        )

    def _compile(
        self, program: Program, signature: Signature, device: torch.device
    ) -> CompiledProgram:
        compiler = self._compiler_for(device)
        compilation = compile(program, signature, kernels=compiler is not None)
        executor = HostIrExecutor(compilation.host, compilation.sources, compiler, device)
        return CompiledProgram(compilation, executor)

    def _compiler_for(self, device: torch.device) -> KernelCompiler | None:
        """The compiler of kernels; None, with one warning, where programs must run op by op."""
        if device.type not in KERNEL_DEVICES:
            self._warn(f"there are no kernels for {device.type} devices yet")
            return None
        with self._lock:
            if self._compiler is None and find_compiler() is not None:
                self._compiler = KernelCompiler()
        if self._compiler is None:
            self._warn("no C++ compiler is on the PATH; install g++ to have kernels")
        return self._compiler

    def _warn(self, reason: str) -> None:
        with self._lock:
            first, self._has_warned = not self._has_warned, True
        if first:
            text = f"meshfuse: {reason}: programs run op by op through torch"
            warnings.warn(text, UserWarning, stacklevel=2)
