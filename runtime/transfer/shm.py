"""KV in a file of shared memory: the decode rank maps it and copies. For instances of one host.

The file begins with the board, where the prefill rank says how far each hand-off is; the KV blocks follow.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from math import prod
from pathlib import Path

import torch

from planner.errors import InputError
from runtime.memory import OutOfMemoryError
from runtime.transfer.base import (
    ANSWER_S,
    CLOSED,
    TICKETS,
    Source,
    TransferError,
    check_bounds,
    checksum_of,
    layers_ran,
    stamp,
)

_BOARD_BYTES = 8 * TICKETS


def reason_against(device: torch.device) -> str | None:
    """Return why shared memory cannot hold KV of `device`, or None when it can."""
    if device.type != "cpu":
        return "the KV of a GPU is not in host memory"
    return None


def wished_address(place: str, host: str) -> str:
    """Return the file to make for each rank."""
    return f"{place}.{{rank}}"


def open_outlet(source: Source, device: torch.device) -> ShmOutlet:
    """Return KV memory in the file that `source.address` names."""
    return ShmOutlet(source)


def open_reader(source: Source, timeout_s: float = ANSWER_S) -> ShmReader:
    """Return a reader of the file that `source.address` names; nothing of it has to be waited for."""
    return ShmReader(source)


class ShmOutlet:
    """Owns the file. All its bytes are taken at once: a write that finds no room later would be a signal."""

    def __init__(self, source: Source):
        self.source = source
        _create(Path(source.address), _bytes(source))
        self._board, self.kv = _map(source)

    def ran(self, ticket: int, layers: int) -> None:
        """Say that the first `layers` layers have run for a ticket."""
        self._board[ticket % TICKETS] = stamp(ticket, layers)

    def close(self) -> None:
        """Remove the file; whoever maps it keeps what is there, and is told."""
        self._board.fill_(CLOSED)
        with suppress(FileNotFoundError):  # the folder of a run is removed as a whole
            os.unlink(self.source.address)


class ShmReader:
    """Maps the file of a prefill rank."""

    def __init__(self, source: Source):
        try:
            size = os.stat(source.address).st_size
        except OSError as error:
            raise TransferError(f"{source.address}: {error.strerror}; has the prefill instance ended?") from None
        if size != _bytes(source):
            raise TransferError(f"{source.address}: expected {_bytes(source)} bytes, got {size}")
        self._source = source
        self._memory: tuple[torch.Tensor, torch.Tensor] | None = _map(source)

    def ran(self, ticket: int) -> int:
        """Return how many layers have run for a ticket."""
        return layers_ran(int(self._mapped()[0][ticket % TICKETS]), ticket)

    def read(self, layer: int, blocks: torch.Tensor, heads: slice) -> torch.Tensor:
        """Return [2, blocks, block_tokens, heads, head_dim]."""
        check_bounds(self._source, layer, blocks, heads)
        return self._mapped()[1][layer].index_select(1, blocks)[..., heads, :]

    def checksum(self, layer: int, blocks: torch.Tensor, heads: slice) -> int:
        """Return the CRC-32 of the mapped source."""
        return checksum_of(self.read(layer, blocks, heads))

    def close(self) -> None:
        """Unmap, once no thread reads any more."""
        self._memory = None

    def _mapped(self) -> tuple[torch.Tensor, torch.Tensor]:
        memory = self._memory
        if memory is None:
            raise TransferError(f"{self._source.name}: the reader is closed")
        return memory


def _bytes(source: Source) -> int:
    return _BOARD_BYTES + prod(source.shape) * source.torch_dtype.itemsize


def _create(path: Path, size: int) -> None:
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError as error:
        raise InputError(f"{path}: shared memory for KV blocks cannot be made: {error.strerror}") from None
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        os.unlink(path)
        if error.errno != errno.ENOSPC:
            raise
        free = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
        raise OutOfMemoryError(
            f"{path.parent}: no room for KV blocks to hand over: {size / 2**30:.2f} GiB asked, {free / 2**30:.2f} GiB "
            "free; lower kv_blocks, or give the container more shared memory (docker run --shm-size)"
        ) from None
    finally:
        os.close(handle)


def _map(source: Source) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the board [TICKETS] and the KV blocks, both in the file."""
    whole = torch.from_file(source.address, shared=True, size=_bytes(source), dtype=torch.uint8)
    board = whole[:_BOARD_BYTES].view(torch.int64)
    return board, whole[_BOARD_BYTES:].view(source.torch_dtype).view(source.shape)
