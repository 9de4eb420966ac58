"""Programs whose loops have a chunk for each rank: what tests of pipelines between peers share."""

from __future__ import annotations

from host_loops import STREAM, define
from meshfuse import DataType, FusionDefinition, TensorView
from sharded_runs import X, mesh_of, place


def in_blocks(
    tensor: TensorView, axis: int, d: int, *, pieces: int = 1, rotated: bool = True
) -> None:
    """Loop axis `axis` has a chunk for each of `d` ranks, each of `pieces`."""
    tensor.outer_split(axis, d)
    if pieces > 1:
        tensor.outer_split(axis + 1, pieces)
    if rotated:
        tensor.swizzle1d(axis, X)
    tensor.axis(axis).parallelize(STREAM)
    if pieces > 1:
        tensor.axis(axis + 1).parallelize(STREAM)


def gather_then_multiply(
    d: int,
    rows: int,
    *,
    pieces: int = 1,
    rotated: bool = True,
    epilogue: bool = False,
    streamed: bool = True,
) -> FusionDefinition:
    """relu(x [rows, 4] @ w [4, 5]), x in blocks of rows; the epilogue is a bias before it and a
    cast behind it."""
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        x = fd.define_tensor([rows, 4], contiguity=True)
        w = fd.define_tensor([4, 5], contiguity=True)
        replicated = [w, fd.ops.matmul(x, w)]
        if epilogue:
            b = fd.define_tensor([5], contiguity=True)
            replicated += [b, fd.ops.add(replicated[-1], b)]
        replicated.append(fd.ops.relu(replicated[-1]))
        if epilogue:
            replicated.append(fd.ops.cast(replicated[-1], DataType.Half))
        place(mesh, {0: X}, x)
        place(mesh, {}, *replicated)
        if streamed:
            in_blocks(replicated[-1], 0, d, pieces=pieces, rotated=rotated)
        fd.add_output(replicated[-1])

    return define(build)


def terms_one_by_one(total: TensorView, d: int) -> None:
    """The reduced axis, which is the last, has a part for each of `d` ranks."""
    last = len(total.get_loop_domain()) - 1
    total.outer_split(last, d)
    total.axis(last).parallelize(STREAM)


def multiply_then_scatter(
    d: int, rows: int, k: int, *, dtype: DataType = DataType.Float, streamed: bool = True
) -> FusionDefinition:
    """x [rows, k] @ w [k, 3], k in blocks; each rank wants a block of rows."""
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        x = fd.define_tensor([rows, k], contiguity=True, dtype=dtype)
        w = fd.define_tensor([k, 3], contiguity=True, dtype=dtype)
        y = fd.ops.matmul(x, w)
        place(mesh, {1: X}, x)
        place(mesh, {0: X}, w, y)
        if streamed:
            terms_one_by_one(y, d)
        fd.add_output(y)

    return define(build)


def pipelined_mlp(d: int, rows: int, wide: int) -> FusionDefinition:
    """relu(x [rows, 4] @ v [4, wide]) @ w [wide, 4]: x and the result in blocks of rows, what is
    between in blocks of columns."""
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        x = fd.define_tensor([rows, 4], contiguity=True)
        v = fd.define_tensor([4, wide], contiguity=True)
        w = fd.define_tensor([wide, 4], contiguity=True)
        product = fd.ops.matmul(x, v)
        hidden = fd.ops.relu(product)
        y = fd.ops.matmul(hidden, w)
        place(mesh, {0: X}, x, w, y)
        place(mesh, {1: X}, v, product, hidden)
        in_blocks(hidden, 0, d)
        terms_one_by_one(y, d)
        fd.add_output(y)

    return define(build)


def scatter_pieces(d: int, rows: int, k: int, *, epilogue: bool = False) -> FusionDefinition:
    """x [rows, k] @ w [3, k] transposed, k in blocks; each rank wants a block of rows, and nothing
    says in which loops it is made. The epilogue is a bias, an activation and a cast."""
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        x = fd.define_tensor([rows, k], contiguity=True)
        w = fd.define_tensor([3, k], contiguity=True)
        scattered = []
        if epilogue:
            b = fd.define_tensor([3], contiguity=True)
            place(mesh, {}, b)
            scattered.append(fd.ops.linear(x, w, b))
            scattered.append(fd.ops.relu(scattered[-1]))
            scattered.append(fd.ops.cast(scattered[-1], DataType.Half))
        else:
            scattered.append(fd.ops.linear(x, w))
        place(mesh, {1: X}, x, w)
        place(mesh, {0: X}, *scattered)
        fd.add_output(scattered[-1])

    return define(build)


def multiply_then_sum(
    d: int, rows: int, k: int, *, epilogue: bool = False, dtype: DataType = DataType.Float
) -> FusionDefinition:
    """x [rows, k] @ w [3, k] transposed, k in blocks; all ranks want all of it. The epilogue is a
    bias, an activation and a cast."""
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        x = fd.define_tensor([rows, k], contiguity=True, dtype=dtype)
        w = fd.define_tensor([3, k], contiguity=True, dtype=dtype)
        replicated = []
        if epilogue:
            b = fd.define_tensor([3], contiguity=True, dtype=dtype)
            replicated += [b, fd.ops.linear(x, w, b)]
            replicated.append(fd.ops.relu(replicated[-1]))
            replicated.append(fd.ops.cast(replicated[-1], DataType.Half))
        else:
            replicated.append(fd.ops.linear(x, w))
        place(mesh, {1: X}, x, w)
        place(mesh, {}, *replicated)
        fd.add_output(replicated[-1])

    return define(build)


def tensor_parallel_mlp(d: int, rows: int, wide: int) -> FusionDefinition:
    """Megatron's pair: relu(x @ v [wide, 4] transposed) @ w [4, wide] transposed, and a bias; what
    is between is in blocks of columns, x and the result on every rank."""
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        x = fd.define_tensor([rows, 4], contiguity=True)
        v = fd.define_tensor([wide, 4], contiguity=True)
        w = fd.define_tensor([4, wide], contiguity=True)
        b = fd.define_tensor([4], contiguity=True)
        product = fd.ops.linear(x, v)
        hidden = fd.ops.relu(product)
        y = fd.ops.linear(hidden, w, b)
        place(mesh, {0: X}, v)
        place(mesh, {1: X}, w, product, hidden)
        place(mesh, {}, x, b, y)
        fd.add_output(y)

    return define(build)
