"""Overlapped programs for minutes: exact results, no hang, and memory that does not grow.

    torchrun --nproc-per-node=2 benchmarks/stress_overlap.py --seconds 180

Shapes, forms, and which rank sleeps when are drawn at random, alike on all ranks. The data are such
that sums are small whole numbers: a result is right to the last bit or wrong. Several calls go out
before any is looked at. Ends with an error for a wrong result, or one that does not come.
"""

from __future__ import annotations

import random
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import overlap_forms as forms
import torch
from linears import AG, KINDS, Problem, block, define, part
from ranks import Failure, Job, Report, parser_of, run_job

from meshfuse import FusionDefinition

LARGEST = 256
"""bfloat16 has all whole numbers up to this."""
DEVIATIONS = 8
"""Sums stay below it by so many times their standard deviation: none is ever larger."""
MOST_CALLS = 4
"""That are under way before the first is looked at."""
LONGEST_SLEEP = 0.02
"""Seconds."""
CYCLES_A_SECOND = 1.5e9
"""Of a GPU, about: what torch.cuda._sleep counts."""
SAMPLE_SECONDS = 1.0
GROWTH_BYTES = 32 * 2**20
"""More than this is called growth."""


@dataclass(frozen=True)
class Subject:
    """A problem in one form, with a definition of its own."""

    problem: Problem
    name: str
    form: object
    fd: FusionDefinition


@dataclass(frozen=True)
class Call:
    """One call: its inputs on this rank, and the result that this rank should get."""

    inputs: list[torch.Tensor]
    wanted: torch.Tensor


