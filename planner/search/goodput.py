"""Goodput by simulation: the highest rate at which enough requests attain their SLO.

Candidates are compared under common random numbers (equal seeds give equal luck at every rate) and over equal
*simulated time*, never an equal number of requests: with a fixed number the run gets shorter as the rate rises, the
queues of large pools never fill, and the ranking flips.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, isfinite, nan, sqrt

import numpy as np
from scipy import stats

from planner.search.layouts import Kind
from planner.simulator.cluster import Run, System
from planner.simulator.metrics import attained, margin
from planner.simulator.phase import simulate
from planner.specs.slo import Slo
from planner.specs.workload import Requests, Workload

WARMUP = 0.15
"""Share of the simulated time in which the system fills up and nobody is counted."""
_SMALLEST_RPS = 1e-4
_FEWEST = 200
"""Requests that a verdict needs: with a handful, a lucky draw of short prompts meets any SLO."""


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
        trial = self.lasting(rate_rps)
        run = trial.run(system, rate_rps, stop_when_missed=True)
        return -1.0 if run.stopped_early else margin([run], trial.slos, trial.warmup_s)

    def lasting(self, rate_rps: float) -> Trial:
        """Return the trial with its time (warm-up included) fit for this rate: at least 200 requests."""
        duration_s = min(max(self.duration_s, _FEWEST / rate_rps), self.most_requests / rate_rps)
        return replace(self, duration_s=duration_s)

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
    """A goodput with the interval that its seeds leave open, and what would bind beyond it.

    `wide_low_rps` and `wide_high_rps` also hold what the latencies may be off by (`sureness.py`); nan until asked.
    """

    goodput_rps: float
    low_rps: float
    high_rps: float
    margin: float = 0.0
    """By how much attainment, pooled over the seeds, exceeds the target at this rate."""
    binding: str = ""
    wide_low_rps: float = nan
    wide_high_rps: float = nan

    def capped(self, bound_rps: float) -> Rate:
        """Return the same, but no more than `bound_rps`: a run may end before the queue of an overload is too long."""
        rates = (self.goodput_rps, self.low_rps, self.high_rps)
        goodput, low, high = (min(rate, bound_rps) for rate in rates)
        return replace(self, goodput_rps=goodput, low_rps=low, high_rps=high)

    @property
    def width(self) -> float:
        """Return the width of the interval relative to the goodput."""
        return (self.high_rps - self.low_rps) / self.goodput_rps if self.goodput_rps > 0 else 0.0


def replicated(
    trial: Trial,
    system: System,
    guess_rps: float,
    seeds: Sequence[int],
    precision: float = 0.005,
    wanted_rps: float = 0.0,
) -> Rate:
    """Return the highest rate at which the seeds together attain the target, with its 95 % confidence interval.

    Attainment need not fall evenly with the rate, so a bisection may stop short; `wanted_rps` is tried in any case.

    The seeds are pooled, so at the rate that is returned the target is met by their requests together (a mean of each
    seed's own goodput would lie beyond the cliff of some). The interval is a jackknife over the seeds.
    """
    curve: dict[float, np.ndarray] = {}

    def passes(rate_rps: float) -> bool:
        curve[rate_rps] = tallies(trial, system, rate_rps, seeds)
        return pooled_margin(curve[rate_rps], trial.slos) >= 0.0

    if not isfinite(guess_rps) or guess_rps <= 0:
        guess_rps = 1.0
    best = bisect(passes, guess_rps * 0.95, guess_rps * 1.05, precision)
    if best < wanted_rps and passes(wanted_rps):
        best = bisect(passes, wanted_rps, wanted_rps * 1.05, precision)
    if best <= 0:
        return Rate(0.0, 0.0, 0.0)
    for factor in (0.9, 1.1):  # how steep the curve is can only be told from some way off
        passes(best * factor)
    half = max(_jackknife(curve, trial.slos), precision)  # the bisection stops that far apart
    return Rate(best, best * exp(-half), best * exp(half), pooled_margin(curve[best], trial.slos))


def tallies(trial: Trial, system: System, rate_rps: float, seeds: Sequence[int]) -> np.ndarray:
    """Return how many requests attained their SLO, and how many there were: one row per seed, one column per class."""
    trial = trial.lasting(rate_rps)
    return np.array([_tally(trial.with_seed(seed), system, rate_rps) for seed in seeds])


def _tally(trial: Trial, system: System, rate_rps: float) -> list[tuple[int, int]]:
    run = trial.run(system, rate_rps)
    counted = run.requests.arrival_s >= trial.warmup_s
    met = attained(run, trial.slos)[counted]
    classes = run.requests.slo_class[counted]
    return [(int(met[classes == at].sum()), int((classes == at).sum())) for at in range(len(trial.slos))]


def pooled_margin(counts: np.ndarray, slos: Sequence[Slo]) -> float:
    """Return by how much the worst class, over all seeds, exceeds its target; one without requests counts as met."""
    met, everyone = counts.sum(axis=0).T
    shares = np.where(everyone > 0, met / np.maximum(everyone, 1), 1.0)
    return float((shares - np.array([slo.attainment for slo in slos])).min())


def _jackknife(curve: Mapping[float, np.ndarray], slos: Sequence[Slo]) -> float:
    """Return the interval's half width in log rate, from each seed's weight on where the pooled curve crosses 0."""
    rates = np.array(sorted(curve))
    count = len(curve[rates[0]])
    if count < 2 or len(rates) < 2:
        return 0.0
    without = []
    for k in range(count):
        margins = [pooled_margin(np.delete(curve[rate], k, axis=0), slos) for rate in rates]
        without.append(_crossing(rates, np.array(margins)))
    error = sqrt((count - 1) / count * float(((np.array(without) - np.mean(without)) ** 2).sum()))
    return float(stats.t.ppf(0.975, count - 1)) * error


def _crossing(rates: np.ndarray, margins: np.ndarray) -> float:
    """Return the log rate at which a falling curve crosses 0, extended beyond its ends by its slope over all."""
    logs = np.log(rates)
    falling = np.minimum.accumulate(margins) - 1e-9 * np.arange(len(margins))
    if falling[0] > 0 > falling[-1]:
        return float(np.interp(0.0, falling[::-1], logs[::-1]))
    slope = (falling[-1] - falling[0]) / (logs[-1] - logs[0])
    end = 0 if falling[0] <= 0 else -1
    return float(np.clip(logs[end] - falling[end] / slope, logs[0] - 0.25, logs[-1] + 0.25))


def pool(kinds: Sequence[tuple[Kind, int]], kv_bytes_per_token: float, **common: object) -> System:
    """Return a system of so many instances of each kind, with a free network between them."""
    instances = tuple(kind.instance() for kind, count in kinds for _ in range(count))
    return System(instances, kv_bytes_per_token, **common)  # type: ignore[arg-type]
