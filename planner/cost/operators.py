"""The cost of a single operator: a physics-shaped law fitted to a few measurements, and what it missed in between.

Families compete on cross-validation inside the measurements, simplest first:
    law          the physics, its parameters fitted on relative error to all shapes together
    scaled       that, times one factor per shape
    calibrated   that, sent through a rising curve per shape which passes by the measured times

A curve from the law's seconds to measured seconds keeps the tiles, waves and knees of the law between two
measurements, and keeps its promises: positive, and never falling when a size grows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression, least_squares

from planner.cost.base import TermError
from planner.cost.operator_physics import Physics
from planner.errors import InputError

Array = np.ndarray
Shape = tuple[float, ...]

FAMILIES = ("law", "scaled", "calibrated")
_SIMPLER = 1.05
"""A family with more freedom must beat a simpler one by this factor, as in `cost.fit`."""

_GAP = 0.5
"""What the held-out error of a curve counts. Leaving a setting out doubles the gap that the curve must bridge, and
interpolation errs with the square of the gap: by up to 4 times too much. A law bridges nothing and is judged fairly;
2 is the middle, for part of the error is noise, which no gap doubles."""

_TIMER = 0.02
"""Relative error below which repeats say nothing of a row: kernel timers and clocks drift by that much."""

_OUTLIER = 0.1
"""Residuals beyond this count by their size, not its square: one row must not bend a law."""

_MAX_FOLDS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """A rising curve from the law's time [s] to the measured one [s], (knots,) each, straight in between.

    Straight and not in logarithms: what a law misses is a latency or a rate, and either keeps it straight.
    """

    law_s: Array
    measured_s: Array

    def __call__(self, law_s: Array) -> Array:
        """Return the measured time [s]; beyond the ends the law, times what it missed at the end."""
        inside = np.interp(law_s, self.law_s, self.measured_s)
        below, above = np.minimum(law_s / self.law_s[0], 1.0), np.maximum(law_s / self.law_s[-1], 1.0)
        return np.asarray(inside * below * above)


@dataclass(frozen=True, slots=True, eq=False)
class OperatorLaw:
    """The time of one operator, with its error on settings that were held out of the fit."""

    physics: Physics
    parameters: Array
    family: str
    curves: dict[Shape, Curve]
    other: float
    """Factor for shapes that were not measured."""
    error: TermError
    measured: tuple[Array, Array]
    """Smallest and largest value of each column; outside, the law is an extrapolation."""

    def time_s(self, points: Array) -> Array:
        """Return the time [s] of each row of `points`, (n, columns of the physics)."""
        points = _table(points, self.physics)
        law_s = self.physics.time_s(self.parameters, points)
        out_s = law_s * self.other
        for shape, rows in _by_shape(points, self.physics.dense).items():
            if curve := self.curves.get(shape):
                out_s[rows] = curve(law_s[rows])
        return np.asarray(out_s)

    def covers(self, points: Array) -> Array:
        """Return which rows lie inside what was measured, (n,)."""
        low, high = self.measured
        return np.asarray(((points >= low) & (points <= high)).all(axis=1))


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Measurements: points (n, columns), time [s] (n,), weight (n,) of at most 1."""

    points: Array
    time_s: Array
    weight: Array

    def where(self, mask: Array) -> _Rows:
        return _Rows(self.points[mask], self.time_s[mask], self.weight[mask])


def fit_operator(
    points: Array, time_s: Array, physics: Physics | Sequence[Physics], spread: Array | None = None
) -> OperatorLaw:
    """Return the law that predicts held-out rows of these measurements best.

    points: (n, columns of the physics); time_s: (n,), the median over repeats; physics: one, or several that
    compete; spread: (n,), standard deviation over repeats, relative, so that rows of little faith weigh little.
    The order of rows does not matter. Raises InputError for times that are none, and for fewer than three rows.
    """
    candidates = [physics] if not isinstance(physics, Sequence) else list(physics)
    rows = _gather(points, time_s, spread, candidates[0])
    laws = [law for candidate in candidates for law in _laws(rows, candidate)]
    bar = _SIMPLER * min(score for _, score in laws)
    ranked = sorted((law for law in laws if law[1] <= bar), key=lambda law: (FAMILIES.index(law[0].family), law[1]))
    return ranked[0][0]


