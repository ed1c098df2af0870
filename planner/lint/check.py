"""All checks over one table, file or profile. To add one: a function table, rows -> findings, and a line below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planner.lint import cells, coefficients, copies, identify, launch, order, parts, rates, readers, repeats
from planner.lint.base import SEVERITIES, Finding, Table
from planner.lint.given import Given
from planner.specs.gpu import Gpu
from planner.specs.model import ModelSpec
from planner.specs.profile import Profile, Sample

Check = Callable[[Table, np.ndarray], Iterable[Finding]]

REJECTING: tuple[Check, ...] = (
    cells.missing,
    cells.unfinished,
    parts.parts,
    parts.within,
    copies.copies,
    rates.rates,
    coefficients.unphysical,
    coefficients.scaled,
)
"""These see every row and may reject some."""

TELLING: tuple[Check, ...] = (
    copies.twice,
    repeats.repeats,
    order.order,
    rates.elements,
    launch.launch,
    identify.identify,
    identify.constant,
    identify.knees,
    coefficients.negative,
    coefficients.regimes,
    coefficients.ranks,
)
"""These see what is left, so that a row is not blamed twice for one fault."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the lint found in one file: rejects first, then flags, then notes."""

    file: str
    kind: str
    rows: int
    findings: tuple[Finding, ...]

    def count(self, severity: str) -> int:
        """Return how many rows have a finding of that severity; a row counts once."""
        return len({row for finding in self.findings if finding.severity == severity for row in finding.rows})

    @property
    def rejects(self) -> bool:
        """True when anything is rejected."""
        return any(finding.severity == "reject" for finding in self.findings)


def check(table: Table) -> tuple[Finding, ...]:
    """Return all findings of a table, in order of severity."""
    everything = np.ones(len(table.lines), dtype=bool)
    bad = np.isin(table.lines, _rejected(table.found))
    rejecting = [finding for one in REJECTING for finding in one(table, everything & ~bad)]
    left = everything & ~np.isin(table.lines, _rejected([*table.found, *rejecting]))
    telling = [finding for one in TELLING for finding in one(table, left)]
    found = [*table.found, *rejecting, *telling]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


def _rejected(findings: Iterable[Finding]) -> list[int]:
    return [row for finding in findings if finding.severity == "reject" for row in finding.rows]


def lint(path: str | Path, given: Given | None = None) -> Report:
    """Return what is wrong in a profile or foreign table. Raises InputError when it is neither."""
    table = readers.read(path, given or Given())
    return Report(table.file, table.kind, len(table.lines) + len(table.laws), check(table))


def sound_samples(profile: Profile, model: ModelSpec, gpu: Gpu) -> tuple[list[Sample], tuple[Finding, ...]]:
    """Return the samples that no check rejects, in order, and all findings.

    Rows of a finding count samples from 1, and the published coefficients behind them.
    """
    table = readers.of_profile(profile, model, gpu)
    findings = check(table)
    rejected = set(_rejected(findings))
    samples = list(profile.samples.each) if profile.samples else []
    return [sample for row, sample in enumerate(samples, 1) if row not in rejected], findings


def lines_of(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield one line of text per reject, for the notes of a cost model."""
    for finding in findings:
        if finding.severity == "reject":
            rows = f"{len(finding.rows)} row{'s' * (len(finding.rows) > 1)}"
            yield f"left out {rows} ({finding.rule}): {finding.what}"
