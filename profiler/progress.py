"""How far a run is, on stderr: a bar with the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_EVERY_S = 15.0


class Quiet:
    """Shows nothing."""

    def at(self, what: str, spent_s: float, budget_s: float) -> None:
        """Show nothing."""


class _Lines:
    """One line every so often, for logs."""

    def __init__(self) -> None:
        self._last_s = -_EVERY_S

    def at(self, what: str, spent_s: float, budget_s: float) -> None:
        import sys

        now_s = time.monotonic()
        if now_s - self._last_s >= _EVERY_S:
            self._last_s = now_s
            print(f"planner: {what}, {_left(spent_s, budget_s)}", file=sys.stderr, flush=True)


def _left(spent_s: float, budget_s: float) -> str:
    left_s = max(0, round(budget_s - spent_s))
    return f"at most {left_s // 60}:{left_s % 60:02d} left"


@contextmanager
def shown(quiet: bool) -> Iterator[Quiet | _Lines]:
    """Yield whoever shows progress while the body runs."""
    import sys

    if quiet:
        yield Quiet()
    elif not sys.stderr.isatty():
        yield _Lines()
    else:
        with _bar() as bar:
            yield bar


@contextmanager
def _bar() -> Iterator[_Lines]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.text import Text

    console = Console(stderr=True, highlight=False, markup=False)
    columns = (BarColumn(bar_width=20), TextColumn("{task.fields[left]}"), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=1.0, left="")

        class Bar(_Lines):
            def at(self, what: str, spent_s: float, budget_s: float) -> None:
                done = min(1.0, spent_s / max(budget_s, 1e-9))
                progress.update(task, completed=done, description=Text(what).plain, left=_left(spent_s, budget_s))

        yield Bar()
