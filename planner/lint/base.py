"""What every check works on: a table of timed rows, and what it may say about them.

A foreign file becomes one `Table` of `Series` (see `readers`): a time, what was varied, and the least time that
physics allows. Checks are pure functions of a table, so that a fault is found by its kind, whatever file, column
or unit it stands in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np

from planner.specs.gpu import Gpu
from planner.specs.model import ModelSpec
from planner.specs.profile import Coefficients, Sample

Severity = Literal["reject", "flag", "note"]
SEVERITIES: tuple[Severity, ...] = ("reject", "flag", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault, with the rows (file lines, from 1) that have it.

    reject  these rows are no measurements of what they claim; a fit leaves them out
    flag    true, odd, and worth a look; nothing is left out
    note    what the table can and cannot tell
    """

    severity: Severity
    rule: str
    rows: tuple[int, ...]
    what: str
    way_out: str = ""

    @property
    def where(self) -> str:
        """The rows as ranges, such as `12-14, 20`."""
        return ranges(self.rows)


_MOST_WORDS = 8


def ranges(rows: Iterable[int], most: int | None = None) -> str:
    """Return row numbers as ranges; of more than `most` ranges the first, and how many rows are left unsaid."""
    ordered = sorted(set(rows))
    starts = [i for i, row in enumerate(ordered) if i == 0 or row != ordered[i - 1] + 1]
    pieces = [ordered[start:end] for start, end in pairwise([*starts, len(ordered)])]
    shown = pieces if most is None else pieces[:most]
    text = ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in shown)
    left = sum(map(len, pieces[len(shown) :]))
    return f"{text} and {left} more" if left else text


@dataclass(frozen=True, slots=True)
class Series:
    """One timed quantity, over all rows of a table; NaN where a row has none.

    `where` holds what was varied. `labels` are those that only name (GPU, model, layer), `sizes` those where more
    means more work, `ranks` the one over which work is divided, `width` the one that holds bytes per operand.
    """

    name: str
    time_s: np.ndarray
    where: dict[str, np.ndarray]
    labels: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    ranks: str = ""
    width: str = ""
    floors: dict[str, np.ndarray] = field(default_factory=dict)
    """The least time [s] by what limits it: `memory bandwidth`, `FLOP rate`, `link rate`."""
    work: np.ndarray | None = None
    """How much is done, in the unit `work_unit`: what a launch-bound row does not depend on."""
    work_unit: str = ""
    spread: np.ndarray | None = None
    """Relative spread of the repeats behind one row, where the file gives it."""
    element_bytes: np.ndarray | None = None
    """Bytes per element of a message, for messages that stay inside a node: sizes may count the wrong one."""
    line_s: np.ndarray | None = None
    """Time [s] of the message's size at the line rate, whatever share of it a collective moves."""
    overhead_s: float = 1e-3
    """The most that launches, host work or, in a loaded server, queues can add to one time [s]."""

    @property
    def floor_s(self) -> np.ndarray:
        """The least time [s] of each row; NaN where nothing is known."""
        if not self.floors:
            return np.full(len(self.time_s), np.nan)
        return np.fmax.reduce(list(self.floors.values()))

    @property
    def rounding_s(self) -> np.ndarray:
        """Half of the last digit that the times were written with [s]."""
        return rounding(self.time_s)

    def varied(self, *without: str) -> list[np.ndarray]:
        """Return what was varied, without some of it."""
        names = (*self.labels, *self.sizes, self.ranks, self.width)
        return [self.where[name] for name in names if name and name not in without]

    def describe(self, row: int, *without: str) -> str:
        """Return the setting of a row in words, such as `tp 4, batch 8`."""
        names = [n for n in (*self.sizes, self.ranks, self.width, *self.labels) if n and n not in without]
        shown = {n: show(self.where[n][row]) for n in names if len(set(self.where[n].tolist())) > 1}
        words = [f"{name} {value}" for name, value in shown.items() if value]
        return ", ".join([*words[:_MOST_WORDS], *["..."] * (len(words) > _MOST_WORDS)])


@dataclass(frozen=True, slots=True)
class Parts:
    """End-to-end times and what their parts add up to [s]."""

    name: str
    whole_s: np.ndarray
    told_s: np.ndarray
    least: float
    """Share of the whole that the parts must reach."""
    way_out: str = ""


@dataclass(frozen=True, slots=True)
class Law:
    """Published coefficients of one degree and the line they stand on; `group` is the model they are of."""

    name: str
    group: str
    line: int
    fit: Coefficients
    model: ModelSpec | None = None
    gpu: Gpu | None = None


