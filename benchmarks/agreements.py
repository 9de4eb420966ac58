"""How long ranks of one host take to agree: through memory that they share, and by gloo.

    torchrun --nproc-per-node=2 benchmarks/agreements.py --device cpu

Behind a barrier, which ranks leave at different times, and in rows, where they stay together. Both
ways take turns. Microseconds: the median, and the ninth tenth.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ranks import Job, Report, parser_of, print_table, run_job

from meshfuse.dist.agreement import CommunicationSequence
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.groups import CONTROL

ROUNDS = 200
ROW = 20
TINY_ROUNDS = 5


def durations(job: Job, call: Callable[[], object], rounds: int) -> list[float]:
    """Of a call behind a barrier, in microseconds."""
    found: list[float] = []
    for _ in range(rounds):
        job.meet()
        begin = time.perf_counter()
        call()
        found.append(1e6 * (time.perf_counter() - begin))
    return found


def measure(job: Job, rounds: int) -> dict[str, dict[str, list[float]]]:
    """What calls took on this rank, by their name and by the way."""
    communicator, team = Communicator.instance(), tuple(range(job.size))
    sequence = CommunicationSequence.of(team, ["all_gather", "all_reduce"], {"i0": "i0, axis 0"})
    turns = iter(range(1 << 30))

    def gather() -> None:
        communicator.gather(team, [next(turns), job.rank], "a benchmark")

    def row() -> None:
        for _ in range(ROW):
            gather()

    calls = {
        "gather": gather,
        "compare": lambda: communicator.compare(sequence.at({"i0": next(turns)})),
        f"gather, {ROW} in a row": row,
    }
    control = communicator.group(team, CONTROL, "a benchmark")
    ways = {"memory": control.mailbox, "gloo": None}
    found = {name: {way: list[float]() for way in ways} for name in calls}
    for _ in range(TINY_ROUNDS):
        for way, mailbox in ways.items():
            control.mailbox = mailbox
            for name, call in calls.items():
                found[name][way] += durations(job, call, -(-rounds // TINY_ROUNDS))
    control.mailbox = ways["memory"]
    return found


def main() -> None:
    options = parser_of(__doc__).parse_args()
    rounds = TINY_ROUNDS if options.tiny else ROUNDS
    with run_job(options) as job:
        report = Report(job, options.out, {"rounds": rounds, "row": ROW})
        rows: list[tuple[object, ...]] = []
        for name, by_way in measure(job, rounds).items():
            calls = ROW if "row" in name else 1
            cells: list[str] = []
            for way, times in by_way.items():
                times.sort()
                shares = [times[len(times) * tenth // 10] / calls for tenth in (5, 9)]
                median, most = job.largest(shares)
                cells.append(f"{median:.1f} ({most:.1f})")
                report.add(name=name, way=way, median=median, most=most)
            rows.append((name, *cells))
        print_table(job, ("us a call", "memory", "gloo"), rows)


if __name__ == "__main__":
    main()
