"""meshfuse: a fusion compiler for tensor programs on one device or a mesh.

The names of nvFuser's Python package: `import meshfuse as nvfuser` is the whole migration.
"""

from meshfuse.base import set_aside  # before all else

# isort: split
from meshfuse import multidevice
from meshfuse.api.definition import FusionDefinition
from meshfuse.api.dtensors import execute_with_dtensors
from meshfuse.api.enumerations import CommunicatorBackend, SchedulerType
from meshfuse.api.executor_cache import FusionExecutorCache
from meshfuse.api.fusion_caches import LRUCache, LruFusionCache
from meshfuse.api.fusion_view import FusionView
from meshfuse.api.iter_domain import IterDomain, TensorDomain
from meshfuse.api.kernel_executor import KernelExecutor
from meshfuse.api.mesh import DeviceMesh
from meshfuse.api.ops import Operations
from meshfuse.api.profiling import (
    FusionProfile,
    KernelProfile,
    PythonProfiler,
    get_fusion_profile,
    reset_profiler,
)
from meshfuse.api.scheduling import Scheduling
from meshfuse.api.tensor_view import TensorView, Val
from meshfuse.api.validation import get_val_tolerances, validate_with_auto_inferred_outputs
from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import (
    CommunicationError,
    InvariantError,
    MeshfuseError,
    ScheduleError,
    Unsupported,
    UserAssertionError,
    UserError,
    UserTypeError,
    UserValueError,
)
from meshfuse.base.orders import compute_tensor_descriptor
from meshfuse.base.version import VERSION
from meshfuse.cache import FusionCache
from meshfuse.dist.tensor import DistributedTensor
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.schedule import MemoryType

set_aside.give_back()

__version__ = VERSION

ops = Operations()
"""The operations, on the definition of their operands."""

schedule = Scheduling()
"""The schedule functions, on the definition of their tensors."""

__all__ = [
    "FusionDefinition",
    "TensorView",
    "Val",
    "IterDomain",
    "TensorDomain",
    "FusionView",
    "KernelExecutor",
    "DataType",
    "ParallelType",
    "MemoryType",
    "multidevice",
    "ops",
    "schedule",
    "DeviceMesh",
    "DistributedTensor",
    "FusionCache",
    "FusionExecutorCache",
    "LRUCache",
    "LruFusionCache",
    "SchedulerType",
    "CommunicatorBackend",
    "PythonProfiler",
    "FusionProfile",
    "KernelProfile",
    "get_fusion_profile",
    "reset_profiler",
    "get_val_tolerances",
    "validate_with_auto_inferred_outputs",
    "compute_tensor_descriptor",
    "execute_with_dtensors",
    "version",
    "__version__",
    "CommunicationError",
    "InvariantError",
    "MeshfuseError",
    "ScheduleError",
    "Unsupported",
    "UserAssertionError",
    "UserError",
    "UserTypeError",
    "UserValueError",
]


def version() -> str:
    """The version of this package."""
    return __version__
