"""An all-gather and a linear on CPUs, in chunks on streams against plain: what overlap hides there.

    torchrun --nproc-per-node=2 benchmarks/overlap_cpu.py

Once as it is, and once with a link that takes its time (slow_link.py). gloo's copies need the cores
that the products need, so on a machine with no cores to spare nothing is to be gained in the first.
In the second there is waiting, and waiting can be hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import overlap_forms as forms
import torch
from linears import AG, Operands, Problem, by_float32, define, place, random_operands
from linears import relative_error as error_of
from races import Call, Times, race
from ranks import Failure, Job, Report, parser_of, print_table, run_job
from slow_link import Link, slow_link

from meshfuse import DataType, FusionDefinition, ParallelType
from meshfuse.multidevice import DeviceMesh

DTYPE = torch.float32
TOLERANCE = 1e-5
GEMM, TRANSFER, PLAIN = "GEMM alone", "transfer alone", "plain"


def define_transfer(problem: Problem) -> FusionDefinition:
    """Nothing but the all-gather."""
    mesh = DeviceMesh(range(problem.ranks))
    with FusionDefinition() as fd:
        x = fd.define_tensor([problem.m, problem.k], contiguity=True)
        y = fd.ops.set(x)
        fd.add_output(y)
        place(mesh, x, 0)
        place(mesh, y, None)
    return fd


def define_chunks(problem: Problem, count: int) -> FusionDefinition:
    """The problem with its rows in `count` chunks on streams, each chunk in a block for each rank.

    A rank's rows are other ones than in `define`, which has one block for each; as many.
    """
    mesh = DeviceMesh(range(problem.ranks))
    with FusionDefinition() as fd:
        x = fd.define_tensor([problem.m, problem.k], contiguity=True, dtype=DataType.Float)
        w = fd.define_tensor([problem.n, problem.k], contiguity=True, dtype=DataType.Float)
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        x.set_device_mesh(mesh)
        x.outer_split(0, count)
        x.outer_split(1, problem.ranks)
        x.axis(1).parallelize(ParallelType.mesh_x)
        place(mesh, w, 0)
        place(mesh, y, 1)
        y.outer_split(0, count)
        y.axis(0).parallelize(ParallelType.stream)
    return fd


@dataclass(frozen=True)
class Variant:
    """`reorder` makes of rows in the order of the result those in the order of float32's.

    `form` says what meshfuse made of a form that it was told to take.
    """

    call: Call
    reorder: Callable[[torch.Tensor], torch.Tensor] | None = None
    form: Callable[[], str] | None = None


def variants_of(problem: Problem, operands: Operands, counts: list[int]) -> dict[str, Variant]:
    plain, transfer = define(problem, DTYPE), define_transfer(problem)
    inputs = [operands.x, operands.w]
    whole = torch.randn(problem.m, problem.k)
    found = {
        GEMM: Variant(lambda number: whole @ operands.w.T),
        TRANSFER: Variant(lambda number: forms.execute(transfer, inputs[:1], "off")),
        PLAIN: Variant(lambda number: forms.execute(plain, inputs, "off"), lambda rows: rows),
    }
    for count in counts:
        fd = define_chunks(problem, count)

        def from_chunks(rows: torch.Tensor, count: int = count) -> torch.Tensor:
            parts = rows.view(count, problem.ranks, -1, rows.shape[-1])
            return parts.transpose(0, 1).reshape(rows.shape)

        found[f"{count} chunks on streams"] = Variant(
            lambda number, fd=fd: forms.execute(fd, inputs, "off"), from_chunks
        )
    named = {"auto": "auto", **forms.explicit_forms()}
    for name, form in named.items():
        fd = define(problem, DTYPE)
        found[f"overlap={name}"] = Variant(
            lambda number, fd=fd, form=form: forms.execute(fd, inputs, form),
            lambda rows: rows,
            None if name == "auto" else lambda fd=fd: forms.chosen_form(fd),
        )
    return found


def check(job: Job, variant: Variant, wanted: torch.Tensor) -> float:
    """The relative error on the worst rank; 0 for what has no result to check."""
    result = variant.call(0)
    if variant.reorder is None:
        return 0.0
    assert isinstance(result, list)
    (worst,) = job.largest([error_of(variant.reorder(forms.local(result)[0]), wanted)])
    return worst


def usable(
    job: Job, variants: dict[str, Variant], problem: Problem, operands: Operands
) -> dict[str, Call]:
    """The variants that run and are right."""
    wanted = by_float32(problem, operands)
    calls: dict[str, Call] = {}
    for name, variant in variants.items():
        error = job.attempt(lambda v=variant: check(job, v, wanted))
        if isinstance(error, Failure):
            job.say(f"{name} failed: {error}")
        elif error > TOLERANCE:
            job.say(f"{name} IS WRONG: relative error {error:.1e}")
        elif variant.form is not None and variant.form() == forms.PLAIN:
            job.say(f"{name} runs plain here, and is left out")
        else:
            calls[name] = variant.call
    return calls


def tell(job: Job, title: str, times: dict[str, Times]) -> None:
    gemm, transfer, plain = (times[name].median for name in (GEMM, TRANSFER, PLAIN))
    rows: list[tuple[object, ...]] = []
    for name, own in times.items():
        row: list[object] = [name, f"{own.median:.1f}"]
        if name in (GEMM, TRANSFER):
            rows.append((*row, "", "", ""))
            continue
        hidden = (plain - own.median) / transfer
        row += [f"{own.ratio_to(times[PLAIN]):.3f}", f"{own.upper_ratio_to(times[PLAIN]):.3f}"]
        rows.append((*row, "" if name == PLAIN else f"{100 * hidden:.0f}"))
    job.say(f"\n{title}")
    print_table(job, ("variant", "ms", "by plain", "bound", "% of transfer hidden"), rows)
    best = min((own.median for name, own in times.items() if name not in (GEMM, TRANSFER, PLAIN)))
    limit = max(gemm, transfer)
    job.say(
        f"plain is {plain / limit:.2f} times max(GEMM, transfer), the best other variant "
        f"{best / limit:.2f} times; at most {100 * min(1.0, gemm / transfer):.0f} % of the "
        "transfer can be hidden"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--size", type=int, nargs=3, default=[2048, 1024, 1024], help="m, k, n")
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--latency", type=float, default=0.5, help="of the link, milliseconds")
    parser.add_argument("--bandwidth", type=float, default=150.0, help="of the link, MB/s")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.set_defaults(device="cpu")
    options = parser.parse_args()
    m, k, n = (128, 64, 64) if options.tiny else options.size
    link = Link(options.latency / 1000, options.bandwidth * 1e6)
    with run_job(options) as job, slow_link(link):
        report = Report(job, options.out, vars(options))
        problem = Problem(AG, m, k, n, job.size)
        operands = random_operands(problem, job, 0, DTYPE)
        for delayed in (False, True):
            link.is_on = delayed
            forms.forget_choices()
            variants = variants_of(problem, operands, options.chunks)
            calls = usable(job, variants, problem, operands)
            title = f"{problem}, float32, {job.size} processes of one thread, gloo " + (
                f"behind a link of {options.bandwidth:.0f} MB/s and {options.latency} ms"
                if delayed
                else "as it is: only what does not need the cores can be hidden"
            )
            run = partial(race, job, calls, iterations=options.iterations, rounds=options.rounds)
            times = job.attempt(run)
            if isinstance(times, Failure):
                job.say(f"{title}: {times}")
                report.add(title=title, failed=str(times))
                continue
            tell(job, title, times)
            report.add(title=title, rounds={name: own.of_rounds for name, own in times.items()})


if __name__ == "__main__":
    main()
