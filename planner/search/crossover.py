"""Pipeline or tensor parallel prefill on equal GPUs: from which rate on the pipeline answers sooner.

A pipeline takes longer for a prompt alone, and lets the next one in sooner. With few requests the first counts, with
many the second: queues are M/D/1, whose service time is what a prompt keeps the busiest stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scipy.optimize import brentq

from planner.search.layouts import Kind

_NEARLY = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class Crossover:
    """Two prefill kinds on as many GPUs, neither of which is better at every rate. Times [s] of a prompt of the mean
    length."""

    tensor: Kind
    pipeline: Kind
    tensor_s: tuple[float, float]
    """Alone, and until the next one may follow."""
    pipeline_s: tuple[float, float]
    rate_rps: float
    """From here on, per instance, the pipeline has the smaller mean TTFT."""


def md1_wait_s(rate_rps: float, service_s: float) -> float:
    """Return the mean wait [s] in an M/D/1 queue (Pollaczek-Khinchine)."""
    busy = rate_rps * service_s
    return busy * service_s / (2 * (1 - busy))


def crossover_rps(tensor_s: tuple[float, float], pipeline_s: tuple[float, float]) -> float | None:
    """Return the rate [requests/s] from which on the pipeline answers sooner, None where one is better at every rate.

    Each is (time of a prompt alone, time until the next one may follow) [s].
    """
    (alone_s, next_s), (piped_alone_s, piped_next_s) = tensor_s, pipeline_s
    if piped_alone_s <= alone_s or piped_next_s >= next_s:
        return None

    def gain_s(rate_rps: float) -> float:
        return alone_s + md1_wait_s(rate_rps, next_s) - piped_alone_s - md1_wait_s(rate_rps, piped_next_s)

    return float(brentq(gain_s, 0.0, _NEARLY / next_s))


def crossovers(kinds: Iterable[Kind], prompt_tokens: int) -> Iterator[Crossover]:
    """Yield for each GPU type and number of GPUs the pipeline that overtakes tensor parallelism at the lowest rate."""
    prefill = [kind for kind in kinds if kind.phase == "prefill"]
    for tensor in (kind for kind in prefill if kind.layout.pp == 1):
        rivals = [k for k in prefill if k.layout.pp > 1 and (k.gpu, k.gpus) == (tensor.gpu, tensor.gpus)]
        found = [one for kind in rivals if (one := _between(tensor, kind, prompt_tokens)) is not None]
        if found:
            yield min(found, key=lambda one: one.rate_rps)


def _between(tensor: Kind, pipeline: Kind, prompt_tokens: int) -> Crossover | None:
    times = [kind.cost.prompt_s(prompt_tokens, kind.limits.pipeline_tokens) for kind in (tensor, pipeline)]
    rate_rps = crossover_rps(*times)
    return None if rate_rps is None else Crossover(tensor, pipeline, times[0], times[1], rate_rps)
