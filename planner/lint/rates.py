"""Rows that beat the data sheet, and tables whose unit is another one than they say."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.cost.physics import IMPOSSIBLE
from planner.lint.base import Finding, Series, Table, group_ids, show_time
from planner.lint.floors import MEMORY

_MOST = 0.8
"""A unit was mixed up where so many of the rows are impossible; single ones are outliers, caches or typing errors."""
_FACTOR = 1000.0
_WASTEFUL = 100.0
"""Beyond launches and host work no time is that far from its floor."""
_LEAST_ROWS = 3
_USUAL = 0.5
"""Share of the line rate that large messages usually pass; tables of small messages alone stay far below it."""
_GROWS = 0.85
"""Power of the width with which large messages take longer when sizes count elements: 1, less the start-up."""


def rates(table: Table, use: np.ndarray) -> Iterator[Finding]:
    """Yield rows that move more bytes or do more FLOP per second than the card or the link can."""
    for series in table.series:
        fast = use & _too_fast(series, series.floor_s)
        blamed = np.zeros(len(fast), dtype=bool)
        for finding, rows in _units(table, series, use):
            blamed |= rows
            yield finding
        for limit, floor_s in series.floors.items():
            rows = fast & ~blamed & _too_fast(series, floor_s)
            blamed |= rows
            if rows.any():
                yield _beyond(table, series, limit, floor_s, np.flatnonzero(rows))


def _too_fast(series: Series, floor_s: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return series.time_s + series.rounding_s < IMPOSSIBLE * floor_s


def _beyond(table: Table, series: Series, limit: str, floor_s: np.ndarray, rows: np.ndarray) -> Finding:
    worst = rows[np.argmax(floor_s[rows] / series.time_s[rows])]
    took, least = show_time(series.time_s[worst]), show_time(floor_s[worst])
    what = (
        f"{series.name}: {len(rows)} row{'s' * (len(rows) > 1)} above the peak {limit}; row {table.lines[worst]} "
        f"({series.describe(worst)}) takes {took}, and at the peak it would be {least}"
    )
    why = "a cache served it, or " if limit == MEMORY else ""
    return Finding("reject", "rates", table.at(rows), what, f"left out; {why}the unit, the GPU or the model is another")


def _units(table: Table, series: Series, use: np.ndarray) -> Iterator[tuple[Finding, np.ndarray]]:
    """Yield groups of rows that are impossible, or absurdly slow, as a whole, with the factor that puts them right."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = series.time_s / series.floor_s
    known = use & np.isfinite(ratio)
    ids = group_ids([series.where[name] for name in series.labels], len(ratio))
    for group in np.unique(ids[known]):
        rows = known & (ids == group)
        if rows.sum() < _LEAST_ROWS:
            continue
        if (finding := _unit(table, series, np.flatnonzero(rows))) is not None:
            yield finding, rows


def _unit(table: Table, series: Series, rows: np.ndarray) -> Finding | None:
    ratio = series.time_s[rows] / series.floor_s[rows]
    beyond = (series.time_s[rows] - series.overhead_s) / series.floor_s[rows]
    impossible = float(np.mean(ratio < IMPOSSIBLE))
    best = float(np.percentile(ratio, 5))
    if impossible >= _MOST and best * _FACTOR >= IMPOSSIBLE:
        way, factor = "too fast", 1 / _power(1 / best)
    elif float(np.percentile(beyond, 1)) > _WASTEFUL:
        way, factor = "too slow", _power(best)
    else:
        return None
    off = f"{factor:g}" if factor > 1 else f"1/{1 / factor:g}"
    told = f"the best rows take {best:.3g} x the least time, about {off} of what is usual"
    what = f"{series.name}: {way} throughout; {told}"
    return Finding("reject", "unit", table.at(rows), what, _UNIT_WAY_OUT)


_UNIT_WAY_OUT = "check the unit of time (us, ms, s), the GPU and the model; correct it and lint again"


def _power(factor: float) -> float:
    """Return the power of a thousand that is closest, at least one."""
    return _FACTOR ** max(1, round(float(np.log(factor) / np.log(_FACTOR))))


def elements(table: Table, use: np.ndarray) -> Iterator[Finding]:
    """Yield message sizes that seem to count elements, not bytes.

    Two signs: a type twice as wide takes twice as long for the same size; or even the best message, inside a node,
    stays below the line rate by more than the width of an element, and would otherwise reach a usual share of it.
    """
    for series in table.series:
        if series.line_s is None or series.element_bytes is None:
            continue
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.where(use, series.line_s / series.time_s, np.nan)
        rows = np.flatnonzero(np.isfinite(share * series.element_bytes))
        if (grown := _width_sign(series, use)) is not None:
            what = f"{series.name}: at equal sizes the time grows with the width of the type, to the power {grown:.2f}"
            rows = np.flatnonzero(use & np.isfinite(series.time_s))
        elif len(rows) and _USUAL < (real := (share * series.element_bytes)[rows].max()) < 1 / IMPOSSIBLE:
            best = share[rows].max()
            told = f"no message gets beyond {best:.0%} of the line rate; {real:.0%} if sizes count elements"
            what = f"{series.name}: {told}"
        else:
            continue
        way_out = "if sizes count elements, multiply them by the bytes of one"
        yield Finding("flag", "elements", table.at(rows), what, way_out)


def _width_sign(series: Series, use: np.ndarray) -> float | None:
    """Return how the largest messages' time grows with the width of the type, relative to the width; None if not."""
    if not series.width:
        return None
    width = series.where[series.width]
    rows = np.flatnonzero(use & np.isfinite(series.time_s))
    ids = group_ids([key[rows] for key in series.varied(series.width)], len(rows))
    found = []
    for group in np.unique(ids):
        part = rows[ids == group]
        narrow, broad = part[np.argmin(width[part])], part[np.argmax(width[part])]
        if width[broad] > width[narrow]:
            grown = np.log(series.time_s[broad] / series.time_s[narrow]) / np.log(width[broad] / width[narrow])
            found.append((float(series.time_s[narrow]), float(grown)))
    largest = [grown for _, grown in sorted(found)[-max(3, len(found) // 4) :]]
    share = float(np.median(largest)) if len(largest) >= _LEAST_ROWS else 0.0
    return share if share > _GROWS else None
