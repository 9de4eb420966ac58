"""A sequence-parallel transformer block, forward and backward: meshfuse beside eager torch.

    torchrun --nproc-per-node=2 benchmarks/transformer_block.py --out block.json

`torch` and `async TP` run attention by the kernel that meshfuse calls; with `any attention` torch
chooses it. Every result is compared with float32 first. All take turns, round by round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import overlap_forms as forms
import torch
from linears import relative_error
from overlap import world_name
from races import Call, race
from ranks import Failure, Job, Report, parser_of, print_table, run_job
from transformer_programs import Sizes, define_backward, define_forward, own_weight
from transformer_torch import AsyncTensorParallel, Collectives, ParallelBlock, by_float32

TOLERANCE = 4e-2
"""Of what passed a dozen roundings to bfloat16; what matters is that all variants err alike."""


@dataclass(frozen=True)
class Data:
    """Whole tensors, the same on all ranks, and this rank's shards."""

    sizes: Sizes
    rank: int
    whole: Mapping[str, torch.Tensor]
    whole_x: torch.Tensor
    whole_grad: torch.Tensor

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: own_weight(self.sizes, name, w, self.rank) for name, w in self.whole.items()}

    def rows(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(self.sizes.ranks, 0)[self.rank].contiguous()


def draw_data(sizes: Sizes, job: Job) -> Data:
    generator = torch.Generator(job.device).manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=job.device).bfloat16()

    whole: dict[str, torch.Tensor] = {}
    for name, shape in sizes.weights.items():
        whole[name] = normal(*shape) / math.sqrt(shape[-1] if len(shape) > 1 else 4)
    shape = (sizes.tokens, sizes.features)
    return Data(sizes, job.rank, whole, normal(*shape), normal(*shape))


@dataclass
class Variant:
    """A forward, and a backward of what it computed. Both can be called again and again."""

    forward: Call
    backward: Call
    y: Callable[[], torch.Tensor]
    gradients: Callable[[], list[torch.Tensor]]
    form: Callable[[], str] = str


Maker = Callable[[Data], Variant]


def of_meshfuse(form: object) -> Maker:
    def make(data: Data) -> Variant:
        ahead, back = define_forward(data.sizes), define_backward(data.sizes)
        weights = list(data.weights.values())
        x, grad = data.rows(data.whole_x), data.rows(data.whole_grad)

        def forward(number: int) -> list[torch.Tensor]:
            return forms.execute(ahead, [*weights, x], form)

        _, middle, joined, attended, *saved = forward(0)
        inputs = [*weights, x, middle, joined, attended, *saved, grad]

        def backward(number: int) -> list[torch.Tensor]:
            return forms.execute(back, inputs, form)

        return Variant(
            forward,
            backward,
            lambda: forms.local(forward(0))[0],
            lambda: forms.local(backward(0)),
            lambda: f"{forms.chosen_form(ahead)} / {forms.chosen_form(back)}",
        )

    return make


def of_torch(async_tp: bool, flash_only: bool) -> Maker:
    def make(data: Data) -> Variant:
        linears = AsyncTensorParallel(world_name()) if async_tp else Collectives()
        block = ParallelBlock(data.sizes, data.weights, linears, flash_only)
        x = data.rows(data.whole_x).requires_grad_()
        grad = data.rows(data.whole_grad)
        kept = block.forward(x)

        def forward(number: int) -> torch.Tensor:
            return block.forward(x)

        def backward(number: int) -> list[torch.Tensor]:
            return block.backward(kept, x, grad)

        return Variant(forward, backward, lambda: forward(0).detach(), lambda: backward(0))

    return make


def makers_of(job: Job, names: list[str]) -> dict[str, Maker]:
    explicit = {name: form for name, form in forms.explicit_forms().items() if name in names}
    makers: dict[str, Maker] = {
        "torch": of_torch(async_tp=False, flash_only=True),
        "torch, any attention": of_torch(async_tp=False, flash_only=False),
        "meshfuse plain": of_meshfuse("off"),
        "meshfuse auto": of_meshfuse("auto"),
        **{f"meshfuse {name}": of_meshfuse(form) for name, form in explicit.items()},
    }
    if job.is_cuda:
        makers["async TP"] = of_torch(async_tp=True, flash_only=True)
    return makers


