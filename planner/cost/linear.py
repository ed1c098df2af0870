"""The linear family (DistServe, OSDI '24, appendix A): non-negative least squares on relative error."""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from planner.cost import kernel
from planner.cost.settings import Settings
from planner.specs.profile import Coefficients, DecodeFit

PREFILL, DECODE = slice(1, 4), slice(4, 7)
_LEAST_S = 1e-6
_LEAST_SHARE = 1e-9
"""Attention, where it would be nothing, as a share of reading a token: the one is counted in units of the other."""


def fit(rows: Settings, fixed: np.ndarray, prefix: bool = False) -> np.ndarray:
    """Return the LINEAR vector that predicts `rows` best. `fixed` holds a value for each known term, else
    NaN. `prefix`: whether the rows tell what reading a cached prefix back takes; else it is nothing.

    Rows are scaled by 1 / t, which minimises relative error as DistServe's own estimator does; unlike there
    no coefficient may be negative, for a batch that costs less than its part would mislead a search.
    """
    p = np.zeros(kernel.SIZE)
    p[kernel.FAMILY], p[10] = kernel.LINEAR, np.inf
    prefill, decode = rows.where(~rows.decode), rows.where(rows.decode)
    if prefix:
        columns = np.c_[prefill.shapes[:, 1:3], 2.0 * prefill.shapes[:, 5]]
        *p[PREFILL], read_s = _solve(prefill, columns, np.append(fixed[PREFILL], np.nan))
        p[3] = max(p[3], _LEAST_SHARE * read_s)
        p[kernel.PREFIX] = read_s / p[3] if read_s > 0.0 else 0.0
    else:
        p[PREFILL] = _solve(prefill, prefill.shapes[:, 1:3], fixed[PREFILL])
    p[DECODE] = _solve(decode, decode.shapes[:, 3:5], fixed[DECODE])
    p[7:10] = p[DECODE]
    return p


def _solve(rows: Settings, columns: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """Return constant and slopes. Known slopes are taken off first; at least 1 us of a row is left."""
    known = ~np.isnan(fixed)
    design = np.c_[np.ones(len(rows)), columns]
    rest = np.maximum(rows.time_s - design[:, known] @ fixed[known], _LEAST_S)
    scaled = design[:, ~known] * (np.sqrt(rows.weight) / rows.time_s)[:, None]
    size = np.maximum(np.linalg.norm(scaled, axis=0), 1e-300)  # columns differ by 10^9; nnls wants them alike
    found, _ = nnls(scaled / size, rest * np.sqrt(rows.weight) / rows.time_s)
    solution = fixed.copy()
    solution[~known] = found / size
    return solution


def published(coefficients: Coefficients) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the LINEAR vector of a published fit, and what a reader should know of it."""
    large = coefficients.decode_large or coefficients.decode
    threshold = coefficients.large_from_batch or np.inf
    prefill = coefficients.prefill
    p = np.zeros(kernel.SIZE)
    p[kernel.FAMILY], p[10] = kernel.LINEAR, threshold
    p[PREFILL] = prefill.constant_s, prefill.per_token_s, prefill.per_attended_s
    p[DECODE], p[7:10] = _decode(coefficients.decode), _decode(large)
    notes = ["published coefficients, no measurements to hold out"]
    if (p[1:10] < 0).any():
        notes.append("negative published coefficients are taken as 0: a larger batch never costs less")
        p[1:10] = np.maximum(p[1:10], 0.0)
    return p, (*notes, *_jump(p))


def _decode(fit: DecodeFit) -> tuple[float, float, float]:
    return fit.constant_s, fit.per_request_s, fit.per_context_token_s


def _jump(p: np.ndarray) -> list[str]:
    """Say so where the two regimes of a published fit do not meet (at 500 tokens of context)."""
    if not np.isfinite(p[10]):
        return []
    shape = np.array([1.0, p[10], 500.0 * p[10]])
    below, above = float(p[DECODE] @ shape), float(p[7:10] @ shape)
    change = above / below - 1.0
    at = f"batch {p[10]:.0f}"
    return [f"the published decode regimes do not meet: {change:+.0%} at {at}"] if abs(change) > 0.02 else []