@dataclass(frozen=True, slots=True)
class Whole:
    """Whole-model rows of one model, GPU and degree, for what a fit of them can tell."""

    name: str
    rows: np.ndarray
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A file as the checks see it. `lines` is the file line of each row; arrays elsewhere are parallel to it."""

    file: str
    kind: str
    lines: np.ndarray
    series: tuple[Series, ...] = ()
    parts: tuple[Parts, ...] = ()
    laws: tuple[Law, ...] = ()
    wholes: tuple[Whole, ...] = ()
    texts: tuple[str, ...] = ()
    """Each row as it was written."""
    cells: dict[str, list[str]] = field(default_factory=dict)
    """Columns as they were written, for what is not a time: version, precision, remarks."""
    wanted: tuple[str, ...] = ()
    """Columns of `cells` without which a row cannot be compared with anything."""
    found: tuple[Finding, ...] = ()
    """What was found while reading."""

    def at(self, rows: Iterable[int]) -> tuple[int, ...]:
        """Return the file lines of rows (indexes)."""
        return tuple(sorted({int(self.lines[row]) for row in rows}))


@dataclass(frozen=True, slots=True)
class Points:
    """The settings of a series, the median over repeats for each. `first` is a row that has the setting."""

    time_s: np.ndarray
    first: np.ndarray
    rows: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return len(self.time_s)


def points(series: Series, use: np.ndarray) -> Points:
    """Return the settings among the rows that `use` selects and that have a time."""
    rows = np.flatnonzero(use & np.isfinite(series.time_s))
    ids = group_ids([key[rows] for key in series.varied()], len(rows))
    order = np.argsort(ids, kind="stable")
    cuts = np.flatnonzero(np.diff(ids[order])) + 1
    members = tuple(rows[part] for part in np.split(order, cuts) if len(part))
    return Points(
        np.array([series.time_s[part[0]] if len(part) == 1 else np.median(series.time_s[part]) for part in members]),
        np.array([part[0] for part in members], dtype=int),
        members,
    )


def group_ids(columns: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Return a number for each of `size` rows, equal where all columns are."""
    ids = np.zeros(size, dtype=np.int64)
    for column in columns:
        _, code = np.unique(column.astype(str) if column.dtype == object else column, return_inverse=True)
        ids = np.unique(ids * (code.max(initial=0) + 1) + code, return_inverse=True)[1]
    return ids


def rounding(values: np.ndarray) -> np.ndarray:
    """Return half of the last digit of each value: the last decimal, or significant digit, that any of them has."""
    sound = values[np.isfinite(values) & (values > 0)]
    if not len(sound):
        return np.zeros(len(values))
    for exponent in range(10):  # times are in seconds, written as s, ms or us with decimals
        step = 10.0**-exponent
        off = np.abs(sound / step - np.round(sound / step))
        if np.mean(off < 1e-6 * np.minimum(1.0, sound / step)) > 0.9:  # medians of two may have half a digit more
            return np.full(len(values), step / 2)
    for digits in range(3, 10):
        step = 10.0 ** (np.floor(np.log10(sound)) - digits + 1)
        if np.all(np.abs(sound / step - np.round(sound / step)) < 1e-6):
            size = np.where(np.isfinite(values) & (values > 0), values, 1.0)
            return 10.0 ** (np.floor(np.log10(size)) - digits + 1) / 2
    return 1e-10 * np.nan_to_num(values)


def noise(series: Series, use: np.ndarray) -> float:
    """Return the median relative spread of repeats, or inside a row where that is larger; 0 when nothing tells."""
    parts = (part for part in points(series, use).rows if len(part) > 1 and not same(series.time_s[part]))
    found = [spread(series, part) for part in parts]
    inside = series.spread[use & np.isfinite(series.spread)] if series.spread is not None else np.zeros(0)
    return max((float(np.median(some)) for some in (found, inside) if len(some)), default=0.0)


LONG_DIGITS = 9
"""Times that agree to so many digits are one time, written twice."""


def same(times: np.ndarray) -> bool:
    """True when long times are all equal: one run that stands several times, no repeats."""
    return bool(np.all(times == times[0])) and digits(float(times[0])) >= LONG_DIGITS


def digits(value: float) -> int:
    """Return the significant digits of a time as it was written, in whatever unit (a power of ten apart)."""
    return len(f"{value:.13e}".split("e")[0].replace(".", "").rstrip("0"))


def spread(series: Series, rows: np.ndarray) -> float:
    """Return (largest - smallest) / median of the times of some rows."""
    times = series.time_s[rows]
    return float((times.max() - times.min()) / np.median(times))


def show(value: object) -> str:
    """Return a value as it was written: whole numbers without a point."""
    if isinstance(value, float | np.floating):
        if not np.isfinite(value):
            return ""
        return f"{value:.0f}" if float(value).is_integer() else f"{value:.4g}"
    return str(value)


def show_time(time_s: float) -> str:
    """Return a time with a unit that suits it."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if time_s >= scale:
            return f"{time_s / scale:.4g} {unit}"
    return f"{time_s / 1e-6:.4g} us"
