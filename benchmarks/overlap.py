"""Linears with a collective: how near meshfuse and torch come to perfect overlap, the limit.

    torchrun --nproc-per-node=2 benchmarks/overlap.py --out overlap.json

Every variant's result is compared with float32 first; then all take turns, round by round, in
rows of eight calls, or of as many as the product alone makes in 10 ms, behind one that is not
timed. The limit is that of the same run: the product alone or the transfer alone, whichever takes
longer. `torch` is the backend's collective and torch's product; `async TP` are torch's fused
operations on symmetric memory. The transfer alone is a copy out of the peers' memory for an
all-gather, else the backend's own collective. On GPUs x of an all-gather lies in symmetric memory
for all, but for the variant with an ordinary x.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import overlap_forms as forms
import torch
import torch.distributed as dist
from linears import (
    AG,
    AR,
    BARE,
    KINDS,
    RS,
    Operands,
    Problem,
    block,
    by_float32,
    define,
    gather_rows,
    relative_error,
    rotated_operands,
)
from races import Call, Times, race
from ranks import Failure, Job, Report, parser_of, print_table, run_job

from meshfuse.base import optional
from meshfuse.multidevice import DeviceMesh, symmetric_empty

Shape = tuple[int, int, int]
SHAPES: tuple[Shape, ...] = (
    (8192, 8192, 8192),
    (8192, 12288, 12288),
    (16384, 8192, 4096),
    (4096, 8192, 4096),
)
"""m, k, n, all global."""
TINY: tuple[Shape, ...] = ((256, 128, 128), (64, 64, 64))
GOALS: dict[str, tuple[int, ...]] = {AG: (95, 98, 96, 87), RS: (93, 95, 93, 87)}
STRETCH: dict[str, tuple[int, ...]] = {AG: (97, 99, 98, 91), RS: (95, 97, 96, 90)}
"""Percent of the limit, on two H200, by shape."""
TOLERANCE = 1e-2
LEAST_ROW, ROW_MS = 8, 10.0
"""Calls that are timed at once: so many, or as many as the product alone makes in this time."""
GEMM, TRANSFER = "GEMM alone", "transfer alone"


@dataclass
class Variant:
    """Something to time. `result` is a call's, on this rank, if there is one to be checked."""

    call: Call
    result: Callable[[], torch.Tensor] | None = None
    form: Callable[[], str] = str


Maker = Callable[[Job, Problem, list[Operands]], Variant]


def of_meshfuse(form: object, *, ordinary: bool = False) -> Maker:
    def make(job: Job, problem: Problem, operands: list[Operands]) -> Variant:
        fd = define(problem)
        inputs = [[own.x.clone() if ordinary else own.x, own.w] for own in operands]

        def call(number: int) -> list[torch.Tensor]:
            return forms.execute(fd, inputs[number % len(inputs)], form)

        return Variant(call, lambda: forms.local(call(0))[0], lambda: forms.chosen_form(fd))

    return make


def of_torch(job: Job, problem: Problem, operands: list[Operands]) -> Variant:
    bare = BARE[problem.kind]

    def call(number: int) -> torch.Tensor:
        return bare(problem, operands[number % len(operands)])

    return Variant(call, lambda: call(0))


def of_async_tp(job: Job, problem: Problem, operands: list[Operands]) -> Variant:
    """torch's fused operations; x of an all-gather lies in symmetric memory, as they like it."""
    group = world_name()
    weights = [own.w.T for own in operands]
    rows = [own.x for own in operands]
    if problem.kind == AG:
        rows = [symmetric_copy(x, group) for x in rows]

        def gather(number: int) -> torch.Tensor:
            at = number % len(rows)
            return torch.ops.symm_mem.fused_all_gather_matmul(rows[at], [weights[at]], 0, group)[1][
                0
            ]

        return Variant(gather, lambda: gather(0))

    def scatter(number: int) -> torch.Tensor:
        at = number % len(rows)
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(
            rows[at], weights[at], "sum", 0, group
        )

    return Variant(scatter, lambda: scatter(0))


def world_name() -> Any:
    """Of the default process group: a string, or what newer versions of torch have instead."""
    world = dist.group.WORLD
    assert world is not None
    return world.group_name


def symmetric_copy(x: torch.Tensor, group: Any) -> torch.Tensor:
    symmetric = optional.load("torch.distributed._symmetric_memory")
    copy = symmetric.empty(*x.shape, device=x.device, dtype=x.dtype)
    symmetric.rendezvous(copy, group)
    return copy.copy_(x)


def gemm_alone(job: Job, problem: Problem, operands: list[Operands]) -> Variant:
    """The product of all that a rank multiplies, without any transfer."""
    rows = [own.x for own in operands]
    if problem.kind == AG:
        rows = [gather_rows(problem, x).clone() for x in rows]
    weights = [own.w.T for own in operands]
    out = rows[0].new_empty(problem.m, weights[0].shape[1])

    def call(number: int) -> torch.Tensor:
        at = number % len(rows)
        return torch.matmul(rows[at], weights[at], out=out)

    return Variant(call)


