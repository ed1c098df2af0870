"""A profile's own findings as tables for a terminal: held-out errors, links, overheads, and what was noticed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from planner.specs.layout import Layout
from planner.specs.profile import Profile
from planner.specs.units import show_bytes, show_seconds
from profiler.accuracy import Target

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def tables(profile: Profile) -> Iterator[RenderableType]:
    """Yield the tables of everything that `planner fit` does not show."""
    from rich.text import Text

    if profile.accuracy:
        yield _accuracy(profile)
        yield Text("  never fitted: drawn at random before anything was", style="dim")
    if profile.transfers:
        yield _transfers(profile)
    if profile.overheads:
        yield _overheads(profile)
    for note in profile.environment.notes if profile.environment else ():
        yield Text(f"  {note}", style="dim")


def _table(title: str, left: int, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right")
    return table


def _accuracy(profile: Profile) -> Table:
    target = Target()
    table = _table(
        "Error on settings kept apart", 2, "layout", "phase", "settings", "median", "p95", "worst", "repeats", "target"
    )
    for each in profile.accuracy:
        shares = (each.median, each.p95, each.worst)
        repeats = "-" if each.repeats is None else f"{each.repeats:.1%}"
        met = "met" if target.met(each) else "missed"
        layout = str(Layout(each.tp, each.pp))
        table.add_row(layout, each.phase, str(each.settings), *(f"{share:.1%}" for share in shares), repeats, met)
    return table


def _transfers(profile: Profile) -> Table:
    table = _table("Moving bytes", 2, "what", "over", "ranks", "few", "many", "rate")
    for each in profile.transfers:
        (low, low_s, *_), (high, high_s, *_) = each.rows[0], each.rows[-1]
        few, many = (f"{show_bytes(size)} in {show_seconds(s)}" for size, s in ((low, low_s), (high, high_s)))
        table.add_row(each.what, each.over, str(each.ranks), few, many, f"{show_bytes(high / high_s)}/s")
    return table


def _overheads(profile: Profile) -> Table:
    table = _table("A step's time outside of the model", 2, "layout", "phase", "requests", "median", "p90")
    for each in profile.overheads:
        times = show_seconds(each.median_s), show_seconds(each.p90_s)
        table.add_row(str(Layout(each.tp, each.pp)), each.phase, f"up to {each.requests}", *times)
    return table
