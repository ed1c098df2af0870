"""How much memory there is for KV blocks, and an error that says what to do when there is too little."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from planner.errors import PlannerError

_CGROUP = Path("/sys/fs/cgroup")


class OutOfMemoryError(PlannerError):
    """A device does not have the memory that was asked for. Says what for, how much, what is free, what to lower."""

    exit_code = 1


def shared_memory() -> str | None:
    """Return the folder whose files lie in memory; None, the usual one for temporary files, where there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def total_bytes(device: torch.device) -> int:
    """Return the bytes of the device's memory; on the CPU, those that this process group may have."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limit = _limit_bytes()
    return min(psutil.virtual_memory().total, limit) if limit else psutil.virtual_memory().total


def free_bytes(device: torch.device) -> int:
    """Return the bytes that could still be allocated there."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available, limit = psutil.virtual_memory().available, _limit_bytes()
    if limit is None:
        return available
    return max(0, min(available, limit - int((_CGROUP / "memory.current").read_text())))


def _limit_bytes() -> int | None:
    """Return the memory limit of the container, or None where there is none."""
    try:
        text = (_CGROUP / "memory.max").read_text().strip()
    except OSError:  # not a container, or an older kernel
        return None
    return None if text == "max" else int(text)


@contextmanager
def within_memory(device: torch.device, what: str, asked: int, way_out: str) -> Iterator[None]:
    """Run the body; raise OutOfMemoryError when `asked` bytes for `what` are not there, before or while taking them."""
    free = free_bytes(device)
    if asked > free:
        raise _short(device, what, asked, free, way_out)
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise _short(device, what, asked, free_bytes(device), way_out) from error
        raise


def _short(device: torch.device, what: str, asked: int, free: int, way_out: str) -> OutOfMemoryError:
    return OutOfMemoryError(f"{device}: no room for {what}: {_gib(asked)} asked, {_gib(free)} free; {way_out}")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
