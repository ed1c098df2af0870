"""A real HTTP server that answers token by token at times that are known, and misbehaves when told to."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

import uvicorn


@dataclass
class Asked:
    """One request as the server saw it; times by time.monotonic [s]."""

    number: int
    body: dict[str, Any]
    arrived_s: float
    tokens_s: list[float] = field(default_factory=list)
    """When each token was handed to the socket."""

    @property
    def prompt(self) -> list[int]:
        return self.body["prompt"]


Law = Callable[[Asked], Sequence[float]]
"""When the tokens of a request come, counted from its arrival [s]."""


def steady(first_s: float, gap_s: float, per_token_s: float = 0.0) -> Law:
    """Return the law of an idle server: so long to the first token, and between the others."""

    def law(asked: Asked) -> list[float]:
        start_s = first_s + per_token_s * len(asked.prompt)
        return [start_s + gap_s * at for at in range(asked.body["max_tokens"])]

    return law


@dataclass
class LawServer:
    """Serves in a thread of its own. The first request, which only asks whether it works, is not kept in `asked`."""

    law: Law
    faults: dict[int, str] = field(default_factory=dict)
    """By number of the request: 500, 429, 401, drop, end, garble, error, hang, short, long-prompt or silent."""
    model: dict[str, Any] = field(default_factory=lambda: {"id": "lawful", "owned_by": "tests"})
    times: Callable[[Asked], dict[str, Any]] | None = None
    asked: list[Asked] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    def __enter__(self) -> LawServer:
        config = uvicorn.Config(self, host="127.0.0.1", port=0, log_level="critical", lifespan="off", access_log=False)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            sleep(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(timeout=10)

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/v1/models":
            await _reply(send, 200, {"object": "list", "data": [self.model]})
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        await self._answer(json.loads(body), send)

    async def _answer(self, body: dict[str, Any], send: Callable) -> None:
        trial = len(body["prompt"]) == 4 and body["max_tokens"] == 2
        one = Asked(-1 if trial else len(self.asked), body, monotonic())
        if not trial:
            self.asked.append(one)
        fault = self.faults.get(one.number, "")
        if fault.isdigit():
            error = {"message": "so it was told", "type": "test", "param": None, "code": None}
            await _reply(send, int(fault), {"error": error})
            return
        self.running += not trial
        self.most_running = max(self.most_running, self.running)
        with suppress(OSError):  # the client has gone
            await self._stream(one, fault, send)
        self.running -= not trial

    async def _stream(self, one: Asked, fault: str, send: Callable) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        count = one.body["max_tokens"]
        tokens = list(self.law(one))
        assert len(tokens) == count
        stop = {"drop": 2, "end": 2, "garble": 2, "error": 2, "short": max(1, count // 2), "hang": 0}.get(fault, count)
        for at, due_s in enumerate(tokens[:stop]):
            await asyncio.sleep(max(0.0, one.arrived_s + due_s - monotonic()))
            one.tokens_s.append(monotonic())
            reason = "length" if at == stop - 1 and fault in ("", "short", "silent", "long-prompt") else None
            await _event(send, {"choices": [{"index": 0, "text": "x", "finish_reason": reason}], "usage": None})
        if fault == "hang":
            await asyncio.sleep(30)
        if fault == "drop":
            raise ConnectionAbortedError  # uvicorn closes the connection before the last chunk
        if fault == "garble":
            await send({"type": "http.response.body", "body": b"data: {nonsense\n\n", "more_body": True})
        if fault == "error":
            await _event(send, {"error": {"message": "lost its instance", "type": "server_error"}})
        if fault in ("", "short", "long-prompt"):
            usage = {"prompt_tokens": len(one.prompt) + (fault == "long-prompt"), "completion_tokens": stop}
            times = {"times": self.times(one)} if self.times is not None and one.body.get("return_times") else {}
            await _event(send, {"choices": [], "usage": usage, **times})
        if fault in ("", "short", "silent", "long-prompt"):
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _event(send: Callable, data: dict[str, Any]) -> None:
    content = f"data: {json.dumps(data)}\n\n".encode()
    await send({"type": "http.response.body", "body": content, "more_body": True})


async def _reply(send: Callable, status: int, data: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(data).encode()})
