"""How KV blocks get from the ranks of a prefill instance to those of a decode instance: they are read, layer by layer.

The prefill rank keeps its KV blocks in an `Outlet` and says after each layer how far a prompt is. The decode rank opens
a `Reader` of it and waits for a layer, then reads the blocks and heads that it needs, while the prefill rank is at the
next layer already (layer-wise transfer: Mooncake, FAST '25, section 5.2; the pulling side decides: DistServe, OSDI '24,
section 4.3). Reading asks nothing of the prefill rank's own thread.

A transport joins by one file with `reason_against`, `wished_address`, `open_outlet` and `open_reader`, and by one line
in `TRANSPORTS`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol

import torch

from planner.errors import InputError, PlannerError

TRANSPORTS = ("shm", "distributed", "nixl")
"""Modules of this package: shm for instances of one host, the others between hosts, too."""
ANSWER_S = 10.0
"""A prefill rank that does not answer for so long is taken for lost."""
TICKETS = 4096
"""Hand-offs that a prefill rank keeps count of at a time; a ticket of as many ago is no longer valid."""
MOST_LAYERS = 4096


class TransferError(PlannerError):
    """KV could not be read: the other side is gone, has let go of it, or did not get on in time."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the KV of one prefill rank is, and which part of the model's KV it is."""

    transport: str
    address: str
    """What the transport's `open_reader` needs to get there."""
    layers: tuple[int, int]
    """First, and one past the last."""
    heads: tuple[int, int]
    """KV heads: first, and one past the last."""
    blocks: int
    block_tokens: int
    head_dim: int
    dtype: str
    instance: str = ""
    rank: int = 0
    start: int = 0
    """How often the instance had been started: a rank's newer source makes the older one worthless."""

    @property
    def name(self) -> str:
        """Return which rank of which instance it is, for messages."""
        return f"{self.instance or 'prefill instance'}, rank {self.rank}"

    def at(self, address: str) -> Source:
        """Return the same source at another address."""
        return replace(self, address=address)

    def replaces(self, other: Source) -> bool:
        """Return True when this is the rank of `other`, started again."""
        return (self.instance, self.rank) == (other.instance, other.rank) and self.start > other.start

    @property
    def shape(self) -> tuple[int, ...]:
        """Return [layers, 2, blocks, block_tokens, kv_heads, head_dim]: keys at 0, values at 1."""
        layers, heads = self.layers[1] - self.layers[0], self.heads[1] - self.heads[0]
        return layers, 2, self.blocks, self.block_tokens, heads, self.head_dim

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the type of the numbers."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


class Outlet(Protocol):
    """The KV memory of a prefill rank, to be read by others."""

    source: Source
    kv: torch.Tensor
    """[layers, 2, blocks, block_tokens, kv_heads, head_dim]"""

    def ran(self, ticket: int, layers: int) -> None:
        """Say that the first `layers` layers of this rank have run for the prompt of a ticket."""
        ...

    def close(self) -> None:
        """Let nobody in any more, and free the memory."""
        ...


class Reader(Protocol):
    """Reads the KV of one prefill rank. Used by several threads at a time."""

    def ran(self, ticket: int) -> int:
        """Return how many of the rank's layers have run for a ticket. Raises TransferError for one that is past."""
        ...

    def read(self, layer: int, blocks: torch.Tensor, heads: slice) -> torch.Tensor:
        """Return [2, blocks, block_tokens, heads, head_dim] of the rank's layer (its own count, from 0) and heads."""
        ...

    def checksum(self, layer: int, blocks: torch.Tensor, heads: slice) -> int:
        """Return the CRC-32 of what `read` should bring, worked out as near to the source as the transport can."""
        ...

    def close(self) -> None:
        """Let go of the connection; whoever uses it then gets a TransferError."""
        ...


def check_bounds(source: Source, layer: int, blocks: torch.Tensor, heads: slice) -> None:
    """Raise TransferError unless a rank has such a layer, blocks and heads."""
    layers, _, most, _, most_heads, _ = source.shape
    inside = 0 <= layer < layers and 0 <= heads.start < heads.stop <= most_heads
    if not inside or not len(blocks) or int(blocks.min()) < 0 or int(blocks.max()) >= most:
        raise TransferError(f"{source.name}: it has no such layer, blocks or heads")


def checksum_of(kv: torch.Tensor) -> int:
    """Return the CRC-32 of some KV, in the order of its numbers. zlib's is the fastest at hand: 4 GB/s."""
    return zlib.crc32(kv.contiguous().cpu().view(torch.uint8).flatten().numpy())  # type: ignore[arg-type]  # it is a buffer


def reason_against(transport: str, device: torch.device) -> str | None:
    """Return why a transport cannot serve memory of `device`, or None when it can."""
    reason: str | None = _module(transport).reason_against(device)
    return reason


def check_usable(transport: str, device: torch.device | str) -> None:
    """Raise InputError with the reason when a transport cannot serve memory of `device`."""
    against = reason_against(transport, torch.device(device))
    if against:
        raise InputError(f"transport {transport}: {against}; use another of {', '.join(TRANSPORTS)}")


def wished_address(transport: str, place: str, host: str = "127.0.0.1") -> str:
    """Return the address to ask for; {rank} in it is to be filled in.

    `place` is a path that is nobody else's, `host` an address of the host by which decode instances reach it.
    """
    address: str = _module(transport).wished_address(place, host)
    return address


def open_outlet(transport: str, source: Source, device: torch.device) -> Outlet:
    """Return memory for `source`, whose address is a wish, ready to be read. Raises InputError, OutOfMemoryError."""
    check_usable(transport, device)
    outlet: Outlet = _module(transport).open_outlet(source, device)
    return outlet


def open_reader(source: Source, timeout_s: float = ANSWER_S) -> Reader:
    """Return a reader of `source`, which waits so long for each answer. Raises TransferError when it is not there."""
    reader: Reader = _module(source.transport).open_reader(source, timeout_s)
    return reader


def _module(transport: str) -> Any:
    if transport not in TRANSPORTS:
        raise InputError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {transport!r}")
    return import_module(f"runtime.transfer.{transport}")


def stamp(ticket: int, layers: int) -> int:
    """Return the number on the board for `layers` layers of a ticket: it only ever grows in a place."""
    return ticket * MOST_LAYERS + layers


CLOSED = stamp(1 << 40, 0)
"""On every place of a board that is no longer kept: a reader may still see the memory."""


def layers_ran(stamped: int, ticket: int) -> int:
    """Return the layers that a number on the board tells of `ticket`. Raises TransferError for one that is past."""
    if stamped == CLOSED:
        raise TransferError("the prefill instance has closed its KV")
    of_ticket, layers = divmod(stamped, MOST_LAYERS)
    if of_ticket > ticket:
        raise TransferError(f"hand-off {ticket} is past: the prefill instance has gone on to {of_ticket}")
    return layers if of_ticket == ticket else 0
