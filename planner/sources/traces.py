"""Request logs as other projects write them -> the rows of a `Workload`. A new format is one function and one
line.

Every bad row is named by its line in the file (the first line, header included, is 1); lines that are blank
are not rows. Files may have a byte-order mark, any line ends, and no newline at the end.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from planner.errors import Fault, InputError
from planner.specs.workload import OnBadRow, Requests, make_requests

MOONCAKE_BLOCK_TOKENS = 512

_MOST_FAULTS = 20
_MOST_TOKENS = 10**9
_MOST_SECONDS = 1e11
"""The year 5138: what lies beyond is an epoch in milliseconds or finer under a column meant for seconds."""

# fmt: off
_PROMPT = (
    "input_length", "prompt_tokens", "input_tokens", "prompt_len", "prompt_length", "num_prefill_tokens",
    "contexttokens", "context_tokens", "request_tokens", "isl",
)
_OUTPUT = (
    "output_length", "output_tokens", "completion_tokens", "generated_tokens", "output_len",
    "num_decode_tokens", "generatedtokens", "response_tokens", "osl",
)
_TIME_MS = ("timestamp_ms", "arrival_ms", "arrival_time_ms")
_TIME = (
    "timestamp_s", "arrival_s", "arrival_time_s", *_TIME_MS,
    "timestamp", "arrival_time", "arrived_at", "start_time", "time",
)
# fmt: on

_DATE = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(\.\d+)? ?(Z|[+-]\d\d:?\d\d)?", re.ASCII | re.IGNORECASE)


class Table(NamedTuple):
    """The rows of one file, sorted by time (from 0), and what was done to them."""

    requests: Requests
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where a format keeps its fields: names in order of preference, lower case, with `_` for blanks."""

    time: tuple[str, ...]
    prompt: tuple[str, ...]
    output: tuple[str, ...]
    time_unit_s: float = 1.0
    dates_only: bool = False
    blocks: bool = False

    def wanted(self) -> dict[str, tuple[str, ...]]:
        """Return the fields of a row in the order in which they are read, each with its names."""
        fields = {"arrival time": self.time, "prompt tokens": self.prompt, "output tokens": self.output}
        return {what: names for what, names in fields.items() if names}


class _BadRowError(Exception):
    """One row cannot be used; never leaves this module."""


@dataclass(slots=True)
class _Ledger:
    """The bad rows of one file, refused or counted as the user chose."""

    file: str
    on_bad_row: OnBadRow
    faults: list[Fault] = field(default_factory=list)

    def add(self, line: int, message: str) -> None:
        """Remember a bad row."""
        self.faults.append(Fault(message, self.file, line))

    def settle(self) -> tuple[str, ...]:
        """Return a note on the rows that were skipped. Raises InputError if bad rows are to be refused."""
        if not self.faults:
            return ()
        if self.on_bad_row == "skip":
            first = f"line {self.faults[0].line}: {self.faults[0].message}"
            return (f"bad rows skipped: {len(self.faults)} (first: {first})",)
        shown, more = self.faults[:_MOST_FAULTS], len(self.faults) - _MOST_FAULTS
        way_out = "on_bad_row: skip leaves bad rows out"
        if more > 0:
            raise InputError([*shown, Fault(f"and {more} more; {way_out}", self.file)])
        raise InputError([*shown[:-1], replace(shown[-1], message=f"{shown[-1].message}; {way_out}")])


@dataclass(slots=True)
class _Clock:
    """Reads the arrival times of one file, all of them numbers or all of them dates."""

    dates_only: bool
    origin_s: int | None = None
    """The whole second of the first date: dates are counted from it, since a float holds 1.7e9 s to 0.2 us
    only."""
    numbers: bool = False

    def read(self, value: Any, unit_s: float) -> float:
        """Return the time [s]. Raises _BadRowError."""
        match = _DATE.fullmatch(value.strip()) if isinstance(value, str) else None
        if match:
            return self._date(match)
        if self.dates_only or self.origin_s is not None:
            raise _BadRowError(f"expected a time such as 2023-11-16 18:15:46.68, got {_short(value)}")
        number = _number(value, "arrival time") * unit_s
        if number > _MOST_SECONDS:
            raise _BadRowError(f"expected a time in seconds, got {_short(value)}; if in ms, call it timestamp_ms")
        self.numbers = True
        return number

    def _date(self, match: re.Match[str]) -> float:
        if self.numbers:
            raise _BadRowError(f"expected a number of seconds as in the rows above, got {match[0]!r}")
        second = _epoch_s(f"{match[1]}T{match[2]}", (match[4] or "Z").upper())
        if self.origin_s is None:
            self.origin_s = second
        return second - self.origin_s + float(match[3] or 0.0)


