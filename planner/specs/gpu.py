"""One kind of GPU: what it can do at most. Peaks are vendors' data-sheet figures, dense (no sparsity)."""

from __future__ import annotations

from planner.specs.base import Spec
from planner.specs.units import Bytes, BytesPerSecond, FlopPerSecond, MoneyPerHour, Name


class Gpu(Spec):
    """A GPU type. `memory_bytes` is what the driver reports, not the number on the box."""

    name: Name
    memory_bytes: Bytes
    memory_bytes_per_s: BytesPerSecond
    fp16_flop_per_s: FlopPerSecond
    fp8_flop_per_s: FlopPerSecond | None = None
    host_bytes_per_s: BytesPerSecond
    """Between the GPU and host memory, one way, for swapped KV blocks."""
    price_per_hour: MoneyPerHour | None = None
    aliases: tuple[str, ...] = ()
    source: str = ""

    def is_called(self, name: str) -> bool:
        """True when `name` means this GPU, ignoring case."""
        return name.lower() in {self.name.lower(), *(alias.lower() for alias in self.aliases)}
