"""One request over HTTP: when its tokens came, how many, and what the server says of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from math import nan
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from planner.bench.server import Server
from planner.specs.base import short

if TYPE_CHECKING:
    import httpx

Status = Literal["ok", "rejected", "refused", "broken", "timeout", "cut"]
"""rejected: 429 or 503, come again; refused: any other HTTP error; broken: an error or an end in the middle of the
answer, or no connection; timeout: it took longer than allowed; cut: we stopped before it had ended."""
_REJECTED = (429, 503)


@dataclass(slots=True)
class Answer:
    """What a client saw. Times by time.monotonic [s], nan for what never happened."""

    status: Status = "cut"
    error: str = ""
    first_token_s: float = nan
    last_token_s: float = nan
    max_gap_s: float = nan
    """Longest wait between two pieces of the answer."""
    pieces: int = 0
    """Server-sent events with some of the answer: one per token, unless the server sends several at once."""
    prompt_tokens: int | None = None
    """As the server counts."""
    output_tokens: int | None = None
    times: dict[str, Any] = field(default_factory=dict)
    """The terms of TTFT as the server measured them (the included runtime only)."""

    def see_tokens(self, now_s: float) -> None:
        """Take note of a piece of the answer."""
        if self.pieces == 0:
            self.first_token_s = now_s
        else:
            gap_s = now_s - self.last_token_s
            self.max_gap_s = gap_s if self.pieces == 1 else max(self.max_gap_s, gap_s)
        self.last_token_s = now_s
        self.pieces += 1


class _BrokenError(Exception):
    """The answer ended otherwise than it should; never leaves this module."""


def body_of(server: Server, prompt: list[int], output_tokens: int) -> bytes:
    """Return the body of a request for exactly so many tokens."""
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if server.ours:
        body["return_times"] = True
    return json.dumps(body, separators=(",", ":")).encode()


async def ask(client: httpx.AsyncClient, server: Server, body: bytes, answer: Answer, timeout_s: float) -> None:
    """Send one request and write into `answer` what comes, as it comes; whatever goes wrong is in its status."""
    import httpx

    try:
        async with asyncio.timeout(timeout_s):
            await _converse(client, server, body, answer)
    except TimeoutError:
        answer.status, answer.error = "timeout", f"not answered within {timeout_s:g} s"
    except httpx.HTTPError as error:
        answer.status, answer.error = "broken", f"{type(error).__name__}: {error}".rstrip(": ")
    except _BrokenError as error:
        answer.status, answer.error = "broken", str(error)


async def _converse(client: httpx.AsyncClient, server: Server, body: bytes, answer: Answer) -> None:
    headers = {"Content-Type": "application/json"}
    async with client.stream("POST", server.completions, content=body, headers=headers) as response:
        if response.status_code != 200:
            answer.status = "rejected" if response.status_code in _REJECTED else "refused"
            answer.error = f"HTTP {response.status_code}: {_message(await response.aread())}"
            return
        done = finished = False
        async for now_s, data in _events(response):
            if data == b"[DONE]":
                done = True
                break
            finished |= _take(answer, now_s, data)
        if not (done or finished):
            raise _BrokenError("the stream ended in the middle of the answer")
        if answer.pieces == 0:
            raise _BrokenError("the stream ended without a token")
        answer.status = "ok"


async def _events(response: httpx.Response) -> AsyncIterator[tuple[float, bytes]]:
    """Yield the data of each server-sent event, with the time at which its last byte came [s]."""
    rest = b""
    async for received in response.aiter_raw():
        now_s = monotonic()
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield now_s, line[5:].strip()


def _take(answer: Answer, now_s: float, data: bytes) -> bool:
    """Write one event into the answer; return True when it is the one with the reason for the end."""
    try:
        chunk = json.loads(data)
    except ValueError:
        raise _BrokenError(f"expected JSON in the stream, got {short(data[:80])}") from None
    if not isinstance(chunk, dict):
        raise _BrokenError(f"expected an object in the stream, got {short(chunk)}")
    if chunk.get("error"):
        raise _BrokenError(_message(data))
    choices, usage, times = chunk.get("choices"), chunk.get("usage"), chunk.get("times")
    if isinstance(usage, dict):
        answer.prompt_tokens, answer.output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if isinstance(times, dict):
        answer.times = times
    if not choices:
        return False
    answer.see_tokens(now_s)
    return bool(choices[0].get("finish_reason"))


def _message(content: bytes) -> str:
    """Return what an error's body says, in one line."""
    try:
        said = json.loads(content)
        said = said["error"] if isinstance(said, dict) and "error" in said else said
        text = said["message"] if isinstance(said, dict) and "message" in said else said
    except ValueError:
        text = content.decode("utf-8", "replace")
    return " ".join(str(text).split())[:200] or "no reason given"
