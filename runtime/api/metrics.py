"""What Prometheus scrapes: vLLM's names where the meaning is the same, our own where it has none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from runtime.api.gauges import StateCollector
from runtime.api.stations import durations
from runtime.service import Service

if TYPE_CHECKING:
    from runtime.api.counted import Counted

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0)
_LONG_SECONDS = (*_SECONDS, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = tuple(float(factor * 10**power) for power in range(6) for factor in (1, 2, 5))
_ANSWERS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_DURATIONS = {
    "ttft_s": ("vllm:time_to_first_token_seconds", "From arrival to the first token [s]."),
    "finish_s": ("vllm:e2e_request_latency_seconds", "From arrival to the last token [s]."),
    "queue_s": ("vllm:request_queue_time_seconds", "From arrival to the first step of the prefill [s]."),
    "prefill_s": ("vllm:request_prefill_time_seconds", "From the first step of the prefill to its end [s]."),
    "decode_s": ("vllm:request_decode_time_seconds", "From the first token to the last [s]."),
    "inference_s": ("vllm:request_inference_time_seconds", "From the first step of the prefill to the last token [s]."),
}
_TERMS = ("queue", "prefill", "handoff", "first_decode_wait")


class Metrics:
    """Counters and histograms of the requests, and, when scraped, the state of the service."""

    def __init__(self, service: Service):
        self.registry = CollectorRegistry()
        self._model = service.model
        self._requests_seen(service.model)
        self._durations = {field: self._histogram(*text) for field, text in _DURATIONS.items()}
        self._terms = Histogram(
            "goodput_planner_ttft_term_seconds",
            "What the time to the first token is made of [s].",
            ["model_name", "term"],
            buckets=_LONG_SECONDS,
            registry=self.registry,
        )
        self.registry.register(StateCollector(service))

    def _requests_seen(self, model: str) -> None:
        self._prompt = self._counter("vllm:prompt_tokens", "Tokens of prompts whose answer is complete.")
        self._generated = self._counter("vllm:generation_tokens", "Tokens of answers.")
        self._queried = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in a prefix cache.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in a prefix cache.")
        self._success = Counter(
            "vllm:request_success",
            "Requests by how they ended.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._rejected = Counter(
            "vllm:admission_rejections",
            "Requests that were turned away.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self._gap = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of one answer [s].", _SECONDS
        )
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean of one request after its first token [s].", _SECONDS
        )
        self._prompts = self._histogram("vllm:request_prompt_tokens", "Tokens of one prompt.", _TOKENS)
        self._answers = self._histogram("vllm:request_generation_tokens", "Tokens of one request's answers.", _TOKENS)
        self._asked_n = self._histogram("vllm:request_params_n", "Answers asked for.", _ANSWERS)
        self._asked_tokens = self._histogram("vllm:request_params_max_tokens", "max_tokens asked for.", _TOKENS)
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(model, reason)  # a series that begins with 0 can be told from one that is missing

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(name, about, ["model_name"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, about: str, buckets: Iterable[float] = _LONG_SECONDS) -> Histogram:
        found = Histogram(name, about, ["model_name"], buckets=tuple(buckets), registry=self.registry)
        return found.labels(self._model)

    def told(self, tokens: int, gap_s: float | None) -> None:
        """Count tokens of an answer, `gap_s` after those before; of several at once each has its share of it."""
        self._generated.inc(tokens)
        if gap_s is not None:
            for _ in range(tokens):
                self._gap.observe(gap_s / tokens)

    def rejected(self, reason: str) -> None:
        """Count a request that was turned away."""
        self._rejected.labels(self._model, reason).inc()

    def ended(self, request: Counted, end: str) -> None:
        """Count a request by its end: `last` delta, `error`, or cancelled before either."""
        if end != "last":
            self._success.labels(self._model, end or "abort").inc()
            return
        for reason in request.reasons:
            self._success.labels(self._model, reason).inc()
        self._count_tokens(request)
        self._observe_times(request)

    def _count_tokens(self, request: Counted) -> None:
        self._prompt.inc(request.prompt_tokens)
        self._queried.inc(request.prompt_tokens)
        self._hits.inc(request.stream.times.cached_tokens)
        self._prompts.observe(request.prompt_tokens)
        self._answers.observe(request.output_tokens)
        self._asked_n.observe(request.sampling.n)
        self._asked_tokens.observe(request.sampling.max_tokens)

    def _observe_times(self, request: Counted) -> None:
        found = durations(request.stream.times)
        for field, histogram in self._durations.items():
            if (value := getattr(found, field)) is not None:
                histogram.observe(value)
        for term in _TERMS:
            if (value := getattr(found, f"{term}_s")) is not None:
                self._terms.labels(self._model, term).observe(value)
        after_first = request.output_tokens / request.sampling.n - 1
        if found.decode_s is not None and after_first > 0:
            self._per_token.observe(found.decode_s / after_first)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)