def transfer_alone(job: Job, problem: Problem, operands: list[Operands]) -> Variant:
    if problem.kind == AG:
        return pull_alone(problem, operands) if job.is_cuda else gather_alone(problem, operands)
    length, dtype = block(problem.m, problem.ranks), operands[0].x.dtype
    terms = torch.randn(problem.ranks * length, problem.n, device=job.device, dtype=dtype)
    if problem.kind == AR:
        # The mean takes as long as the sum, and stays finite however often it is taken.
        return Variant(lambda number: dist.all_reduce(terms[: problem.m], dist.ReduceOp.AVG))
    own = terms.new_empty(length, problem.n)
    return Variant(lambda number: dist.reduce_scatter_tensor(own, terms))


def gather_alone(problem: Problem, operands: list[Operands]) -> Variant:
    return Variant(lambda number: gather_rows(problem, operands[number % len(operands)].x))


def pull_alone(problem: Problem, operands: list[Operands]) -> Variant:
    """The blocks of all others, by the copy engine out of their memory."""
    symmetric = optional.load("torch.distributed._symmetric_memory")
    rank, x = dist.get_rank(), operands[0].x
    shape = (problem.ranks, block(problem.m, problem.ranks), problem.k)
    rows = symmetric.empty(*shape, device=x.device, dtype=x.dtype)
    handle = symmetric.rendezvous(rows, world_name())
    rows.normal_()
    others = [(rank + step) % problem.ranks for step in range(1, problem.ranks)]
    blocks = [(rows[peer], handle.get_buffer(peer, shape, x.dtype)[peer]) for peer in others]

    def call(number: int) -> None:
        for own, theirs in blocks:
            own.copy_(theirs, non_blocking=True)

    return Variant(call)


def makers_of(job: Job, problem: Problem) -> dict[str, Maker]:
    explicit = {f"meshfuse {name}": of_meshfuse(f) for name, f in forms.explicit_forms().items()}
    makers: dict[str, Maker] = {
        GEMM: gemm_alone,
        TRANSFER: transfer_alone,
        "torch": of_torch,
        "meshfuse plain": of_meshfuse("off"),
        "meshfuse auto": of_meshfuse("auto"),
        **explicit,
    }
    if job.is_cuda and problem.kind == AG:
        makers["meshfuse auto, ordinary x"] = of_meshfuse("auto", ordinary=True)
    if job.is_cuda and problem.kind != AR and problem.m % problem.ranks == 0:
        makers["async TP"] = of_async_tp
    return makers


@dataclass
class Case:
    """One problem, measured."""

    problem: Problem
    errors: dict[str, object]
    times: dict[str, Times]
    form_of: dict[str, str]

    def percent(self, name: str) -> float:
        """Of the limit, reached by a variant."""
        limit = max(self.times[GEMM].median, self.times[TRANSFER].median)
        return 100 * limit / self.times[name].median


def reachable(problem: Problem, own: Operands) -> Operands:
    """Operands whose x peers can read where it is."""
    mesh = DeviceMesh(range(problem.ranks))
    memory = symmetric_empty((block(problem.m, problem.ranks), problem.k), own.x.dtype, mesh)
    return replace(own, x=memory[: own.x.shape[0]].copy_(own.x))


def measure(
    job: Job,
    problem: Problem,
    *,
    iterations: int | None,
    rounds: int,
    settle: int,
    only: list[str] | None,
) -> Case:
    operands = rotated_operands(problem, job)
    if job.is_cuda and problem.kind == AG:
        operands = [reachable(problem, own) for own in operands]
    wanted = job.attempt(lambda: by_float32(problem, operands[0]))
    case = Case(problem, {}, {}, {})
    if isinstance(wanted, Failure):
        case.errors["reference"] = str(wanted)
        return case
    variants: dict[str, Variant] = {}
    for name, make in makers_of(job, problem).items():
        if only and name not in (GEMM, TRANSFER) and not any(text in name for text in only):
            continue
        variant = _checked(job, name, lambda m=make: m(job, problem, operands), wanted, case)
        if variant is not None:
            variants[name] = variant
    calls = {name: variant.call for name, variant in variants.items()}
    del wanted

    def run() -> dict[str, Times]:
        row = iterations or row_of_calls(job, calls[GEMM])
        return race(job, calls, iterations=row, rounds=rounds, warm_up=settle)

    times = job.attempt(run)
    if isinstance(times, Failure):
        case.errors["race"] = str(times)
        return case
    case.times = times
    for name, variant in variants.items():
        case.form_of[name] = variant.form()
    return case


def row_of_calls(job: Job, call: Call) -> int:
    """How many calls to time at once: so many that the first one, which finds the host cold and the
    GPU idle, counts for little."""
    once = race(job, {GEMM: call}, iterations=2, rounds=2)[GEMM].median
    return job.first(max(LEAST_ROW, round(ROW_MS / max(once, 1e-3))))


