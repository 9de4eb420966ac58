"""Running a definition on one device."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshfuse import DataType, FusionDefinition, ParallelType, TensorView
from meshfuse.multidevice import DeviceMesh

Build = Callable[..., object]


def run(build: Build, *inputs: torch.Tensor | float) -> list[torch.Tensor]:
    """Define with `from_pytorch` (or a scalar) per input, and execute once."""
    with FusionDefinition() as fd:
        handles = [
            fd.from_pytorch(value)
            if isinstance(value, torch.Tensor)
            else fd.define_scalar(dtype=DataType.Int if isinstance(value, int) else DataType.Double)
            for value in inputs
        ]
        results = build(fd, *handles)
        for result in results if isinstance(results, Sequence) else [results]:
            assert isinstance(result, TensorView)
            fd.add_output(result)
    return fd.execute(inputs)


X = torch.arange(-6.0, 6.0).view(3, 4)
W = torch.arange(20.0).view(5, 4)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda fd, x: fd.ops.set(x), X),
        (lambda fd, x: fd.ops.cast(x, DataType.Int), X.long()),
        (lambda fd, x: fd.ops.neg(x), -X),
        (lambda fd, x: fd.ops.exp(x), X.exp()),
        (lambda fd, x: fd.ops.rsqrt(x * x + 1.0), (X * X + 1).rsqrt()),
        (lambda fd, x: fd.ops.tanh(x), X.tanh()),
        (lambda fd, x: fd.ops.erf(x), X.erf()),
        (lambda fd, x: fd.ops.relu(x), X.relu()),
        (lambda fd, x: fd.ops.gelu(x), torch.nn.functional.gelu(X)),
        (lambda fd, x: fd.ops.add(x, x) - 3 * x / 2, X + X - 3 * X / 2),
        (lambda fd, x: fd.ops.where(x < 0, -1.0, x), torch.where(X < 0, -1.0, X)),
        (lambda fd, x: fd.ops.lt(x, 0), X < 0),
        (lambda fd, x: fd.ops.broadcast(x, [False, True, False]), X[:, None, :]),
        (lambda fd, x: fd.ops.broadcast_in_dim(x, [2, 3, 4], [1, 2]), X.expand(2, 3, 4)),
        (
            lambda fd, x: fd.ops.broadcast_in_dim(x, [x.size(1), *x.shape()], [1, 2]),
            X.expand(4, 3, 4),
        ),
        (lambda fd, x: fd.ops.permute(x, [1, 0]), X.t()),
        (lambda fd, x: fd.ops.squeeze(fd.ops.broadcast(x, [True, False, False]), [0]), X),
        (lambda fd, x: fd.ops.sum(x), X.sum()),
        (lambda fd, x: fd.ops.sum(x, [0], keepdim=True), X.sum(0, keepdim=True)),
        (lambda fd, x: fd.ops.max(x, dim=1), X.amax(1)),
        (lambda fd, x: fd.ops.var_mean(x, [1]), torch.var_mean(X, 1)),
        (lambda fd, x: fd.ops.mul(x, x.size(0)), X * 3),
    ],
)
def test_every_operation_by_value(
    build: Build, expected: torch.Tensor | Sequence[torch.Tensor]
) -> None:
    results = run(build, X)
    wanted = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    for result, want in zip(results, wanted, strict=True):
        assert result.dtype == want.dtype
        torch.testing.assert_close(result, want, rtol=1e-6, atol=1e-6)


def test_contractions_by_value() -> None:
    bias = torch.arange(5.0)
    [y] = run(lambda fd, x, w, b: fd.ops.linear(x, w, b), X, W, bias)
    assert torch.equal(y, torch.nn.functional.linear(X, W, bias))
    [y] = run(lambda fd, x, w: fd.ops.matmul(x, fd.ops.permute(w, [1, 0])), X, W)
    assert torch.equal(y, X @ W.t())


def test_scalar_inputs() -> None:
    [y] = run(lambda fd, x, a, n: fd.ops.add(fd.ops.mul(x, a), n), X, 2.5, 3)
    assert torch.equal(y, X * 2.5 + 3)


def test_a_vector_input_is_passed_as_a_list() -> None:
    with FusionDefinition() as fd:
        a, b = fd.define_vector(2)
        x = fd.from_pytorch(X)
        fd.add_output(x * a + b)
    [y] = fd.execute([[2, 3], X])
    assert torch.equal(y, X * 2 + 3)


def test_outputs_come_in_order_of_add_output() -> None:
    with FusionDefinition() as fd:
        x = fd.from_pytorch(X)
        y, z = x + 1.0, x * 2.0
        fd.add_output(z)
        fd.add_output(y)
        fd.add_output(z)
        fd.add_output(x)
    first, second, third, same = fd.execute([X])
    assert torch.equal(first, X * 2)
    assert torch.equal(second, X + 1)
    assert torch.equal(third, X * 2)
    assert same.data_ptr() == X.data_ptr()


def test_an_in_place_update_is_hidden() -> None:
    target = torch.zeros(3, 4)
    with FusionDefinition() as fd:
        x, out = fd.from_pytorch(X), fd.from_pytorch(target)
        y = x + 1.0
        fd.add_output(y, out)
        fd.add_output(y * 2.0)
    [doubled] = fd.execute([X, target])
    assert torch.equal(target, X + 1)
    assert torch.equal(doubled, (X + 1) * 2)


def test_other_sizes_reuse_what_was_compiled() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.sum(fd.ops.exp(x), [1]))
    compiled = []
    for shape in ((2, 8), (5, 3), (17, 64)):
        data = torch.randn(shape)
        [y] = fd.execute([data])
        torch.testing.assert_close(y, data.exp().sum(1))
        compiled.append(fd.fec.host_program())
    assert compiled[0] is compiled[1] is compiled[2]


def test_outputs_never_require_grad_and_one_warning_says_so() -> None:
    with FusionDefinition() as fd:
        x = fd.from_pytorch(X)
        fd.add_output(x * 2.0)
        fd.add_output(x)
    needs_grad = X.clone().requires_grad_()
    with pytest.warns(UserWarning, match="input 0 requires grad") as told:
        outputs = fd.execute([needs_grad])
    assert [warning.filename for warning in told] == [__file__]
    assert not any(y.requires_grad for y in outputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fd.execute([needs_grad])


def test_the_program_is_fixed_by_the_first_execute() -> None:
    with FusionDefinition() as fd:
        x = fd.from_pytorch(X)
        y = x + 1.0
        fd.add_output(y)
    fd.execute([X])
    assert repr(y) == "T1 f32[i0, i1]", "handles stay readable"
    before = str(fd)
    for mutate in (
        lambda: fd.define_tensor([2]),
        lambda: fd.ops.neg(x),
        lambda: x + 1,
        lambda: fd.add_output(x),
        lambda: y.outer_split(0, 2),
        lambda: y.axis(0).parallelize(ParallelType.mesh_x),
        lambda: y.set_device_mesh(DeviceMesh([0])),
    ):
        with pytest.raises(RuntimeError, match="this definition has been executed"):
            mutate()
    assert str(fd) == before


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([X], "expected 2 inputs .*, but got 1"),
        ([X, 1.0, 2.0], "expected 2 inputs .*, but got 3"),
        ([2, 1.0], "Expected input 0, T0.*, to be an at::Tensor but got scalar 2"),
        ([X, X], "Expected input 1, d0, to be a scalar but got float tensor of rank 2"),
        ([X[0], 1.0], "bound to a tensor of rank 2, but got a tensor of rank 1"),
        ([X.half(), 1.0], "dtype float, but got a tensor of dtype __half"),
        ([X.to(torch.int8), 1.0], "dtype float, but got a tensor of dtype torch.int8"),
        ([X, 2 + 1j], r"Scalar value \(2,1\) is not compatible .*: double"),
        ([X.t().contiguous().t(), 1.0], "contiguous on axis"),
        ([X, "a"], "input 1 is str 'a'"),
    ],
)
def test_wrong_inputs(inputs: list[object], message: str) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(x * fd.define_scalar())
    with pytest.raises(RuntimeError, match=message):
        fd.execute(inputs)
    [y] = fd.execute([X, 2.0])
    assert torch.equal(y, X * 2), "an error leaves the definition usable"


def test_wrong_static_size() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.define_tensor([3, 5])))
    with pytest.raises(RuntimeError, match="of size 5 on axis 1, but got a tensor of shape"):
        fd.execute([X])


def test_sizes_that_should_be_equal() -> None:
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([-1]), fd.define_tensor([-1])
        fd.add_output(x + y)
    with pytest.raises(RuntimeError):
        fd.execute([torch.zeros(3), torch.zeros(4)])


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None])
def test_device_may_be_named(device: torch.device | str | None) -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.from_pytorch(X)))
    [y] = fd.execute([X], device=device)
    assert y.device.type == "cpu"


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("cuda:1", RuntimeError, r"execute\(device=cuda:1\): input 0.* lies on cpu"),
        (1, RuntimeError, r"execute\(device=cuda:1\): input 0.* lies on cpu"),
        ("gpu", RuntimeError, "gpu"),
        (1.5, TypeError, r"execute\(device=1.5\)"),
    ],
)
def test_wrong_device(device: object, error: type[Exception], message: str) -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.from_pytorch(X)))
    with pytest.raises(error, match=message):
        fd.execute([X], device=device)  # type: ignore[arg-type]  # the point of the test


def test_options_of_one_call() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.from_pytorch(X)))
    [y] = fd.execute([X], _enable_options=["host_ir_lowering"], _disable_options=["fma"])
    assert torch.equal(y, -X)
    with pytest.raises(RuntimeError, match="Unrecognized enable_option: speed"):
        fd.execute([X], _enable_options=["speed"])
    with pytest.raises(RuntimeError, match="Unrecognized disable_option: speed"):
        fd.execute([X], _disable_options=["speed"])
    with pytest.raises(TypeError, match="quickly"):
        fd.execute([X], quickly=True)  # type: ignore[call-arg]  # refused, not ignored


def test_threads_may_share_a_definition() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.exp(x) + 1.0)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(5):
                data = torch.randn(3 + seed, 4 + step)
                [y] = fd.execute([data])
                torch.testing.assert_close(y, data.exp() + 1)
        except BaseException as error:  # noqa: BLE001  # handed to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_explain_before_and_after() -> None:
    with FusionDefinition() as fd:
        x = fd.from_pytorch(X)
        fd.add_output(fd.ops.sum(fd.ops.exp(x), [1]))
    assert "not been executed" in fd.explain()
    fd.execute([X])
    text = fd.explain()
    for part in ("program", "segments", "reduction", "host program"):
        assert part in text


def test_shardings_are_reported_after_a_call_only() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.from_pytorch(X)))
    with pytest.raises(RuntimeError, match="not been executed"):
        fd.fec.get_output_shardings()
    [y] = fd.execute([X])
    assert fd.fec.get_output_shardings() == []
    assert type(y) is torch.Tensor


def test_tensors_without_memory_of_their_own_are_refused() -> None:
    """A kernel that read or wrote through a null address would end the process."""
    fd = FusionDefinition()
    fd.add_output(fd.define_tensor([-1, -1]) + 1)
    freed = torch.ones(2, 2)
    assert torch.equal(fd.execute([freed])[0], freed + 1)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"a Tensor of shape \[2, 2\] has no memory"):
        fd.execute([freed])
    with FakeTensorMode():
        fake = torch.ones(2, 2)
    with pytest.raises(RuntimeError, match=r"Expected input 0.* holds its own .* a FakeTensor"):
        fd.execute([fake])
    assert fd.execute([torch.ones(0, 2)])[0].shape == (0, 2)
