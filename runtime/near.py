"""Which CPU cores are near a GPU, as Linux tells it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PCI = Path("/sys/bus/pci/devices")


def cores_near(gpu: Any, pci: Path = _PCI) -> set[int]:
    """Return the cores of the NUMA node that a GPU hangs on; none where the system does not say.

    `gpu`: what torch.cuda.get_device_properties gives.
    """
    numbers = [getattr(gpu, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in numbers:
        return set()
    domain, bus, device = numbers
    try:
        text = (pci / f"{domain:04x}:{bus:02x}:{device:02x}.0" / "local_cpulist").read_text()
    except OSError:  # a container without the host's devices
        return set()
    return cores_of(text)


def cores_of(text: str) -> set[int]:
    """Return the numbers in a list such as `0-15,32-47`."""
    ranges = [part.strip().partition("-") for part in text.split(",") if part.strip()]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
