"""What every request passes before the application sees it: key, gate, and bounds on what is read and sent.

An ASGI middleware of our own, since a body has to be refused while it arrives, and a client may stop reading at any
time.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.api.errors import ApiError, ClientGoneError, busy, unavailable
from runtime.api.gate import Gate
from runtime.api.json_response import event
from runtime.api.limits import ApiLimits

OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})
"""Need no key: what probes and scrapers ask."""
ANSWERING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})


class Entrance:
    """Turns away who may not come in; bounds what comes in and how long going out may take."""

    def __init__(self, app: ASGIApp, limits: ApiLimits, gate: Gate, rejected: Callable[[str], None]):
        self.app, self.limits, self.gate, self._rejected = app, limits, gate, rejected
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body, client = _Body(self, scope, receive), _Client(send, self.limits.send_timeout_s)
        try:
            await self._pass(scope, body, client)
        except ApiError as error:
            if error.status in (429, 503):
                self._rejected("draining" if self.gate.draining else "concurrency")
            await error.response()(scope, receive, client)
        except ClientGoneError:
            pass  # nobody is left to be told
        except asyncio.CancelledError:
            if not self.gate.ended:
                raise
            await client.give_up(unavailable("the server has shut down", self.limits.retry_after_s), scope, receive)
        finally:
            self._held_bytes -= body.held_bytes

    async def _pass(self, scope: Scope, body: _Body, client: _Client) -> None:
        self._check_key(scope)
        body.check_length()
        if scope["path"] not in ANSWERING_PATHS:
            await self.app(scope, body, client)
            return
        with self.gate.entered():
            await self.app(scope, body, client)

    def _check_key(self, scope: Scope) -> None:
        if not self.limits.api_key or scope["path"] in OPEN_PATHS:
            return
        kind, _, key = _header(scope, b"authorization").partition(b" ")
        right = hmac.compare_digest(key.strip(), self.limits.api_key.encode())  # takes as long whatever is wrong
        if kind.lower() != b"bearer" or not right:
            raise ApiError(401, "expected the header 'Authorization: Bearer <API key>'", code="invalid_api_key")

    def hold(self, size: int) -> None:
        """Count bytes of a body. Raises ApiError when those of all requests are too many."""
        self._held_bytes += size
        if self._held_bytes > self.limits.held_bytes:
            raise busy("too many large requests are being answered", self.limits.retry_after_s)


class _Body:
    """The receiving side of one request, which ends with an error when the body grows too large or comes too slowly."""

    def __init__(self, entrance: Entrance, scope: Scope, receive: Receive):
        self._entrance, self._limits, self._receive = entrance, entrance.limits, receive
        self._length = _header(scope, b"content-length")
        self._complete = False
        self._deadline_s = asyncio.get_running_loop().time() + self._limits.body_timeout_s
        self.held_bytes = 0

    def check_length(self) -> None:
        """Refuse what says itself that it is too long, before a byte of it is read."""
        if self._length.isdigit() and int(self._length) > self._limits.body_bytes:
            raise self._too_long()

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self._limits.body_bytes} bytes", code="request_too_large")

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()  # waits for the client to go
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._limits.body_timeout_s:g} s") from None
        if message["type"] != "http.request":
            raise ClientGoneError
        size = len(message.get("body", b""))
        self.held_bytes += size
        self._entrance.hold(size)
        if self.held_bytes > self._limits.body_bytes:
            raise self._too_long()
        self._complete = not message.get("more_body", False)
        return message


class _Client:
    """The sending side of one request, which gives up on a client that takes nothing for too long."""

    def __init__(self, send: Send, timeout_s: float):
        self._send, self._timeout_s = send, timeout_s
        self._started = self._streams = False

    async def give_up(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """Say `error` in the way that is left: as the answer, or as the last event of a stream."""
        if not self._started:
            await error.response()(scope, receive, self)
        elif self._streams:
            await self({"type": "http.response.body", "body": event(error.body), "more_body": False})

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self._streams = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            raise ClientGoneError from None


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")
