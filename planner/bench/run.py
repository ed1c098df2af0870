"""The whole bench on one screen: load -> prediction -> server -> replay -> result."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from planner.bench.answer import Answer, ask, body_of
from planner.bench.load import Load, Question, load_of
from planner.bench.predict import predict
from planner.bench.prompts import TOKEN_IDS, Prompts
from planner.bench.replay import Replayed, Sender, replay
from planner.bench.result import Result, result_of
from planner.bench.server import Server, connections, find_server, plain_url
from planner.errors import InputError
from planner.specs.deployment import Deployment

if TYPE_CHECKING:
    import httpx

_TRIED_S = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask, and how."""

    url: str
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0
    """For one request, from when it is sent."""
    token_ids: tuple[int, int] = TOKEN_IDS
    prompt_seed: int | None = None
    """Luck of the prompts' token ids; new each time by default, so that no cache knows them."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A run, and of what."""

    server: Server
    prompt_seed: int
    result: Result


def bench(
    target: Target,
    question: Question,
    deployment: Deployment | None = None,
    progress: Callable[[str], None] = lambda step: None,
    every_s: float = 0.5,
) -> Outcome:
    """Return what a server did with a load, beside what was predicted; progress is told each `every_s`.

    Raises InputError.
    """
    url, load = plain_url(target.url), load_of(question, deployment)
    prompt_seed = secrets.randbits(63) if target.prompt_seed is None else target.prompt_seed
    prompts = Prompts(load.requests, prompt_seed, target.token_ids)

    server = asyncio.run(_find(target, url, load))
    prediction = None
    if deployment is not None:
        progress("simulating the same requests (compiles on the first run, about 25 s)")
        prediction = predict(deployment, load)

    async def replayed() -> Replayed:
        async with connections(url, target.api_key) as client:
            sender = Sender(client, server, load, prompts, target.timeout_s)
            return await replay(sender, lambda now: progress(_so_far(now, load, sender.now_s())), every_s)

    told = asyncio.run(replayed())
    progress("working out intervals")
    return Outcome(server, prompt_seed, result_of(told, load, prediction))


async def _find(target: Target, url: str, load: Load) -> Server:
    """Return the server, once it is sure that it takes the load."""
    async with connections(url, target.api_key) as client:
        server = await find_server(client, url, target.model)
        _check_lengths(server, load)
        await _try(client, server, target.token_ids)
        return server


def _check_lengths(server: Server, load: Load) -> None:
    """Raise InputError when the server says that it cannot hold some request: it would refuse it."""
    total = load.requests.prompt_tokens + load.requests.output_tokens
    if server.max_tokens is not None and (over := int((total > server.max_tokens).sum())):
        raise InputError(
            f"{over} of {len(total)} requests are longer than the {server.max_tokens} tokens that {server.model} can "
            f"hold (the longest has {int(total.max())}); cut them with --max-prompt and --max-output"
        )


async def _try(client: httpx.AsyncClient, server: Server, token_ids: tuple[int, int]) -> None:
    """Raise InputError when the server does not take the kind of request that a bench sends."""
    answer = Answer()
    await ask(client, server, body_of(server, [token_ids[0], token_ids[1] - 1] * 2, 2), answer, _TRIED_S)
    if answer.status == "rejected":
        raise InputError(f"{server.url} takes no requests now: {answer.error}; wait until it is ready")
    if answer.status != "ok":
        way_out = f"ids are {token_ids[0]} to {token_ids[1] - 1}; for a small vocabulary give --token-ids"
        raise InputError(f"{server.url} does not answer a prompt of token ids: {answer.error} ({way_out})")


def _so_far(now: Replayed, load: Load, now_s: float) -> str:
    """Return how far it is, and what is left of the time in which requests are sent."""
    sent, finished = len(now.sent), now.finished
    of = f" of {len(load.requests)}" if load.clients is None or not isfinite(load.ends_s) else ""
    left_s = load.ends_s - now_s
    if not isfinite(left_s):  # clients with a number of requests to send
        left_s = now_s * (len(load.requests) / finished - 1) if finished else np.nan
    left = f"{_clock(left_s)} left" if left_s > 0 else "waiting for the last answers" if left_s <= 0 else "beginning"
    failed = f", {now.failed} failed" if now.failed else ""
    return f"{sent}{of} requests sent, {sent - finished} running{failed}; {left}"


def _clock(left_s: float) -> str:
    minutes, seconds = divmod(round(left_s), 60)
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
