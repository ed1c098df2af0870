"""End-to-end times against the sum of their parts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.lint.base import Finding, Parts, Table, show_time


def parts(table: Table, use: np.ndarray) -> Iterator[Finding]:
    """Yield rows whose parts do not come near the whole: something else took time, such as a queue."""
    for one in table.parts:
        with np.errstate(invalid="ignore"):
            rows = np.flatnonzero(use & (one.told_s < one.least * one.whole_s))
        if not len(rows):
            continue
        worst = rows[np.argmin(one.told_s[rows] / one.whole_s[rows])]
        what = (
            f"{one.name}: the parts are far below the whole in {len(rows)} row{'s' * (len(rows) > 1)}; row "
            f"{table.lines[worst]}: {show_time(one.told_s[worst])} of {show_time(one.whole_s[worst])}"
        )
        yield Finding("reject", "parts", table.at(rows), what, one.way_out)


def misfit(table: Table, rows: np.ndarray) -> float | None:
    """Return the median gap between parts and whole of some rows, of the half that fits better; None without parts.

    Half: where generation stopped early the parts, worked out from what was asked for, exceed the whole.
    """
    gaps = [gap for one in table.parts for gap in _gaps(one, rows)]
    return float(np.median(sorted(gaps)[: max(1, len(gaps) // 2)])) if gaps else None


def _gaps(one: Parts, rows: np.ndarray) -> list[float]:
    share = one.told_s[rows] / one.whole_s[rows]
    return np.abs(share[np.isfinite(share)] - 1.0).tolist()


def within(table: Table, use: np.ndarray) -> Iterator[Finding]:
    """Yield rows whose own statistics contradict each other: a median outside of smallest and largest."""
    names = [name[: -len(".median")] for name in table.cells if name.endswith(".median")]
    for name in names:
        low, mid, high = (_numbers(table, f"{name}.{part}") for part in ("min", "median", "max"))
        if low is None or mid is None or high is None:
            continue
        with np.errstate(invalid="ignore"):
            rows = np.flatnonzero(use & ((mid < low * (1 - 1e-9)) | (mid > high * (1 + 1e-9))))
        if len(rows):
            what = f"{name}: the median lies outside of smallest and largest in {len(rows)} rows"
            yield Finding("reject", "parts", table.at(rows), what, "left out; the columns are mixed up")


def _numbers(table: Table, name: str) -> np.ndarray | None:
    if name not in table.cells:
        return None
    return np.array([number(text) for text in table.cells[name]])


def number(text: str) -> float:
    """Return a cell as a number, NaN where it is none."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return float("nan")
