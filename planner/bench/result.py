"""Measured beside predicted: attainment, TTFT with its terms, TPOT, throughput, and whether the prediction held."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import isnan, nan

import numpy as np
from numpy.typing import NDArray

from planner.bench.intervals import Interval, percentiles, share
from planner.bench.load import Load
from planner.bench.measured import OUTSIDE, TERMS, Measured, measured_of
from planner.bench.predict import Prediction
from planner.bench.replay import Replayed
from planner.simulator.metrics import Throughput, attained, terms_of, throughput

PERCENTILES = (50, 90, 95, 99)
_LATE_OF_TTFT, _LATE_OF_TPOT = 0.02, 0.1
"""Shares of the SLO's bounds that the client's own lateness may reach before it is said that it rules the figures."""
_FEW = 50


@dataclass(frozen=True, slots=True)
class Pair:
    """One figure, measured and predicted; nan where there is none."""

    measured: Interval
    predicted: float = nan


@dataclass(frozen=True, slots=True)
class Attainment:
    """Of one class of requests."""

    name: str
    target: float
    measured: Interval
    predicted: float = nan
    predicted_low: float = nan
    """What is predicted of a system that is worth no more than the lower end of the claim's interval."""
    stated: float = nan
    """What the file says of the rate that it claims, where this is that rate."""

    @property
    def held(self) -> bool | None:
        """Return False when even the upper end of what was measured is below the lower end of what was predicted."""
        unknown = isnan(self.predicted_low) or isnan(self.measured.high)
        return None if unknown else self.measured.high >= self.predicted_low


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """What the client itself did to the figures."""

    late_p50_s: float
    late_p99_s: float
    """How long after it was due a request left."""
    late_max_s: float
    beat_late_p99_s: float
    """How late the client's event loop was: time stamps may be off by as much."""
    cpu_share: float
    """Of one core."""


@dataclass(frozen=True, slots=True, eq=False)
class Predicted:
    """Columns of the simulated requests that stand against those that were counted."""

    met: NDArray[np.bool_]
    met_low: NDArray[np.bool_] | None
    """With the system worth the lower end of the claim's interval."""
    slo_class: NDArray[np.int64]
    terms: np.ndarray
    """As `metrics.terms_of` has them."""
    throughput: Throughput
    stated: dict[str, float]
    """Attainment by class that the file states, where it is of this rate."""

    @property
    def ttft_s(self) -> np.ndarray:
        """Return each request's TTFT [s]."""
        found: np.ndarray = self.terms[0]
        return found

    @property
    def tpot_s(self) -> np.ndarray:
        """Return each request's TPOT [s]."""
        found: np.ndarray = self.terms[-1]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Everything that is shown of a run."""

    load: Load
    measured: Measured
    prediction: Prediction | None
    predicted: Predicted | None
    statuses: dict[str, int]
    """Of the requests that were counted."""
    attainment: tuple[Attainment, ...]
    ttft: dict[str, Pair]
    tpot: dict[str, Pair]
    terms: dict[str, Pair]
    """Means [s]; they add up to the mean TTFT."""
    throughput: Throughput
    client: ClientLoad
    interrupted: bool
    warnings: tuple[str, ...]

    @property
    def held(self) -> bool | None:
        """Return whether the prediction held; None where there is none to hold."""
        told = [one.held for one in self.attainment if one.held is not None]
        return all(told) if told else None

    @property
    def counted(self) -> int:
        """Return how many requests the figures are of."""
        return int(self.measured.counted.sum())


def result_of(replayed: Replayed, load: Load, prediction: Prediction | None) -> Result:
    """Return the figures of a run."""
    measured = measured_of(replayed, load)
    predicted = predicted_of(prediction, load, measured) if prediction is not None else None
    client = _client_load(replayed, measured)
    seed = load.seed
    return Result(
        load=load,
        measured=measured,
        prediction=prediction,
        predicted=predicted,
        statuses=_statuses(measured),
        attainment=_attainments(load, measured, predicted),
        ttft=_pairs(
            np.where(measured.ok, measured.ttft_s, nan), measured, predicted.ttft_s if predicted else None, seed
        ),
        tpot=_pairs(measured.tpot_s, measured, predicted.tpot_s if predicted else None, seed),
        terms=_terms(measured, predicted),
        throughput=_throughput(measured),
        client=client,
        interrupted=replayed.interrupted,
        warnings=tuple(_warnings(load, measured, client)),
    )


def predicted_of(prediction: Prediction, load: Load, measured: Measured) -> Predicted:
    """Return what stands against the requests that were counted: the same ones, or a closed loop after warm-up."""
    run = prediction.run
    if load.clients is None:
        rows, ends_s = measured.row[measured.counted], measured.ends_s
    else:
        ends_s = load.ends_s if np.isfinite(load.ends_s) else float(run.requests.arrival_s[-1])
        rows = np.flatnonzero(run.requests.arrival_s >= load.warmup_s(ends_s))
    low, warmup_s = prediction.pessimistic, load.warmup_s(ends_s)
    return Predicted(
        met=attained(run, load.slos)[rows],
        met_low=None if low is None else attained(low, load.slos)[rows],
        slo_class=run.requests.slo_class[rows],
        terms=terms_of(run)[:, rows],
        throughput=throughput(run, load.slos, warmup_s, max(ends_s, warmup_s + 1e-9)),
        stated=prediction.deployment.prediction.attainment if prediction.at_claim else {},
    )


def _statuses(measured: Measured) -> dict[str, int]:
    return dict(Counter(one.answer.status for one, yes in zip(measured.sent, measured.counted, strict=True) if yes))


def _attainments(load: Load, measured: Measured, columns: Predicted | None) -> tuple[Attainment, ...]:
    found = []
    for at, slo in enumerate(load.slos):
        mine = measured.counted & (measured.slo_class == at)
        name, seen = slo.name or "all", share(measured.met[mine], measured.ttft_s[mine])
        predicted = low = nan
        if columns is not None and (rows := columns.slo_class == at).any():
            predicted = low = float(columns.met[rows].mean())
            if columns.met_low is not None:
                low = min(predicted, float(columns.met_low[rows].mean()))
        stated = columns.stated.get(name, nan) if columns is not None else nan
        found.append(Attainment(name, slo.attainment, seen, predicted, low, stated))
    return tuple(found)


def _pairs(values: np.ndarray, measured: Measured, predicted: np.ndarray | None, seed: int) -> dict[str, Pair]:
    """Return the percentiles of a time over whole answers."""
    seen = percentiles(values[measured.counted], PERCENTILES, seed)
    others = [nan] * len(PERCENTILES)
    if predicted is not None and np.isfinite(predicted).any():
        others = np.percentile(predicted[np.isfinite(predicted)], PERCENTILES).tolist()
    return {f"p{q}": Pair(one, other) for q, one, other in zip(PERCENTILES, seen, others, strict=True)}


def _terms(measured: Measured, columns: Predicted | None) -> dict[str, Pair]:
    """Return the mean of each term of TTFT, and of TTFT itself."""
    rows = measured.counted & measured.ok
    found = {"mean": Pair(Interval(_mean(measured.ttft_s[rows])), _mean(columns.terms[0]) if columns else nan)}
    for at, name in enumerate(TERMS, 1):
        found[name] = Pair(Interval(_mean(measured.terms[name][rows])), _mean(columns.terms[at]) if columns else nan)
    found[OUTSIDE] = Pair(Interval(_mean(measured.terms[OUTSIDE][rows])))
    return found


def _mean(values: np.ndarray) -> float:
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else nan


def _throughput(measured: Measured) -> Throughput:
    """Return what was answered per second, by the definition of the simulator's `throughput`."""
    start_s, end_s = measured.warmup_s, measured.ends_s
    inside = measured.ok & (measured.last_token_s >= start_s) & (measured.last_token_s < end_s)
    counts = int(inside.sum()), int((inside & measured.met).sum()), int(measured.output_tokens[inside].sum())
    return Throughput(*(count / max(end_s - start_s, 1e-9) for count in counts))


