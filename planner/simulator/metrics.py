"""What a run says: attainment per class, the terms of TTFT, utilisation."""

from __future__ import annotations

from collections.abc import Sequence
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
        met[rows] = attains(run.ttft_s[rows], _own_tpot_s(run, slo)[rows], slo) & np.isfinite(run.finish_s[rows])
    return met


def _own_tpot_s(run: Run, slo: Slo) -> np.ndarray:
    """Return the TPOT of each request [s] by the definition of `slo`."""
    requests = run.requests
    tpot_s: np.ndarray = slo.request_tpot_s(requests.arrival_s, run.first_token_s, run.finish_s, requests.output_tokens)
    return tpot_s


def attainment(runs: Sequence[Run], slos: tuple[Slo, ...], warmup_s: float = 0.0) -> tuple[float, ...]:
    """Return the share of requests that met their SLO, per class, of those that arrived after the warm-up.

    Runs are pooled. A class without requests counts as met.
    """
    met = np.concatenate([attained(run, slos)[_counted(run, warmup_s)] for run in runs])
    classes = np.concatenate([run.requests.slo_class[_counted(run, warmup_s)] for run in runs])
    of_class = [met[classes == at] for at in range(len(slos))]
    return tuple(float(rows.mean()) if len(rows) else 1.0 for rows in of_class)


def _counted(run: Run, warmup_s: float) -> np.ndarray:
    return run.requests.arrival_s >= warmup_s


def margin(runs: Sequence[Run], slos: tuple[Slo, ...], warmup_s: float = 0.0) -> float:
    """Return by how much the worst class is above its target attainment (below, when negative)."""
    shares = attainment(runs, slos, warmup_s)
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


def latencies(runs: Sequence[Run], warmup_s: float = 0.0) -> Latencies:
    """Return TTFT itemised, and TPOT, over all runs' requests after the warm-up.

    The terms: waiting for prefill, prefill itself, hand-off (waiting for blocks on the decode side, and the transfer),
    and the wait for the first decode step. Terms that come after the first token are nil. Requests that never got a
    token are left out of all of them.
    """
    columns = [terms_of(run)[:, _counted(run, warmup_s)] for run in runs]
    return Latencies(*(Spread.of(values) for values in np.concatenate(columns, axis=1)))


def terms_of(run: Run) -> np.ndarray:
    """Return one row per field of `Latencies`, one column per request [s]."""
    in_ttft = np.isfinite(run.pull_end_s) & (run.first_token_s == run.first_step_s)
    terms = np.array(
        [
            run.ttft_s,
            run.prefill_start_s - run.requests.arrival_s,
            run.prefill_end_s - run.prefill_start_s,
            np.where(in_ttft, run.pull_end_s - run.prefill_end_s, 0.0),
            np.where(in_ttft, run.first_step_s - run.pull_end_s, 0.0),
            run.tpot_s,
        ]
    )
    return np.where(np.isfinite(run.ttft_s), terms, np.nan)


@dataclass(frozen=True, slots=True)
class Throughput:
    """What was answered per second."""

    requests_per_s: float
    attaining_requests_per_s: float
    """Of those, the ones that met their SLO."""
    output_tokens_per_s: float


def throughput(run: Run, slos: tuple[Slo, ...], start_s: float, end_s: float) -> Throughput:
    """Return what was answered per second from `start_s` to `end_s`: a request counts when its last token comes."""
    answered = (run.finish_s >= start_s) & (run.finish_s < end_s)
    tokens = int(run.requests.output_tokens[answered].sum())
    counts = int(answered.sum()), int((answered & attained(run, slos)).sum()), tokens
    return Throughput(*(count / (end_s - start_s) for count in counts))


@dataclass(frozen=True, slots=True)
class Load:
    """How loaded some instances were."""

    busy: float
    """Share of the time in which the slowest stage works."""
    batch: float
    """Requests in an iteration, averaged over busy time."""
    kv_peak: float
    """Share of the KV blocks in use at the worst moment of any of them."""


def load_of(runs: Sequence[Run], instances: list[int], blocks: list[int]) -> Load:
    """Return the load of the given instances (positions) with that many blocks, averaged over the runs."""
    busy, batch, peak = [], [], 0.0
    for run in runs:
        horizon_s = float(run.requests.arrival_s[-1]) if len(run.requests) else 0.0
        if horizon_s > 0:
            busy.append(np.minimum(run.busy_s[instances] / horizon_s, 1.0).mean())
            batch.append(run.batch_s[instances].sum() / max(run.busy_s[instances].sum(), 1e-12))
        peak = max([peak, *(1 - run.least_free_blocks[i] / b for i, b in zip(instances, blocks, strict=True))])
    return Load(float(np.mean(busy or [0.0])), float(np.mean(batch or [0.0])), float(peak))


def binding_term(runs: Sequence[Run], slos: tuple[Slo, ...], warmup_s: float = 0.0) -> tuple[str, float, float]:
    """Return which bound is missed more often, "TTFT" or "TPOT", and the shares that miss TTFT and TPOT."""
    late, slow = [], []
    for run in runs:
        for of_class, slo in enumerate(slos):
            rows = _counted(run, warmup_s) & (run.requests.slo_class == of_class)
            late.append(~(run.ttft_s[rows] <= slo.ttft_s * (1 + 1e-9)))
            slow.append(_own_tpot_s(run, slo)[rows] > slo.tpot_s * (1 + 1e-9))
    everyone = max(sum(map(len, late)), 1)
    misses = float(sum(rows.sum() for rows in late)) / everyone, float(sum(rows.sum() for rows in slow)) / everyone
    return ("TTFT" if misses[0] >= misses[1] else "TPOT"), *misses
