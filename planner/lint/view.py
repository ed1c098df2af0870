"""A lint report as lines of text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from planner.lint.base import Finding, ranges
from planner.lint.check import Report

_MOST_RANGES = 8
_INDENT = 7


def lines(report: Report, width: int) -> Iterator[str]:
    """Yield each finding, wrapped to `width` columns, and a summary line."""
    for finding in report.findings:
        wrapped = textwrap.wrap(_text(finding), max(width, 40), subsequent_indent=" " * _INDENT, break_on_hyphens=False)
        yield "\n".join(wrapped)
    yield "\n".join(textwrap.wrap(f"{report.file}: {summary(report)}", max(width, 40), break_long_words=False))


def _text(finding: Finding) -> str:
    rows = f" row{'s' * (len(finding.rows) > 1)} {ranges(finding.rows, _MOST_RANGES)}" if finding.rows else ""
    way_out = f"; {finding.way_out}" if finding.way_out else ""
    text = f"{finding.severity:<6} {finding.rule}:{rows}{':' * bool(rows)} {finding.what}{way_out}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def summary(report: Report) -> str:
    """Return how many rows there are and how many of them were rejected and flagged."""
    things = "fit" if report.kind == "published fits" else "row"
    return (
        f"{report.kind}, {report.rows} {things}{'s' * (report.rows != 1)}, "
        f"{report.count('reject')} rejected, {report.count('flag')} flagged"
    )


def to_json(report: Report) -> dict[str, Any]:
    """Return the report as plain data; `rows` are file lines as ranges, none left unsaid."""
    return {
        "file": report.file,
        "kind": report.kind,
        "rows": report.rows,
        "rejected": report.count("reject"),
        "flagged": report.count("flag"),
        "findings": [
            {
                "severity": finding.severity,
                "rule": finding.rule,
                "rows": finding.where,
                "count": len(finding.rows),
                "what": finding.what,
                "way_out": finding.way_out,
            }
            for finding in report.findings
        ],
    }
