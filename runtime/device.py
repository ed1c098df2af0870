"""Whether to run on GPUs or on the CPU."""

from __future__ import annotations

from typing import Literal

import torch

from planner.errors import InputError


def gpus() -> int:
    """Return how many GPUs torch finds."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_of(asked: str) -> Literal["cpu", "cuda"]:
    """Return what `auto`, `cpu` or `cuda` means here. Raises InputError for other words, or where there is no GPU."""
    if asked not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device: expected auto, cpu or cuda, got {asked!r}")
    if asked == "cuda" and not gpus():
        raise InputError("--device cuda: torch finds no GPU here; see nvidia-smi, or give --device cpu")
    return "cuda" if asked == "cuda" or (asked == "auto" and gpus()) else "cpu"
