"""Tokens that came through a prefill and a decode instance are those of one engine, whatever the two look like."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from runtime.answer import Answer
from runtime.load import load_engine
from runtime.sampling import Sampling
from runtime.serving import ServeOptions, Serving
from runtime.settings import EngineSettings
from tests.serving import Kind, answers_of, deployment, served

REQUESTS = 200
VOCABULARY = 49152
LAYOUTS: dict[str, list[Kind]] = {
    "1P1D": [("prefill", 1, 1), ("decode", 1, 1)],
    "2P1D": [("prefill", 1, 1), ("prefill", 1, 1), ("decode", 1, 1)],
    "1P2D": [("prefill", 1, 1), ("decode", 1, 1), ("decode", 1, 1)],
    "TP3 to TP1": [("prefill", 3, 1), ("decode", 1, 1)],
    "TP1 to TP3": [("prefill", 1, 1), ("decode", 3, 1)],
    "PP2 to PP1": [("prefill", 1, 2), ("decode", 1, 1)],
    "PP1 to PP2": [("prefill", 1, 1), ("decode", 1, 2)],
}
LITTLE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def mixed(vocabulary: int, count: int, seed: int = 0) -> list[tuple[list[int], Sampling]]:
    """Return requests of many kinds: single tokens and long prompts, equal prefixes, two answers, beams, one token."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, vocabulary, 48).tolist()
    lengths = np.minimum(np.exp(rng.normal(3.5, 1.0, count)).astype(int) + 1, 300)
    requests = []
    for index, length in enumerate(lengths):
        own = rng.integers(0, vocabulary, int(length)).tolist()
        prompt = prefix + own if index % 4 == 0 else own
        sampling = Sampling(
            max_tokens=1 if index % 23 == 7 else int(rng.integers(2, 16)),
            n=2 if index % 10 == 3 else 1,
            beam_width=3 if index % 40 == 11 else 0,
            ignore_eos=index % 2 == 0,
            logprobs=2 if index % 7 == 0 else None,
        )
        requests.append((prompt, sampling))
    return requests


@cache
def plain(source: str, load_format: str, vocabulary: int, count: int) -> list[tuple[Answer, ...]]:
    """Return what one engine answers, one instance, no hand-over."""
    settings = EngineSettings(dtype="float32", kv_blocks=512, max_batch=16, threads=1)
    engine = load_engine(source, settings, load_format)  # type: ignore[arg-type]
    try:
        requests = mixed(vocabulary, count)
        return engine.generate([prompt for prompt, _ in requests], [sampling for _, sampling in requests])
    finally:
        engine.close()


def told(answers: tuple[Answer, ...]) -> list[tuple]:
    return [(answer.token_ids, answer.text, answer.finish_reason, len(answer.logprobs)) for answer in answers]


async def cancelled(serving: Serving, prompt: list[int], sampling: Sampling) -> tuple[int, ...]:
    """Return the first tokens of a request that is given up in the middle."""
    stream = serving.conductor.submit(prompt, sampling)
    got: list[int] = []
    async for delta in stream:
        got += delta.token_ids
        if len(got) > 2:
            break
    await stream.aclose()
    return tuple(got)


def assert_equal(kinds: list[Kind], options: ServeOptions, expected: list, requests: list, **limits) -> None:
    async def work(serving: Serving) -> None:
        gave_up = [
            asyncio.create_task(cancelled(serving, prompt, sampling))
            for prompt, sampling in requests[::5]
            if sampling.width == 1
        ]
        found = await asyncio.gather(*(answers_of(serving, *request) for request in requests))
        for mine, theirs in zip(found, expected, strict=True):
            assert told(mine) == told(theirs)
        parts = await asyncio.gather(*gave_up)
        whole = [
            answers[0].token_ids for answers, (_, it) in zip(expected[::5], requests[::5], strict=True) if it.width == 1
        ]
        assert all(full[: len(part)] == part for part, full in zip(parts, whole, strict=True))
        await nothing_left(serving)

    served(deployment(kinds, **limits), work, options, limit_s=900)


async def nothing_left(serving: Serving) -> None:
    """Return once all instances say that no request holds a KV block any more."""
    for _ in range(100):
        snapshot = serving.conductor.snapshot()
        if not snapshot.requests and not any(it.used_blocks or it.running or it.waiting for it in snapshot.instances):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"blocks are still held: {snapshot}")


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_greedy_tokens_of_smollm2_are_those_of_one_engine(name):
    expected = plain("smollm2", "auto", VOCABULARY, REQUESTS)
    assert_equal(LAYOUTS[name], ServeOptions(), expected, mixed(VOCABULARY, REQUESTS), kv_blocks=512)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        [("prefill", 2, 1), ("decode", 4, 1)],
        [("prefill", 4, 1), ("decode", 2, 1)],
        [("prefill", 2, 2), ("decode", 1, 2)],
    ],
    ids=["TP2 to TP4", "TP4 to TP2", "TP2 PP2 to PP2"],
)
def test_greedy_tokens_of_a_random_model_are_those_of_one_engine(kinds, tmp_path):
    options = little(tmp_path)
    expected = plain(options.model, "dummy", LITTLE["vocab_size"], REQUESTS)
    assert_equal(kinds, options, expected, mixed(LITTLE["vocab_size"], REQUESTS), kv_blocks=512)


def test_tokens_through_a_full_cache_are_those_of_one_engine(tmp_path):
    """Blocks for hardly more than one request on either side: everybody waits for everybody, nobody for ever."""
    options = little(tmp_path)
    expected = plain(options.model, "dummy", LITTLE["vocab_size"], 40)
    requests = mixed(LITTLE["vocab_size"], 40)
    kinds: list[Kind] = [("prefill", 1, 1), ("decode", 1, 1)]
    assert_equal(kinds, options, expected, requests, kv_blocks=52, first_token_at="prefill")


def little(folder: Path) -> ServeOptions:
    """Return how a model of a few thousand random weights is served."""
    config = folder / "little" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(LITTLE))
    return ServeOptions(model=str(config), load_format="dummy")