def _gather(points: Array, time_s: Array, spread: Array | None, physics: Physics) -> _Rows:
    """Return the rows in one fixed order. Repeats of a point become their median."""
    points, time_s = _table(points, physics), np.asarray(time_s, dtype=float)
    spread = np.zeros(len(time_s)) if spread is None else np.asarray(spread, dtype=float)
    if len(points) != len(time_s) or len(spread) != len(time_s):
        raise InputError(f"{physics.name}: {len(points)} points, {len(time_s)} times and {len(spread)} spreads")
    if not (np.isfinite(time_s) & (time_s > 0)).all():
        raise InputError(f"{physics.name}: expected times above 0 s, got {time_s[~(time_s > 0)][:1]}")
    if not (np.isfinite(points) & (points >= 0)).all():
        raise InputError(f"{physics.name}: expected finite sizes of at least 0 in every column")
    distinct, group = np.unique(points, axis=0, return_inverse=True)
    if len(distinct) < 3:
        raise InputError(f"{physics.name}: {len(distinct)} different points, at least 3 are needed to fit a law")
    members = [np.flatnonzero(group.ravel() == i) for i in range(len(distinct))]
    return _Rows(
        distinct,
        np.array([np.median(time_s[rows]) for rows in members]),
        np.array([_TIMER**2 / (_TIMER**2 + np.median(spread[rows]) ** 2) for rows in members]),
    )


def _table(points: Array, physics: Physics) -> Array:
    points = np.asarray(points, dtype=float)
    if points.ndim != 2 or points.shape[1] != len(physics.columns):
        raise InputError(f"{physics.name}: expected the columns {', '.join(physics.columns)}, got {points.shape}")
    return points


def _laws(rows: _Rows, physics: Physics) -> Iterator[tuple[OperatorLaw, float]]:
    """Yield each family's law with its score: the weighted mean over held-out rows of the absolute log error."""
    parameters = _parameters(rows, physics)
    families = FAMILIES if physics.dense is not None else FAMILIES[:1]
    misses: dict[str, list[float]] = {family: [] for family in families}
    weight: list[float] = []
    for held in _folds(rows, physics.dense):
        left, test = rows.where(~held), rows.where(held)
        near = _parameters(left, physics, parameters)
        weight += list(test.weight)
        for family in families:
            law = _law(left, physics, near, family)
            misses[family] += list(np.log(law.time_s(test.points) / test.time_s))
    for family in families:
        error = np.array(misses[family])
        law = _law(rows, physics, parameters, family, error)
        score = float(np.average(np.abs(error), weights=weight)) if weight else np.inf
        yield law, score * (_GAP if family == "calibrated" else 1.0)


def _parameters(rows: _Rows, physics: Physics, near: Array | None = None) -> Array:
    """Return the parameters that predict the logarithm of the times best, set out from `near`."""
    typical, pull = physics.start(rows.points, rows.time_s)
    root = np.sqrt(rows.weight)
    return np.asarray(
        least_squares(
            lambda p: np.r_[
                root * np.log(physics.time_s(p, rows.points) / rows.time_s),
                pull * (p - typical),
            ],
            typical if near is None else near,
            loss="soft_l1",
            f_scale=_OUTLIER,
            xtol=1e-5,
            ftol=1e-6,
            max_nfev=100,
        ).x
    )


def _folds(rows: _Rows, dense: int | None) -> Iterator[Array]:
    """Yield masks of rows to hold out: all rows of one value of the dense column, never its ends; else every 8th."""
    if dense is None:
        folds = min(_MAX_FOLDS, len(rows.time_s))
        yield from (np.arange(len(rows.time_s)) % folds == fold for fold in range(folds))
        return
    values = np.unique(rows.points[:, dense])
    folds = min(_MAX_FOLDS, len(values) - 2)
    yield from (np.isin(rows.points[:, dense], values[1:-1][fold::folds]) for fold in range(folds))


