"""The roofline family: a few multipliers on what physics says, fitted on log error and gently pulled to 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from planner.cost import kernel
from planner.cost.settings import Settings

KNEES = (1024, 2048, 4096, 8192)
KNEE_SHARE = 0.2
"""How much a token beyond the knee costs more, before the data say."""


class Part(NamedTuple):
    """One multiplier: the places of the vector it scales, its bounds, and how strongly it is pulled to 1."""

    places: tuple[int, ...]
    low: float
    high: float
    pull: float = 0.02


# A pull of 0.02 weighs a factor of e like one setting that is 2 % off: it decides only what the data leave
# open. The lower bounds of rates keep efficiencies at or under 1 (0.65, 0.4, 0.8 and 0.6 are typical).
PARTS: dict[str, Part] = {
    "prefill overhead": Part((1,), 0.01, 200.0, 0.01),
    "decode overhead": Part((2,), 0.01, 200.0, 0.01),
    "launch floor": Part((13,), 0.01, 200.0, 0.01),
    "sharpness": Part((3,), 0.5, 2.0, 0.05),
    "prefill tokens": Part((4,), 0.65, 20.0),
    "prefill attention": Part((5,), 0.4, 20.0),
    "prefix read": Part((kernel.PREFIX,), 0.01, 100.0),
    "decode batch": Part((6,), 0.01, 100.0, 0.01),
    "weight streaming": Part((7, 8), 0.8, 3.0, 0.1),
    "decode KV read": Part((10,), 0.6, 20.0),
    "knee": Part((15,), 0.01, 10.0),
}


OWN = 0.05
"""How strongly a degree is pulled to what all degrees of a profile share; 0.05 weighs a factor of e like one setting
that is 5 % off. Chosen among 0.02, 0.05 and 0.1 on Splitwise's table, where it hardly matters."""

_EVEN = ("sharpness", "prefill attention", "prefix read", "weight streaming", "decode KV read")
"""Level over the ranks: heads and weights are cut evenly, and a part of them that was not would be no different from
overhead (with it free, A100's multiplier of weight streaming came to 1.6, and other models to twice their time)."""
_LEVEL = 0.02
"""How strongly a line is pulled to level. On Splitwise's table 0.005 and 0.05 predict as well."""
_NO_RISE = 1e-6

Parts = tuple[str, ...]
Degree = tuple[Settings, np.ndarray]
"""Rows of one tensor-parallel degree, and the ROOFLINE vector that physics gives there."""


def shared(degrees: Sequence[Degree], parts: Parts, start: np.ndarray | None = None) -> np.ndarray:
    """Return the multipliers (logarithms, one per part) that predict all degrees best together, pulled to 0.

    `start`: multipliers found before (for more rows), from which the search sets out. Deterministic.
    """
    errors = [_Error(rows, base, parts) for rows, base in degrees]
    pull = np.array([PARTS[name].pull for name in parts])

    def misses(theta: np.ndarray) -> np.ndarray:
        return np.concatenate([*(error(theta) for error in errors), pull * theta])

    return _least(misses, parts, np.zeros(len(parts)) if start is None else start)


