"""What the operator laws must know of a GPU beside its rates: how many processors, and the tiles its libraries cut.

A matrix product is cut into tiles, one block of threads each, and blocks run in waves over the streaming
multiprocessors (SMs): a product costs what whole tiles and, mostly, whole waves cost (NVIDIA, Matrix Multiplication
Background User's Guide, sections on tile and wave quantization).
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.specs.gpu import Gpu


@dataclass(frozen=True, slots=True)
class Chip:
    """One GPU as its kernels see it. `sms` None: unknown, and then nothing is rounded up to whole waves."""

    sms: int | None
    flop_per_s: float
    bytes_per_s: float
    tile_rows: tuple[int, ...]
    """Heights that a tile may have along the tokens, ascending; a batch takes the first that covers it, else the
    last."""
    tile_columns: tuple[int, ...]
    """Widths along the outputs; the library takes the cheaper one."""


_AMPERE = ((64, 128), (128, 256))
"""Largest tile 128 tokens x 256 outputs: its long side lies along the weights (A100, A800, Ada)."""

_HOPPER = ((64, 128, 256), (128,))
"""Largest tile 256 tokens x 128 outputs: two blocks in a cluster share the weights they load (Hopper, Blackwell)."""

_SMS = {
    "a100-80gb": (108, _AMPERE),
    "a40": (84, _AMPERE),
    "rtx4090": (128, _AMPERE),
    "l40s": (142, _AMPERE),
    "h100-80gb": (132, _HOPPER),
    "h200": (132, _HOPPER),
    "gb200": (148, _HOPPER),
}
"""Enabled SMs, from NVIDIA's architecture white papers."""


def chip(gpu: Gpu) -> Chip:
    """Return `gpu` as its kernels see it; of a GPU that the table has not, without the number of its SMs."""
    sms, (rows, columns) = _SMS.get(gpu.name, (None, _AMPERE))
    return Chip(sms, gpu.fp16_flop_per_s, gpu.memory_bytes_per_s, rows, columns)
