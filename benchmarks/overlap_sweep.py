"""Is `overlap="auto"` ever slower than the plain program? Sixty shapes, uneven ones among them.

    torchrun --nproc-per-node=2 benchmarks/overlap_sweep.py --out sweep.json

For each: the form that was chosen, auto by plain round by round, and a bound that the median ratio
exceeds in less than 5 % of such runs. Where plain was chosen it is the same program, and the ratio
shows the noise. Then, what a plain call costs the host beside the same calls in torch. A second run
with the same file goes on where the first one stopped.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import overlap_forms as forms
from linears import BARE, KINDS, Operands, Problem, by_float32, define, random_operands
from linears import relative_error as error_of
from overlap import TOLERANCE
from races import Call, host_microseconds, race
from ranks import Failure, Job, Report, parser_of, print_table, run_job

SEED = 20
COUNT = 60
LARGEST_RATIO = 1.02
"""Goal for the bound of auto by plain, where auto is not plain."""
HOST_GOAL = 10.0
"""Microseconds that a plain call may cost more than torch's."""
HOST_ROW = 20
"""Calls in a row by which it is measured: as in a loop of a program, not as the first one of it."""
ROW_OF_CALLS_MS = 6.0
"""What is timed at once is about this long, or two calls."""
AUTO, PLAIN, TORCH = "auto", "plain", "torch"


def problems(count: int, ranks: int, tiny: bool) -> list[Problem]:
    """Sizes even on a logarithmic scale; of 40 % m or n is odd, or both. Always the same ones."""
    draw = random.Random(SEED)
    low, middle, high = (16, 64, 256) if tiny else (256, 1024, 16384)
    widest = 256 if tiny else 28672

    def size(least: int, most: int) -> int:
        value = math.exp(draw.uniform(math.log(least), math.log(most)))
        return max(least, round(value / 64) * 64)

    found: list[Problem] = []
    for number in range(count):
        m, k, n = size(low, high), size(middle, widest), size(middle, widest)
        turn, is_second = number // len(KINDS) % 5, number // (5 * len(KINDS)) % 2 == 1
        if turn == 3 or (turn == 4 and is_second):
            m -= draw.choice((1, 3, 7))
        if turn == 4:
            n -= draw.choice((1, 3))
        found.append(Problem(KINDS[number % len(KINDS)], m, k, n, ranks))
    return found


def measure(job: Job, problem: Problem, rounds: int, settle: int) -> dict[str, Any]:
    """A row of the report. Raises what a variant raises."""
    operands = [random_operands(problem, job, seed) for seed in range(2)]
    fds = {AUTO: define(problem), PLAIN: define(problem)}
    ways = {AUTO: "auto", PLAIN: "off"}
    inputs = [[own.x, own.w] for own in operands]
    calls: dict[str, Call] = {
        name: lambda number, f=fds[name], way=ways[name]: forms.execute(f, inputs[number % 2], way)
        for name in fds
    }
    calls[TORCH] = lambda number: BARE[problem.kind](problem, operands[number % 2])
    error = check(job, problem, operands, calls)
    for number in range(settle):
        calls[AUTO](number)
    estimate = race(job, {PLAIN: calls[PLAIN]}, iterations=2, rounds=2)[PLAIN].median
    iterations = job.first(max(2, min(20, round(ROW_OF_CALLS_MS / max(estimate, 1e-3)))))
    times = race(job, calls, iterations=iterations, rounds=rounds, warm_up=1)
    host = host_microseconds(
        job, {name: calls[name] for name in (PLAIN, TORCH)}, iterations=HOST_ROW, rounds=rounds
    )
    return {
        "form": forms.chosen_form(fds[AUTO]),
        "error": error,
        "iterations": iterations,
        "milliseconds": {name: own.median for name, own in times.items()},
        "ratio": times[AUTO].ratio_to(times[PLAIN]),
        "bound": times[AUTO].upper_ratio_to(times[PLAIN]),
        "plain by torch": times[PLAIN].ratio_to(times[TORCH]),
        "host": host,
        "rounds": {name: own.of_rounds for name, own in times.items()},
    }


