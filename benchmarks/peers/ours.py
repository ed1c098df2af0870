"""This project's engine, and how near its decode steps come to the time that reading their bytes takes."""

from __future__ import annotations

import runtime  # isort: skip  # noqa: F401 - says how OpenMP waits, before torch reads it

import statistics
import time
import timeit

import torch

from benchmarks.peers.trace import (
    MAX_RUNNING,
    SEED,
    VOCABULARY,
    Request,
    arguments,
    prefill_tokens_per_s,
    tell,
    trace_tokens_per_s,
)
from runtime.engine import Engine
from runtime.load import load_engine
from runtime.sampling import Sampling
from runtime.settings import EngineSettings
from runtime.tensor_shapes import tensor_shapes

CONTEXT, STEPS = 1024, 12


def main() -> None:
    """Print the throughput of the trace and of prefill, and a decode step's time beside its bytes'."""
    asked = arguments()
    settings = EngineSettings(
        dtype=asked.dtype, threads=asked.threads, max_batch=MAX_RUNNING, kv_blocks=1600, prefix_caching=False
    )
    engine = load_engine(asked.folder, settings)

    def serve(requests: list[Request]) -> list[int]:
        wanted = [Sampling(max_tokens=request.output_tokens, ignore_eos=True) for request in requests]
        answers = engine.generate([request.prompt for request in requests], wanted)
        return [len(answer[0].token_ids) for answer in answers]

    prefill = prefill_tokens_per_s(lambda prompt: serve([Request(prompt, 1)]))
    trace = trace_tokens_per_s(serve)
    weights, kv_values = decode_values(engine)
    size, rate = getattr(torch, asked.dtype).itemsize, read_bytes_per_s()
    products_s = 2 * MAX_RUNNING * weights / product_flop_per_s(getattr(torch, asked.dtype))
    tell(
        prefill=prefill,
        trace=trace,
        step_s=decode_step_s(engine),
        bytes_s=size * (weights + kv_values) / rate,
        least_s=max(products_s, size * weights / rate) + size * kv_values / rate,
    )


def decode_step_s(engine: Engine) -> float:
    """Return the median time of a step of 16 sequences of 1,024 tokens, scheduling and sampling included."""
    random = torch.Generator().manual_seed(SEED)
    prompts = torch.randint(VOCABULARY, (MAX_RUNNING, CONTEXT - STEPS), generator=random).tolist()
    for prompt in prompts:
        engine.add(prompt, Sampling(max_tokens=2 * STEPS, ignore_eos=True))
    times = []
    while engine.unfinished:
        start = time.perf_counter()
        changed = engine.step()
        if len(changed) == MAX_RUNNING:
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first one holds the last prompt


def decode_values(engine: Engine) -> tuple[int, int]:
    """Return how many weights a step reads, each once (an embedding only as the head), and how many numbers of KV."""
    config = engine.config
    shapes = dict(tensor_shapes(config))
    if not config.tied_embeddings:
        del shapes["model.embed_tokens.weight"]
    weights = sum(torch.Size(shape).numel() for shape in shapes.values())
    return weights, MAX_RUNNING * CONTEXT * config.layers * config.kv_values_per_token


def read_bytes_per_s() -> float:
    """Return the most of 9 readings of a buffer that no cache holds, by as many threads as the engine has."""
    data = torch.ones(1 << 27)  # not zeros: pages that nobody has written are all one page, which stays in the cache
    return data.nbytes / min(timeit.repeat(data.sum, number=1, repeat=9))


def product_flop_per_s(dtype: torch.dtype) -> float:
    """Return the most of 9 products of large matrices: what the cores can do where memory does not matter."""
    a, b = torch.randn(2, 2048, 2048).to(dtype)
    return 2 * 2048**3 / min(timeit.repeat(lambda: torch.mm(a, b), number=1, repeat=9))


if __name__ == "__main__":
    main()
