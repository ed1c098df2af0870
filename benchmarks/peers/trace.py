"""The requests that every engine serves, what is said of them, and how a script is called."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

REQUESTS, MAX_RUNNING, SEED, VOCABULARY = 32, 16, 1, 49_152
LONG_PROMPT, REPEATS = 512, 5


@dataclass(frozen=True)
class Request:
    """Random token ids, and how many tokens to answer with."""

    prompt: list[int]
    output_tokens: int


def trace() -> list[Request]:
    """Return 32 requests, all there at time 0: 3,807 prompt tokens, 2,415 output tokens."""
    random = np.random.default_rng(SEED)
    prompts = np.clip(random.lognormal(np.log(90), 1.0, REQUESTS), 8, 512).astype(int)
    outputs = np.clip(random.lognormal(np.log(70), 0.8, REQUESTS), 4, 256).astype(int)
    return [Request(random.integers(0, VOCABULARY, p).tolist(), int(o)) for p, o in zip(prompts, outputs, strict=True)]


def long_prompts() -> list[list[int]]:
    """Return prompts of 512 tokens to time prefill with; the first is to warm up."""
    return np.random.default_rng(SEED).integers(0, VOCABULARY, (REPEATS + 1, LONG_PROMPT)).tolist()


def arguments() -> argparse.Namespace:
    """Return what a script is called with: model folder, dtype, threads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("dtype", choices=("float32", "bfloat16"))
    parser.add_argument("threads", type=int)
    return parser.parse_args()


def prefill_tokens_per_s(first_token: Callable[[list[int]], object]) -> float:
    """Return the median over prompts of 512 tokens, one after the other; `first_token` runs one."""
    warm_up, *prompts = long_prompts()
    first_token(warm_up)
    return LONG_PROMPT / statistics.median(seconds(lambda prompt=prompt: first_token(prompt)) for prompt in prompts)


def trace_tokens_per_s(serve: Callable[[list[Request]], Sequence[int]]) -> float:
    """Return useful output tokens per second; `serve` returns how many tokens each request got."""
    requests, counts = trace(), list[int]()
    serve([Request(request.prompt[:40], 4) for request in requests])
    taken = seconds(lambda: counts.extend(serve(requests)))
    assert counts == [request.output_tokens for request in requests], counts
    return sum(counts) / taken


def seconds(run: Callable[[], object]) -> float:
    """Return how long `run` takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def tell(**measured: float) -> None:
    """Print what was measured."""
    print(json.dumps(measured), flush=True)
