"""How sure a claim is: what the error of the latencies does to goodput.

The interval of the replay covers luck alone. But the latencies of each phase and layout are off by some share that
nobody knows, typically by the spread of their held-out errors. So the goodput is found again with each of
them that much longer and that much shorter, under equal luck, and the answers are added in quadrature: they are taken
as independent, and each as one factor on all steps of its phase. Errors that differ from shape to shape average out
over a load, so this is on the wide side.

Where two ways rest on the same latencies, an error moves both, and only the difference of their answers counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, hypot, inf, log, sqrt
from typing import NamedTuple

from planner.cost.base import CostModel
from planner.replay import Placed
from planner.search.goodput import Rate, Trial, goodput_rps
from planner.search.layouts import Kind
from planner.simulator.cluster import System

UNCHECKED = {"prefill": 0.10, "decode": 0.15}
"""Typical error of latencies that come without any check (published coefficients, tables put together). DistServe's,
replayed beside recorded runs of the very engine they are of, had to be raised by 15 % in decode (`make recorded`), and
its authors had raised their prefill fit by 10 %."""
EVERY_LAYOUT = "every layout"
_COMMON = 0.7
"""Share of the variance of such an error that all layouts of a GPU have in common, for it is mostly the engine: of
data-sheet estimates 0.69 in prefill and 0.77 in decode over Splitwise's eight tables."""
_DEVIATIONS = 1.96
_MEDIAN_OF_NORMAL = 0.6745
"""Median absolute value of a normal variable, in standard deviations."""
_PRECISION = 0.01
_LEAST = 0.005
"""Errors below this are not told from none at the precision of a search."""


class Latency(NamedTuple):
    """The latencies of one phase of one kind of instance: what an error has in common."""

    gpu: str
    layout: str
    phase: str

    def __str__(self) -> str:
        return f"{self.phase} at {self.layout} on {self.gpu}"


@dataclass(frozen=True, slots=True)
class Response:
    """What goodput does when one latency is off by its typical error. Changes of the logarithm, -inf for no goodput."""

    error: float
    slower: float
    faster: float


Responses = Mapping[Latency, Response]


def responses(trial: Trial, placed: Placed, rate_rps: float) -> Responses:
    """Return how the goodput of a placement (about `rate_rps`) answers to each latency that it rests on."""
    base_rps = goodput_rps(trial, placed.system, rate_rps, _PRECISION)
    found = {}
    for latency, error in _latencies(placed).items():
        moved = []
        for share in (error, 1 / (1 + error) - 1):
            changed_rps = goodput_rps(trial, _with_error(placed, latency, share), base_rps * (1 - share), _PRECISION)
            moved.append(log(changed_rps / base_rps) if min(changed_rps, base_rps) > 0 else -inf)
        found[latency] = Response(error, min(moved[0], 0.0), max(moved[1], 0.0))
    return found


def _latencies(placed: Placed) -> dict[Latency, float]:
    """Return each latency that a placement rests on, with its typical error."""
    found = {}
    for kind in placed.kinds:
        for phase in ("prefill", "decode") if kind.phase == "aggregated" else (kind.phase,):
            error = typical_error(kind.cost, phase)
            own = error
            if _learnt_elsewhere(kind.cost, phase):
                own = error * sqrt(1 - _COMMON)
                found[Latency(kind.gpu, EVERY_LAYOUT, phase)] = error * sqrt(_COMMON)
            if own >= _LEAST:
                found[Latency(kind.gpu, str(kind.layout), phase)] = own
    return found


def _learnt_elsewhere(cost: CostModel, phase: str) -> bool:
    """Return True when the error is not that of these latencies but what such estimates were off by elsewhere."""
    error = cost.error(phase)
    return error is None or error.settings == 0


def typical_error(cost: CostModel, phase: str) -> float:
    """Return by which share a latency is typically off, as a standard deviation of held-out errors, or of others' kind.

    Their root mean square is often ruled by the ends of a grid, which are extrapolated only while they are left out;
    then what the median amounts to says more of the fit in use.
    """
    error = cost.error(phase)
    return UNCHECKED[phase] if error is None else min(error.rms or inf, error.median / _MEDIAN_OF_NORMAL)


def _with_error(placed: Placed, latency: Latency, share: float) -> System:
    """Return the system with one latency off by `share`."""
    system = placed.system
    pairs = zip(system.instances, placed.kinds, strict=True)
    instances = tuple(
        replace(instance, cost=instance.cost.slower(latency.phase, share)) if _rests_on(kind, latency) else instance
        for instance, kind in pairs
    )
    return replace(system, instances=instances)


def _rests_on(kind: Kind, latency: Latency) -> bool:
    same_layout = latency.layout in (EVERY_LAYOUT, str(kind.layout))
    return kind.gpu == latency.gpu and same_layout and kind.phase in (latency.phase, "aggregated")


def widened(rate: Rate, answers: Responses) -> Rate:
    """Return the rate with the interval (95 %) that luck and the error of the latencies leave together."""
    down, up = spread(rate, answers, {})
    return replace(rate, wide_low_rps=rate.goodput_rps * exp(-down), wide_high_rps=rate.goodput_rps * exp(up))


def spread(rate: Rate, mine: Responses, others: Responses) -> tuple[float, float]:
    """Return how far down and up the log of a goodput (or of its ratio to another one) may be off, at 95 %.

    `others`: the answers of the goodput that it is divided by. Its luck is not in here.
    """
    downs, ups = [log(rate.goodput_rps / rate.low_rps)], [log(rate.high_rps / rate.goodput_rps)]
    for latency in {**mine, **others}:
        still = Response(0.0, 0.0, 0.0)
        a, b = mine.get(latency, still), others.get(latency, still)
        moves = (_minus(a.slower, b.slower), _minus(a.faster, b.faster))
        downs.append(_DEVIATIONS * max(0.0, -min(moves)))
        ups.append(_DEVIATIONS * max(0.0, *moves))
    return hypot(*downs), hypot(*ups)


def _minus(a: float, b: float) -> float:
    return 0.0 if a == b else a - b


def weakest(answers: Responses) -> Latency | None:
    """Return the latency whose error moves the goodput most: the one to measure better. None where none matters."""
    worst = max(answers, key=lambda latency: answers[latency].faster - answers[latency].slower, default=None)
    return worst if worst is not None and answers[worst].faster - answers[worst].slower > 0 else None
