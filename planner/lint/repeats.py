"""What repeats of one setting say: the noise floor, and repeats that disagree."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.lint.base import Finding, Points, Series, Table, points, same, show_time, spread

_FAR = 0.25
"""Repeats that differ by less are not worth a look ..."""
_NOISES = 8.0
"""... nor are those within so many times of what repeats of this table usually differ by."""
_UNIT = 300.0


def repeats(table: Table, use: np.ndarray) -> Iterator[Finding]:
    """Yield the noise floor of each series, outliers among repeats, and repeats of which none can be told true."""
    noise: list[str] = []
    for series in table.series:
        at = points(series, use)
        repeated = [rows for rows in at.rows if len(rows) > 1 and not same(series.time_s[rows])]
        floor = _floor(series, repeated)
        if told := _told(series, repeated, floor, use):
            noise.append(told)
        yield from _outliers(table, series, at, max(_FAR, _NOISES * floor))
    if noise:
        yield Finding("note", "noise", (), f"noise floor: {', '.join(noise)}", "no fit can be held to less")


def _floor(series: Series, repeated: list[np.ndarray]) -> float:
    return float(np.median([spread(series, rows) for rows in repeated])) if repeated else 0.0


def _told(series: Series, repeated: list[np.ndarray], floor: float, use: np.ndarray) -> str:
    """Return the noise of a series in words: between its repeats, else the deviation inside its rows."""
    if repeated:
        worst = max(spread(series, rows) for rows in repeated)
        return f"{series.name} {floor:.1%} between repeats of {len(repeated)} settings (worst {worst:.0%})"
    if series.spread is None or not np.isfinite(series.spread[use]).any():
        return ""
    known = series.spread[use & np.isfinite(series.spread)]
    return f"{series.name} {np.median(known):.1%} inside a row (p95 {np.percentile(known, 95):.0%})"


def _outliers(table: Table, series: Series, at: Points, bar: float) -> Iterator[Finding]:
    alone: list[int] = []
    unclear: list[int] = []
    for rows, middle in zip(at.rows, at.time_s, strict=True):
        off = np.abs(series.time_s[rows] / middle - 1.0)
        if len(rows) == 2 and spread(series, rows) > bar:
            unclear += rows.tolist()
        elif len(rows) > 2:
            alone += rows[off > bar].tolist()
    if alone:
        yield _odd(table, series, at, alone, "far from the other repeats of their setting", "a median ignores them")
    if unclear:
        yield _odd(table, series, at, unclear, "two repeats that disagree", "measure a third time")


def _odd(table: Table, series: Series, at: Points, rows: list[int], said: str, way_out: str) -> Finding:
    middle = {int(row): float(t) for part, t in zip(at.rows, at.time_s, strict=True) for row in part}
    worst = max(rows, key=lambda row: abs(np.log(series.time_s[row] / middle[row])))
    factor = series.time_s[worst] / middle[worst]
    unit = "; another unit?" if max(factor, 1 / factor) > _UNIT else ""
    what = (
        f"{series.name}: {len(rows)} row{'s' * (len(rows) > 1)}, {said}; row {table.lines[worst]} is "
        f"{show_time(series.time_s[worst])} where the median is {show_time(middle[worst])}{unit}"
    )
    return Finding("flag", "repeats", table.at(rows), what, way_out)
