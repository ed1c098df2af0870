"""Print how far predictions are off on measurements that no fit has seen, beside what was aimed at. `make held-out`.

A section is a name and a function that returns its rows; each says what it was trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks import held_out_instances, held_out_operators


class Line(NamedTuple):
    """One line of a table: relative errors of the settings held out."""

    data: str
    trained: int
    errors: np.ndarray
    target: tuple[float, float] | None = None
    """Median and 95th percentile to reach."""


Section = tuple[str, Callable[[], Sequence[tuple[str, int, np.ndarray, tuple[float, float] | None]]]]

SECTIONS: list[Section] = [
    ("whole instances", held_out_instances.rows),
    ("operators", held_out_operators.rows),
]


def table(lines: Sequence[Line]) -> str:
    """Return the lines as a table of errors [%], at most 80 columns wide; a line that misses its target says so."""
    head = f"{'errors in %':36} {'fit':>4} {'tested':>6} {'median':>6} {'p95':>5} {'worst':>5}  target"
    return "\n".join([head, *(_text(line) for line in lines)])


def _text(line: Line) -> str:
    median, p95, worst = 100 * np.median(line.errors), 100 * np.percentile(line.errors, 95), 100 * line.errors.max()
    text = f"{line.data:36} {line.trained:4} {len(line.errors):6} {median:6.2f} {p95:5.1f} {worst:5.0f}"
    if line.target is None:
        return text
    met = median <= 100 * line.target[0] and p95 <= 100 * line.target[1]
    return f"{text}  {100 * line.target[0]:g}/{100 * line.target[1]:g} {'met' if met else 'MISSED'}"


def main() -> None:
    """Print every section."""
    for name, rows in SECTIONS:
        print(name, table([Line(*row) for row in rows()]), sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