@lru_cache(maxsize=4096)
def _epoch_s(text: str, zone: str) -> int:
    try:
        return int((datetime.fromisoformat(text + zone) - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds())
    except (ValueError, OverflowError):
        raise _BadRowError(f"expected a date that exists, got {text!r}") from None


def _number(value: Any, what: str) -> float:
    """Return a finite number of at least 0 from a number or its text. Raises _BadRowError."""
    if value is None or value == "":
        raise _BadRowError(f"{what} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _BadRowError(f"expected a number for {what}, got {_short(value)}")
    try:
        number = float(value)
    except ValueError:
        raise _BadRowError(f"expected a number for {what}, got {_short(value)}") from None
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _BadRowError(f"expected a finite number for {what}, got {_short(value)}")
    if number < 0:
        raise _BadRowError(f"expected at least 0 for {what}, got {_short(value)}")
    return number


def _tokens(value: Any, what: str, at_least: int) -> int:
    number = _number(value, what)
    if number != int(number) or not at_least <= number <= _MOST_TOKENS:
        limits = f"a whole number from {at_least} to {_MOST_TOKENS}"
        raise _BadRowError(f"expected {limits} for {what}, got {_short(value)}")
    return int(number)


def _block_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(block) is int and 0 <= block < 2**62 for block in value):
        raise _BadRowError(f"expected hash_ids, a list of whole numbers, got {_short(value)}")
    return tuple(value)


def _short(value: Any) -> str:
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"  # repr() of deep nesting can overflow the stack
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Row(NamedTuple):
    """One row as it stands in the file: the values of the wanted fields, or what is wrong with it."""

    line: int
    cells: list[Any]
    names: list[str]
    blocks: Any = None
    problem: str = ""


@lru_cache(maxsize=1024)
def _plain_name(name: str) -> str:
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def _lines(text: str) -> list[str]:
    # not splitlines(): it also splits at U+2028 and form feeds, which are data in JSON, and shifts the count
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _rows(text: str, file: str, columns: _Columns) -> Iterator[_Row]:
    """Yield the rows of a CSV (with a header) or JSON Lines file, told apart by their first character."""
    filled = [(number, line) for number, line in enumerate(_lines(text), 1) if line.strip()]
    if not filled:
        raise InputError(Fault("no requests: the file is empty", file, 1))
    yield from (_json_rows if filled[0][1].lstrip().startswith("{") else _csv_rows)(filled, file, columns)


def _csv_rows(filled: list[tuple[int, str]], file: str, columns: _Columns) -> Iterator[_Row]:
    header = [_plain_name(cell) for cell in _cells(filled[0][1])]
    chosen = {what: _choose(names, header) for what, names in columns.wanted().items()}
    if missing := [what for what, name in chosen.items() if name is None]:
        raise InputError([_no_column(what, columns, header, file, filled[0][0]) for what in missing])
    names = [name for name in chosen.values() if name is not None]
    picks = [header.index(name) for name in names]
    for line, text in filled[1:]:
        cells = _cells(text)
        if len(cells) < len(header) or any(cells[len(header) :]):
            yield _Row(line, [], names, problem=f"expected {len(header)} fields, got {len(cells)}")
        else:
            yield _Row(line, [cells[pick].strip() for pick in picks], names)


def _choose(names: tuple[str, ...], present: list[str] | dict[str, Any]) -> str | None:
    return next((name for name in names if name in present), None)


def _no_column(what: str, columns: _Columns, header: list[str], file: str, line: int) -> Fault:
    names = ", ".join(columns.wanted()[what])
    return Fault(f"no column for the {what}: expected one of {names}; got {_short(','.join(header))}", file, line)


def _cells(line: str) -> list[str]:
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line]), [""])
    except csv.Error:
        return [line]


def _json_rows(filled: list[tuple[int, str]], file: str, columns: _Columns) -> Iterator[_Row]:
    wanted = columns.wanted()
    for line, text in filled:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            what = error.msg if isinstance(error, json.JSONDecodeError) else "number or nesting too large"
            yield _Row(line, [], [], problem=f"not valid JSON: {what}")
            continue
        if not isinstance(data, dict):
            yield _Row(line, [], [], problem=f"expected a JSON object, got {_short(data)}")
            continue
        row = {_plain_name(key): value for key, value in data.items()}
        chosen = {what: _choose(names, row) for what, names in wanted.items()}
        missing = [f"{what} ({names[0]})" for what, names in wanted.items() if chosen[what] is None]
        if missing:
            yield _Row(line, [], [], problem=f"missing: {', '.join(missing)}")
        else:
            present = [name for name in chosen.values() if name is not None]
            yield _Row(line, [row[name] for name in present], present, row.get("hash_ids"))


class _Parsed(NamedTuple):
    line: int
    time_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] | None


def _parse(row: _Row, columns: _Columns, clock: _Clock) -> _Parsed:
    """Return the row's numbers. Raises _BadRowError."""
    if row.problem:
        raise _BadRowError(row.problem)
    time_s, cells = 0.0, row.cells
    if columns.time:
        time_s = clock.read(cells[0], 1e-3 if row.names[0] in _TIME_MS else columns.time_unit_s)
        cells = cells[1:]
    prompt, output = _tokens(cells[0], "prompt tokens", 1), _tokens(cells[1], "output tokens", 0)
    return _Parsed(row.line, time_s, prompt, output, _block_ids(row.blocks) if columns.blocks else None)


