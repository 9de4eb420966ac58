"""A two-layer perceptron on two ranks: `up` split by columns, `down` by rows, one all-reduce.

Run it as it is: both ranks live in this process, and no GPU is needed.
"""

import torch
from torch.nn.functional import gelu, linear

from meshfuse import FusionDefinition
from meshfuse.multidevice import DeviceMesh, simulate

mesh = DeviceMesh(range(2))
with FusionDefinition() as fd:
    x = fd.define_tensor([-1, 64], contiguity=True)
    up, down = fd.define_tensor([256, 64]), fd.define_tensor([64, 256])
    fd.add_output(fd.ops.linear(fd.ops.gelu(fd.ops.linear(x, up)), down))
    x.set_device_mesh(mesh)
    for weight, axis in ((up, 0), (down, 1)):
        weight.set_device_mesh(mesh)
        weight.outer_split(axis, mesh.size).axis(axis).parallelize(mesh.axis(0))

inputs = [torch.randn(8, 64), torch.randn(256, 64) / 8, torch.randn(64, 256) / 16]
results = simulate(fd, inputs)  # what `fd.execute` returns on each rank
expected = linear(gelu(linear(inputs[0], inputs[1])), inputs[2])
for rank, [y] in enumerate(results):
    print(f"rank {rank}: largest error against torch {(y - expected).abs().max():.1e}")
