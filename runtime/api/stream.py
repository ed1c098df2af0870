"""Answers on their way out: stopped as soon as nobody takes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.api.errors import ClientGoneError, api_error
from runtime.api.json_response import event

T = TypeVar("T")


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return what `work` returns; cancel it and raise ClientGoneError when the client closes the connection."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. The status is sent with the first of them, so what fails before has a status of its own."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], retry_after_s: float):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._retry_after_s = events, retry_after_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(self._send_all(send), receive)

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            await self._send_rest(events, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_rest(self, events: AsyncGenerator[bytes, None], send: Send) -> None:
        """Send event by event; an error becomes the last, since the status is out already."""
        try:
            async for each in events:
                await send({"type": "http.response.body", "body": each, "more_body": True})
        except ClientGoneError:
            raise
        except Exception as error:
            last = event(api_error(error, self._retry_after_s).body)
            await send({"type": "http.response.body", "body": last, "more_body": True})
