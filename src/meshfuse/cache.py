"""FusionCache: the process's store of compiled programs. The only caller of pipeline.compile."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from hashlib import blake2b
from threading import Lock
from typing import Any, ClassVar, final

import torch

from meshfuse.base.bounded import BoundedTable
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.options import Options
from meshfuse.base.trace import Activity, Trace
from meshfuse.facts.overlap_form import PLAIN, Overlap
from meshfuse.host.executors import WHOLE_PROGRAM, HostIrExecutor
from meshfuse.ir.printer import print_program
from meshfuse.ir.program import Program
from meshfuse.pipeline import USER, Compilation, compile, compile_scheduled, compile_segment
from meshfuse.runtime.arguments import Signature
from meshfuse.runtime.compile import KernelCompiler, find_compiler
from meshfuse.runtime.executors import ExecutorIds

KERNEL_DEVICES = ("cpu",)
"""Device types that kernels are generated for. Elsewhere programs run op by op through torch."""

MOST_CHOICES = 4096
"""Measured choices that a process remembers."""


@final
@frozen_dataclass
class CacheKey:
    """What compiled code depends on.

    `program` is a fingerprint. `scheduler`: "" for a program that is cut into segments, USER for
    one kernel as its user scheduled it, else who has taken the program, which is one segment.
    `form`: of a program that is cut into segments.
    """

    program: str
    signature: Signature
    options: Options
    device: str
    scheduler: str = ""
    form: Overlap = PLAIN


@final
@frozen_dataclass
class CompiledProgram:
    """A program compiled for a signature: how it was done, and what runs it."""

    compilation: Compilation
    executor: HostIrExecutor


@final
@frozen_dataclass
class CacheStatistics:
    """Counted since the process began or the last reset."""

    compilations: int = 0
    hits: int = 0


def fingerprint(program: Program) -> str:
    """A hash of the program's text: equal programs, equal fingerprints, in every process."""
    return blake2b(print_program(program).encode(), digest_size=16).hexdigest()


def _translate(program: Program, key: CacheKey, kernels: bool) -> Compilation:
    if not key.scheduler:
        return compile(program, key.signature, kernels=kernels, options=key.options, form=key.form)
    if key.scheduler == USER:
        return compile_scheduled(program, key.signature, kernels=kernels, options=key.options)
    return compile_segment(
        program, key.scheduler, key.signature, kernels=kernels, options=key.options
    )


@final
class FusionCache:
    """Compiled programs by key. Safe to use from several threads: each key is compiled once."""

    _instance: ClassVar[FusionCache | None] = None
    _instance_lock: ClassVar[Lock] = Lock()

    def __init__(self) -> None:
        self._lock = Lock()
        self._entries: dict[CacheKey, Future[CompiledProgram]] = {}
        self._ids: dict[str, ExecutorIds] = {}
        self._statistics = CacheStatistics()
        self._compiler: KernelCompiler | None = None
        self._has_warned = False
        self.choices: BoundedTable[str, Mapping[str, Any]] = BoundedTable(MOST_CHOICES)
        """Measured choices as they are written to disk, by what they hold for."""

    @classmethod
    def instance(cls) -> FusionCache:
        """The store of this process, made at the first call."""
        with cls._instance_lock:
            if cls._instance is None:
                cls._instance = FusionCache()
            return cls._instance

    def reset(self) -> None:
        """Forget everything that was compiled or chosen, and the counts."""
        with self._lock:
            self._entries.clear()
            self._ids.clear()
            self._statistics = CacheStatistics()
            self.choices = BoundedTable(MOST_CHOICES)

    def statistics(self) -> CacheStatistics:
        return self._statistics

    def find(
        self,
        program: Program,
        key: str,
        signature: Signature,
        device: torch.device,
        options: Options,
        *,
        scheduler: str = "",
        form: Overlap = PLAIN,
        trace: Trace | None = None,
    ) -> CompiledProgram:
        """The program compiled for arguments of this signature, now or before.

        `key` is the program's fingerprint, which callers keep; for `scheduler` and `form` see
        CacheKey. Compiling is a span of `trace`. Sizes are no part of the signature: others reuse
        what was compiled. Raises what `pipeline.compile` does; a failure is not kept.
        """
        wanted = CacheKey(key, signature, options, str(device), scheduler, form)
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
            mine.set_result(self._compile(program, wanted, device, trace))
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
        self, program: Program, key: CacheKey, device: torch.device, trace: Trace | None
    ) -> CompiledProgram:
        if trace is not None:
            with trace.span(Activity.compile, WHOLE_PROGRAM):
                return self._compile(program, key, device, None)
        compiler = self._compiler_for(device)
        compilation = _translate(program, key, kernels=compiler is not None)
        executor = HostIrExecutor(
            compilation.host,
            compilation.sources,
            compiler,
            device,
            compilation.schedulers,
            self._number(key.program),
        )
        return CompiledProgram(compilation, executor)

    def _number(self, program: str) -> ExecutorIds:
        """The ids of what is compiled next for a program: programs count up, and so do its forms.

        One concretisation serves all sizes: extents stay symbols.
        """
        with self._lock:
            latest = self._ids.get(program)
            if latest is None:
                ids = ExecutorIds(fusion=len(self._ids))
            else:
                ids = replace(latest, runtime=latest.runtime + 1)
            self._ids[program] = ids
            return ids

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
