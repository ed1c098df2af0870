"""Instances are killed, stopped and starved in the middle of a hundred requests: none is lost, none answered twice."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable

import psutil
import pytest

from runtime.sampling import Sampling
from runtime.serving import Serving
from tests.serving import Kind, answers_of, deployment, served
from tests.test_disaggregated import LITTLE, little, nothing_left, told

REQUESTS = 100
READY_AGAIN_S = 30.0
PAIR: list[Kind] = [("prefill", 1, 1), ("decode", 1, 1)]
pytestmark = pytest.mark.slow
Fault = Callable[[Serving], Awaitable[None]]


def requests_of(count: int) -> list[tuple[list[int], Sampling]]:
    """Return requests that run for a while."""
    prompts = [
        [(7 * index + place) % LITTLE["vocab_size"] for place in range(5 + index % 40)] for index in range(count)
    ]
    return [
        (prompt, Sampling(max_tokens=40 + index % 60, n=1 + (index % 9 == 0), ignore_eos=True))
        for index, prompt in enumerate(prompts)
    ]


def process_of(serving: Serving, name: str, rank: int | None = None) -> psutil.Process:
    """Return the process of an instance, or that of one of its ranks."""
    (state,) = [each for each in serving.conductor.snapshot().instances if each.name == name]
    return psutil.Process(state.process_ids[0 if rank is None else rank + 1])


def survives(tmp_path, kinds: list[Kind], fault: Fault, times: int = 1) -> None:
    """Run a hundred requests, do `fault` in their middle, and hold every answer to that of an undisturbed engine."""
    options = little(tmp_path)
    requests = requests_of(REQUESTS)
    expected = reference(options.model)

    async def work(serving: Serving) -> None:
        running = [asyncio.create_task(answers_of(serving, *request)) for request in requests]
        for _ in range(times):
            await some_tokens_more(serving)
            await fault(serving)
            begun = time.monotonic()
            while serving.conductor.ready and time.monotonic() - begun < READY_AGAIN_S:
                await asyncio.sleep(0.05)  # the fault is not noticed yet
            assert not serving.conductor.ready, "nobody noticed"
            await serving.until_ready()
            assert time.monotonic() - begun < READY_AGAIN_S
        found = await asyncio.gather(*running)
        for mine, theirs in zip(found, expected, strict=True):
            assert told(mine) == told(theirs)
        snapshot = serving.conductor.snapshot()
        assert (snapshot.finished, snapshot.lost, snapshot.requests) == (REQUESTS, 0, 0)
        assert snapshot.retries > 0, "the fault hit nobody"
        await nothing_left(serving)

    # few seats on the decode side: prompts that have run wait on the prefill side, for a fault to hit them
    served(deployment(kinds, kv_blocks=256, max_batch=24, max_tokens=64, first_token_at="prefill"), work, options)


def reference(model: str) -> list:
    """Return the answers of one engine that nobody disturbs."""
    from runtime.load import load_engine
    from runtime.settings import EngineSettings

    engine = load_engine(model, EngineSettings(dtype="float32", kv_blocks=512, threads=1), "dummy")
    try:
        prompts, samplings = zip(*requests_of(REQUESTS), strict=True)
        return engine.generate(prompts, samplings)
    finally:
        engine.close()


async def some_tokens_more(serving: Serving) -> None:
    """Return when the instances have chosen a few hundred tokens more."""

    def tokens() -> int:
        return sum(each.output_tokens for each in serving.conductor.snapshot().instances)

    before = tokens()
    while tokens() < before + 200:
        await asyncio.sleep(0.02)


def sends(number: int, name: str, rank: int | None = None) -> Fault:
    async def fault(serving: Serving) -> None:
        os.kill(process_of(serving, name, rank).pid, number)

    return fault


@pytest.mark.parametrize("name", ["prefill0", "decode1"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_nothing_is_lost_when_an_instance_is(name, number, tmp_path):
    survives(tmp_path, PAIR, sends(number, name))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_nothing_is_lost_when_one_rank_of_an_instance_is(number, tmp_path):
    survives(tmp_path, [("prefill", 1, 1), ("decode", 2, 1)], sends(number, "decode1", rank=1))


def test_nothing_is_lost_when_an_aggregated_instance_is(tmp_path):
    survives(tmp_path, [("aggregated", 1, 1)], sends(signal.SIGKILL, "aggregated0"))


def test_ten_restarts_leave_nothing_behind(tmp_path):
    options = little(tmp_path)

    async def work(serving: Serving) -> None:
        before = len(psutil.Process().children(recursive=True)), psutil.Process().num_fds()
        for round_ in range(10):
            name = ("prefill0", "decode1")[round_ % 2]
            process_of(serving, name).kill()
            while serving.conductor.ready:
                await asyncio.sleep(0.01)
            await serving.until_ready()
            answers = await answers_of(serving, [1, 2, 3], Sampling(max_tokens=5, ignore_eos=True))
            assert len(answers[0].token_ids) == 5
        await nothing_left(serving)
        after = len(psutil.Process().children(recursive=True)), psutil.Process().num_fds()
        assert after[0] == before[0] and after[1] <= before[1] + 2
        assert len(list(serving.supervisor.folder.glob("prefill0@*"))) == 1, "KV memory of earlier starts is left"

    served(deployment(PAIR, kv_blocks=256), work, options)
