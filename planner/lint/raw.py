"""A CSV file read leniently: a bad cell is a finding with its row, not the end of the check."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from planner.errors import bad_row
from planner.lint.base import Finding
from planner.lint.parts import number
from planner.specs.base import read_text

MOST, SHORTEST_S = 1e12, 1e-12
"""No count, and no time in seconds, is larger; no time is shorter, whatever its unit was taken for."""
Test = Callable[[np.ndarray], np.ndarray]


@dataclass(slots=True)
class Raw:
    """Columns of text by name, and the file line of each row. Asking for a number notes the cells that are none."""

    file: str
    lines: np.ndarray
    columns: dict[str, list[str]]
    texts: tuple[str, ...]
    found: list[Finding] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.lines)

    def text(self, name: str) -> np.ndarray:
        """Return a column as text."""
        return np.array([cell.strip() for cell in self.columns[name]], dtype=object)

    def count(self, name: str, least: int = 1) -> np.ndarray:
        """Return a column of whole numbers; NaN, with a finding, where a cell is none."""
        return self._numbers(
            name, lambda v: (v >= least) & (v <= MOST) & (v == np.round(v)), f"a whole number from {least}"
        )

    def time_s(self, name: str, unit_s: float, only: np.ndarray | None = None) -> np.ndarray:
        """Return a column of times [s]; NaN, with a finding, where a cell is no number above 0.

        `only`: the rows that have one; the others are NaN without a word.
        """
        value = self._numbers(name, lambda v: (v * unit_s > SHORTEST_S) & (v * unit_s < MOST), "a time above 0", only)
        return np.where(only, value, np.nan) * unit_s if only is not None else value * unit_s

    def optional(self, name: str) -> np.ndarray:
        """Return a column of numbers of a sensible size, NaN where a cell is none."""
        values = np.array([number(cell) for cell in self.columns[name]])
        return np.where(np.abs(values) <= MOST, values, np.nan)

    def _numbers(self, name: str, good: Test, expected: str, only: np.ndarray | None = None) -> np.ndarray:
        values = np.array([number(cell) for cell in self.columns[name]])
        with np.errstate(invalid="ignore", over="ignore"):
            bad = ~(np.isfinite(values) & good(np.nan_to_num(values)))
        if only is not None:
            bad &= only
        if bad.any():
            rows = np.flatnonzero(bad)
            what = f"{name}: expected {expected}, got {self.columns[name][rows[0]][:20]!r}"
            self.found.append(Finding("reject", "cells", tuple(int(self.lines[r]) for r in rows), what, "left out"))
        return np.where(bad, np.nan, values)


def read_csv(path: str | Path) -> Raw:
    """Return the table. Raises InputError for what is no table; short and long rows become findings."""
    file = str(path)
    text = read_text(path).splitlines()
    try:
        reader = csv.reader(text, strict=True)
        header = [name.strip() for name in next(reader, [])]
        rows = [(reader.line_num, cells) for cells in reader if cells]
    except csv.Error as error:
        raise bad_row(file, None, f"not a CSV table: {error}") from None
    if not rows:
        raise bad_row(file, 1, "expected rows under the header, got none")
    if len(set(header)) != len(header):
        raise bad_row(file, 1, "expected columns of different names")
    whole = [(line, cells) for line, cells in rows if len(cells) == len(header)]
    if not whole:
        raise bad_row(file, rows[0][0], f"expected {len(header)} cells as in the header, got {len(rows[0][1])}")
    return Raw(
        file,
        np.array([line for line, _ in whole], dtype=int),
        {name: [cells[i] for _, cells in whole] for i, name in enumerate(header)},
        tuple(",".join(cells) for _, cells in whole),
        _ragged(rows, len(header)),
    )


def read_parquet(path: str | Path) -> Raw:
    """Return the table; its rows count from 1. Raises InputError when it cannot be read, or nothing here can."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError:
        raise bad_row(path, None, "reading Parquet needs pyarrow: pip install pyarrow, or convert it to CSV") from None
    try:
        columns = read_table(path).to_pydict()
    except (ArrowException, OSError) as error:
        raise bad_row(path, None, f"not a Parquet table: {str(error).splitlines()[0][:100]}") from None
    cells = {name: ["" if value is None else str(value) for value in values] for name, values in columns.items()}
    rows = list(zip(*cells.values(), strict=True))
    if not rows:
        raise bad_row(path, None, "expected rows, got none")
    return Raw(str(path), np.arange(1, len(rows) + 1), cells, tuple(",".join(row) for row in rows))


def _ragged(rows: Sequence[tuple[int, list[str]]], width: int) -> list[Finding]:
    odd = tuple(line for line, cells in rows if len(cells) != width)
    what = f"expected {width} cells as in the header, got more or fewer"
    return [Finding("reject", "cells", odd, what, "left out; an unquoted comma, or a line cut short")] if odd else []
