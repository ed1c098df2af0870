"""The size below which a table measures launches, not work."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.lint.base import Finding, Points, Series, Table, group_ids, points, show, show_time

FLAT = 1.25
"""Times within a quarter of the shortest count as flat."""
_SHARE = 0.95
_GROWN = 4.0
"""Work that grew by less says nothing."""
_FROM_FLOOR = 4.0
"""Flat and near what physics allows is a read of weights; flat and this far above it is launches."""
_MOST_NAMES = 4


def launch(table: Table, use: np.ndarray) -> Iterator[Finding]:
    """Yield, per series, up to which work the times are flat and far above the floor."""
    for series in table.series:
        if series.work is None:
            continue
        at = points(series, use)
        names = (*series.labels, series.ranks, series.width)
        ids = group_ids([series.where[name][at.first] for name in names if name], len(at))
        flat = [found for group in np.unique(ids) if (found := _flat(series, at, np.flatnonzero(ids == group)))]
        if flat:
            yield _finding(table, series, at, flat)


_Flat = tuple[np.ndarray, float, float]


def _flat(series: Series, at: Points, group: np.ndarray) -> _Flat | None:
    """Return the points of a group that are flat, the work up to which they are, and their time [s]."""
    assert series.work is not None
    work, t = series.work[at.first[group]], at.time_s[group]
    order = np.argsort(work, kind="stable")
    work, t = work[order], t[order]
    base = float(np.sort(t)[2 if len(t) > 10 else 0])  # the shortest, but for a stray one or two
    close = t <= FLAT * base
    share = np.cumsum(close) / np.arange(1, len(t) + 1)
    # ties in work are decided together: only the last of equal works may end the flat part
    last = np.append(work[1:] > work[:-1], True)
    ends = np.flatnonzero(last & close & (share >= _SHARE))
    if not len(ends):
        return None
    end = ends[-1]
    least = work[work > 0].min(initial=np.inf)
    floor_s = series.floor_s[at.first[group]][order][end]
    if work[end] < _GROWN * least or (np.isfinite(floor_s) and t[end] < _FROM_FLOOR * floor_s):
        return None
    return group[order][: end + 1], float(work[end]), base


def _finding(table: Table, series: Series, at: Points, flat: list[_Flat]) -> Finding:
    rows = [row for part, _, _ in flat for point in part for row in at.rows[point]]
    names = [name for name in (*series.labels, series.ranks, series.width) if name and len(set(series.where[name])) > 1]
    told = []
    for part, work, time_s in flat[:_MOST_NAMES]:
        which = "".join(f"{name} {show(series.where[name][at.first[part[0]]])} " for name in names)
        told.append(f"{which}to {work:,.0f} {series.work_unit} ({show_time(time_s)})")
    more = f"; and {len(flat) - _MOST_NAMES} more" if len(flat) > _MOST_NAMES else ""
    unsure = (
        ""
        if any(np.isfinite(one.floor_s).any() for one in table.series)
        else " or weights, which only --gpu and --model can tell"
    )
    what = f"{series.name}: flat for small work, so it measures launches{unsure}, {', '.join(told)}{more}"
    return Finding("note", "launch", table.at(rows), what, "fit slopes on larger sizes only")
