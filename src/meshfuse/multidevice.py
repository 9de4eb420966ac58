"""`meshfuse.multidevice`: what a program on a mesh needs beyond `FusionDefinition`."""

from meshfuse.api.dtensor_function import DTensorFunction
from meshfuse.api.dtensors import execute_with_dtensors
from meshfuse.api.mesh import DeviceMesh
from meshfuse.api.mesh_plan import MeshPlan, PlannedCommunication
from meshfuse.api.multidevice_executor import MultiDeviceExecutor, MultiDeviceExecutorParams
from meshfuse.api.overlap_choice import OverlapChoice
from meshfuse.api.planning import plan
from meshfuse.api.sharding import Sharding, shard_tensor
from meshfuse.api.simulation import SimulatedResults, simulate
from meshfuse.api.symmetric_memory import symmetric_empty
from meshfuse.api.timeline import Timeline
from meshfuse.api.visualization import ShardingPicture, visualize
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.tensor import DistributedTensor
from meshfuse.facts.overlap_form import Overlap
from meshfuse.host.device_rates import CPU_RATES, H200_RATES, DeviceRates

__all__ = [
    "CPU_RATES",
    "H200_RATES",
    "DeviceRates",
    "Timeline",
    "Communicator",
    "DTensorFunction",
    "DeviceMesh",
    "DistributedTensor",
    "MeshPlan",
    "MultiDeviceExecutor",
    "MultiDeviceExecutorParams",
    "Overlap",
    "OverlapChoice",
    "PlannedCommunication",
    "Sharding",
    "ShardingPicture",
    "SimulatedResults",
    "execute_with_dtensors",
    "plan",
    "shard_tensor",
    "simulate",
    "symmetric_empty",
    "visualize",
]
