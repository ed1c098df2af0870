"""What a run says: attainment per class, the terms of TTFT, utilisation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.simulator.cluster import Run
from planner.specs.slo import Slo, attains


def attained(run: Run, slos: tuple[Slo, ...]) -> np.ndarray:
    """Return for each request whether it met its own class's SLO; one that never finished did not."""
    requests = run.requests
    met = np.zeros(len(requests), bool)
    for of_class, slo in enumerate(slos):
        rows = requests.slo_class == of_class
        tpot_s = slo.request_tpot_s(
            requests.arrival_s[rows], run.first_token_s[rows], run.finish_s[rows], requests.output_tokens[rows]
        )
        met[rows] = attains(run.ttft_s[rows], tpot_s, slo) & np.isfinite(run.finish_s[rows])
    return met


def attainment(run: Run, slos: tuple[Slo, ...], warmup_s: float = 0.0) -> tuple[float, ...]:
    """Return the share of requests that met their SLO, per class, of those that arrived after the warm-up.

    A class without requests counts as met.
    """
    met, counted = attained(run, slos), run.requests.arrival_s >= warmup_s
    shares = []
    for of_class in range(len(slos)):
        rows = counted & (run.requests.slo_class == of_class)
        shares.append(float(met[rows].mean()) if rows.any() else 1.0)
    return tuple(shares)


def margin(run: Run, slos: tuple[Slo, ...], warmup_s: float = 0.0) -> float:
    """Return by how much the worst class is above its target attainment (below, when negative)."""
    shares = attainment(run, slos, warmup_s)
    return min(share - slo.attainment for share, slo in zip(shares, slos, strict=True))


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of one time [s]."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, values: np.ndarray) -> Spread:
        """Return the spread of the finite values; all nan where there are none."""
        values = values[np.isfinite(values)]
        if not len(values):
            return cls(*(float("nan"),) * 4)
        return cls(float(values.mean()), *(float(v) for v in np.percentile(values, [50, 90, 99])))


@dataclass(frozen=True, slots=True)
class Latencies:
    """TTFT with its terms, and TPOT. The terms' means add up to TTFT's."""

    ttft: Spread
    queue: Spread
    prefill: Spread
    handoff: Spread
    first_decode_wait: Spread
    tpot: Spread


def latencies(run: Run, warmup_s: float = 0.0) -> Latencies:
    """Return TTFT itemised: waiting for prefill, prefill itself, hand-off (waiting for blocks on the decode side and
    the transfer), and the wait for the first decode step. Terms that come after the first token are nil."""
    rows = run.requests.arrival_s >= warmup_s
    pulled = np.isfinite(run.pull_end_s)
    in_ttft = pulled & (run.first_token_s >= run.pull_end_s)
    handoff_s = np.where(in_ttft, run.pull_end_s - run.prefill_end_s, 0.0)
    wait_s = np.where(in_ttft, run.first_step_s - run.pull_end_s, 0.0)
    return Latencies(
        ttft=Spread.of(run.ttft_s[rows]),
        queue=Spread.of((run.prefill_start_s - run.requests.arrival_s)[rows]),
        prefill=Spread.of((run.prefill_end_s - run.prefill_start_s)[rows]),
        handoff=Spread.of(handoff_s[rows]),
        first_decode_wait=Spread.of(wait_s[rows]),
        tpot=Spread.of(run.tpot_s[rows]),
    )


def utilisation(run: Run, instances: list[int]) -> float:
    """Return the mean share of time that the given instances' slowest stage was busy while requests arrived."""
    horizon_s = float(run.requests.arrival_s[-1]) if len(run.requests) else 0.0
    if not instances or horizon_s <= 0:
        return 0.0
    return float(np.minimum(run.busy_s[instances] / horizon_s, 1.0).mean())


def binding_term(run: Run, slos: tuple[Slo, ...], warmup_s: float = 0.0) -> tuple[str, float, float]:
    """Return which bound is missed more often, "TTFT" or "TPOT", and the shares that miss TTFT and TPOT."""
    counted = run.requests.arrival_s >= warmup_s
    late = np.zeros(len(counted), bool)
    slow = np.zeros(len(counted), bool)
    for of_class, slo in enumerate(slos):
        rows = run.requests.slo_class == of_class
        late[rows] = ~(run.ttft_s[rows] <= slo.ttft_s * (1 + 1e-9))
        slow[rows] = run.tpot_s[rows] > slo.tpot_s * (1 + 1e-9)
    misses = float(late[counted].mean()), float(slow[counted].mean())
    return ("TTFT" if misses[0] >= misses[1] else "TPOT"), *misses