def check(
    job: Job, variant: Variant, data: Data, y: torch.Tensor, gradients: list[torch.Tensor]
) -> dict[str, float]:
    """Relative errors of y and of each gradient, on the worst rank. `y` and so on are whole."""
    names = list(data.whole)
    wanted = [data.rows(y), data.rows(gradients[0])]
    wanted += [
        own_weight(data.sizes, name, whole, data.rank)
        for name, whole in zip(names, gradients[1:], strict=True)
    ]
    found = [variant.y(), *variant.gradients()]
    errors = [relative_error(a, b) for a, b in zip(found, wanted, strict=True)]
    return dict(zip(("y", "x", *names), job.largest(errors), strict=True))


def prepare(
    job: Job, data: Data, makers: Mapping[str, Maker]
) -> tuple[dict[str, Variant], dict[str, object]]:
    """The variants that run and are right, and the errors of all."""
    truth = job.attempt(lambda: by_float32(data.sizes, data.whole, data.whole_x, data.whole_grad))
    if isinstance(truth, Failure):
        job.say(f"the reference failed: {truth}")
        return {}, {"reference": str(truth)}
    variants: dict[str, Variant] = {}
    told: dict[str, object] = {}
    for name, make in makers.items():

        def run(maker: Maker = make) -> tuple[Variant, dict[str, float]]:
            variant = maker(data)
            return variant, check(job, variant, data, *truth)

        found = job.attempt(run)
        if isinstance(found, Failure):
            told[name] = str(found)
            job.say(f"{name} failed: {found}")
            continue
        variant, told[name] = found
        worst, of = max((error, of) for of, error in found[1].items())
        job.say(f"{name}: largest relative error {worst:.1e}, of {of}")
        if worst <= TOLERANCE:
            variants[name] = variant
        else:
            job.say(f"{name} IS WRONG: {found[1]}")
    return variants, told


def measure(
    job: Job, variants: Mapping[str, Variant], iterations: int, rounds: int, settle: int
) -> dict[str, dict[str, float]]:
    """Milliseconds by direction and variant."""
    found: dict[str, dict[str, float]] = {}
    for direction in ("forward", "backward"):
        calls: dict[str, Call] = {
            name: variant.forward if direction == "forward" else variant.backward
            for name, variant in variants.items()
        }
        times = race(job, calls, iterations=iterations, rounds=rounds, warm_up=settle)
        found[direction] = {name: own.median for name, own in times.items()}
    return found


def tell(job: Job, variants: Mapping[str, Variant], found: dict[str, dict[str, float]]) -> None:
    rows: list[tuple[object, ...]] = []
    base = sum(own["torch"] for own in found.values()) if "torch" in variants else math.nan
    for name, variant in variants.items():
        ahead, back = found["forward"][name], found["backward"][name]
        together = ahead + back
        ratio = f"{base / together:.2f}"
        rows.append((name, f"{ahead:.2f}", f"{back:.2f}", f"{together:.2f}", ratio, variant.form()))
    job.say()
    heads = ("variant", "forward ms", "backward ms", "both", "torch/this", "form")
    print_table(job, heads, rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument(
        "--forms", nargs="*", default=[], help="explicit ones, as chunks(4), peers(1)"
    )
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--settle", type=int, default=4, help="calls before the first round")
    options = parser.parse_args()
    if options.tiny:
        options.batch, options.sequence, options.hidden, options.heads = 2, 16, 64, 4
    with run_job(options) as job:
        report = Report(job, options.out, vars(options))
        sizes = Sizes(options.batch, options.sequence, options.hidden, options.heads, job.size)
        job.say(f"{sizes}, bfloat16")
        data = draw_data(sizes, job)
        variants, errors = prepare(job, data, makers_of(job, options.forms))
        found = job.attempt(
            lambda: measure(job, variants, options.iterations, options.rounds, options.settle)
        )
        if isinstance(found, Failure):
            job.say(f"the race failed: {found}")
            report.add(errors=errors, failed=str(found))
        elif variants:
            tell(job, variants, found)
            report.add(
                errors=errors,
                milliseconds=found,
                forms={name: variant.form() for name, variant in variants.items()},
            )


if __name__ == "__main__":
    main()
