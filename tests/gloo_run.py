"""Runs a function as several ranks: one spawned process each, joined by gloo, with a hard deadline.

    def work(rank: int, world_size: int, factor: int) -> list[float]: ...

    assert run_ranks(work, 2, 10) == [[0.0], [10.0]]

`work` is a function of a test module's top level. It runs in fresh interpreters with one OpenMP
thread, after torch.distributed's default process group was set up over a file. What it returns
must pickle without the test module: plain data and tensors. Children load `work` from its file, so
a test module needs no name that can be imported; it may import what stands in tests/.

run_ranks wants all ranks to succeed. observe_ranks is for ranks that are meant to fail. Neither
outlasts its deadline (seconds), and no child outlasts either.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FAILED = 70
"""Exit code of a rank whose function raised."""
LATER_RANKS_SECONDS = 5.0
"""Once a rank has failed, the others get this long to end by themselves."""


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: what its function returned, or what it raised as text, and the exit code.

    `code` is None for a rank that was killed at the deadline. `output` is what it printed.
    `seconds` is the time its function took.
    """

    value: Any
    error: str | None
    code: int | None
    output: str
    seconds: float

    @property
    def succeeded(self) -> bool:
        return self.code == 0 and self.error is None


@dataclass(frozen=True)
class _Job:
    path: str
    name: str
    world_size: int
    arguments: tuple[Any, ...]
    folder: str
    initialise: bool


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    deadline: float = 60.0,
    environ: Callable[[int], Mapping[str, str]] | None = None,
) -> list[Any]:
    """`function(rank, world_size, *arguments)` of every rank, in rank order.

    Raises AssertionError with the traceback of each rank that failed or came to no end.
    """
    outcomes = observe_ranks(
        function,
        world_size,
        *arguments,
        deadline=deadline,
        stop_after_failure=True,
        environ=environ,
    )
    failed = [(rank, o) for rank, o in enumerate(outcomes) if not o.succeeded]
    if failed:
        raise AssertionError("\n".join(_report(rank, outcome) for rank, outcome in failed))
    return [outcome.value for outcome in outcomes]


def observe_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    deadline: float = 60.0,
    stop_after_failure: bool = False,
    initialise: bool = True,
    environ: Callable[[int], Mapping[str, str]] | None = None,
) -> list[Outcome]:
    """How each rank ended. Ranks still alive at the deadline are killed.

    `initialise` False leaves out the default process group; `environ(rank)` adds environment
    variables.
    """
    limit = time.monotonic() + deadline
    with tempfile.TemporaryDirectory() as folder:
        job = _Job(
            function.__code__.co_filename,
            function.__qualname__,
            world_size,
            arguments,
            folder,
            initialise,
        )
        Path(folder, "job").write_bytes(pickle.dumps(job))
        children = [
            _start(folder, rank, environ(rank) if environ else {}) for rank in range(world_size)
        ]
        try:
            _await_all(children, limit, stop_after_failure)
        finally:
            codes = [_end(child) for child in children]
        return [_collect(folder, rank, code) for rank, code in enumerate(codes)]


def _start(folder: str, rank: int, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    search = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    with Path(folder, f"output{rank}").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, __file__, folder, str(rank)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search, **environ},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _await_all(
    children: Sequence[subprocess.Popen[bytes]], limit: float, stop_after_failure: bool
) -> None:
    while time.monotonic() < limit:
        codes = [child.poll() for child in children]
        if None not in codes:
            return
        if stop_after_failure and any(codes):
            limit = min(limit, time.monotonic() + LATER_RANKS_SECONDS)
            stop_after_failure = False
        time.sleep(0.02)


def _end(child: subprocess.Popen[bytes]) -> int | None:
    code = child.poll()
    if code is None:
        child.kill()
        child.wait()
    return code


def _collect(folder: str, rank: int, code: int | None) -> Outcome:
    output = Path(folder, f"output{rank}").read_text(encoding="utf-8", errors="replace")
    result = Path(folder, f"result{rank}")
    value, error, seconds = (
        pickle.loads(result.read_bytes()) if result.exists() else (None, None, 0.0)
    )
    return Outcome(value, error, code, output, seconds)


def _report(rank: int, outcome: Outcome) -> str:
    end = "killed at the deadline" if outcome.code is None else f"exit code {outcome.code}"
    return f"--- rank {rank}: {end}\n{outcome.error or ''}{outcome.output}"


def _run_child(folder: str, rank: int) -> int:
    """The whole life of one rank. Returns its exit code."""
    torch.set_num_threads(1)
    job: _Job = pickle.loads(Path(folder, "job").read_bytes())
    started = time.monotonic()
    value, error = None, None
    try:
        function = _load(job)
        if job.initialise:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=job.world_size,
                timeout=timedelta(seconds=60),
            )
        started = time.monotonic()
        value = function(rank, job.world_size, *job.arguments)
    except BaseException:  # noqa: BLE001  # whatever ended the rank is the parent's to judge
        error = traceback.format_exc()
    finally:
        # gloo's threads must be gone before the interpreter is: see Group.close.
        if dist.is_initialized():
            dist.destroy_process_group()
    content = pickle.dumps((value, error, time.monotonic() - started))
    Path(folder, f"result{rank}").write_bytes(content)
    return 0 if error is None else FAILED


def _load(job: _Job) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location("ranks_under_test", job.path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, job.name)


if __name__ == "__main__":
    # Unpickling the job looks for its class in the module that the parent knows it by.
    sys.modules["gloo_run"] = sys.modules["__main__"]
    sys.exit(_run_child(sys.argv[1], int(sys.argv[2])))
