"""Groups of rows that are another group's times a constant, and rows that stand twice.

Timers never agree to their last digit over several rows. How much an agreement proves depends on how many digits
the times have: a table in whole microseconds agrees by chance, so evidence is counted in digits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from planner.lint.base import LONG_DIGITS, Finding, Series, Table, digits, group_ids, show
from planner.lint.parts import misfit

_SAME = 1e-9
_LEAST = 3
_SHARE = 0.5
_NATURAL = 0.002
"""Even one kernel timed twice differs by so much; the chance to agree is the rounding over that. Operators that do
not depend on a key, such as a norm on the degree, agree to a percent, and coarse timers show no more."""
_EVIDENCE = 12.0
"""Digits of agreement in all: a few times in full, or many times that are shown to three or four."""
_MOST_VALUES = 16


@dataclass(frozen=True, slots=True)
class _Copy:
    """One column of times in which one value of a key copies another."""

    column: str
    key: str
    copy: str
    original: str
    factor: float
    rows: np.ndarray
    agree: int
    pairs: int


def copies(table: Table, use: np.ndarray) -> Iterator[Finding]:
    """Yield groups (of a GPU, a degree, a batch size, ...) whose times are those of another times a constant."""
    groups: dict[tuple[str, str], list[_Copy]] = defaultdict(list)
    for series in table.series:
        for key in filter(None, (*series.labels, series.ranks, series.width, *series.sizes)):
            for found in _within(table, series, key, use):
                groups[found.key, found.copy].append(found)
    for (key, value), found_ in groups.items():
        told = " and ".join(f"{one.column} is {one.factor:.6g} x that of {one.original}" for one in found_)
        best = max(found_, key=lambda one: one.agree)
        what = f"{key} {value}: {told}, exactly, in {best.agree} of {best.pairs} pairs of rows: a copy"
        rows = table.at(np.concatenate([one.rows for one in found_]).tolist())
        yield Finding("reject", "copies", rows, what, f"left out; use {key} {best.original}, or measure")


def _within(table: Table, series: Series, key: str, use: np.ndarray) -> Iterator[_Copy]:
    """Yield the copies among the values of one key, all else equal."""
    column = series.where[key]
    rows = np.flatnonzero(use & np.isfinite(series.time_s))
    ids = group_ids([other[rows] for other in series.varied(key)], len(rows))
    values = list(dict.fromkeys(column[rows].tolist()))
    if not 1 < len(values) <= _MOST_VALUES:
        return
    settings = {value: _by_setting(rows[column[rows] == value], ids[column[rows] == value]) for value in values}
    copied: set[object] = set()
    for first, second in combinations(values, 2):
        if first in copied or second in copied:
            continue
        pairs = _pairs(settings[first], settings[second])
        found = _constant(series, pairs)
        if found is None:
            continue
        factor, agree = found
        later = _is_second(table, column, (first, second), factor)
        copy, original = (second, first) if later else (first, second)
        members = _members(use & (column == copy), pairs[agree, int(later)], factor)
        if members is None:
            continue
        copied.add(copy)
        times = factor if later else 1 / factor
        yield _Copy(series.name, key, show(copy), show(original), times, members, int(agree.sum()), len(pairs))


def _members(group: np.ndarray, agree: np.ndarray, factor: float) -> np.ndarray | None:
    """Return the rows to blame: the whole group where half of it agrees, for then the rest is not to be trusted.

    Fewer rows that equal another's as they are stand under two labels, which `twice` tells: None.
    """
    members = np.flatnonzero(group)
    if len(np.unique(agree)) >= _SHARE * len(members):
        return members
    return None if abs(factor - 1) < _SAME else np.unique(agree)


def _by_setting(rows: np.ndarray, ids: np.ndarray) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for row, group in zip(rows.tolist(), ids.tolist(), strict=True):
        found[group].append(row)
    return found


def _pairs(first: dict[int, list[int]], second: dict[int, list[int]]) -> np.ndarray:
    """Return pairs of rows at equal settings, (pairs, 2), repeats matched in the order of the file."""
    shared = [key for key in first if key in second]
    found = [pair for key in shared for pair in zip(first[key], second[key], strict=False)]
    return np.array(found, dtype=int).reshape(-1, 2)


def _constant(series: Series, pairs: np.ndarray) -> tuple[float, np.ndarray] | None:
    """Return the factor and which pairs agree on it, when that many cannot agree by chance."""
    if len(pairs) < _LEAST:
        return None
    a, b = series.time_s[pairs[:, 0]], series.time_s[pairs[:, 1]]
    factor = float(np.median(b / a))
    least = np.maximum(_SAME * b, series.rounding_s[pairs[:, 1]] * (1 + b / a))
    agree = np.abs(b - factor * a) <= least
    chance = np.clip(2 * least / (_NATURAL * b), 1e-6, 1.0)
    distinct = np.unique(np.c_[a, b][agree], axis=0, return_index=True)[1]
    evidence = -np.log10(chance[agree][distinct]).sum()
    telling = chance < 0.5
    if evidence < _EVIDENCE or len(distinct) < _LEAST or (agree & telling).sum() < _SHARE * telling.sum():
        return None
    return factor, agree


def _is_second(table: Table, column: np.ndarray, values: tuple[object, object], factor: float) -> bool:
    """True when the second is the copy: its times add up less well to their whole, or the factor is rounder."""
    first, second = (misfit(table, column == value) for value in values)
    if first is not None and second is not None and first != second:
        return second > first
    return _roundness(factor) <= _roundness(1 / factor)


def _roundness(factor: float) -> int:
    """Return how many digits it takes to write a factor: 1.3 takes two."""
    return next((n for n in range(1, 10) if abs(float(f"{factor:.{n}g}") / factor - 1) < 1e-6), 10)


def twice(table: Table, use: np.ndarray) -> Iterator[Finding]:
    """Yield rows that stand twice, and rows of other settings that have all of their (two or more) times.

    One long time may be shared by chance: averages of a coarse timer's ticks are long, too.
    """
    keys = [key for series in table.series for key in series.varied()]
    setting = group_ids(keys, len(table.lines))
    again: list[int] = []
    other: list[int] = []
    for rows in _same_times(table, use):
        seen: set[int] = set()
        for place, row in enumerate(rows):
            if place:
                (again if setting[row] in seen else other).append(row)
            seen.add(int(setting[row]))
    if again:
        what = f"{_count(again)} each an earlier one again, times and all, to the last digit"
        yield Finding("flag", "twice", table.at(again), what, "one run counts once: drop the later rows")
    if other and len(table.series) > 1:
        what = f"{_count(other)} each with the times of an earlier one to the last digit, under another setting"
        way_out = "one is mislabelled, or a column that tells them apart is missing"
        yield Finding("flag", "twice", table.at(other), what, way_out)


def _same_times(table: Table, use: np.ndarray) -> Iterator[list[int]]:
    """Yield the rows that share all of their times, where one of these is long enough to tell."""
    keys: dict[tuple[float, ...], list[int]] = defaultdict(list)
    for row in np.flatnonzero(use).tolist():
        keys[tuple(float(series.time_s[row]) for series in table.series if np.isfinite(series.time_s[row]))].append(row)
    for key, rows in keys.items():
        if len(rows) > 1 and any(digits(value) >= LONG_DIGITS for value in key):
            yield rows


def _count(rows: list[int]) -> str:
    return f"{len(rows)} row{'s' * (len(rows) > 1)},"
