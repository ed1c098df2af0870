"""An hour's mix of requests, compressed: memory stays flat, no descriptor and no block is lost.

Runs for ten minutes, or for GOODPUT_SOAK_S seconds.
"""

from __future__ import annotations

import asyncio
import os
import random
import time

import httpx
import psutil
import pytest

from planner.deploy import to_yaml
from tests.serving import deployment, running_server
from tests.test_disaggregated import LITTLE, little

SECONDS = float(os.environ.get("GOODPUT_SOAK_S", "600"))
CLIENTS = 24
GROWTH = 1.10
SLACK_BYTES = 24 * 2**20

pytestmark = pytest.mark.slow


def test_ten_minutes_of_mixed_requests_leave_nothing_behind(tmp_path):
    options, file = little(tmp_path), tmp_path / "deployment.yaml"
    file.write_text(to_yaml(deployment([("prefill", 1, 1), ("decode", 1, 1)], kv_blocks=200)))
    with running_server(file, "--model", options.model, "--load-format", "dummy") as (url, process):
        samples = asyncio.run(soak(url, process))
    warm = [memory for at_s, memory, _ in samples if 0.15 * SECONDS < at_s < 0.35 * SECONDS]
    late = [memory for at_s, memory, _ in samples if at_s > 0.8 * SECONDS]
    for name in warm[0]:
        before, after = (max(memory[name] for memory in each) for each in (warm, late))
        assert after < GROWTH * before + SLACK_BYTES, f"{name} grew from {before >> 20} to {after >> 20} MiB"
    files = [count for _, _, count in samples]
    assert files[-1] <= files[0] + 2, f"open files: {files[0]} at first, {files[-1]} in the end"


async def soak(url: str, process: psutil.Process) -> list[tuple[float, dict[str, int], int]]:
    """Return (seconds, resident bytes by process, open files in all) along the way; the first and last at rest."""
    begun = time.monotonic()
    samples = [sample(begun, process)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        clients = [asyncio.create_task(ask(client, random.Random(seed), begun)) for seed in range(CLIENTS)]
        while not all(each.done() for each in clients):
            await asyncio.sleep(SECONDS / 60)
            samples.append(sample(begun, process))
        for each in clients:
            each.result()
        await at_rest(client)
    await asyncio.sleep(1.0)
    return [*samples, sample(begun, process)]


def sample(begun: float, process: psutil.Process) -> tuple[float, dict[str, int], int]:
    family = [process, *process.children(recursive=True)]
    memory = {f"process {index}": each.memory_info().rss for index, each in enumerate(family)}
    return time.monotonic() - begun, memory, sum(each.num_fds() for each in family)


async def ask(client: httpx.AsyncClient, luck: random.Random, begun: float) -> None:
    """Send requests of all sorts, some of them bad, some given up."""
    while time.monotonic() - begun < SECONDS:
        kind = luck.choice(("whole", "whole", "streamed", "given up", "two", "beams", "too long", "malformed"))
        prompt = [luck.randrange(LITTLE["vocab_size"]) for _ in range(luck.randint(1, 120))]
        body = {"prompt": prompt, "max_tokens": luck.randint(1, 40), "ignore_eos": True}
        if kind == "malformed":
            assert (await client.post("/v1/completions", content=b'{"prompt": ')).status_code == 400
        elif kind == "too long":
            assert (await client.post("/v1/completions", json={**body, "max_tokens": 5000})).status_code == 400
        elif kind in ("streamed", "given up"):
            await stream(client, body, luck.randint(1, 5) if kind == "given up" else None)
        else:
            more = {"two": {"n": 2}, "beams": {"use_beam_search": True, "n": 2}}.get(kind, {})
            answer = await client.post("/v1/completions", json={**body, **more})
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["choices"]) == (2 if more else 1)


async def stream(client: httpx.AsyncClient, body: dict, lines: int | None) -> None:
    """Read a stream, whole or its first lines."""
    got = 0
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        async for _ in answer.aiter_lines():
            got += 1
            if lines is not None and got >= lines:
                return


async def at_rest(client: httpx.AsyncClient) -> None:
    """Return when no request holds anything any more."""
    for _ in range(100):
        status = (await client.get("/status")).json()
        if not status["requests"] and not any(each["used_blocks"] for each in status["instances"]):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"something is still held: {status}")
