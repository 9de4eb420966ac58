"""Programs with loops of several kinds, which tests of the checker share."""

from __future__ import annotations

from host_loops import STREAM, chunks, define, dense
from meshfuse import FusionDefinition
from sharded_runs import X, mesh_of, place


def added_columns(fd: FusionDefinition) -> None:
    total = fd.ops.sum(fd.ops.mul(dense(fd, 7, 5), dense(fd, 7, 5)), [0])
    chunks(total, 0, 3)
    fd.add_output(fd.ops.neg(total))


def added_in_chunks_of_columns(fd: FusionDefinition) -> None:
    """What is added in each of 3 iterations is in 2 chunks itself."""
    total = fd.ops.sum(fd.ops.mul(dense(fd, 9, 6), dense(fd, 9, 6)), [0])
    chunks(total, 0, 3)
    chunks(total, 2, 2)
    fd.add_output(total)


def added_in_chunks_of_any_size(fd: FusionDefinition) -> None:
    """Of many iterations that add, each is in 2 chunks: the checker looks at a few of the many."""
    x, y = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
    total = fd.ops.sum(fd.ops.mul(x, y), [0])
    total.inner_split(0, 3)
    total.axis(0).parallelize(STREAM)
    chunks(total, 2, 2)
    fd.add_output(total)


def columns_of_one_term(fd: FusionDefinition) -> None:
    """Chunks of one place of what is transposed, whose other axis has one place, too: by w.size(1),
    which x tells."""
    x, w = dense(fd, 5, 1), fd.define_tensor([-1, -1], contiguity=True)
    y = fd.ops.matmul(fd.ops.relu(x), fd.ops.permute(w, [1, 0]))
    y.axis(1).parallelize(STREAM)
    fd.add_output(fd.ops.add(y, dense(fd, 5, 3)))


def two_loops(fd: FusionDefinition) -> None:
    """What one writes in 6 chunks of columns the other reads in 12 of rows, and then no more."""
    c = fd.ops.matmul(dense(fd, 12, 4), dense(fd, 4, 6))
    d = fd.ops.matmul(c, dense(fd, 6, 3))
    chunks(c, 1, 6)
    chunks(d, 0, 12)
    fd.add_output(d)


def nested(fd: FusionDefinition) -> None:
    c = fd.ops.matmul(dense(fd, 10, 7), dense(fd, 7, 6))
    chunks(c, 0, 5)
    chunks(c, 3, 3)
    fd.add_output(fd.ops.relu(c))


def of_any_size(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1], contiguity=True)
    y = fd.ops.relu(x)
    z = fd.ops.sum(y, [1])
    for tensor in (y, z):
        tensor.inner_split(0, 3)
        tensor.axis(0).parallelize(STREAM)
        fd.add_output(tensor)


def updated(fd: FusionDefinition) -> None:
    x = dense(fd, 9, 4)
    y = fd.ops.mul(x, 2.0)
    chunks(y, 0, 3)
    fd.add_output(y, x)


def two_layers() -> FusionDefinition:
    """Two perceptrons in a row, of which each rank has a part of the hidden axes."""
    mesh = mesh_of(2)

    def build(fd: FusionDefinition) -> None:
        x = y = dense(fd, 8, 3, 4)
        for _ in range(2):
            v, w = dense(fd, 4, 4), dense(fd, 4, 4)
            y = fd.ops.linear(fd.ops.relu(fd.ops.linear(y, v)), w)
            place(mesh, {0: X}, v)
            place(mesh, {1: X}, w)
            place(mesh, {}, y)
        place(mesh, {}, x)
        fd.add_output(y)

    return define(build)


def terms_of_any_rows(fd: FusionDefinition) -> None:
    """Three rows at a time, each a sum over two ranks."""
    mesh = mesh_of(2)
    x = fd.define_tensor([-1, 8], contiguity=True)
    w = dense(fd, 8, 3)
    y = fd.ops.matmul(x, w)
    z = fd.ops.relu(y)
    place(mesh, {1: X}, x)
    place(mesh, {0: X}, w)
    place(mesh, {}, y, z)
    y.inner_split(0, 3)
    y.axis(0).parallelize(STREAM)
    fd.add_output(z)


def columns_of_any_rows(fd: FusionDefinition) -> None:
    """Rows that are gathered, of which two ranks may have unequal blocks, by columns, three at a
    time."""
    mesh = mesh_of(2)
    x = fd.define_tensor([-1, 8], contiguity=True)
    w = fd.define_tensor([8, -1], contiguity=True)
    y = fd.ops.matmul(x, w)
    z = fd.ops.relu(y)
    place(mesh, {0: X}, x)
    place(mesh, {}, w, y, z)
    z.inner_split(1, 3)
    z.axis(1).parallelize(STREAM)
    fd.add_output(z)
