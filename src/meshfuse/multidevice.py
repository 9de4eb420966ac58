"""`meshfuse.multidevice`: what a program on a mesh needs beyond `FusionDefinition`."""

from meshfuse.api.mesh import DeviceMesh
from meshfuse.api.sharding import Sharding, shard_tensor
from meshfuse.api.simulation import SimulatedResults, simulate
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.tensor import DistributedTensor

__all__ = [
    "Communicator",
    "DeviceMesh",
    "DistributedTensor",
    "Sharding",
    "SimulatedResults",
    "shard_tensor",
    "simulate",
]