def draw_subjects(draw: random.Random, job: Job, count: int, tiny: bool) -> list[Subject]:
    """Sizes up to 2048 (tiny: 96), every third even for the ranks, in all forms in turn."""
    named = {"auto": "auto", "plain": "off", **forms.explicit_forms()}
    names, most = list(named), 96 if tiny else 2048
    found: list[Subject] = []
    for number in range(count):
        m, k, n = (draw.randint(most // 16, most) for _ in range(3))
        if number % 3 == 0:
            m, k, n = (64 * max(1, size // 64) for size in (m, k, n))
        k = job.size * max(1, k // job.size)
        problem = Problem(KINDS[number // len(names) % len(KINDS)], m, k, n, job.size)
        name = names[number % len(names)]
        found.append(Subject(problem, name, named[name], define(problem)))
    return found


def draw_call(problem: Problem, job: Job, seed: int) -> Call:
    """Whole inputs of -1, 0 and 1, the same on all ranks; then this rank's shards of them."""
    share = min(1.0, LARGEST / DEVIATIONS / problem.k**0.5)  # a product is 1 or -1 so often
    generator = torch.Generator(job.device).manual_seed(seed)

    def signs(rows: int) -> torch.Tensor:
        shape, device = (rows, problem.k), job.device
        values = torch.rand(shape, generator=generator, device=device) * 2 - 1
        return torch.where(values.abs() < share, values.sign(), 0.0)

    x, w = signs(problem.m), signs(problem.n)
    wanted = x @ w.T
    if problem.kind == AG:
        inputs = [own(x, 0, job), own(w, 0, job)]
        wanted = own(wanted, 1, job)
    else:
        inputs = [own(x, 1, job), own(w, 1, job)]
        if problem.kind == "GEMM+RS":
            wanted = own(wanted, 0, job)
    return Call([tensor.bfloat16().contiguous() for tensor in inputs], wanted.bfloat16())


def own(whole: torch.Tensor, axis: int, job: Job) -> torch.Tensor:
    """This rank's block."""
    size = whole.shape[axis]
    length = part(size, job.size, job.rank)
    return whole.narrow(axis, min(job.rank * block(size, job.size), size - length), length)


def sleep(draw: random.Random, job: Job) -> None:
    """One rank, or none, sleeps: its host, or its device."""
    victim, seconds = draw.randrange(job.size + 1), draw.uniform(0, LONGEST_SLEEP)
    on_device = draw.random() < 0.5
    if job.rank != victim:
        return
    if on_device and job.is_cuda:
        torch.cuda._sleep(int(seconds * CYCLES_A_SECOND))
    else:
        time.sleep(seconds)


def step(draw: random.Random, job: Job, subjects: Sequence[Subject]) -> tuple[str, int]:
    """Some calls, then a look at each. Returns what was wrong, or "", and the number of calls."""
    calls: list[tuple[Subject, Call, list[torch.Tensor]]] = []
    prepared: list[tuple[Subject, Call]] = []
    for _ in range(draw.randint(1, MOST_CALLS)):
        subject = draw.choice(subjects)
        prepared.append((subject, draw_call(subject.problem, job, draw.getrandbits(32))))
    for subject, call in prepared:
        sleep(draw, job)
        outputs = forms.local(forms.execute(subject.fd, call.inputs, subject.form))
        calls.append((subject, call, outputs))
    for subject, call, (found,) in calls:
        if found.shape != call.wanted.shape or not torch.equal(found, call.wanted):
            return f"{subject.problem}, {subject.name}: wrong result", len(calls)
    return "", len(calls)


@dataclass(frozen=True)
class Sample:
    """Bytes, `seconds` after the first."""

    seconds: float
    allocated: int
    reserved: int
    resident: int

    @staticmethod
    def take(job: Job, start: float) -> Sample:
        seconds = time.monotonic() - start
        allocated = torch.cuda.memory_allocated() if job.is_cuda else 0
        reserved = torch.cuda.memory_reserved() if job.is_cuda else 0
        return Sample(seconds, allocated, reserved, resident_bytes())


def resident_bytes() -> int:
    """Of this process, now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def growth(samples: Sequence[Sample], name: str) -> list[float]:
    """Bytes from the first quarter of the samples to each of the others, by medians."""
    values = [getattr(sample, name) for sample in samples]
    ends = [len(values) * k // 4 for k in range(5)]
    quarters = [values[a:b] or values for a, b in pairwise(ends)]
    first, *others = [statistics.median(quarter) for quarter in quarters]
    return [other - first for other in others]


def warm_up(job: Job, subjects: Sequence[Subject]) -> list[Subject]:
    """Each a few times, checked: those that run. What the others raise is told."""
    kept: list[Subject] = []
    for subject in subjects:

        def run(one: Subject = subject) -> bool:
            right = True
            for seed in range(3):
                call = draw_call(one.problem, job, seed)
                (found,) = forms.local(forms.execute(one.fd, call.inputs, one.form))
                right = right and torch.equal(found, call.wanted)
            return right

        found = job.attempt(run)
        if isinstance(found, Failure):
            job.say(f"{subject.problem}, {subject.name} failed: {found}")
        elif not all(job.all(found)):
            job.say(f"{subject.problem}, {subject.name}: WRONG RESULT")
        else:
            kept.append(subject)
    return kept


def stress(
    job: Job, draw: random.Random, subjects: Sequence[Subject], seconds: float
) -> tuple[str, int, list[Sample]]:
    """Steps for so long. Returns what was wrong, the number of calls, and samples of memory."""
    start = time.monotonic()
    if not subjects:
        return "nothing ran", 0, [Sample.take(job, start)]
    samples, done, wrong = [Sample.take(job, start)], 0, ""
    while not wrong and job.first(time.monotonic() - start < seconds):
        job.keep_watch()
        wrong, calls = step(draw, job, subjects)
        done += calls
        wrong = "; ".join(
            f"rank {rank}: {text}" for rank, text in enumerate(job.all(wrong)) if text
        )
        if time.monotonic() - start - samples[-1].seconds > SAMPLE_SECONDS:
            samples.append(Sample.take(job, start))
    return wrong, done, samples


def tell(
    job: Job, wrong: str, calls: int, samples: Sequence[Sample], report: Report
) -> dict[str, float]:
    """What was found; returns the growth of each kind of memory on the worst rank, in bytes."""
    kinds = ("allocated", "reserved", "resident")
    grown: dict[str, float] = {}
    for kind in kinds:
        by_quarter = job.largest(growth(samples, kind))
        grown[kind] = by_quarter[-1]
        verdict = "GROWS" if grown[kind] > GROWTH_BYTES else "flat"
        told = ", ".join(f"{value / 2**20:+.1f}" for value in by_quarter)
        job.say(f"{kind}: {told} MiB by quarters after the first, {verdict}")
    job.say(f"{calls} calls, {len(samples)} samples: {wrong or 'all exact, no hang'}")
    report.add(calls=calls, wrong=wrong, growth=grown, samples=[asdict(s) for s in samples])
    return grown


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--subjects", type=int, default=36, help="shapes, each in one form")
    parser.add_argument("--seed", type=int, default=1)
    parser.set_defaults(stall=90.0)
    options = parser.parse_args()
    with run_job(options) as job:
        report = Report(job, options.out, vars(options))
        draw = random.Random(options.seed)
        drawn = draw_subjects(draw, job, options.subjects, options.tiny)
        subjects = warm_up(job, drawn)
        job.say(f"{len(subjects)} of {len(drawn)} run and are right; now at random")
        wrong, calls, samples = stress(job, draw, subjects, options.seconds / 6)
        if not wrong:
            wrong, more, samples = stress(job, draw, subjects, options.seconds * 5 / 6)
            calls += more
        grown = tell(job, wrong, calls, samples, report)
    if wrong or len(subjects) < len(drawn) or max(grown.values()) > GROWTH_BYTES:
        sys.exit(1)


if __name__ == "__main__":
    main()
