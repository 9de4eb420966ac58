"""Sizes that only a call knows: given by other tensors and by scalars, and checked."""

from __future__ import annotations

import pytest
import torch

from kernel_paths import PATHS, Run
from meshfuse import DataType, FusionDefinition


@pytest.fixture(params=PATHS)
def run(request: pytest.FixtureRequest) -> Run:
    return PATHS[request.param]


def test_shapes_of_sizes_and_scalars(run: Run) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.define_tensor([-1, 1, -1], contiguity=True)
        count = fd.define_scalar(dtype=DataType.Int)
        fd.add_output(fd.ops.expand(x, [count, -1, y.size(2)]) * 2.0)
        fd.add_output(fd.ops.expand(y, [-1, count + 1, x.size(1)]) + 1.0)
        fd.add_output(fd.ops.broadcast_in_dim(x, [x.size(0), y.size(0) // 2, 3], [0, 2]))
        fd.add_output(fd.ops.sum(fd.ops.expand(y, [y.size(0), x.size(0) * 2, 3]), [1]))
    x_data, y_data = torch.randn(4, 3), torch.randn(6, 1, 3)
    outputs = run(fd, [x_data, y_data, 7])
    torch.testing.assert_close(outputs[0], x_data.expand(7, 4, 3) * 2)
    torch.testing.assert_close(outputs[1], y_data.expand(6, 8, 3) + 1)
    torch.testing.assert_close(outputs[2], x_data[:, None, :].expand(4, 3, 3))
    torch.testing.assert_close(outputs[3], y_data[:, 0, :] * 8)


def test_sizes_that_do_not_fit_are_reported_before_anything_runs(run: Run) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.define_tensor([-1], contiguity=True)
        count = fd.define_scalar(dtype=DataType.Int)
        fd.add_output(fd.ops.expand(x, [count, 6]))
        fd.add_output(fd.ops.broadcast_in_dim(x, [count, 5, y.size(0) * 2], [0, 2]))
    with pytest.raises(RuntimeError, match=r"input 0, T0, to be of size 6 on axis 1"):
        run(fd, [torch.ones(4, 5), torch.ones(3), 4])
    with pytest.raises(RuntimeError, match=r"input 0, T0, to be of size 3 on axis 0"):
        run(fd, [torch.ones(4, 6), torch.ones(3), 3])
    with pytest.raises(RuntimeError, match=r"T\d+ meet the sizes 8 \(2\*i\d\) and 6, which"):
        run(fd, [torch.ones(4, 6), torch.ones(4), 4])


def test_tensors_whose_sizes_are_multiples_meet(run: Run) -> None:
    """[n, 1] stretched to [n, 2m] meets [n, k]: k must be 2m."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 1], contiguity=True)
        m = fd.define_tensor([-1], contiguity=True)
        y = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.expand(x, [-1, m.size(0) * 2]) + y)
    x_data, y_data = torch.randn(4, 1), torch.randn(4, 6)
    [result] = run(fd, [x_data, torch.ones(3), y_data])
    torch.testing.assert_close(result, x_data + y_data)
    with pytest.raises(RuntimeError, match="of size 6 on axis 1"):
        run(fd, [x_data, torch.ones(3), torch.randn(4, 5)])


def test_a_number_that_is_no_size(run: Run) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1])
        count = fd.define_scalar(DataType.Int)
        fd.add_output(fd.ops.broadcast_in_dim(x, [count, fd.ops.size(x, 0)], [1]))
    data = torch.arange(3.0)
    for size in (2, 0):
        assert torch.equal(run(fd, [data, size])[0], data.expand(size, 3))
    with pytest.raises(RuntimeError, match=r"an axis of T\d has size -1 \(c0\); a size is 0 or"):
        run(fd, [data, -1])


def test_reshapes_to_sizes_that_are_known_when_run(run: Run) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        count = fd.define_scalar(dtype=DataType.Int)
        rows = fd.ops.reshape(fd.ops.relu(x), [count, -1])
        fd.add_output(rows + 1.0)
        fd.add_output(fd.ops.reshape(fd.ops.sum(rows, [1]), [1, -1, 1]))
    data = torch.randn(4, 6)
    outputs = run(fd, [data, 8])
    torch.testing.assert_close(outputs[0], data.relu().reshape(8, 3) + 1)
    torch.testing.assert_close(outputs[1], data.relu().reshape(8, 3).sum(1).reshape(1, 8, 1))
    with pytest.raises(RuntimeError, match=r"to have 20 \(.*\) elements.*reshaped from has 24"):
        run(fd, [data, 5])
    with pytest.raises(RuntimeError, match="divided by zero; the size that -1 stands for"):
        run(fd, [data, 0])
    with pytest.raises(RuntimeError, match=r"an axis of T\d+ has size -2"):
        run(fd, [data, -2])


def test_a_squeezed_size_must_be_one_when_run(run: Run) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        count = fd.define_scalar(dtype=DataType.Int)
        fd.add_output(fd.ops.squeeze(fd.ops.reshape(x, [count, -1]), [0]) * 2.0)
    data = torch.randn(4, 6)
    [result] = run(fd, [data, 1])
    torch.testing.assert_close(result, data.reshape(24) * 2)
    with pytest.raises(RuntimeError, match=r"meet the sizes 2 \(c0\) and 1, which must be equal"):
        run(fd, [data, 2])


def test_reshapes_of_tensors_without_elements(run: Run) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.define_tensor([-1, 4], contiguity=True)
        fd.add_output(fd.ops.reshape(x, [0, 7]))
        fd.add_output(fd.ops.reshape(y, [y.size(0), 2, 2]) * 2.0)
    outputs = run(fd, [torch.ones(0, 3), torch.ones(0, 4)])
    assert [output.shape for output in outputs] == [(0, 7), (0, 2, 2)]
    with pytest.raises(RuntimeError, match="must be equal"):
        run(fd, [torch.ones(1, 3), torch.ones(0, 4)])


def test_outputs_of_sizes_that_are_equal_only_when_run(run: Run) -> None:
    """i0 // 8 rows beside 2 rows: loops of one kernel would not agree before the run."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        y = fd.define_tensor([-1], contiguity=True)
        rows = fd.ops.reshape(x, [-1, 8]) * 2.0
        two = fd.ops.expand(rows, [2, -1])
        fd.add_output(rows * 3.0)
        fd.add_output(two + 1.0)
        fd.add_output(fd.ops.sum(two, [1]))
        fd.add_output(fd.ops.max(rows, [1]))
        fd.add_output(fd.ops.add(rows, fd.ops.reshape(y, [-1, 8])))
        fd.add_output(fd.ops.abs(fd.ops.add(fd.ops.reshape(y, [-1, 8]), rows)))
    data, other = torch.randn(16), torch.randn(16)
    wanted = data.reshape(2, 8) * 2
    total = wanted + other.reshape(2, 8)
    references = [wanted * 3, wanted + 1, wanted.sum(1), wanted.amax(1), total, total.abs()]
    for output, reference in zip(run(fd, [data, other]), references, strict=True):
        torch.testing.assert_close(output, reference)
    with pytest.raises(RuntimeError, match="meet the sizes"):
        run(fd, [torch.randn(24), torch.randn(24)])
