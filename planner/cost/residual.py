"""What measurements say that a roofline is off by, smoothed over settings and degrees: the grids of the hybrid family.

A Gaussian process on the log of measured over predicted time (Rasmussen and Williams, Gaussian Processes for Machine
Learning, section 2.2), evaluated at whole octaves. Where settings were measured it follows them, between them it
interpolates, and away from all of them it returns to the roofline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost import kernel
from planner.cost.settings import Settings

AMPLITUDE = 0.15
"""How far off a roofline tends to be, as a share: fitted whole-instance tables leave 5 to 20 %."""
REACH_OCTAVES = 2.0
"""A setting speaks for others up to a factor of about 4 away: in total tokens, in requests, in ranks."""
NOISE = 0.02
"""How far settings repeat: the tables at hand spread by 0.3 to 3 % between repeats."""
_MOST_ROWS = 400
_FINE = 4
_NEAR = 2.0**-10
_SLACK = 0.9
_REACH = np.array([REACH_OCTAVES, REACH_OCTAVES, REACH_OCTAVES])

LONG_TOKENS = 2.0 ** np.arange(kernel.FIRST_LONG, kernel.FIRST_LONG + kernel.LONG)
SHORT_REQUESTS = 2.0 ** np.arange(kernel.SHORT)


@dataclass(frozen=True, slots=True)
class Residuals:
    """Log of measured over predicted time of some settings of one phase, at any degrees."""

    at: np.ndarray
    """(rows, 3): octaves of (tokens, requests, ranks); total new tokens in prefill, KV tokens of each in decode."""
    off: np.ndarray
    weight: np.ndarray
    by_tokens: bool = True
    """False where the settings cannot tell what a token costs: then the residuals must not depend on tokens."""

    @classmethod
    def of(cls, rows: dict[int, Settings], predicted_s: dict[int, np.ndarray], by_tokens: bool) -> Residuals:
        """Return those of `rows` by degree, all of one phase; where there are very many, one per half octave."""
        at = np.concatenate([_places(part, tp) for tp, part in rows.items()])
        off = np.concatenate([np.log(part.time_s / predicted_s[tp]) for tp, part in rows.items()])
        weight = np.concatenate([part.weight for part in rows.values()])
        if not by_tokens:
            at[:, 0] = 0.0
        if len(off) > _MOST_ROWS:
            at, off, weight = _thinned(at, off, weight)
        return cls(at, off, weight, by_tokens)


def hybrid(p: np.ndarray, tp: int, prefill: Residuals | None, decode: Residuals | None) -> np.ndarray:
    """Return the HYBRID vector: the ROOFLINE vector `p` with the grids of either phase, or none for a phase."""
    grids = []
    for residuals, decoding in ((prefill, False), (decode, True)):
        grid = np.zeros((kernel.LONG, kernel.SHORT))
        if residuals is not None:
            grid = rising(_posterior(residuals, tp, decoding), p, decoding)
        grids.append(grid.ravel())
    vector = np.concatenate([p, *grids])
    vector[kernel.FAMILY] = kernel.HYBRID
    return vector


def _places(rows: Settings, tp: int) -> np.ndarray:
    prefills, tokens, _, decodes, context, _ = rows.shapes.T
    long = np.where(rows.decode, context / np.maximum(decodes, 1), tokens)
    ranks = np.full(len(rows), float(tp))
    return np.log2(np.maximum(np.c_[long, np.maximum(prefills, decodes), ranks], 1.0))


def _posterior(residuals: Residuals, tp: int, decoding: bool) -> np.ndarray:
    """Return the mean of the process at the nodes, (LONG, SHORT)."""
    long, short = np.meshgrid(np.log2(LONG_TOKENS), np.log2(SHORT_REQUESTS), indexing="ij")
    total = (long if decoding else long + short) * residuals.by_tokens
    nodes = np.c_[total.ravel(), short.ravel(), np.full(total.size, np.log2(tp))]
    between = _covariance(residuals.at, residuals.at)
    noise = NOISE**2 / np.maximum(residuals.weight, 1e-9)
    mean = _covariance(nodes, residuals.at) @ np.linalg.solve(between + np.diag(noise), residuals.off)
    return mean.reshape(kernel.LONG, kernel.SHORT)


def _covariance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the Matern covariance with smoothness 3/2 (Rasmussen and Williams, eq. 4.17)."""
    distance = np.sqrt(3.0 * (((a[:, None] - b[None]) / _REACH) ** 2).sum(-1))
    return AMPLITUDE**2 * (1.0 + distance) * np.exp(-distance)