def own(degree: Degree, parts: Parts, center: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Return the multipliers of one degree: what its own rows say, pulled to what all degrees share (`center`)."""
    error = _Error(*degree, parts)

    def misses(theta: np.ndarray) -> np.ndarray:
        return np.concatenate([error(theta), OWN * (theta - center)])

    return _least(misses, parts, start)


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """Multipliers of every degree: each a line over the ranks, m(tp) = a + b tp, neither below 0."""

    parts: Parts
    middle: float
    """Ranks at which `level` holds."""
    level: np.ndarray
    """Logarithm of m there, one per part."""
    rise: np.ndarray
    """Which share of m there comes once per rank: b middle / m."""

    def at(self, tp: int) -> np.ndarray:
        """Return the multipliers at `tp` as logarithms, none below what a fit may find: no rate above its peak."""
        low = np.log([PARTS[name].low for name in self.parts])
        return np.asarray(np.maximum(_on_line(self.level, self.rise, tp / self.middle), low))


def lines(degrees: Mapping[int, Degree], parts: Parts) -> Lines:
    """Return the lines that predict all degrees best together; with one degree alone, level ones. Deterministic.

    Together they tell what single degrees do not: a constant time is host work if it stays as ranks are added, and
    streamed weights if it is shared out.
    """
    middle = float(np.exp(np.mean(np.log(list(degrees)))))
    level = shared(list(degrees.values()), parts)
    if len(degrees) == 1 or not parts:
        return Lines(parts, middle, level, np.zeros(len(parts)))
    errors = [(tp / middle, _Error(rows, base, parts)) for tp, (rows, base) in degrees.items()]
    pull = np.array([PARTS[name].pull for name in parts] + [_LEVEL] * len(parts))

    def misses(theta: np.ndarray) -> np.ndarray:
        middle_, rise = np.split(theta, 2)
        return np.concatenate([*(error(_on_line(middle_, rise, ranks)) for ranks, error in errors), pull * theta])

    steepest = np.array([0.0 if name in _EVEN else 1.0 for name in parts])
    low, high = (np.log([getattr(PARTS[name], end) for name in parts]) for end in ("low", "high"))
    low, high = np.concatenate([low, -_NO_RISE * np.ones(len(parts))]), np.concatenate([high, steepest + _NO_RISE])
    start = np.clip(np.concatenate([level, 0.2 * steepest]), low + _NO_RISE / 2, high - _NO_RISE / 2)
    found = least_squares(misses, start, bounds=(low, high), xtol=1e-5, ftol=1e-6, max_nfev=80).x
    return Lines(parts, middle, *np.split(found, 2))


def _on_line(level: np.ndarray, rise: np.ndarray, ranks: float) -> np.ndarray:
    return np.asarray(level + np.log(np.maximum(1.0 + rise * (ranks - 1.0), _NO_RISE)))


def vector(base: np.ndarray, parts: Parts, theta: np.ndarray) -> np.ndarray:
    """Return the ROOFLINE vector `base` with each part multiplied by e^theta."""
    return np.asarray(base * np.exp(_places(parts) @ theta))


@cache
def _places(parts: Parts) -> np.ndarray:
    """Return which place of the vector (row) belongs to which part (column), as ones in zeros."""
    places = np.zeros((kernel.SIZE, len(parts)))
    for column, name in enumerate(parts):
        places[list(PARTS[name].places), column] = 1.0
    return places


def with_knee(base: np.ndarray, tokens: int) -> np.ndarray:
    """Return `base` with a knee from `tokens` on, to be fitted."""
    p = base.copy()
    p[14], p[15] = tokens, KNEE_SHARE
    return p


def _least(misses: Callable[[np.ndarray], np.ndarray], parts: Parts, start: np.ndarray) -> np.ndarray:
    if not parts:
        return np.zeros(0)
    low, high = (np.log([getattr(PARTS[name], end) for name in parts]) for end in ("low", "high"))
    inside = np.clip(start, low + 1e-6, high - 1e-6)
    return np.asarray(least_squares(misses, inside, bounds=(low, high), xtol=1e-5, ftol=1e-6, max_nfev=60).x)


class _Error:
    """Weighted log error of each row; one buffer serves all calls."""

    def __init__(self, rows: Settings, base: np.ndarray, parts: Parts):
        self.rows, self.base, self.parts = rows, base, parts
        self.out = np.empty(len(rows))
        self.root = np.sqrt(rows.weight)

    def __call__(self, theta: np.ndarray) -> np.ndarray:
        kernel.iterations_s(vector(self.base, self.parts, theta), self.rows.shapes, self.out)
        return self.root * np.log(self.out / self.rows.time_s)