def _read(text: str, file: str, on_bad_row: OnBadRow, columns: _Columns) -> tuple[Table, list[int]]:
    """Return the table of a file and the line of each of its rows. Raises InputError, one fault per bad
    row."""
    ledger, clock = _Ledger(file, on_bad_row), _Clock(columns.dates_only)
    parsed: list[_Parsed] = []
    for row in _rows(text, file, columns):
        try:
            parsed.append(_parse(row, columns, clock))
        except _BadRowError as problem:
            ledger.add(row.line, str(problem))
    notes = ledger.settle()
    if not parsed:
        rows = len(ledger.faults)
        raise InputError(Fault(f"no requests: all {rows} rows are bad" if rows else "no requests: only a header", file))
    return _sorted_table(parsed, notes)


def _sorted_table(parsed: list[_Parsed], notes: tuple[str, ...]) -> tuple[Table, list[int]]:
    """Return the rows in order of time; rows of the same time stay in the order of the file."""
    time_s = np.array([row.time_s for row in parsed], dtype=float)
    early = int((np.diff(time_s) < 0).sum())
    if early:
        parsed = [parsed[index] for index in np.argsort(time_s, kind="stable")]
        time_s = np.sort(time_s, kind="stable")
        notes += (f"rows were sorted by time: {early} stood below a later one",)
    blocks = tuple(row.blocks for row in parsed if row.blocks is not None)
    requests = make_requests(
        time_s - time_s[0],
        np.array([row.prompt_tokens for row in parsed], dtype=np.int64),
        np.array([row.output_tokens for row in parsed], dtype=np.int64),
        blocks if blocks else None,
    )
    return Table(requests, notes), [row.line for row in parsed]


def read_azure(text: str, file: str, on_bad_row: OnBadRow = "reject") -> Table:
    """Return an Azure LLM inference trace: TIMESTAMP (wall clock), ContextTokens, GeneratedTokens.

    AzurePublicDataset; Patel et al., "Splitwise", ISCA '24.
    """
    columns = _Columns(("timestamp",), ("contexttokens",), ("generatedtokens",), dates_only=True)
    return _read(text, file, on_bad_row, columns)[0]


def read_burstgpt(text: str, file: str, on_bad_row: OnBadRow = "reject") -> Table:
    """Return a BurstGPT trace: Timestamp [whole s], Request tokens, Response tokens. No response: a failed
    request.

    Its `Total tokens` column is not read: it is not always the sum. Wang et al., "BurstGPT", KDD '25.
    """
    columns = _Columns(("timestamp",), ("request_tokens",), ("response_tokens",))
    return _read(text, file, on_bad_row, columns)[0]


def read_mooncake(text: str, file: str, on_bad_row: OnBadRow = "reject") -> Table:
    """Return a Mooncake trace: JSON Lines of timestamp [ms], input_length, output_length, hash_ids.

    One id per block of 512 prompt tokens, the last one partly filled. Qin et al., "Mooncake", FAST '25.
    """
    columns = _Columns(("timestamp",), ("input_length",), ("output_length",), time_unit_s=1e-3, blocks=True)
    table, lines = _read(text, file, on_bad_row, columns)
    blocks = np.array([len(ids) for ids in table.requests.prefix_blocks or ()], dtype=np.int64)
    wrong = np.flatnonzero(blocks != -(-table.requests.prompt_tokens // MOONCAKE_BLOCK_TOKENS))
    if not len(wrong):
        return table
    note = f"rows without one hash id per {MOONCAKE_BLOCK_TOKENS} tokens of input_length: {len(wrong)}"
    return table._replace(notes=(*table.notes, f"{note} (first: line {min(lines[row] for row in wrong)})"))


def read_trace(text: str, file: str, on_bad_row: OnBadRow = "reject") -> Table:
    """Return any CSV or JSON Lines log with a time [s, ms if its name ends in _ms, or a date] and two
    lengths."""
    if '"hash_ids"' in text[:100_000] and '"timestamp"' in text[:100_000]:
        raise InputError(Fault("looks like a Mooncake trace, whose timestamps are in ms; say source: mooncake", file))
    return _read(text, file, on_bad_row, _Columns(_TIME, _PROMPT, _OUTPUT))[0]


def read_lengths(text: str, file: str, on_bad_row: OnBadRow = "reject") -> Table:
    """Return a table of prompt and output lengths, all at time 0."""
    return _read(text, file, on_bad_row, _Columns((), _PROMPT, _OUTPUT))[0]


Reader = Callable[[str, str, OnBadRow], Table]

READERS: dict[str, Reader] = {
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "lengths": read_lengths,
    "mooncake": read_mooncake,
    "trace": read_trace,
}


def cut(table: Table, start_s: float, end_s: float | None, most: int | None) -> Table:
    """Return the rows with start_s <= time < end_s, at most `most` of them, from 0. The table may come back
    empty."""
    times = table.requests.arrival_s
    end_s = math.inf if end_s is None else end_s
    first, last = np.searchsorted(times, [start_s, end_s])
    rows = np.arange(first, last)[:most]
    requests = table.requests.take(rows)
    if len(rows):
        requests = replace(requests, arrival_s=requests.arrival_s - requests.arrival_s[0])
    return table._replace(requests=requests)