def _law(rows: _Rows, physics: Physics, parameters: Array, family: str, error: Array | None = None) -> OperatorLaw:
    law_s = physics.time_s(parameters, rows.points)
    curves = {
        shape: _curve(law_s[mask], rows.time_s[mask], rows.weight[mask], family)
        for shape, mask in _by_shape(rows.points, physics.dense).items()
    }
    return OperatorLaw(
        physics=physics,
        parameters=parameters,
        family=family,
        curves={} if family == "law" else curves,
        other=1.0 if family == "law" else float(np.median(rows.time_s / law_s)),
        error=_error(error),
        measured=(rows.points.min(axis=0), rows.points.max(axis=0)),
    )


def _curve(law_s: Array, time_s: Array, weight: Array, family: str) -> Curve:
    """Return the curve of one shape: a constant factor, or the rising curve nearest to the measurements."""
    if family != "calibrated":
        ends = np.array([law_s.min(), law_s.max()])
        return Curve(ends, ends * np.median(time_s / law_s))
    tiles, group = np.unique(np.round(np.log(law_s), 9), return_inverse=True)  # in one tile rows cost the same
    total = np.bincount(group, weight)
    logs = np.bincount(group, weight * np.log(time_s)) / total
    return Curve(np.exp(tiles), np.exp(isotonic_regression(logs, weights=total).x))


def _by_shape(points: Array, dense: int | None) -> dict[Shape, Array]:
    """Return which rows, (k,), have the same values in all columns but the dense one."""
    if dense is None:
        return {(): np.arange(len(points))}
    shapes, group = np.unique(np.delete(points, dense, axis=1), axis=0, return_inverse=True)
    return {tuple(float(v) for v in shape): np.flatnonzero(group.ravel() == i) for i, shape in enumerate(shapes)}


def _error(log_error: Array | None) -> TermError:
    """Return the relative error; not a number where nothing could be held out."""
    if log_error is None or not len(log_error):
        return TermError(np.nan, np.nan, np.nan, 0)
    relative = np.abs(np.expm1(log_error))
    return TermError(
        float(np.median(relative)), float(np.percentile(relative, 95)), float(relative.max()), len(relative)
    )


def spread_out(points: Array, count: int) -> Array:
    """Return `count` rows that fill the space of `points` in log scale, (count,): each next is farthest from all.

    Sets out from the smallest corner, so the corners come first. Knows nothing of times: a plan of measurements.
    """
    scaled = np.log1p(np.asarray(points, dtype=float))
    scaled = (scaled - scaled.min(axis=0)) / np.maximum(np.ptp(scaled, axis=0), 1e-12)
    chosen = [int(np.lexsort((*scaled.T, scaled.sum(axis=1)))[0])]
    away = _distance(scaled, chosen[0])
    while len(chosen) < min(count, len(scaled)):
        chosen.append(int(np.argmax(np.round(away, 12))))
        away = np.minimum(away, _distance(scaled, chosen[-1]))
    return np.array(sorted(chosen))


def _distance(scaled: Array, row: int) -> Array:
    return np.asarray(((scaled - scaled[row]) ** 2).sum(axis=1))


def graded(sizes: Array, count: int) -> Array:
    """Return `count` of the ascending `sizes`, (count,) indices, evenly spaced in their cube root, ends included.

    Interpolation errs by the square of a step. Where sizes are tabled evenly, that spacing makes the sum of the
    relative errors over the table least: denser than a geometric one where most of the sizes are.
    """
    wanted = np.linspace(sizes[0] ** (1 / 3), sizes[-1] ** (1 / 3), count) ** 3
    return np.unique([int(np.abs(np.log(sizes / value)).argmin()) for value in wanted])
