"""How long a request was where: the terms of its TTFT, and the whole, from the times that it passed its stations."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from runtime.service import Times


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations of one request [s]; None for what did not happen. The first four sum up to the TTFT, messages aside."""

    queue_s: float | None
    """Until the first step with some of its prompt."""
    prefill_s: float | None
    handoff_s: float | None
    """From the end of its prefill until its KV was pulled; 0 when the first token was out without."""
    first_decode_wait_s: float | None
    """From there until its first decode step began; 0 when the first token was out without."""
    ttft_s: float | None
    finish_s: float | None
    decode_s: float | None
    """From the first token to the last."""
    inference_s: float | None
    """From the first step to the last token."""


def durations(times: Times) -> Durations:
    """Return the durations between the stations. Terms are those of `planner.simulator.metrics`."""
    handed = isfinite(times.pull_end_s) and times.first_token_s >= times.first_step_s
    ready_s = max(times.pull_end_s, times.prefill_end_s) if handed else times.prefill_end_s
    return Durations(
        queue_s=_between(times.arrival_s, times.prefill_start_s),
        prefill_s=_between(times.prefill_start_s, times.prefill_end_s),
        handoff_s=_between(times.prefill_end_s, ready_s),
        first_decode_wait_s=_between(ready_s, times.first_step_s if handed else ready_s),
        ttft_s=_between(times.arrival_s, times.first_token_s),
        finish_s=_between(times.arrival_s, times.finish_s),
        decode_s=_between(times.first_token_s, times.finish_s),
        inference_s=_between(times.prefill_start_s, times.finish_s),
    )


def _between(start_s: float, end_s: float) -> float | None:
    """Return the time between; None when one of them never came."""
    return max(0.0, end_s - start_s) if isfinite(start_s) and isfinite(end_s) else None


def times_json(times: Times) -> dict[str, Any]:
    """Return what `return_times` asks for."""
    found = asdict(durations(times))
    del found["decode_s"], found["inference_s"]
    about = {"prefill_at": times.prefill_at or None, "decode_at": times.decode_at or None}
    return {**found, **about, "retries": times.retries, "cached_tokens": times.cached_tokens}