def _client_load(replayed: Replayed, measured: Measured) -> ClientLoad:
    late_s = measured.sent_s - measured.due_s if len(measured.sent) else np.zeros(1)
    beats_s = np.array(replayed.beats_late_s or [0.0])
    p50_s, p99_s, max_s = (float(value) for value in np.percentile(late_s, [50, 99, 100]))
    beat_s, cpu_share = float(np.percentile(beats_s, 99)), replayed.cpu_s / max(replayed.wall_s, 1e-9)
    return ClientLoad(p50_s, p99_s, max_s, beat_s, cpu_share)


def _warnings(load: Load, measured: Measured, client: ClientLoad) -> list[str]:
    """Return what makes the figures doubtful, worst first."""
    found = []
    ttft_s, tpot_s = (min(getattr(slo, name) for slo in load.slos) for name in ("ttft_s", "tpot_s"))
    if client.late_p99_s > _LATE_OF_TTFT * ttft_s or client.beat_late_p99_s > _LATE_OF_TPOT * tpot_s:
        found.append(
            f"the client is the bottleneck: requests left up to {1e3 * client.late_p99_s:.3g} ms late (p99) and its "
            f"loop lags by {1e3 * client.beat_late_p99_s:.3g} ms; run it on another machine, or on a core of its own"
        )
    found += _mismatches(load, measured)
    for status in ("rejected", "refused", "broken", "timeout"):
        errors = [one.answer.error for one in measured.sent if one.answer.status == status]
        if errors:
            common, _ = Counter(errors).most_common(1)[0]
            found.append(f"{len(errors)} of {len(measured.sent)} requests {_SAID[status]} (mostly: {common})")
    if 0 < (counted := int(measured.counted.sum())) < _FEW:
        found.append(f"only {counted} requests were counted; their percentiles say little")
    if not counted:
        found.append(f"no request was counted: all {len(measured.sent)} were sent in the warm-up or had not ended")
    return found


_SAID = {
    "rejected": "were rejected",
    "refused": "were refused",
    "broken": "broke off",
    "timeout": "took longer than --timeout",
}


def _mismatches(load: Load, measured: Measured) -> list[str]:
    """Return what the server did other than it was asked, in tokens."""
    found = []
    answers = [(one, one.answer) for one in measured.sent if one.answer.status == "ok"]
    silent = sum(answer.output_tokens is None for _, answer in answers)
    if silent:
        found.append(f"the server gives no usage for {silent} of {len(answers)} answers: their tokens were not checked")
    for what, asked, way_out in (
        ("prompt", load.requests.prompt_tokens, "does it add or cut tokens?"),
        ("output", load.requests.output_tokens, "does it heed ignore_eos and min_tokens?"),
    ):
        told = [(int(asked[one.row]), getattr(answer, f"{what}_tokens")) for one, answer in answers]
        wrong = [(a, b) for a, b in told if b is not None and a != b]
        if wrong:
            found.append(
                f"{len(wrong)} of {len(answers)} answers are not of the tokens asked for: {what} {wrong[0][1]} instead "
                f"of {wrong[0][0]} in the first; {way_out}"
            )
    return found
