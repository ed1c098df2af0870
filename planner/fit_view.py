"""The fit report as tables: once as rows of text, then for a terminal of 80 columns (rich) or for a page (HTML)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from planner.cost.fit import PHASES
from planner.fit_report import NEAR_NOISE, Degree, FitReport, Row, Term, near_noise
from planner.specs.units import show_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

_LEGEND = {
    "weakly": "weakly: the rows say little of this term alone; other terms can stand in for it",
    "limit": "limit: the fit stopped at a bound, such as the card's peak; the rows do not pin this term down",
    "published": "published: coefficients without measurements",
    "data sheet": "data sheet: nobody measured this model on this GPU type",
    "transferred": "transferred: from degrees that were measured",
    "measured": "measured: what the fastest row reaches, in model FLOP, or in weights and KV read once",
}
_PEAK = "peak: share of the data sheet's rate; time: share of the time that a term makes, on average over the settings"
_ERROR = "+/-: standard error, as the rows of that degree alone tell it; open: they hardly do"


@dataclass(slots=True)
class Grid:
    """A table as text. Columns from the `right`-th to the `left_again`-th hold numbers."""

    title: str
    columns: tuple[str, ...]
    right: int
    left_again: int = 99
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def holds_numbers(self, column: int) -> bool:
        """True for columns that are set to the right."""
        return self.right <= column < self.left_again


def grids(report: FitReport) -> Iterator[Grid]:
    """Yield the tables of one GPU type: held-out errors, terms, worst rows."""
    yield _errors(report)
    yield _terms(report)
    for phase in PHASES:
        if rows := report.worst(phase):
            yield _worst(phase, rows)


def render(reports: Sequence[FitReport]) -> Iterator[RenderableType]:
    """Yield the report for a terminal, piece by piece."""
    from rich.padding import Padding
    from rich.text import Text

    for report in reports:
        yield Text(report.title, style="bold")
        for grid in grids(report):
            yield _rich(grid)
            for note in grid.notes:
                yield Padding(Text(note, style="dim"), (0, 0, 0, 2))
            yield Text("")


def html_tables(report: FitReport) -> str:
    """Return the tables of one GPU type as HTML."""
    return "\n".join(_html(grid) for grid in grids(report))


# ---- what stands in them


def _errors(report: FitReport) -> Grid:
    columns = ("layout", "phase", "family", "settings", "median", "p95", "worst", "RMS", "repeats")
    grid = Grid("Error on settings left out of the fit", columns, right=3)
    each = [[_error_row(degree, phase) for degree in report.degrees] for phase in PHASES]
    merged = [_merged(rows, len(report.degrees)) for rows in each]
    alike = all(len(rows) == 1 for rows in merged)
    grid.rows += [row for rows in zip(*(merged if alike else each), strict=True) for row in rows]
    if any(cell.endswith("*") for row in grid.rows for cell in row):
        grid.notes.append(f"* within {NEAR_NOISE:g} times the spread of repeats: no model can do much better")
    if any(error.noise is not None for degree in report.degrees for phase in PHASES if (error := degree.error(phase))):
        grid.notes.append("repeats: how far those of one setting lie from their median, typically")
    notes = [(note, degree.layout) for degree in report.degrees for note in degree.cost.notes]
    grid.notes += _by_degree(report, notes)
    return grid


def _error_row(degree: Degree, phase: str) -> tuple[str, ...]:
    error, name = degree.error(phase), (degree.layout, phase, degree.cost.family)
    if error is None:
        return (*name, *("-",) * 6)
    mark = " *" if near_noise(error) else ""
    numbers = (_percent(error.median) + mark, *map(_percent, (error.p95, error.worst, error.rms)))
    return (*name, str(error.settings or "-"), *numbers, _percent(error.noise))


def _by_degree(report: FitReport, found: list[tuple[str, str]]) -> list[str]:
    """Return each text once, behind the degrees that it is true of; those that all share come bare."""
    layouts: dict[str, list[str]] = {}
    for text, layout in found:
        if layout not in layouts.setdefault(text, []):
            layouts[text].append(layout)
    everywhere = len(report.degrees)
    return [text if len(at) == everywhere else f"{', '.join(at)}: {text}" for text, at in layouts.items()]


def _terms(report: FitReport) -> Grid:
    columns = ("term", "layout", "amount", "peak", "time", "+/-", "told")
    grid = Grid("What the terms amount to (rates are per GPU)", columns, right=2, left_again=6)
    terms = [term for degree in report.degrees for term in degree.terms]
    names = dict.fromkeys(term.name for term in terms)
    for name in sorted(names, key=lambda name: _order([term for term in terms if term.name == name])):
        rows = _merged([_term_cells(term) for term in terms if term.name == name], len(report.degrees))
        grid.rows += [(name if index == 0 else "", *row) for index, row in enumerate(rows)]
    told = {term.told for term in terms}
    grid.notes = [_PEAK, _ERROR] if any(term.of_time is not None for term in terms) else []
    grid.notes += [text for key, text in _LEGEND.items() if key in told]
    grid.notes += ["prefix read: of one cached token, as queries that attend to it"] * ("prefix read" in names)
    grid.notes += ["sharpness: exponent of the soft maximum of compute and memory"] * ("sharpness" in names)
    grid.notes += _by_degree(report, [(f"{term.name}: {term.why}", term.layout) for term in terms if term.why])
    return grid


def _merged(rows: list[tuple[str, ...]], degrees: int) -> list[tuple[str, ...]]:
    """Return one row for all degrees where they differ in nothing else."""
    same = len(rows) == degrees > 1 and len({row[1:] for row in rows}) == 1
    return [("all", *rows[0][1:])] if same else rows


def _order(terms: list[Term]) -> int:
    """Prefill first, then both, decode, and what was measured."""
    return 3 if terms[0].told == "measured" else ("prefill", "both", "decode").index(terms[0].phase)


def _term_cells(term: Term) -> tuple[str, ...]:
    shares = _percent(term.of_peak, 0), _percent(term.of_time, 0)
    error = "open" if term.told in ("weakly", "limit") else _percent(term.standard_error, 0)
    return (f"{term.layout} {term.when}".strip(), _amount(term), *shares, error, term.told)


def _amount(term: Term) -> str:
    """Return a term's value as an engineer reads it."""
    if term.value is None:
        return "no cost"
    if term.unit.startswith("FLOP/s"):
        return f"{_three(term.value / 1e12)} TFLOP/s"
    if term.unit.startswith("bytes/s"):
        return f"{_three(term.value / 1e9)} GB/s"
    if term.unit.startswith("more time") or term.unit.startswith("of the"):
        return f"{term.value:+.0%}"
    if term.unit == "exponent":
        return f"{term.value:.2g}"
    if term.unit == "queries":
        return f"{_three(term.value)} queries"
    each = "/req" if "request" in term.unit else "/token" if "token" in term.unit else ""
    return f"{show_seconds(term.value)}{each}" if term.value > 0 else "no cost"


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _worst(phase: str, rows: list[Row]) -> Grid:
    shape = ("tokens of each", "cached") if phase == "prefill" else ("KV tokens of each",)
    grid = Grid(f"Predicted worst: {phase}", ("layout", "batch", *shape, "measured", "predicted", "error"), right=1)
    for row in rows:
        counts = (row.new_tokens, row.cached_tokens) if phase == "prefill" else (row.context_tokens,)
        times = show_seconds(row.measured_s), show_seconds(row.predicted_s or 0.0)
        tokens = (f"{count or 0:,}" for count in counts)
        grid.rows.append((row.layout, f"{row.batch:,}", *tokens, *times, f"{row.error or 0.0:+.1%}"))
    return grid


def _percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


# ---- as text and as HTML


def _rich(grid: Grid) -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table(
        title=grid.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for at, column in enumerate(grid.columns):
        table.add_column(column, justify="right" if grid.holds_numbers(at) else "left", overflow="fold")
    for row in grid.rows:
        table.add_row(*row)
    return table


def _html(grid: Grid) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        marks = (' class="number"' if grid.holds_numbers(at) else "" for at in range(len(cells)))
        each = "".join(f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(marks, cells, strict=True))
        return f"<tr>{each}</tr>"

    body = "\n".join(line("td", row) for row in grid.rows)
    notes = "".join(f"<li>{escape(note)}</li>\n" for note in grid.notes)
    table = f"<table>\n<thead>{line('th', grid.columns)}</thead>\n<tbody>\n{body}\n</tbody>\n</table>\n"
    return f"<h3>{escape(grid.title)}</h3>\n{table}" + (f"<ul>\n{notes}</ul>\n" if notes else "")
