"""Goodput by simulation: the highest rate at which enough requests attain their SLO.

Candidates are compared under common random numbers (equal seeds give equal luck at every rate) and over equal
*simulated time*, never an equal number of requests: with a fixed number the run gets shorter as the rate rises, the
queues of large pools never fill, and the ranking flips.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, sqrt

import numpy as np
from scipy import stats

from planner.search.layouts import Kind
from planner.simulator.cluster import Run, System, simulate
from planner.simulator.metrics import margin
from planner.specs.slo import Slo
from planner.specs.workload import Requests, Workload

WARMUP = 0.15
"""Share of the simulated time in which the system fills up and nobody is counted."""
_SMALLEST_RPS = 1e-4


@dataclass(frozen=True, slots=True)
class Trial:
    """The conditions under which candidates are compared."""

    workload: Workload
    slos: tuple[Slo, ...]
    duration_s: float
    seed: int = 0
    most_requests: int = 200_000
    tally: list[int] = field(default_factory=lambda: [0, 0])
    """Simulations and requests so far, for the report."""

    @property
    def warmup_s(self) -> float:
        """Requests before this time are not counted [s]."""
        return WARMUP * self.duration_s

    def run(self, system: System, rate_rps: float, stop_when_missed: bool = False) -> Run:
        """Return one simulation at `rate_rps`."""
        duration_s = min(self.duration_s, self.most_requests / rate_rps)
        requests = self.workload.generate(rate_rps, duration_s, self.seed)
        requests = classify(requests, self.slos, self.seed)
        self.tally[0] += 1
        self.tally[1] += len(requests)
        return simulate(system, requests, self.slos, self.warmup_s, stop_when_missed)

    def margin(self, system: System, rate_rps: float) -> float:
        """Return by how much attainment exceeds the target at this rate; negative when it falls short."""
        run = self.run(system, rate_rps, stop_when_missed=True)
        return -1.0 if run.stopped_early else margin(run, self.slos, self.warmup_s)

    def with_seed(self, seed: int) -> Trial:
        """Return the same with other luck."""
        return replace(self, seed=seed)


def classify(requests: Requests, slos: tuple[Slo, ...], seed: int) -> Requests:
    """Return the requests with traffic classes dealt out by the classes' shares, alike at every rate."""
    if len(slos) == 1:
        return requests
    given = sum(slo.share or 0.0 for slo in slos)
    rest = max(1.0 - given, 0.0) / max(sum(slo.share is None for slo in slos), 1)
    shares = np.array([rest if slo.share is None else slo.share for slo in slos])
    dealt = np.searchsorted(np.cumsum(shares / shares.sum()), np.random.default_rng([seed, 7]).random(len(requests)))
    return replace(requests, slo_class=np.minimum(dealt, len(slos) - 1).astype(np.int64))


def bisect(passes: Callable[[float], bool], low: float, high: float, precision: float) -> float:
    """Return the highest rate that passes, to a relative `precision`, for a test that passes below and fails above.

    `low` and `high` are guesses: the bracket is widened until it holds. 0 when not even a trickle passes.
    """
    while not passes(low):
        high, low = low, low / 2
        if low < _SMALLEST_RPS:
            return 0.0
    while passes(high):
        low, high = high, high * 1.5
        if high > 1e9:
            return low
    while high / low > 1 + precision:
        middle = sqrt(low * high)
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def goodput_rps(trial: Trial, system: System, guess_rps: float, precision: float = 0.01) -> float:
    """Return the goodput [requests/s] of `system` under the trial's luck; 0 if even a trickle misses the SLO."""
    if not isfinite(guess_rps) or guess_rps <= 0:
        guess_rps = 1.0
    return bisect(lambda rate: trial.margin(system, rate) >= 0.0, guess_rps * 0.87, guess_rps * 1.15, precision)


@dataclass(frozen=True, slots=True)
class Rate:
    """A goodput with the interval that its seeds leave open, and what would bind beyond it."""

    goodput_rps: float
    low_rps: float
    high_rps: float
    per_seed_rps: tuple[float, ...]
    binding: str = ""

    @property
    def width(self) -> float:
        """Return the width of the interval relative to the goodput."""
        return (self.high_rps - self.low_rps) / self.goodput_rps if self.goodput_rps > 0 else 0.0


def replicated(trial: Trial, system: System, guess_rps: float, seeds: Sequence[int], precision: float = 0.005) -> Rate:
    """Return the mean goodput over `seeds` with its 95 % confidence interval (Student's t)."""
    values: list[float] = []
    for seed in seeds:
        values.append(goodput_rps(trial.with_seed(seed), system, values[-1] if values else guess_rps, precision))
    mean = float(np.mean(values))
    half = 0.0
    if len(values) > 1:
        half = float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / sqrt(len(values)))
    half = max(half, precision * mean)  # bisection stops that far apart
    return Rate(mean, max(mean - half, 0.0), mean + half, tuple(values))


def pool(kinds: Sequence[tuple[Kind, int]], kv_bytes_per_token: float, **common: object) -> System:
    """Return a system of so many instances of each kind, with a free network between them."""
    instances = tuple(kind.instance() for kind, count in kinds for _ in range(count))
    return System(instances, kv_bytes_per_token, **common)  # type: ignore[arg-type]
