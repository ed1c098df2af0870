"""What must not get faster: more work, fewer ranks, a wider type. Flags only: tiles and kernels do such things."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.lint.base import Finding, Points, Series, Table, group_ids, noise, points, show, show_time

LEAST = 0.1
"""Falls below a tenth are tiles, clocks and timers."""
_NOISES = 4.0
"""... and so is what repeats differ by, several times over."""


def order(table: Table, use: np.ndarray) -> Iterator[Finding]:
    """Yield settings that break the order along one thing varied, all else equal."""
    for series in table.series:
        at = points(series, use)
        bar = max(LEAST, _NOISES * noise(series, use))
        for size in series.sizes:
            yield from _broken(table, series, at, bar, size, 1.0, "more work", f"the time falls as {size} grows")
        if series.ranks:
            yield from _broken(
                table, series, at, bar, series.ranks, -1.0, "more ranks", f"the time grows with {series.ranks}"
            )
        if series.width:
            said = "a narrower type takes longer than a wider one"
            yield from _broken(table, series, at, bar, series.width, 1.0, "narrower type", said)


_WAY_OUT = {
    "more work": "repeat these rows; if it stays, the kernel changes there, and no smooth law fits across it",
    "more ranks": "true where launches or collectives decide; else repeat these rows",
    "narrower type": "check that the narrow kernels ran and were not emulated; repeat these rows",
}


def _broken(
    table: Table, series: Series, at: Points, bar: float, name: str, sign: float, rule: str, said: str
) -> Iterator[Finding]:
    falls = _falls(series, at, bar, name, sign)
    if not falls:
        return
    rows = [row for before, after, blamed in falls for point in blamed for row in at.rows[point]]
    before, after, _ = max(falls, key=lambda fall: at.time_s[fall[0]] / at.time_s[fall[1]])
    a, b = at.first[before], at.first[after]
    values = series.where[name]
    what = (
        f"{series.name}: {said} in {len(falls)} place{'s' * (len(falls) > 1)}; the worst, {name} {show(values[a])} and "
        f"{show(values[b])}: {show_time(at.time_s[before])} and {show_time(at.time_s[after])}"
    )
    others = series.describe(a, name)
    yield Finding("flag", rule, table.at(rows), what + (f" ({others})" if others else ""), _WAY_OUT[rule])


_Fall = tuple[int, int, tuple[int, ...]]


def _falls(series: Series, at: Points, bar: float, name: str, sign: float) -> list[_Fall]:
    """Return the pairs of neighbouring points where time falls by more than `bar`, and which of them is to blame."""
    axis = sign * series.where[name][at.first].astype(float)
    ids = group_ids([key[at.first] for key in series.varied(name)], len(at))
    ordered = np.lexsort((axis, ids))
    t, rounded, group = at.time_s[ordered], series.rounding_s[at.first][ordered], ids[ordered]
    there = np.isfinite(axis[ordered]) & (axis[ordered] != 0)  # none at all is another kernel, not less work
    joined = (group[1:] == group[:-1]) & there[1:] & there[:-1]
    fell = np.flatnonzero(joined & (t[1:] + rounded[1:] < (1 - bar) * (t[:-1] - rounded[:-1])))
    return [
        (int(ordered[i]), int(ordered[i + 1]), tuple(int(ordered[j]) for j in _blamed(t, joined, int(i), bar)))
        for i in fell
    ]


def _blamed(t: np.ndarray, joined: np.ndarray, i: int, bar: float) -> tuple[int, ...]:
    """Return which of points i and i + 1 is out of line with its other neighbour; both where neither neighbour says."""
    before = t[i - 1] if i > 0 and joined[i - 1] else None
    after = t[i + 2] if i + 2 < len(t) and joined[i + 1] else None
    peak = before is not None and before <= t[i + 1] * (1 + bar)
    dip = after is not None and after >= t[i] * (1 - bar)
    if peak == dip:
        return (i, i + 1)
    return (i,) if peak else (i + 1,)
