"""Foreign tables, read strictly: a missing column, or a cell that is no number, has its file and line."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import Fault, InputError, bad_row
from planner.specs.base import read_text


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a CSV file."""

    file: str
    line: int
    cells: dict[str, str]

    def text(self, column: str) -> str:
        """Return the cell as text. Raises InputError when it is empty."""
        value = (self.cells.get(column) or "").strip()
        if not value:
            raise bad_row(self.file, self.line, f"{column}: is empty")
        return value

    def number(self, column: str, above: float = 0.0) -> float:
        """Return the cell as a finite number above `above`. Raises InputError with the line."""
        value = self.text(column)
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not above < number < math.inf:
            raise bad_row(self.file, self.line, f"{column}: expected a number above {above:g}, got {value!r}")
        return number

    def count(self, column: str, least: int = 1) -> int:
        """Return the cell as a whole number. Raises InputError with the line."""
        number = self.number(column, least - 1)
        if number != int(number) or number > 10**9:
            raise bad_row(self.file, self.line, f"{column}: expected a whole number, got {self.text(column)!r}")
        return int(number)


def read_table(path: str | Path, columns: tuple[str, ...]) -> list[Row]:
    """Return the rows of a CSV file that has at least `columns`. Raises InputError; an empty table is one."""
    file = str(path)
    try:
        reader = csv.DictReader(read_text(path).splitlines(), strict=True)
        header = [name.strip() for name in reader.fieldnames or ()]
        if missing := [name for name in columns if name not in header]:
            got = ", ".join(header)[:200] or "nothing"
            raise bad_row(file, 1, f"expected the columns {', '.join(missing)}, got {got}")
        reader.fieldnames = header
        rows = [_row(file, reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise bad_row(file, None, f"not a CSV table: {error}") from None
    if not rows:
        raise bad_row(file, 1, "expected rows under the header, got none")
    return rows


def _row(file: str, line: int, cells: dict[Any, Any]) -> Row:
    if None in cells or None in cells.values():
        raise bad_row(file, line, "has more or fewer cells than the header")
    return Row(file, line, cells)


def read_json(path: str | Path) -> Any:
    """Return the data of a JSON file. Raises InputError with the line."""
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        fault = Fault(f"not valid JSON: {error.msg}", str(path), error.lineno, error.colno)
        raise InputError(fault) from None
    except RecursionError:
        raise InputError(Fault("not valid JSON: nested too deeply", str(path))) from None


def pick(path: str | Path, what: str, wanted: str | None, found: set[str]) -> str:
    """Return the one of `found` that is meant, ignoring case. Raises InputError that lists them."""
    if wanted is None and len(found) == 1:
        return next(iter(found))
    names = {name.lower(): name for name in found}
    if wanted is not None and wanted.lower() in names:
        return names[wanted.lower()]
    got = "none was given" if wanted is None else f"got {wanted!r}"
    raise InputError(Fault(f"{what}: expected one of {', '.join(sorted(found))}; {got}", str(path)))


def slug(*parts: str) -> str:
    """Return a name that our files accept, out of words that others chose."""
    words = (re.sub(r"[^A-Za-z0-9._+]+", "-", part.rsplit("/", 1)[-1]).strip("-._+") for part in parts)
    return "-".join(word.lower() for word in words if word)[:200]


def seconds(value: float) -> float:
    """Return a measured time [s] at six digits: more than any timer has, and files stay small."""
    return float(f"{value:.6g}")
