"""Everything that can go wrong, as one tree.

PlannerError                    the base: `except PlannerError` catches all of ours
+- InputError        exit 1     a file or a flag is wrong; holds one `Fault` (one line) per mistake
+- InfeasibleError   exit 2     the inputs are right, yet no plan meets the SLO; holds the way out
+- InvariantError    exit 70    our own mistake: a plan that fails its own check. Please report it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class PlannerError(Exception):
    """Base of all errors that this package raises on purpose."""

    exit_code = 70


@dataclass(frozen=True, slots=True)
class Fault:
    """One mistake in one input: where it is and what was expected there. `str()` is the line a user reads."""

    message: str
    file: str = ""
    line: int | None = None
    column: int | None = None
    field: str = ""

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part not in ("", None))
        text = ": ".join(part for part in (place, self.field, self.message) if part)
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)  # one line, whatever a key or name holds


class InputError(PlannerError):
    """An input cannot be used. `faults` holds every mistake found, not only the first."""

    exit_code = 1

    def __init__(self, faults: Fault | str | Iterable[Fault]):
        if isinstance(faults, str):
            faults = Fault(faults)
        self.faults: tuple[Fault, ...] = (faults,) if isinstance(faults, Fault) else tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


def bad_row(file: str | Path, line: int | None, message: str) -> InputError:
    """Return the error for one row of a table or trace (`line` counts from 1, header included)."""
    return InputError(Fault(message, str(file), line))


class InfeasibleError(PlannerError):
    """No layout meets the SLO. Says which bound binds, the best achievable value, and what would help."""

    exit_code = 2

    def __init__(self, message: str, *, binding: str, best_s: float, bound_s: float, way_out: str = ""):
        self.binding, self.best_s, self.bound_s, self.way_out = binding, best_s, bound_s, way_out
        super().__init__(message)


class InvariantError(PlannerError):
    """A result contradicts our own constraints. Never the user's fault."""