def _checked(
    job: Job, name: str, make: Callable[[], Variant], wanted: torch.Tensor, case: Case
) -> Variant | None:
    """A variant that runs and is right; what is wrong with others is noted."""

    def run() -> tuple[Variant, float]:
        variant = make()
        if variant.result is None:
            variant.call(0)
            return variant, 0.0
        variant.result()  # the first call may try several forms: the second is what is timed
        return variant, relative_error(variant.result(), wanted)

    found = job.attempt(run)
    if isinstance(found, Failure):
        case.errors[name] = str(found)
        job.say(f"{case.problem}: {name} failed: {found}")
        return None
    variant, error = found
    (worst,) = job.largest([error])
    if variant.result is not None:
        case.errors[name] = worst
    if worst > TOLERANCE:
        job.say(f"{case.problem}: {name} IS WRONG: relative error {worst:.2e}")
        return None
    if is_explicit(name) and variant.form() == forms.PLAIN:
        case.errors[name] = "runs plain here"
        return None
    return variant


def is_explicit(name: str) -> bool:
    """Whether it is a form that meshfuse was told to take, and cannot take everywhere."""
    return name.removeprefix("meshfuse ") in forms.explicit_forms()


def tell(job: Job, case: Case, place: int) -> None:
    job.say(f"\n{case.problem}: milliseconds, percent of the limit")
    if GEMM not in case.times or TRANSFER not in case.times:
        job.say(f"nothing measured: {case.errors}")
        return
    rows: list[tuple[object, ...]] = []
    for name, times in case.times.items():
        spread = statistics.quantiles(times.of_rounds, n=4) if len(times.of_rounds) > 1 else [0] * 3
        error = case.errors.get(name)
        rows.append(
            (
                name,
                f"{times.median:.3f}",
                f"{spread[0]:.3f}-{spread[2]:.3f}",
                "" if name in (GEMM, TRANSFER) else f"{case.percent(name):.0f}",
                f"{error:.1e}" if isinstance(error, float) else "",
                case.form_of[name],
            )
        )
    print_table(job, ("variant", "ms", "middle half", "%", "error", "form"), rows)
    left_out = [f"{n} ({e})" for n, e in case.errors.items() if isinstance(e, str)]
    if left_out:
        job.say(f"left out: {'; '.join(left_out)}")
    goals = GOALS.get(case.problem.kind)
    if goals is not None and job.is_cuda and place < len(goals):
        stretch = STRETCH[case.problem.kind][place]
        job.say(f"goal: {goals[place]} % (stretch: {stretch}), on two H200")


def summarize(job: Job, cases: list[tuple[int, Case]]) -> None:
    names = list(dict.fromkeys(name for _, case in cases for name in case.times))
    names = [name for name in names if name not in (GEMM, TRANSFER)]
    rows: list[tuple[object, ...]] = []
    for place, case in cases:
        done = {n: f"{case.percent(n):.0f}" for n in names if n in case.times}
        goal = GOALS.get(case.problem.kind, ())[place : place + 1] if job.is_cuda else ()
        rows.append((case.problem, *(done.get(n, "-") for n in names), *(goal or ("-",))))
    job.say("\nPercent of max(GEMM alone, transfer alone), each in its own race")
    print_table(job, ("m x k, n", *names, "goal"), rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--shapes", nargs="+", help="as 8192x8192x4096: m, k, n")
    parser.add_argument("--variants", nargs="+", help="only those with one of these in their name")
    parser.add_argument(
        "--iterations", type=int, help=f"in a row; default: {LEAST_ROW}, or {ROW_MS:.0f} ms of them"
    )
    parser.add_argument("--rounds", type=int, default=18, help="all orders of 9 variants are 18")
    parser.add_argument("--settle", type=int, default=60, help="calls before the first round")
    options = parser.parse_args()
    shapes = TINY if options.tiny else SHAPES
    if options.shapes:
        shapes = tuple(tuple(int(size) for size in text.split("x")) for text in options.shapes)
    with run_job(options) as job:
        report = Report(job, options.out, vars(options))
        cases: list[tuple[int, Case]] = []
        wanted = [(kind, place) for kind in options.kinds for place in range(len(shapes))]
        for kind, place in wanted:
            if not job.has_time():
                job.say("out of time: the rest is left out")
                break
            m, k, n = shapes[place]
            case = measure(
                job,
                Problem(kind, m, k, n, job.size),
                iterations=options.iterations,
                rounds=options.rounds,
                settle=options.settle,
                only=options.variants,
            )
            place = place if shapes == SHAPES else len(SHAPES)
            tell(job, case, place)
            record(report, case)
            if GEMM in case.times and TRANSFER in case.times:
                cases.append((place, case))
        summarize(job, cases)


def record(report: Report, case: Case) -> None:
    report.add(
        problem=str(case.problem),
        errors=case.errors,
        forms=case.form_of,
        milliseconds={name: times.median for name, times in case.times.items()},
        rounds={name: times.of_rounds for name, times in case.times.items()},
    )


if __name__ == "__main__":
    main()
