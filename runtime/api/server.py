"""The API on a socket, in the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from planner.errors import InputError
from runtime.api.app import DEFAULTS, create_app
from runtime.api.gate import Gate
from runtime.api.limits import ApiLimits
from runtime.service import Service

LOOPBACK = "127.0.0.1"
_KEEP_ALIVE_S = 75
_FAREWELL_S = 1
"""For answers that are all but sent when the server stops, and then for the others to be told."""
_BACKLOG = 2048
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
log = logging.getLogger("runtime.api")


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to whoever owns the event loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiServer:
    """The API of one service. Made inside a running event loop; `run` serves until `stop`."""

    def __init__(self, service: Service, host: str = LOOPBACK, port: int = 0, limits: ApiLimits = DEFAULTS):
        """Take the port, any free one for 0. Raises InputError when it cannot be had."""
        self.gate = Gate(limits.concurrent_requests, limits.retry_after_s)
        self.app: FastAPI = create_app(service, limits, self.gate)
        self._socket = bind(host, port, limits.send_timeout_s)
        name, number = self._socket.getsockname()[:2]
        self.url = f"http://[{name}]:{number}" if ":" in name else f"http://{name}:{number}"
        """Where it is reached."""
        config = uvicorn.Config(
            self.app,
            http="h11",  # what is tested is what runs, whatever else is installed
            proxy_headers=False,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_FAREWELL_S,
        )
        self._server = _Server(config)

    async def run(self) -> None:
        """Serve until `stop`."""
        raise_descriptor_limit()
        try:
            await self._server.serve([self._socket])
        finally:
            self._socket.close()
            await self.gate.emptied(_FAREWELL_S)  # uvicorn cancels what it no longer waits for, but does not see it end

    async def drain(self, timeout_s: float) -> bool:
        """Turn new requests away and wait for those inside; return False when some still are after `timeout_s`."""
        self.gate.close()
        return await self.gate.emptied(timeout_s)

    def stop(self) -> None:
        """Make `run` return; what is still being answered ends with an error that says why."""
        self.gate.end()
        self._server.should_exit = True

    async def run_until_signal(self, drain_s: float) -> bool:
        """Serve until SIGINT or SIGTERM, then drain; a second signal ends the draining. Returns what `drain` does."""
        loop, first, second = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        def told() -> None:
            (second if first.is_set() else first).set()

        for each in _SIGNALS:
            loop.add_signal_handler(each, told)
        serving = asyncio.create_task(self.run())
        drained = asyncio.create_task(self._drained_after(first, drain_s))
        hurried = asyncio.create_task(second.wait())
        try:
            await asyncio.wait({serving, drained, hurried}, return_when=asyncio.FIRST_COMPLETED)
            return drained.done() and drained.result()
        finally:
            drained.cancel()
            hurried.cancel()
            self.stop()
            for each in _SIGNALS:
                loop.remove_signal_handler(each)
            await serving

    async def _drained_after(self, told: asyncio.Event, drain_s: float) -> bool:
        await told.wait()
        log.info("draining: %d requests are being answered", self.gate.inside)
        return await self.drain(drain_s)


def bind(host: str, port: int, stuck_s: float) -> socket.socket:
    """Return a listening socket. Connections whose client takes nothing for `stuck_s` are closed by the system, since
    nobody else can: what was written stays in its buffers until then. Raises InputError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InputError(f"host: {host!r} is no address to listen at: {error.strerror or error}") from None
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that is gone says no goodbye
    for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_USER_TIMEOUT", round(stuck_s * 1000))):
        if hasattr(socket, option):
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    try:
        found.bind(address)
        found.listen(_BACKLOG)
    except OSError as error:
        found.close()
        raise InputError(f"port: cannot listen at {host}:{port}: {error.strerror}; choose another port") from None
    found.setblocking(False)
    return found


def raise_descriptor_limit() -> None:
    """Allow as many open connections as the system lets us have: the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS names a hard limit that it does not grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
