"""KV over torch.distributed (gloo): between hosts, and for KV on a GPU, which goes through host memory.

gloo sends and receives, it does not read. So the prefill rank has a thread for each reader that answers requests:
how far is a ticket, send these blocks of that layer. Each pair is a process group of two, of its own (`pair.py`):
readers come and go, and the groups of the ranks of an instance know nothing of it.

Back-pressure: a reader has one request under way, so that at most one layer of one prompt waits to be sent to it.
Who can reach the port can read KV: it is bound to one address, that of the loopback unless another is asked for.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.transfer.base import ANSWER_S, TICKETS, Source, TransferError, check_bounds, checksum_of, layers_ran, stamp
from runtime.transfer.pair import CALLER, LISTENER, Group, call, host_and_port, join, listen

_RAN, _READ, _CHECKSUM, _FAREWELL = range(4)
_OK, _REFUSED, _CLOSED = range(3)
_HEAD, _INLINE, _REPLY = 5, 251, 2
"""Numbers that begin a request: what, ticket or layer, first head, end of heads, count of blocks. The first blocks
follow in the same message, the rest in one of its own. In a reply: how, value."""
_SEND_S = 30.0
"""A reader that does not take an answer for so long is given up."""
_QUIET = timedelta(hours=24)
"""A reader that asks nothing for so long is given up; it finds its way back when it has to."""


def reason_against(device: torch.device) -> str | None:
    """Return why gloo cannot serve KV of `device`, or None when it can."""
    if not dist.is_available() or not dist.is_gloo_available():
        return "this build of torch has no gloo"
    return None


def wished_address(place: str, host: str) -> str:
    """Return a free port of the host."""
    return f"tcp://{host}:0"


def open_outlet(source: Source, device: torch.device) -> DistributedOutlet:
    """Return KV memory on `device`, served at the host and port of `source.address`; port 0: a free one."""
    return DistributedOutlet(source, device)


def open_reader(source: Source, timeout_s: float = ANSWER_S) -> DistributedReader:
    """Return a reader of the rank that serves at `source.address`."""
    return DistributedReader(source, timeout_s)


# ---- the prefill rank


class DistributedOutlet:
    """Serves its KV from threads: one that waits for readers, and one for each reader."""

    def __init__(self, source: Source, device: torch.device):
        host, port = host_and_port(source.address)
        self._listening = listen(host, port)
        port = self._listening.getsockname()[1]
        self.source = source.at(f"tcp://{f'[{host}]' if ':' in host else host}:{port}")
        self.kv = torch.zeros(source.shape, dtype=source.torch_dtype, device=device)
        self._board = torch.zeros(TICKETS, dtype=torch.int64)
        self._closed = False
        threading.Thread(target=self._let_in, name="kv-outlet", daemon=True).start()

    def ran(self, ticket: int, layers: int) -> None:
        """Say that the first `layers` layers have run for a ticket."""
        self._board[ticket % TICKETS] = stamp(ticket, layers)

    def close(self) -> None:
        """Answer nothing more, and free the memory. Threads end when their reader next asks, or leaves."""
        self._closed = True
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, which closing alone does not
        self._listening.close()
        self.kv = torch.zeros(0)

    def _let_in(self) -> None:
        """Give each reader that calls a thread."""
        while True:
            try:
                wire, _ = self._listening.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(wire,), name="kv-reader", daemon=True).start()

    def _serve(self, wire: socket.socket) -> None:
        with suppress(RuntimeError, OSError):  # a reader has gone, in whatever way
            group = join(wire, LISTENER, ANSWER_S)
            request, coming = _next_request(group)
            going_on = True
            while going_on:
                coming.wait(_QUIET)
                asked = request
                request, coming = _next_request(group)
                going_on = self._answer(group, asked)

    def _answer(self, group: Group, request: torch.Tensor) -> bool:
        """Answer a request. Return False when no other is to be read."""
        what, number, first, end, count = request[:_HEAD].tolist()
        if what == _FAREWELL:
            return False
        kv = self.kv  # taken first: closing sets the flag, then lets go of it
        if self._closed:
            return _reply(group, _CLOSED)
        if what == _RAN:
            return _reply(group, _OK, int(self._board[number % TICKETS]))
        if not 0 < count <= self.source.blocks:
            return _reply(group, _REFUSED)
        blocks, heads = request[_HEAD : _HEAD + count], slice(first, end)
        if count > _INLINE:
            rest = torch.empty(count - _INLINE, dtype=torch.int64)
            group.recv([rest], CALLER, 1).wait(timedelta(seconds=_SEND_S))
            blocks = torch.cat([blocks, rest])
        try:
            check_bounds(self.source, number, blocks, heads)
        except TransferError:
            return _reply(group, _REFUSED)
        part = _part(kv, number, blocks, heads)
        if what == _CHECKSUM:
            return _reply(group, _OK, checksum_of(part))
        return _reply(group, _OK, part.numel()) and _send(group, part, CALLER, _SEND_S, 1)


def _next_request(group: Group) -> tuple[torch.Tensor, dist.Work]:
    """Return where the next request will be, and what to wait for: gloo sends nothing before it is asked to receive."""
    request = torch.empty(_HEAD + _INLINE, dtype=torch.int64)
    return request, group.recv([request], CALLER, 0)


def _part(kv: torch.Tensor, layer: int, blocks: torch.Tensor, heads: slice) -> torch.Tensor:
    """Return the bytes of some blocks and heads of a layer, in host memory."""
    found = kv[layer].index_select(1, blocks.to(kv.device))[..., heads, :]
    return found.contiguous().cpu().view(torch.uint8).flatten()


def _reply(group: Group, how: int, value: int = 0) -> bool:
    """Send a reply. Return True when the reader may ask again."""
    _send(group, torch.tensor([how, value]), CALLER, _SEND_S)
    return how == _OK


# ---- the decode rank


class DistributedReader:
    """Asks a prefill rank. One request is under way at a time, whatever the number of threads that have one."""

    def __init__(self, source: Source, timeout_s: float):
        self._source, self._timeout_s = source, timeout_s
        self._lock = threading.Lock()
        self._group: Group | None = None
        self._closed = False
        self._connect()

    def ran(self, ticket: int) -> int:
        """Return how many layers have run for a ticket."""
        return layers_ran(self._ask(_request(_RAN, ticket)), ticket)

    def read(self, layer: int, blocks: torch.Tensor, heads: slice) -> torch.Tensor:
        """Return [2, blocks, block_tokens, heads, head_dim]."""
        check_bounds(self._source, layer, blocks, heads)
        shape = (2, len(blocks), self._source.block_tokens, heads.stop - heads.start, self._source.head_dim)
        into = torch.empty(shape, dtype=self._source.torch_dtype)
        self._ask(_request(_READ, layer, blocks, heads), blocks[_INLINE:], into)
        return into

    def checksum(self, layer: int, blocks: torch.Tensor, heads: slice) -> int:
        """Return the CRC-32 of what `read` should bring, computed by the prefill rank."""
        return self._ask(_request(_CHECKSUM, layer, blocks, heads), blocks[_INLINE:])

    def close(self) -> None:
        """Take leave. What other threads are in the middle of is waited for."""
        with self._lock:
            self._closed = True
            if self._group is not None:
                with suppress(RuntimeError):  # the other side has gone first
                    _send(self._group, _request(_FAREWELL), LISTENER, self._timeout_s)
            self._group = None

    def _ask(self, request: torch.Tensor, rest: torch.Tensor | None = None, into: torch.Tensor | None = None) -> int:
        """Return the value of the reply, with what follows it in `into`. Asks again on a new connection, once."""
        with self._lock:
            if self._closed:
                raise TransferError(f"{self._source.name}: the reader is closed")
            fresh = self._group is None
            begun = time.monotonic()
            try:
                return self._exchange(request, rest, into)
            except RuntimeError as error:
                self._group = None
                silent = time.monotonic() - begun >= self._timeout_s * 0.9
                if fresh or silent:
                    raise self._lost(error, silent) from None
            try:  # it may have been given up for being quiet: every request can be repeated
                return self._exchange(request, rest, into)
            except RuntimeError as error:
                self._group = None
                raise self._lost(error, False) from None

    def _exchange(self, request: torch.Tensor, rest: torch.Tensor | None, into: torch.Tensor | None) -> int:
        group, within = self._connect(), timedelta(seconds=self._timeout_s)
        reply = torch.empty(_REPLY, dtype=torch.int64)
        replying = group.recv([reply], LISTENER, 0)
        filling = group.recv([into.view(torch.uint8).flatten()], LISTENER, 1) if into is not None else None
        _send(group, request, LISTENER, self._timeout_s)
        if rest is not None and len(rest):
            _send(group, rest.contiguous(), LISTENER, self._timeout_s, 1)
        replying.wait(within)
        how, value = reply.tolist()
        if how != _OK:
            self._group = None
            why = "it has closed its KV" if how == _CLOSED else "it has no such layer, blocks or heads"
            raise TransferError(f"{self._source.name}: {why}")
        if filling is not None:
            filling.wait(within)
        return int(value)

    def _connect(self) -> Group:
        if self._group is None:
            begun = time.monotonic()
            try:
                self._group = call(*host_and_port(self._source.address), self._timeout_s)
            except (OSError, RuntimeError) as error:
                raise self._lost(error, time.monotonic() - begun >= self._timeout_s * 0.9) from None
        return self._group

    def _lost(self, error: Exception, silent: bool) -> TransferError:
        if silent:
            return TransferError(f"{self._source.name} at {self._source.address}: no answer in {self._timeout_s:g} s")
        why = getattr(error, "strerror", None) or "the connection was lost"
        return TransferError(f"{self._source.name} at {self._source.address}: {why}; has the prefill instance ended?")


def _request(
    what: int, number: int = 0, blocks: torch.Tensor | None = None, heads: slice | None = None
) -> torch.Tensor:
    """Return a request, with the first of its blocks."""
    request = torch.zeros(_HEAD + _INLINE, dtype=torch.int64)
    request[0], request[1] = what, number
    if blocks is not None and heads is not None:
        request[2], request[3], request[4] = heads.start, heads.stop, len(blocks)
        request[_HEAD : _HEAD + len(blocks)] = blocks[:_INLINE]
    return request


# ---- both


def _send(group: Group, tensor: torch.Tensor, to: int, timeout_s: float, tag: int = 0) -> bool:
    group.send([tensor], to, tag).wait(timedelta(seconds=timeout_s))
    return True
