"""How quick devices are, as a cost model needs it."""

from __future__ import annotations

from typing import Final, final

from meshfuse.base.dtypes import ITEM_BYTES, DataType
from meshfuse.base.frozen import frozen_dataclass


@final
@frozen_dataclass
class DeviceRates:
    """What one device does in a second, and how many seconds it takes to begin something.

    `contraction_flops`: of float32 in matmul, linear and attention, which multiply and add;
    `contraction_flops_16bit`: of 16-bit floats. Of float64 it is half of float32. `other_flops`: of
    all other arithmetic. `memory_bytes`: read and written. `link_bytes`: received from other ranks,
    over links of which no bandwidth is given. `launch` is what a kernel takes before it begins,
    `operation` one that torch runs, `communication` a meeting of ranks.
    """

    name: str
    contraction_flops: float
    contraction_flops_16bit: float
    other_flops: float
    memory_bytes: float
    link_bytes: float
    launch: float
    operation: float
    communication: float

    def contraction_flops_of(self, dtype: DataType) -> float:
        match ITEM_BYTES[dtype]:
            case 1 | 2:
                return self.contraction_flops_16bit
            case 4:
                return self.contraction_flops
            case _:
                return self.contraction_flops / 2


CPU_RATES: Final = DeviceRates(
    name="2 cores of a Zen 4 CPU with AVX-512, gloo",
    contraction_flops=150e9,
    contraction_flops_16bit=800e9,
    other_flops=50e9,
    memory_bytes=40e9,
    link_bytes=0.5e9,
    launch=2e-6,
    operation=5e-6,
    communication=300e-6,
)
"""Measured once, rounded: for the size of things, not for their last digit."""

H200_RATES: Final = DeviceRates(
    name="NVIDIA H200, NCCL over NVLink",
    contraction_flops=50e12,
    contraction_flops_16bit=750e12,
    other_flops=30e12,
    memory_bytes=4.2e12,
    link_bytes=205e9,
    launch=2e-6,
    operation=4e-6,
    communication=20e-6,
)
"""Large matrices and messages; other numbers are NVIDIA's. float32 without TF32."""
