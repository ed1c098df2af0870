"""A server whose law is known, seen through the files that vLLM's and SGLang's benchmark clients write.

Continuous batching in its plainest form: whoever waits is prefilled alone, then everyone decodes one token per step.
The files have the keys that the clients write, and nothing that they do not.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

import numpy as np


def prefill_s(tokens: int) -> float:
    """8 ms, 20 us a token, and attention."""
    return 8e-3 + 20e-6 * tokens + 4e-10 * tokens**2


def decode_s(batch: int, context: int) -> float:
    """6 ms, 40 us a request, 50 ns per KV token in the whole batch."""
    return 6e-3 + 40e-6 * batch + 50e-9 * context


@dataclass
class Call:
    """One request as its client saw it."""

    start_s: float
    prompt: int
    output: int
    tokens_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.start_s

    @property
    def gaps_s(self) -> list[float]:
        return np.diff(self.tokens_s).tolist()


def serve(lengths: list[tuple[int, int]], limit: int | None = None, rate_rps: float | None = None) -> list[Call]:
    """Return what the clients of a server saw: `limit` of them at a time, or arrivals at a rate (seed 3)."""
    calls = [Call(0.0, prompt, output) for prompt, output in lengths]
    if rate_rps is not None:
        arrivals = np.cumsum(np.random.default_rng(3).exponential(1 / rate_rps, len(calls)))
        for call, at_s in zip(calls, arrivals, strict=True):
            call.start_s = float(at_s)
    free = [0.0] * (limit or len(calls))
    left, waiting, running, now_s = list(calls), [], [], 0.0
    while left or waiting or running:
        while left and free and max(free[0], left[0].start_s) <= now_s:
            left[0].start_s = max(heapq.heappop(free), left[0].start_s)
            waiting.append(left.pop(0))
        if waiting:
            now_s += prefill_s(waiting[0].prompt)
            waiting[0].tokens_s.append(now_s)
            running.append(waiting.pop(0))
        elif running:
            now_s += decode_s(len(running), sum(call.prompt + len(call.tokens_s) for call in running))
            for call in running:
                call.tokens_s.append(now_s)
        else:
            now_s = max(left[0].start_s, free[0])
        for call in [call for call in running if len(call.tokens_s) == call.output]:
            running.remove(call)
            heapq.heappush(free, now_s)
    return calls


def vllm_json(calls: list[Call], limit: int | None = None, rate: float | str = "inf", **more: Any) -> dict[str, Any]:
    """Return what `vllm bench serve --save-result --save-detailed` writes (vllm/benchmarks/serve.py, main_async)."""
    duration = max(call.tokens_s[-1] for call in calls)
    return {
        "date": "20260101-120000",
        "endpoint_type": "openai",
        "backend": "openai",
        "label": None,
        "model_id": "meta-llama/Llama-3.1-8B-Instruct",
        "tokenizer_id": "meta-llama/Llama-3.1-8B-Instruct",
        "num_prompts": len(calls),
        "request_rate": rate,
        "burstiness": 1.0,
        "max_concurrency": limit,
        "duration": duration,
        "completed": len(calls),
        "failed": 0,
        "total_input_tokens": sum(call.prompt for call in calls),
        "total_output_tokens": sum(call.output for call in calls),
        "request_throughput": len(calls) / duration,
        "request_goodput": None,
        "input_lens": [call.prompt for call in calls],
        "output_lens": [call.output for call in calls],
        "ttfts": [call.ttft_s for call in calls],
        "itls": [call.gaps_s for call in calls],
        "start_times": [1000.0 + call.start_s for call in calls],
        "generated_texts": ["text"] * len(calls),
        "errors": [""] * len(calls),
        "max_output_tokens_per_s": 100.0,
        "max_concurrent_requests": limit or len(calls),
        **more,
    }


def sglang_json(calls: list[Call], limit: int | None = None, rate: float = float("inf"), **more: Any) -> dict[str, Any]:
    """Return what `sglang.bench_serving --output-details` writes (python/sglang/benchmark/serving.py, benchmark)."""
    return {
        "tag": None,
        "backend": "sglang",
        "dataset_name": "random",
        "request_rate": rate,
        "max_concurrency": limit,
        "sharegpt_output_len": None,
        "random_input_len": 1024,
        "random_output_len": 128,
        "random_range_ratio": 0.0,
        "server_info": {
            "model_path": "meta-llama/Llama-3.1-8B-Instruct",
            "tp_size": 2,
            "pp_size": 1,
            "dp_size": 1,
            "dtype": "bfloat16",
            "version": "0.5.9",
            "internal_states": [{"max_total_num_tokens": 450_000}],
        },
        "duration": max(call.tokens_s[-1] for call in calls),
        "completed": len(calls),
        "total_input_tokens": sum(call.prompt for call in calls),
        "total_output_tokens": sum(call.output for call in calls),
        "accept_length": None,
        "input_lens": [call.prompt for call in calls],
        "output_lens": [call.output for call in calls],
        "ttfts": [call.ttft_s for call in calls],
        "itls": [call.gaps_s for call in calls],
        "generated_texts": ["text"] * len(calls),
        "errors": [""] * len(calls),
        **more,
    }
