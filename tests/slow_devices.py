"""Devices of which predicted times can be worked out in the head."""

from __future__ import annotations

from meshfuse.host.device_rates import DeviceRates


def products_and_links(flops: float) -> DeviceRates:
    """Only products, of so many operations a second, and transfers, of a byte, take time."""
    return DeviceRates(
        name="slow",
        contraction_flops=flops,
        contraction_flops_16bit=flops,
        other_flops=float("inf"),
        memory_bytes=float("inf"),
        link_bytes=1.0,
        launch=0.0,
        operation=0.0,
        communication=0.0,
    )
