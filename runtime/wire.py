"""ZeroMQ between hosts: encrypted and authenticated by one shared token, and aware of a connection that was lost.

The conductor's CurveZMQ key pair is derived from the token (scrypt), so whoever has the token knows the public key, and
without it no handshake succeeds: both sides are proved by it, and nothing is readable on the way. Within a host,
instances speak over a socket in a folder that only its user may enter.
"""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from planner.errors import InputError

_SHORTEST_TOKEN = 16
_PING_MS, _SILENT_MS = 1000, 6000
"""A connection is asked for a sign of life so often, and given up when none has come for so long."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The key pair that a token stands for."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def of(cls, token: str) -> Keys:
        """Return the pair. Raises InputError for a token that could be guessed."""
        if len(token) < _SHORTEST_TOKEN:
            raise InputError(
                f"--token: expected at least {_SHORTEST_TOKEN} characters, the same on all hosts, got {len(token)}; "
                "make one with: export PLANNER_TOKEN=$(openssl rand -hex 16)"
            )
        seed = hashlib.scrypt(token.encode(), salt=b"goodput-planner hosts", n=2**14, r=8, p=1, dklen=32)
        secret = z85.encode(seed)
        return cls(zmq.curve_public(secret).decode(), secret.decode())


def bind_guarded(socket: zmq.Socket[Any], address: str, keys: Keys) -> str:
    """Bind to a tcp:// address that only holders of the token can use; return the one to connect to.

    Addresses that the socket was bound to before stay as they are: options count for what is bound after them.
    """
    host, port = host_and_port(address, "--listen")
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    _watch_connections(socket)
    numeric = _numeric(host)
    socket.setsockopt(zmq.IPV6, numeric[0] == "[")
    try:
        socket.bind(f"tcp://{numeric}:{port or '*'}")
    except zmq.ZMQError as error:
        raise InputError(f"--listen {address}: {error.strerror}") from None
    return socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]


def guard(socket: zmq.Socket[Any], public_key: str) -> None:
    """Let a socket that is not connected yet speak to the holder of a key alone."""
    public, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_SERVERKEY, public_key.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.IPV6, 1)
    _watch_connections(socket)


def _watch_connections(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)


def end_when_disconnected(socket: zmq.Socket[Any]) -> None:
    """End this process when an established connection is lost: what was under way on it is lost, too.

    ZeroMQ would connect again and go on as if nothing had been said meanwhile. Started again, the process is sent
    everything anew.
    """
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    threading.Thread(target=_end_when_disconnected, args=(monitor,), daemon=True).start()


def _end_when_disconnected(monitor: zmq.Socket[Any]) -> None:
    established = False
    while True:
        event = recv_monitor_message(monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            established = True
        elif established:
            print("the connection to the conductor was lost", flush=True)
            os._exit(1)


def host_and_port(address: str, option: str) -> tuple[str, int]:
    """Return both parts of tcp://HOST:PORT. Raises InputError, naming `option`, for anything else."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:  # a port that is none
        host = port = None
    if not address.startswith("tcp://") or not host or port is None:
        raise InputError(f"{option}: expected tcp://HOST:PORT, got {address!r}")
    return host, port


def _numeric(host: str) -> str:
    """Return an address that ZeroMQ can bind to: it knows no names of hosts there."""
    import socket

    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InputError(f"--listen: {host}: {error.strerror}") from None
    return f"[{found[4][0]}]" if found[0] == socket.AF_INET6 else str(found[4][0])


def own_address(towards: str) -> str:
    """Return the address of this host on the way to another one. Raises InputError when there is no way."""
    import socket

    try:
        family = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))  # sends nothing: it chooses the interface
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InputError(f"no way to {towards}: {error.strerror}; give this host's address with --advertise") from None
