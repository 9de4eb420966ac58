"""What moving chunks between GPUs through symmetric memory costs, on the device and on the host.

    torchrun --nproc-per-node=2 benchmarks/symmetric.py --out symmetric.json

Each rank gets a chunk of another: by a bare copy out of its memory, by meshfuse's deliveries and
fetches, and for 16 bytes, where what is left is the order between ranks, beside torch's signals and
barrier. On CPUs (`--device cpu --tiny`) gloo carries the chunks, and torch's rows are left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import Failure, Job, Report, parser_of, print_table, run_job

from meshfuse.base import optional
from meshfuse.dist.collectives import CollectiveRequest, Transfer
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.transfers import SharedChunk

ITERATIONS = 20
ROUNDS = 9
CAUSE = "a benchmark"


def request(job: Job, collective: str, src: torch.Tensor, out: torch.Tensor, step: int) -> Any:
    """Each rank gets the chunk of the one `step` places on."""
    sources = tuple((place + step) % job.size for place in range(job.size))
    transfer = Transfer(job.rank, sources, src.nbytes, (1,))
    team = tuple(range(job.size))
    out = src if transfer.is_own else out
    return CollectiveRequest(1, collective, team, src, out, None, CAUSE, transfer=transfer)


def ours(job: Job, elements: int) -> dict[str, Callable[[], object]]:
    communicator = Communicator.instance()
    src = torch.randn(elements, device=job.device)
    out = torch.empty_like(src)
    team = tuple(range(job.size))
    chunk = SharedChunk(team, (elements,), (1,), src.dtype, src.device, src.nbytes, CAUSE)
    delivery = request(job, "deliver", src, out, 1)
    fetches = [request(job, "fetch", src, out, step) for step in range(job.size)]

    def deliver_in_place() -> None:
        made = communicator.reserve(chunk)
        communicator.post(request(job, "deliver", made, out, 1)).wait()

    def fetch() -> None:
        for each in fetches:
            communicator.post(each).wait()

    return {
        "delivery, made in place": deliver_in_place,
        "delivery, copied to be sent": lambda: communicator.post(delivery).wait(),
        "fetches of all, copied to be sent": fetch,
    }


def torch_rows(job: Job, elements: int) -> dict[str, Callable[[], object]]:
    """The parts that such a transport is made of, as torch has them."""
    symmetric = optional.load("torch.distributed._symmetric_memory")
    memory = symmetric.empty(elements, dtype=torch.float32, device=job.device)
    assert dist.group.WORLD is not None
    handle = symmetric.rendezvous(memory, dist.group.WORLD.group_name)
    to, source = (job.rank - 1) % job.size, (job.rank + 1) % job.size
    there = handle.get_buffer(source, (elements,), torch.float32)
    out = torch.empty_like(there)
    wait = int(1000 * job.stall)

    def signal() -> None:
        handle.put_signal(to, 1, wait)
        handle.wait_signal(source, 1, wait)

    return {
        "bare copy": lambda: out.copy_(there, non_blocking=True),
        "torch put_signal + wait_signal": signal,
        "torch barrier": lambda: handle.barrier(0, wait),
    }


def measure(job: Job, work: Callable[[], object]) -> tuple[float, float]:
    """Microseconds of the device and of the host for one of ITERATIONS back to back."""
    job.meet()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if job.is_cuda else []
    began = time.perf_counter()
    for event in events[:1]:
        event.record()
    for _ in range(ITERATIONS):
        work()
    host = time.perf_counter() - began
    for event in events[1:]:
        event.record()
    job.synchronize()
    device = events[0].elapsed_time(events[1]) / 1e3 if events else time.perf_counter() - began
    return 1e6 * device / ITERATIONS, 1e6 * host / ITERATIONS


def race(job: Job, variants: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Medians over rounds in which all take their turns; the slowest rank counts."""
    for work in variants.values():
        measure(job, work)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, work in variants.items():
            job.keep_watch()
            found[name].append(measure(job, work))
    return {
        name: job.largest([statistics.median(column) for column in zip(*times, strict=True)])
        for name, times in found.items()
    }


def main() -> None:
    options = parser_of(__doc__).parse_args()
    with run_job(options) as job:
        report = Report(job, options.out, vars(options))
        for elements in (4, 1 << 12 if options.tiny else 1 << 24):
            variants = ours(job, elements)
            if job.is_cuda:
                rows = job.attempt(lambda elements=elements: torch_rows(job, elements))
                if isinstance(rows, Failure):
                    job.say(f"torch: {rows}")
                else:
                    variants = {**rows, **variants}
            times = race(job, variants)
            table: list[tuple[object, ...]] = [
                (name, f"{device:.1f}", f"{host:.1f}", f"{4 * elements / device / 1e3:.1f}")
                for name, (device, host) in times.items()
            ]
            job.say(f"\n{4 * elements} bytes")
            print_table(job, ("", "device us", "host us", "GB/s"), table)
            report.add(bytes=4 * elements, microseconds=times)


if __name__ == "__main__":
    main()
