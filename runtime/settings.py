"""Settings of one instance of the runtime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.errors import InputError

Preemption = Literal["auto", "swap", "recompute"]
Role = Literal["aggregated", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How one instance is cut up and run. The defaults that planning shares are those of planner.specs.engine."""

    tp: int = 1
    pp: int = 1
    stage_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty: as even as can be."""
    device: str = "cpu"
    """cpu or cuda; rank r takes the r-th of `device_indices`."""
    device_indices: tuple[int, ...] = ()
    """GPUs, or CPU cores (each rank is pinned to its equal share of them); empty: whatever there is."""
    dtype: str = ""
    """float32, bfloat16 or float16; empty: the type that the weights were published in."""
    threads: int = 0
    """CPU threads of each rank; 0: an equal share of the cores."""
    block_tokens: int = 16
    kv_blocks: int = 0
    """KV blocks of the instance; 0: as many as fit into the memory that is left."""
    host_blocks: int = 0
    """Blocks of host memory to swap to."""
    memory_fraction: float = 0.9
    """Share of the device's memory that weights, KV cache and workspace may take together."""
    prefix_caching: bool = True
    max_batch: int = 256
    """Sequences that run side by side."""
    step_tokens: int = 2048
    """Token budget of one step: longer prompts run in chunks beside the decoding requests; 0: no bound."""
    preemption: Preemption = "auto"
    """What becomes of the KV of a request that has to make room; auto: what takes less time, measured at the start."""
    role: Role = "aggregated"
    """prefill: prompts run whole, in batches of up to step_tokens, and are handed over; decode: takes them in."""
    transport: str = ""
    """How KV leaves a prefill instance: a name of `runtime.transfer.base.TRANSPORTS`."""
    address: str = ""
    """Where each rank of a prefill instance offers its KV, {rank} to be filled in; the transport says what it means."""
    transfer_checksums: bool = False
    """Compare what a decode instance has pulled with what the prefill instance holds, layer by layer."""
    name: str = ""
    """Of the instance, for messages; with its number of starts behind @ when it may be started again."""
    max_pulls: int = 4
    """Hand-offs that a decode instance pulls at a time."""
    attention: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("tp", 1), ("pp", 1), ("block_tokens", 1), ("max_batch", 1), ("max_pulls", 1)):
            _at_least(name, getattr(self, name), low)
        for name in ("threads", "kv_blocks", "host_blocks", "step_tokens"):
            _at_least(name, getattr(self, name), 0)
        if self.preemption not in ("auto", "swap", "recompute"):
            raise InputError(f"preemption: expected auto, swap or recompute, got {self.preemption!r}")
        if self.role not in ("aggregated", "prefill", "decode"):
            raise InputError(f"role: expected aggregated, prefill or decode, got {self.role!r}")
        if self.dtype not in ("", "float32", "bfloat16", "float16"):
            raise InputError(f"dtype: expected float32, bfloat16 or float16, got {self.dtype!r}")
        if self.device not in ("cpu", "cuda"):
            raise InputError(f"device: expected cpu or cuda, got {self.device!r}")
        if not 0 < self.memory_fraction <= 1:
            raise InputError(f"memory_fraction: expected more than 0 and up to 1, got {self.memory_fraction}")
        if self.preemption == "swap" and not self.host_blocks:
            raise InputError("preemption: swap needs host_blocks of at least 1")

    @property
    def ranks(self) -> int:
        """Return how many processes share the model."""
        return self.tp * self.pp


def _at_least(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InputError(f"{name}: expected a whole number of at least {low}, got {value!r}")