def check(job: Job, problem: Problem, operands: list[Operands], calls: dict[str, Call]) -> float:
    """The largest relative error of the three, on any rank; RuntimeError if one is wrong."""
    wanted = by_float32(problem, operands[0])
    found: dict[str, float] = {}
    for name, call in calls.items():
        call(0)
        result = call(0)
        tensors = result if isinstance(result, list) else [result]
        (found[name],) = job.largest([error_of(forms.local(tensors)[0], wanted)])
    worst = max(found.values())
    if worst > TOLERANCE:
        raise RuntimeError(f"wrong result: relative errors {found}")
    return worst


def tell(job: Job, cases: list[dict[str, Any]]) -> None:
    rows: list[tuple[object, ...]] = []
    for case in cases:
        if "failed" in case:
            rows.append((case["problem"], "FAILED", *["-"] * 6))
            continue
        over = case["form"] != forms.PLAIN and case["bound"] > LARGEST_RATIO
        host = case["host"]
        rows.append(
            (
                case["problem"],
                case["form"],
                *(f"{case['milliseconds'][name]:.3f}" for name in (TORCH, PLAIN, AUTO)),
                f"{case['ratio']:.3f}",
                f"{case['bound']:.3f}" + (" <- above" if over else ""),
                f"{host[PLAIN] - host[TORCH]:+.1f}",
            )
        )
    job.say()
    heads = (
        "m x k, n",
        "form",
        "torch ms",
        "plain ms",
        "auto ms",
        "auto/plain",
        "bound",
        "host us",
    )
    print_table(job, heads, rows)
    summarize(job, [case for case in cases if "failed" not in case], len(cases))


def summarize(job: Job, done: list[dict[str, Any]], count: int) -> None:
    if not done:
        return
    other = [case for case in done if case["form"] != forms.PLAIN]
    above = [case for case in other if case["bound"] > LARGEST_RATIO]
    job.say(f"\n{len(done)} of {count} measured; {len(other)} not plain")
    job.say(f"bound of auto/plain above {LARGEST_RATIO}: {len(above)} of {len(other)} (goal: none)")
    for title, chosen in (("where not plain", other), ("in all", done)):
        if chosen:
            mean = math.exp(sum(math.log(case["ratio"]) for case in chosen) / len(chosen))
            worst = max(case["ratio"] for case in chosen)
            job.say(f"auto/plain {title}: geometric mean {mean:.3f}, largest {worst:.3f}")
    if not job.is_cuda:
        job.say("host: on CPUs a call does its work before it returns, so this says nothing")
        return
    more = sorted(case["host"][PLAIN] - case["host"][TORCH] for case in done)
    within = sum(value <= HOST_GOAL for value in more)
    job.say(
        f"host, plain less torch: median {more[len(more) // 2]:+.1f} us, largest {more[-1]:+.1f}; "
        f"within {HOST_GOAL:.0f} us in {within} of {len(more)}"
    )


def earlier(job: Job, path: Path | None, tiny: bool) -> list[dict[str, Any]]:
    """What an earlier run has measured, as rank 0 finds it."""
    cases: list[dict[str, Any]] = []
    if job.rank == 0 and path is not None and path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["settings"]["tiny"] == tiny:
            cases = [case for case in content["cases"] if "failed" not in case]
    return job.first(cases)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--rounds", type=int, default=12, help="all orders of 3 variants are 6")
    parser.add_argument("--settle", type=int, default=40, help="calls of auto before it is timed")
    parser.set_defaults(limit=420.0)
    options = parser.parse_args()
    with run_job(options) as job:
        report = Report(job, options.out, vars(options))
        cases = earlier(job, options.out, options.tiny)
        report.cases.extend(cases)
        known = {case["problem"] for case in cases}
        for problem in problems(options.count, job.size, options.tiny):
            if str(problem) in known:
                continue
            if not job.has_time():
                job.say("out of time; run it again with the same file for the rest")
                break
            found = job.attempt(lambda p=problem: measure(job, p, options.rounds, options.settle))
            case = {"failed": str(found)} if isinstance(found, Failure) else found
            case = {"problem": str(problem), "sizes": asdict(problem), **case}
            cases.append(case)
            report.add(**case)
            line = case.get("failed") or f"{case['form']} {case['ratio']:.3f}"
            job.say(f"{len(cases)}: {problem}: {line}")
        tell(job, cases)


if __name__ == "__main__":
    main()
