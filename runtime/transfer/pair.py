"""Process groups of two, made and left at any time: one process listens at an address, the other connects to it.

gloo asks a store where the other member listens. The two tell each other over the connection itself: a TCPStore would
stay behind as a service, and takes many seconds, and pages on stderr, to find that nobody is there.
"""

from __future__ import annotations

import functools
import socket
from contextlib import closing
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from planner.errors import InputError

Group = Any
"""A torch.distributed.ProcessGroupGloo, of which torch's stubs know nothing but the name."""
_gloo: Any = getattr(dist, "ProcessGroupGloo", None)
LISTENER, CALLER = 0, 1
"""Ranks in the group."""
_MOST_BYTES = 4096
"""Of what the two tell each other: where they listen."""


class AbsentError(ConnectionError):
    """The other member did not come, or left before the group was made."""


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of tcp://HOST:PORT. Raises InputError for anything else."""
    parts = urlsplit(address)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:  # a port that is none
        host = port = None
    if parts.scheme != "tcp" or host is None or port is None:
        raise InputError(f"address: expected tcp://HOST:PORT, got {address!r}")
    return host, port


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that callers reach at `host`; port 0: a free one. Raises InputError."""
    if host in ("0.0.0.0", "::"):
        raise InputError(f"address: {host} is none that others can reach; name one address of this host")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise InputError(f"tcp://{host}:{port}: KV cannot be served there: {error.strerror or error}") from None


def call(host: str, port: int, timeout_s: float) -> Group:
    """Return the group of this process and the one that listens there. Raises OSError, RuntimeError."""
    return join(socket.create_connection((host, port), timeout_s), CALLER, timeout_s)


def join(wire: socket.socket, rank: int, timeout_s: float) -> Group:
    """Return the group of the two ends of a connection, which is closed. Raises OSError, RuntimeError."""
    own = wire.getsockname()[0]
    wire.setblocking(True)
    with closing(Connection(wire.detach())) as telling:
        options = _gloo._Options()
        options._devices, options._threads = [_device(own)], 1
        options._timeout = timedelta(seconds=timeout_s)
        return _gloo(_Meeting(telling, timeout_s), rank, 2, options)


@functools.cache
def _device(host: str) -> Any:
    """Return what gloo binds its sockets with; it has a thread, so all groups of an address share one."""
    return _gloo.create_device(hostname=host, lazy_init=False)


class _Meeting(dist.Store):
    """A store of two: what one sets, the other gets."""

    def __init__(self, wire: Connection, timeout_s: float):
        super().__init__()
        self._wire, self._timeout_s = wire, timeout_s
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._known[key] = value
        self._wire.send_bytes(key.encode() + b"\0" + value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        while not all(key in self._known for key in keys):
            if not self._wire.poll((timeout or timedelta(seconds=self._timeout_s)).total_seconds()):
                raise AbsentError("no answer")
            key, _, value = self._wire.recv_bytes(_MOST_BYTES).partition(b"\0")
            self._known[key.decode()] = value
