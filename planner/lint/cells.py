"""Cells that are missing, and rows whose own remarks say that the run was not finished."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from planner.lint.base import Finding, Table

_TRUE = ("true", "yes", "1", "y", "t")
_FALSE = ("false", "no", "0", "n", "f")
_UNFINISHED = (
    r"wip|work[ _-]?in[ _-]?progress|unfinished|incomplete|partial|aborted|interrupted|cancell?ed|failed|"
    r"timed?[ _-]?out|truncated"
)
_FINISHED = r"finished|complete|completed|done|success|succeeded|ok|valid|passed"
_STATE = r"status|state|result|outcome"
_PAIR = re.compile(r"\s*([A-Za-z][\w -]*?)\s*[=:]\s*([^;,|]*)")


def missing(table: Table, use: np.ndarray) -> Iterator[Finding]:
    """Yield rows that do not say what they are of: an empty cell in a column that a comparison needs."""
    for name in table.wanted:
        rows = [i for i in np.flatnonzero(use).tolist() if not table.cells[name][i].strip()]
        if rows:
            what = f"{name}: empty in {len(rows)} row{'s' * (len(rows) > 1)}"
            yield Finding(
                "flag",
                "missing",
                table.at(rows),
                what,
                "such rows are comparable with nothing; fill it in or drop them",
            )


def unfinished(table: Table, use: np.ndarray) -> Iterator[Finding]:
    """Yield rows that a column, or a `key=value` remark in one, marks as from a run that did not finish."""
    for name, texts in table.cells.items():
        says = {text: _says(name, text) for text in set(texts)}
        said = [says[text] for text in texts]
        rows = [int(i) for i in np.flatnonzero(use) if said[i]]
        if rows:
            marks = ", ".join(sorted({said[i] for i in rows})[:3])
            what = f"{name}: {len(rows)} row{'s' * (len(rows) > 1)} from unfinished runs ({marks})"
            yield Finding("reject", "unfinished", table.at(rows), what, "left out; finish the runs")


def _says(name: str, text: str) -> str:
    """Return the mark of an unfinished run in a cell, or nothing."""
    for key, value in ((name, text), *_PAIR.findall(text)):
        if _unfinished(key.strip().lower(), value.strip().lower()):
            return f"{key}={value.strip()}"
    return ""


def _unfinished(key: str, value: str) -> bool:
    if re.fullmatch(f"(is[ _-]?)?({_UNFINISHED})", key):
        return value in _TRUE
    if re.fullmatch(f"(is[ _-]?)?({_FINISHED})", key):
        return value in _FALSE
    return bool(re.fullmatch(_STATE, key) and re.fullmatch(f"({_UNFINISHED}|running|pending|error|killed)", value))