def _thinned(at: np.ndarray, off: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the weighted means of the rows that share a half octave in each direction."""
    _, cell = np.unique(np.round(2 * at).astype(int), axis=0, return_inverse=True)
    cell = cell.ravel()
    total = np.bincount(cell, weight)
    places = np.stack([np.bincount(cell, weight * column) / total for column in at.T], axis=1)
    return places, np.bincount(cell, weight * off) / total, np.bincount(cell)


# ---- more work never takes less time


def rising(grid: np.ndarray, p: np.ndarray, decoding: bool) -> np.ndarray:
    """Return `grid`, raised where it falls faster than the roofline `p` rises: the product must not fall.

    Along either axis: longer requests, and more of them.
    """
    slack = [_SLACK * _slopes(p, decoding, axis) for axis in (0, 1)]
    raised = grid.copy()
    for _ in range(kernel.LONG + kernel.SHORT):
        before = raised.copy()
        for axis, rise in enumerate(slack):
            rows, rise = (raised, rise) if axis == 0 else (raised.T, rise.T)  # noqa: PLW2901
            for node in range(1, len(rows)):
                np.maximum(rows[node], rows[node - 1] - rise[node - 1], out=rows[node])
        if np.array_equal(before, raised):
            break
    return raised


def _slopes(p: np.ndarray, decoding: bool, axis: int) -> np.ndarray:
    """Return the least rise of the log time per octave within each step between two nodes along `axis`.

    Rises are those at points of the step, not between them: where the law bends upwards, the mean over one is more
    than the rise at its start. Points to either side count, too, up to the next nodes, since the grid is interpolated
    there. A longer prompt counts without its longer attention: a step may also grow by tokens that attend to little.
    """
    starts = np.linspace(0.0, 1.0 - _NEAR, _FINE + 1)
    within = np.stack([starts, starts + _NEAR], axis=1).ravel()
    aside = np.arange(-_FINE, _FINE + 1)[:, None] / _FINE
    each = np.arange(kernel.LONG)[:, None, None, None] + float(kernel.FIRST_LONG)
    many = np.arange(kernel.SHORT)[None, :, None, None] + 0.0
    if axis == 0:
        grid = (each[:-1] + within, np.clip(many + aside, 0, kernel.SHORT - 1), each[:-1])
    else:
        beside = np.clip(each + aside, kernel.FIRST_LONG, kernel.FIRST_LONG + kernel.LONG - 1)
        grid = (beside, many[:, :-1] + within, beside)
    axes = [2.0**values for values in np.broadcast_arrays(*grid)]
    time_s = predict(p, _shapes(axes[0].ravel(), axes[1].ravel(), axes[2].ravel(), decoding)).reshape(axes[0].shape)
    pairs = np.log(time_s).reshape(*time_s.shape[:2], -1, 2)
    return np.asarray((pairs[..., 1] - pairs[..., 0]).min(axis=2) / _NEAR)


def _shapes(each: np.ndarray, requests: np.ndarray, attending: np.ndarray, decoding: bool) -> np.ndarray:
    """Return the shapes of `requests` equal requests with `each` tokens; prompts attend as if of `attending` tokens."""
    none = np.zeros_like(each)
    if decoding:
        return np.c_[none, none, none, requests, requests * each, none]
    return np.c_[requests, requests * each, requests * attending**2, none, none, none]


def predict(p: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """Return the time [s] of each row of `shapes` under the law `p`."""
    out = np.empty(len(shapes))
    kernel.iterations_s(p, np.ascontiguousarray(shapes, dtype=float), out)
    return out
