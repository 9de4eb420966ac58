"""Results are tensors of their own where grad is recorded, views or not, however they come out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from captured_on_cpu import Cuda
from meshfuse import FusionDefinition, KernelExecutor
from meshfuse.api.results import plain_result, wrap_result
from meshfuse.facts.sharding import Sharding
from meshfuse.multidevice import MultiDeviceExecutor, simulate

Run = Callable[[FusionDefinition, torch.Tensor], list[torch.Tensor]]
CALLS = 4


def views() -> FusionDefinition:
    """[2, 4]: its transpose, it with an axis in front, it flat; and what is no view."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4], contiguity=True)
        fd.add_output(fd.ops.permute(x, [1, 0]))
        fd.add_output(fd.ops.broadcast(x, [True, False, False]))
        fd.add_output(fd.ops.reshape(x, [-1]))
        fd.add_output(fd.ops.add(x, 1.0))
    return fd


def check(x: torch.Tensor, results: list[torch.Tensor]) -> None:
    """The values; then each result is scaled in place, and its gradient asked for."""
    values = x.clone()
    for result, want in zip(
        results, (values.T, values[None], values.reshape(-1), values + 1), strict=True
    ):
        assert not result.requires_grad
        assert torch.equal(result, want)
    more = torch.nn.Parameter(torch.ones(()))
    for result in results:
        result.add_(more)
        assert result.requires_grad
    torch.stack([result.sum() for result in results]).sum().backward()
    assert more.grad == 4 * x.numel()


def segmented(fd: FusionDefinition, x: torch.Tensor) -> list[torch.Tensor]:
    if not fd.segments:
        fd.segment([x])
    return fd.execute([x])


WAYS: dict[str, Run] = {
    "execute": lambda fd, x: fd.execute([x]),
    "off": lambda fd, x: fd.execute([x], overlap="off"),
    "with a profile": lambda fd, x: fd.execute([x], profile=True),
    "segments": segmented,
    "MultiDeviceExecutor": lambda fd, x: MultiDeviceExecutor(fd.fusion).run([x]),
    "simulate": lambda fd, x: simulate(fd, [x])[0],
    "simulate, its own inputs": lambda fd, x: simulate(fd, [[x]], per_rank=True)[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_views_can_be_changed_where_grad_is_recorded(way: str) -> None:
    fd = views()
    for _ in range(CALLS):
        x = torch.randn(2, 4)
        check(x, WAYS[way](fd, x))


def test_calls_with_numbers_are_the_same() -> None:
    """These are found in a table."""
    with FusionDefinition() as fd:
        x, factor = fd.define_tensor([-1, 4], contiguity=True), fd.define_scalar()
        fd.add_output(fd.ops.permute(x, [1, 0]))
        fd.add_output(fd.ops.mul(x, factor))
    for _ in range(CALLS):
        x = torch.randn(2, 4)
        for result in fd.execute([x, 2.0]):
            assert result.add_(torch.nn.Parameter(torch.ones(()))).requires_grad


def test_one_kernel_is_the_same() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4], contiguity=True)
        fd.add_output(fd.ops.permute(x, [1, 0]))
    executor = KernelExecutor()
    executor.compile(fd.fusion)
    for _ in range(CALLS):
        for run in (executor.run, fd.manual_execute):
            [result] = run([torch.randn(2, 4)])
            assert result.add_(torch.nn.Parameter(torch.ones(()))).requires_grad


def test_captured_calls_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda().install(monkeypatch)
    x = torch.randn(2, 4)
    captured = views().capture([x])
    for _ in range(CALLS):
        check(x, captured([x], clone_outputs=True))
    check(x, captured([x]))


def test_memory_is_the_outputs() -> None:
    """Nothing is copied: what is written to a view is written to what it shows."""
    fd = views()
    for _ in range(CALLS):
        x = torch.randn(2, 4)
        transposed, *_ = fd.execute([x])
        transposed.zero_()
        assert torch.equal(x, torch.zeros(2, 4))


def test_what_is_no_view_is_the_result_itself() -> None:
    x = torch.randn(2, 4)
    assert plain_result(x) is x
    with torch.no_grad():
        view = x.T
    for own in (plain_result(view), wrap_result(view, Sharding(None, ()), (4, 2))):
        assert view._is_view() and not own._is_view()
        assert (own.data_ptr(), own.stride()) == (x.data_ptr(), (1, 4))
    assert not plain_result(x.requires_grad_()).requires_grad


def viewed(x: torch.Tensor) -> torch.Tensor:
    """A view of it that torch refuses to change in place where grad is recorded."""
    with torch.no_grad():
        return x[:]


@torch.inference_mode()
def inferred(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


KINDS = (torch.clone, viewed, inferred, torch.nn.Parameter)


@pytest.mark.filterwarnings("ignore:input 0 requires grad")
@pytest.mark.parametrize("is_inferring", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_calls_are_made_of_before_makes_no_difference(
    kind: Callable[[torch.Tensor], torch.Tensor], is_inferring: bool
) -> None:
    """Inputs that are views, were made in inference mode or require grad; calls inside of that.
    Results are inputs, views of them or neither; of a program that takes a number or does not."""
    with FusionDefinition() as numbered:
        x, factor = numbered.define_tensor([-1, 4], contiguity=True), numbered.define_scalar()
        numbered.add_output(numbered.ops.permute(x, [1, 0]))
        numbered.add_output(x)
        numbered.add_output(numbered.ops.mul(x, factor))
    with FusionDefinition() as plain:
        x = plain.define_tensor([-1, 4], contiguity=True)
        plain.add_output(plain.ops.permute(x, [1, 0]))
        plain.add_output(x)
    more = torch.nn.Parameter(torch.ones(()))
    for fd, numbers in ((plain, []), (numbered, [2.0])):
        for _ in range(2):
            with torch.inference_mode(is_inferring):
                fd.execute([kind(torch.randn(2, 4)), *numbers])
            for other in (torch.clone, viewed, torch.clone):
                x = torch.randn(2, 4)
                values = x.clone()
                transposed, *others = fd.execute([other(x), *numbers])
                assert torch.equal(transposed, values.T)
                for result in (transposed, *others):
                    assert result.detach().add_(more).requires_grad
                    assert result.add_(more).requires_grad


@pytest.mark.parametrize("count", [1, 2])
def test_results_that_are_inputs(count: int) -> None:
    """Nothing is to be done, and nothing is let go of."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4], contiguity=True)
        for _ in range(count):
            fd.add_output(x)
    for size in (3, 0, 3):
        value = torch.randn(size, 4)
        results = fd.execute([value])
        assert len(results) == count
        assert all(torch.equal(result, value) for result in results)
