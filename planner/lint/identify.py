"""What whole-model rows can tell of each term of the linear law, and where no such law fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from scipy.optimize import nnls

from planner.cost.settings import Settings, gather, identifiable
from planner.lint.base import Finding, Table, points
from planner.lint.launch import FLAT

_MISFIT = 0.05
"""A break is worth a flag where the law is off by more than this, which repeats rarely are ..."""
_BETTER = 2.0
"""... and settings held out are predicted so many times better with it (both settled on Splitwise's table)."""
_HOPELESS = 0.15
"""Off by so much, the law is flagged whether or not a break helps."""
_LEAST = 6
"""Settings below which a break could fit anything."""


def identify(table: Table, use: np.ndarray) -> Iterator[Finding]:
    """Yield the terms that these rows cannot identify: varied too little, or only one factor at a time."""
    found: dict[tuple[str, str], list[tuple[str, list[int]]]] = defaultdict(list)
    for whole in table.wholes:
        kept = [(row, s) for row, s in zip(whole.rows, whole.samples, strict=True) if use[row]]
        phases = {s.phase for _, s in kept}
        for term, why in identifiable(gather([s for _, s in kept])).items():
            phase = term.split()[0]
            if why and phase in phases:
                found[term, why].append((whole.name, [int(row) for row, s in kept if s.phase == phase]))
    for (term, why), wholes in found.items():
        what = f"the {term} term cannot be identified: {why} ({', '.join(name for name, _ in wholes)})"
        yield Finding("flag", "identify", table.at(row for _, rows in wholes for row in rows), what, _WAY_OUT[term])


_WAY_OUT = {
    "prefill tokens": "measure prompts of at least 1.5 x the length",
    "prefill attention": "measure long prompts alone and short ones in batches of the same total",
    "decode batch": "measure batches of at least 1.5 x the size",
    "decode KV read": "measure two contexts at two batch sizes, not one factor at a time",
}


def constant(table: Table, use: np.ndarray) -> Iterator[Finding]:
    """Yield sizes of a kernel table that were never varied, so that their share cannot be told."""
    covered = {int(row) for whole in table.wholes for row in whole.rows}
    for series in table.series:
        at = points(series, use)
        if not len(at) or covered & set(at.first.tolist()):
            continue
        fixed = [name for name in series.sizes if len(np.unique(series.where[name][at.first])) == 1]
        if fixed:
            told = f"{' and '.join(fixed)} never var{'y' if len(fixed) > 1 else 'ies'}"
            what = f"{series.name}: {told}, so no share of the time can be laid to it"
            yield Finding("flag", "identify", (), what, "measure at least two values")


def knees(table: Table, use: np.ndarray) -> Iterator[Finding]:
    """Yield prefills that no law a + b * tokens + c * attended fits, with the size at which they break away from it."""
    for whole in table.wholes:
        kept = [(row, s) for row, s in zip(whole.rows, whole.samples, strict=True) if use[row] and s.phase == "prefill"]
        rows = _beyond_launches(gather([s for _, s in kept]))
        if len(rows) < _LEAST:
            continue
        off = float(np.abs(_predict(rows, _columns(rows), np.ones(len(rows), dtype=bool)) - 1.0).max())
        alone = _held_out(rows, _columns(rows))
        best, low, high = _best_break(rows)
        said = f"{whole.name}: no law a + b x tokens + c x attention fits its prefills, it is up to {off:.0%} off"
        members = [int(row) for row, _ in kept]
        if off > _MISFIT and alone > _BETTER * best:
            said += f"; from between {low:.0f} and {high:.0f} tokens on, a token costs more"
            members = [int(row) for row, s in kept if s.batch * s.prompt_tokens >= high]
        elif off <= _HOPELESS:
            continue
        yield Finding("flag", "knee", table.at(members), said, "measure sizes between; use a family with a knee")


def _beyond_launches(rows: Settings) -> Settings:
    """Return the rows from the last of those on that take no longer than the smallest."""
    tokens = rows.shapes[:, 1]
    if not len(rows):
        return rows
    flat = rows.time_s <= FLAT * rows.time_s[np.argmin(tokens)]
    return rows.where(tokens >= tokens[flat].max())


def _columns(rows: Settings) -> list[np.ndarray]:
    return [rows.shapes[:, 1], rows.shapes[:, 2]]


def _best_break(rows: Settings) -> tuple[float, float, float]:
    """Return the held-out error with the best break, and the tokens before and after it."""
    tokens = rows.shapes[:, 1]
    return min(
        (_held_out(rows, [*_columns(rows), tokens * (tokens >= high)]), float(low), float(high))
        for low, high in pairwise(np.unique(tokens))
    )


def _held_out(rows: Settings, columns: list[np.ndarray]) -> float:
    """Return the root mean square relative error of predicting each setting from the others."""
    each = np.arange(len(rows))
    off = [_predict(rows, columns, each != held)[held] - 1.0 for held in each]
    return float(np.sqrt(np.mean(np.square(off))))


def _predict(rows: Settings, columns: list[np.ndarray], use: np.ndarray) -> np.ndarray:
    """Return predicted / measured of the best law with positive coefficients for the rows of `use`."""
    design = np.column_stack([np.ones(len(rows)), *columns]) / rows.time_s[:, None]
    size = np.maximum(np.linalg.norm(design[use], axis=0), 1e-300)
    solution, _ = nnls(design[use] / size, np.ones(int(use.sum())))
    return np.asarray(design / size @ solution)
