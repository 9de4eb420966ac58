"""Start gloo processes on this machine, each running one function, under one deadline."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as torch_distributed
from torch.multiprocessing.spawn import spawn


def run_processes(main: Callable[[int], None], ranks: int, deadline: timedelta) -> None:
    """Run `main(rank)` in `ranks` processes of a gloo group; leave with an error if one has any.

    `main` must be a function of a module, since each process imports it anew.
    """
    print(f"starting {ranks} processes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        context = spawn(_run_rank, (main, ranks, store, deadline), nprocs=ranks, join=False)
        assert context is not None  # it is only with join=True
        last = time.monotonic() + deadline.total_seconds()
        while not context.join(timeout=max(0.0, last - time.monotonic())):
            if time.monotonic() < last:
                continue  # one process has ended, the other is on its way
            for process in multiprocessing.active_children():
                process.kill()
            sys.exit(f"the processes did not finish within {deadline}")


def _run_rank(
    rank: int, main: Callable[[int], None], ranks: int, store: str, deadline: timedelta
) -> None:
    torch.set_num_threads(1)
    torch_distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=deadline
    )
    main(rank)
    torch_distributed.barrier()
    torch_distributed.destroy_process_group()


def all_errors(error: float, ranks: int) -> list[float]:
    """Every rank's error, on every rank."""
    errors = [torch.empty(()) for _ in range(ranks)]
    torch_distributed.all_gather(errors, torch.tensor(error))
    return [e.item() for e in errors]
