"""The fit report as one HTML page: tables and pictures, nothing to fetch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from planner.fit_plot import to_svg
from planner.fit_report import FitReport
from planner.fit_view import html_tables

_STYLE = """\
body{font:14px/1.45 sans-serif;color:#1f2328;max-width:1000px;margin:24px auto;padding:0 16px}
h1{font-size:22px} h2{font-size:18px;margin-top:36px} h3{font-size:15px;margin:24px 0 6px}
table{border-collapse:collapse} th{border-bottom:1px solid #8c959f;text-align:left} th,td{padding:2px 12px 2px 0}
.number{text-align:right;font-variant-numeric:tabular-nums} ul{color:#57606a;margin:6px 0;padding-left:18px}
svg{max-width:100%;height:auto}"""


def page(source: str, reports: Sequence[FitReport]) -> str:
    """Return the page of all GPU types; equal reports give equal bytes. `source`: a file, or a preset's name."""
    name = re.sub(r"\.(ya?ml|json)$", "", source.rsplit("/", 1)[-1])
    sections = "\n".join(_section(index, report) for index, report in enumerate(reports))
    title = f"{escape(name)}: fit of the cost models"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>\n{_STYLE}\n</style>\n</head>\n<body>\n<h1>{title}</h1>\n{sections}\n</body>\n</html>\n"
    )


def _section(index: int, report: FitReport) -> str:
    heading = f"<h2>{escape(report.title)}</h2>"
    return f"{heading}\n{_inline(to_svg([report]), f'fit{index}-')}\n{html_tables(report)}"


def _inline(svg: str, prefix: str) -> str:
    """Return a picture to stand inside a page: without its prologue, its ids unlike those of other pictures."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r'\bid="', f'id="{prefix}', body)
    return re.sub(r'(url\(|href=")#', rf"\1#{prefix}", body)
