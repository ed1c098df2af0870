"""The roofline family: a few multipliers on what physics says, fitted on log error and gently pulled to 1."""

from __future__ import annotations

from math import log
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from planner.cost import kernel
from planner.cost.settings import Settings

KNEES = (1024, 2048, 4096, 8192)
_KNEE_SHARE = 0.2


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
    "decode batch": Part((6,), 0.01, 100.0, 0.01),
    "weight streaming": Part((7, 8), 0.8, 3.0, 0.1),
    "decode KV read": Part((10,), 0.6, 20.0),
    "knee": Part((15,), 0.01, 10.0),
}


def fit(rows: Settings, base: np.ndarray, parts: tuple[str, ...], start: np.ndarray | None = None) -> np.ndarray:
    """Return the ROOFLINE vector that predicts `rows` best, changing only `parts` of `base`.

    `start`: a vector fitted before (to more rows), from which the search sets out. Deterministic.
    """
    chosen = [PARTS[name] for name in parts]
    low, high = np.log([part.low for part in chosen]), np.log([part.high for part in chosen])
    first = np.zeros(len(chosen)) if start is None else _multipliers(start, base, chosen)
    pull = np.array([part.pull for part in chosen])
    error = _Error(rows, base, chosen)
    found = least_squares(
        lambda theta: np.concatenate([error(theta), pull * theta]),
        np.clip(first, low + 1e-6, high - 1e-6),
        bounds=(low, high),
        xtol=1e-5,
        ftol=1e-6,
        max_nfev=60,
    )
    return scaled(base, chosen, found.x)


def with_knee(base: np.ndarray, tokens: int) -> np.ndarray:
    """Return `base` with a knee from `tokens` on, to be fitted."""
    p = base.copy()
    p[14], p[15] = tokens, _KNEE_SHARE
    return p


def scaled(base: np.ndarray, parts: list[Part], theta: np.ndarray) -> np.ndarray:
    """Return `base` with each part multiplied by e^theta."""
    p = base.copy()
    for part, value in zip(parts, theta, strict=True):
        p[list(part.places)] *= np.exp(value)
    return p


def _multipliers(p: np.ndarray, base: np.ndarray, parts: list[Part]) -> np.ndarray:
    return np.array([log(p[part.places[0]] / base[part.places[0]]) for part in parts])


class _Error:
    """Weighted log error of each row; one buffer serves all calls."""

    def __init__(self, rows: Settings, base: np.ndarray, parts: list[Part]):
        self.rows, self.base, self.parts = rows, base, parts
        self.out = np.empty(len(rows))
        self.root = np.sqrt(rows.weight)

    def __call__(self, theta: np.ndarray) -> np.ndarray:
        kernel.iterations_s(scaled(self.base, self.parts, theta), self.rows.shapes, self.out)
        return self.root * np.log(self.out / self.rows.time_s)
