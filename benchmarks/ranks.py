"""What benchmarks on several ranks share: their options, agreement between ranks, and the report.

Such a program is started by torchrun, on GPUs or, to see that it works, on CPUs with tiny sizes:

    torchrun --nproc-per-node=2 benchmarks/overlap.py --out overlap.json
    torchrun --nproc-per-node=2 benchmarks/overlap.py --device cpu --tiny
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

WAIT_SECONDS = 60
"""A rank that waits this long for another gives up."""
CLOCKS = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"
"""What nvidia-smi is asked for."""


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Options that all have; each program adds its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if it is there")
    parser.add_argument("--tiny", action="store_true", help="small sizes: see that it works")
    parser.add_argument("--out", type=Path, help="write what was found to this file, as JSON")
    parser.add_argument("--limit", type=float, default=480.0, help="begin nothing after N seconds")
    parser.add_argument("--stall", type=float, default=150.0, help="end if N seconds bring nothing")
    return parser


@dataclass(frozen=True)
class Failure:
    """What a rank raised, as all ranks know it."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass
class Job:
    """This process among the ranks. `control` is a gloo group for what ranks tell one another."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup
    limit: float
    stall: float
    started: float = field(default_factory=time.monotonic)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def say(self, text: str = "") -> None:
        if self.rank == 0:
            print(text, flush=True)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def meet(self) -> None:
        """All ranks go on at the same time, their devices idle."""
        self.synchronize()
        dist.barrier()
        self.synchronize()

    def keep_watch(self) -> None:
        """From now on the time for the next step counts; a step that hangs ends the process."""
        faulthandler.dump_traceback_later(self.stall, exit=True)

    def has_time(self) -> bool:
        """Whether to begin something new, as rank 0 sees it."""
        self.keep_watch()
        return self.first(time.monotonic() - self.started < self.limit)

    def first(self, value: T) -> T:
        """Rank 0's value, on all ranks."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def all(self, value: T) -> list[T]:
        """The values of all ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def attempt(self, work: Callable[[], T]) -> T | Failure:
        """What `work` returns, or on all ranks a Failure if it raised on one."""
        self.keep_watch()
        result, error = None, None
        try:
            result = work()
            self.synchronize()
        except Exception as raised:  # noqa: BLE001  # whatever a rival raises is told, not ours
            error = f"{type(raised).__name__}: {raised}".strip()
            if os.environ.get("BENCHMARK_TRACEBACKS"):
                traceback.print_exc()
        errors = [f"rank {rank}: {text}" for rank, text in enumerate(self.all(error)) if text]
        if errors:
            return Failure("; ".join(errors))
        return result  # type: ignore[return-value]  # it was set, since nothing was raised

    def largest(self, values: list[float]) -> list[float]:
        """The largest of each over the ranks."""
        return [max(column) for column in zip(*self.all(values), strict=True)]


@contextmanager
def run_job(options: argparse.Namespace) -> Iterator[Job]:
    """Join the ranks that torchrun started."""
    if "RANK" not in os.environ:
        sys.exit(f"start it so: torchrun --nproc-per-node=2 {sys.argv[0]} ...")
    os.environ.setdefault("MESHFUSE_TIMEOUT", str(WAIT_SECONDS))
    warnings.filterwarnings("ignore", category=FutureWarning)  # names that torch 2.13 has renamed
    is_cuda = torch.cuda.is_available() if options.device is None else options.device == "cuda"
    wait = datetime.timedelta(seconds=WAIT_SECONDS)
    if is_cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=wait)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=wait)
    control = dist.new_group(backend="gloo", timeout=2 * wait)
    assert isinstance(control, dist.ProcessGroup)  # and not a rank outside it
    job = Job(dist.get_rank(), dist.get_world_size(), device, control, options.limit, options.stall)
    job.keep_watch()
    with torch.no_grad():
        yield job
    job.meet()
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


@dataclass
class Report:
    """What was found, written anew after each case, so that what was measured is never lost."""

    job: Job
    path: Path | None
    settings: Mapping[str, object]
    cases: list[Mapping[str, object]] = field(default_factory=list)

    def add(self, **case: object) -> None:
        if self.job.rank == 0:
            self.cases.append({**case, "clocks": clocks()})
            self.write()

    def write(self) -> None:
        if self.path is None or self.job.rank:
            return
        content = {**environment(), "settings": self.settings, "cases": self.cases}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
        unfinished.replace(self.path)


def environment() -> dict[str, object]:
    """Date, versions and devices."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "program": " ".join(sys.argv),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "meshfuse": _version("meshfuse"),
        "commit": _output_of("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "devices": clocks(),
    }


def clocks() -> list[str]:
    """A line for each GPU: name, driver, clocks, power, temperature; none without nvidia-smi."""
    found = _output_of("nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader")
    return found.splitlines()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _output_of(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip()


def print_table(job: Job, heads: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    """Columns as wide as what is in them; the first one to the left."""
    cells = [heads, *(tuple(str(cell) for cell in row) for row in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(heads))]
    for row in cells:
        first, *others = (
            text.ljust(width) if place == 0 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        job.say("  ".join((first, *others)).rstrip())
