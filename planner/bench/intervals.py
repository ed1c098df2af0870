"""Intervals (95 %) for shares and percentiles of requests that follow each other.

Neighbours share queues and batches, so a hundred of them tell less than a hundred independent ones. For a share,
Wilson's interval (1927) with the number of independent requests that the neighbours are worth; a bootstrap was dropped
because it gives a run without a miss an interval of no width. For percentiles, a circular block bootstrap (Politis and
Romano, 1992) with blocks longer than neighbours depend on each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, nan, sqrt

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

_DEVIATIONS = 1.96
_RESAMPLES = 1000
_MOST_DRAWN = 20_000_000
"""Values drawn in all: long runs get fewer resamples, and need fewer."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval; nan where there is none."""

    value: float
    low: float = nan
    high: float = nan


def worth(series: FloatArray) -> float:
    """Return how many neighbours of a series carry as much as one independent value: its autocorrelation time, >= 1.

    1 + 2 x the sum of the autocorrelations, which is cut off where a pair of neighbouring lags no longer adds to it
    (Geyer, 1992, initial positive sequence).
    """
    count = len(series)
    centred = series - series.mean() if count else series
    power = float(centred @ centred)
    if count < 4 or power <= 0:
        return 1.0
    width = 1 << (2 * count - 1).bit_length()
    spectrum = np.fft.rfft(centred, width)
    correlation = np.fft.irfft(spectrum * spectrum.conj(), width)[: count // 2 * 2] / power
    pairs = correlation[0::2] + correlation[1::2]
    ends = np.flatnonzero(pairs <= 0)
    total = 2 * float(pairs[: ends[0] if len(ends) else len(pairs)].sum()) - 1
    return min(max(total, 1.0), float(count))


def share(met: NDArray[np.bool_], times_s: FloatArray) -> Interval:
    """Return the share of requests that met their SLO. Without a hit or without a miss, `times_s` (TTFT) tells how far
    neighbours depend on each other."""
    count = len(met)
    if not count:
        return Interval(nan)
    varied = 0 < met.sum() < count
    series = met.astype(float) if varied else _ranks(times_s)
    return wilson(float(met.mean()), count / worth(series))


def wilson(value: float, count: float) -> Interval:
    """Return the interval of a share seen in so many independent cases."""
    square = _DEVIATIONS**2
    middle = (value + square / (2 * count)) / (1 + square / count)
    half = _DEVIATIONS / (1 + square / count) * sqrt(value * (1 - value) / count + square / (4 * count**2))
    low = 0.0 if value == 0 else max(0.0, middle - half)  # exact where rounding would leave a trace
    high = 1.0 if value == 1 else min(1.0, middle + half)
    return Interval(value, low, high)


def percentiles(values: FloatArray, which: Sequence[float], seed: int) -> list[Interval]:
    """Return percentiles of the finite values, which stand in the order of their arrival."""
    values = values[np.isfinite(values)]
    if not len(values):
        return [Interval(nan)] * len(which)
    found = np.percentile(values, which)
    low, high = np.percentile(_resampled(values, which, seed), [2.5, 97.5], axis=0)
    return [Interval(*map(float, one)) for one in zip(found, low, high, strict=True)]


def _resampled(values: FloatArray, which: Sequence[float], seed: int) -> FloatArray:
    """Return the percentiles of each resample, one row each."""
    count, stream = len(values), np.random.default_rng(seed)
    block = min(count, ceil(max(2 * worth(_ranks(values)), count ** (1 / 3))))
    pieces = -(-count // block)
    resamples = max(100, min(_RESAMPLES, _MOST_DRAWN // count))
    found = np.empty((resamples, len(which)))
    for row in found:
        starts = stream.integers(count, size=pieces)
        index = (starts[:, None] + np.arange(block)).ravel()[:count] % count
        row[:] = np.percentile(values[index], which)
    return found


def _ranks(values: FloatArray) -> FloatArray:
    """Return the place of each value among all: single long ones must not rule a correlation. inf and nan come last."""
    return np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(float)
