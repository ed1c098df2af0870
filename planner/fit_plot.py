"""The fit report as a picture: predicted against measured, where the error lies, and the curves themselves.

Drawn with matplotlib without its global state, so that equal reports give equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from planner import drawing
from planner.cost.base import BatchShape
from planner.cost.fit import PHASES
from planner.drawing import COLORS, plain_ticks
from planner.fit_report import Degree, FitReport, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "osD^vPX"
_BANDS = ((0.2, "#e8ecf1"), (0.1, "#d3dbe5"))
_WIDTH_IN, _TITLE_IN, _ROW_IN = 10.0, 0.4, 3.8
_LEFT_IN, _RIGHT_IN, _BOTTOM_IN, _BETWEEN_IN = 0.95, 0.15, 0.5, 0.85
_BEYOND = 4.0
"""Curves go on for this factor outside what was measured, dashed."""
_POINTS = 120
_BESIDE = 1.05
"""Degrees stand side by side, by this factor, where all of them have the same few batch sizes."""
_NEAR = 2**0.25
_UNMEASURED = {"prefill": (64, 8192), "decode": (1, 256)}
_TOKENS = 1024
"""Context of the decode curves where no context was measured."""
_NO_ROWS = "no measurements to hold out"


def to_svg(reports: Sequence[FitReport]) -> str:
    """Return the picture of all GPU types, one below the other, as SVG text."""
    return drawing.to_svg(lambda: draw(reports))


def to_png(reports: Sequence[FitReport]) -> bytes:
    """Return the picture as PNG, 1,200 pixels wide."""
    return drawing.to_png(lambda: draw(reports))


def draw(reports: Sequence[FitReport]) -> Figure:
    """Return the figure: per GPU type rows of two panels, prefill on the left and decode on the right.

    Panels stand at fixed places: matplotlib's own layout differs in the last bits from one drawing to the next.
    """
    from matplotlib.figure import Figure

    rows = [_panels(report) for report in reports]
    height_in = sum(_TITLE_IN + _ROW_IN * len(draws) for draws in rows)
    figure = Figure(figsize=(_WIDTH_IN, height_in))
    top_in = height_in
    for report, draws in zip(reports, rows, strict=True):
        at = (top_in - 0.5 * _TITLE_IN) / height_in
        figure.text(0.5, at, report.title, fontsize=12, fontweight="bold", ha="center", va="center")
        top_in -= _TITLE_IN
        for panel in draws:
            top_in -= _ROW_IN
            for column, phase in enumerate(PHASES):
                left, width = (_LEFT_IN + column * _WIDTH_IN / 2) / _WIDTH_IN, 0.5 - (_LEFT_IN + _RIGHT_IN) / _WIDTH_IN
                bottom, height = (top_in + _BOTTOM_IN) / height_in, (_ROW_IN - _BETWEEN_IN) / height_in
                axes = figure.add_axes((left, bottom, width, height))
                panel(axes, report, phase)
    return figure


def _panels(report: FitReport) -> list[Callable[[Axes, FitReport, str], None]]:
    """Return what to draw of a GPU type, from the top down; without measurements only the curves."""
    checked = any(row.predicted_s is not None for degree in report.degrees for row in degree.rows)
    return [_against, _errors, _curves] if checked else [_curves]


# ---- panels


def _against(axes: Axes, report: FitReport, phase: str) -> None:
    """Held-out prediction against measurement, both in ms."""
    axes.set_title(f"{phase.capitalize()}: settings left out of the fit")
    rows = [row for degree in report.degrees for row in degree.of(phase) if row.predicted_s is not None]
    if not rows:
        return _empty(axes)
    times_ms = 1e3 * np.array([(row.measured_s, row.predicted_s) for row in rows])
    ends = np.array([times_ms.min() / 1.25, times_ms.max() * 1.25])
    for band, color in _BANDS:
        axes.fill_between(ends, ends * (1 - band), ends * (1 + band), color=color, linewidth=0, label=f"±{band:.0%}")
    axes.plot(ends, ends, color="#57606a", linewidth=0.8)
    for style, degree in _styled(report):
        mine = [row for row in degree.of(phase) if row.predicted_s is not None]
        if mine:
            xy = 1e3 * np.array([(row.measured_s, row.predicted_s) for row in mine])
            axes.plot(*xy.T, linestyle="", label=degree.layout, **_points(style))
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured [ms]", ylabel="predicted [ms]")
    plain_ticks(axes.xaxis, ends)
    plain_ticks(axes.yaxis, ends)
    axes.legend(loc="upper left")


def _errors(axes: Axes, report: FitReport, phase: str) -> None:
    """Signed error of each row where it lies: against the tokens of a prefill, against the batch of a decode step."""
    axes.set_title(f"{phase.capitalize()}: error of what was left out")
    rows = [row for degree in report.degrees for row in degree.of(phase) if row.error is not None]
    if not rows:
        return _empty(axes)
    most = max(0.14, 1.4 * max(abs(row.error or 0.0) for row in rows))  # room for the legend
    axes.axhspan(-10, 10, color=_BANDS[1][1], linewidth=0, label="±10%")
    axes.axhline(0, color="#57606a", linewidth=0.8)
    middle = (len(report.degrees) - 1) / 2
    for at, (style, degree) in enumerate(_styled(report)):
        mine = [row for row in degree.of(phase) if row.error is not None]
        if mine:
            beside = _BESIDE ** (at - middle) if phase == "decode" else 1.0
            x, y = [beside * _size(row) for row in mine], [100 * (row.error or 0.0) for row in mine]
            axes.plot(x, y, linestyle="", label=degree.layout, **_points(style))
    _size_axis(axes, phase, [_size(row) for row in rows])
    axes.set(ylim=(-100 * most, 100 * most), ylabel="predicted / measured - 1 [%]")
    axes.legend(loc="upper right", ncols=5, columnspacing=1.2, handletextpad=0.4)


def _curves(axes: Axes, report: FitReport, phase: str) -> None:
    """The law of each degree over the tokens of one prompt, or over the batch at one context, with what was measured.

    Hollow: prefills of a batch or over a cached prefix, and steps whose context is farther than a quarter of an octave.
    """
    rows = [row for degree in report.degrees for row in degree.of(phase)]
    context = _typical_context(rows)
    of = "of one prompt" if phase == "prefill" else f"at {context:,} KV tokens per request"
    axes.set_title(f"{phase.capitalize()}: time {of}")
    for style, degree in _styled(report):
        _curve(axes, style, degree, phase, context)
        for near in (True, False):
            mine = [row for row in degree.of(phase) if _on_curve(row, context) == near]
            if mine:
                x, y = [_size(row) for row in mine], [1e3 * row.measured_s for row in mine]
                axes.plot(x, y, linestyle="", **_points(style, filled=near))
    everything = [_size(row) for row in rows] or list(_UNMEASURED[phase])
    _size_axis(axes, phase, [max(1.0, min(everything) / _BEYOND), max(everything) * _BEYOND])
    axes.set(yscale="log", ylabel="time [ms]")
    plain_ticks(axes.yaxis, axes.get_ylim())
    axes.legend(handles=_legend(report, phase, rows), loc="upper left")


def _curve(axes: Axes, style: int, degree: Degree, phase: str, context: int) -> None:
    """One law: solid over the sizes that were measured at this degree and near this curve, dashed beyond."""
    everything = [_size(row) for row in degree.of(phase)]
    sizes = [_size(row) for row in degree.of(phase) if _on_curve(row, context)]
    low, high = (min(sizes), max(sizes)) if sizes else _UNMEASURED[phase]
    ends = max(1.0, min((low, *everything)) / _BEYOND), max((high, *everything)) * _BEYOND
    stretches = ((ends[0], low, "--"), (low, high, "-"), (high, ends[1], "--")) if sizes else ((*ends, "--"),)
    for start, end, line in stretches:
        x = np.unique(np.round(np.geomspace(start, end, _POINTS)))
        y = [1e3 * degree.cost.iteration_s(_shape(phase, int(size), context)) for size in x]
        axes.plot(x, y, line, color=COLORS[style], linewidth=1.4)


def _shape(phase: str, size: int, context: int) -> BatchShape:
    return BatchShape.prefill(size) if phase == "prefill" else BatchShape.decode(size, size * context)


def _size(row: Row) -> float:
    """Return what a row is drawn over: new tokens of the whole batch, or requests."""
    return float(row.tokens if row.phase == "prefill" else row.batch)


def _typical_context(rows: Sequence[Row]) -> int:
    """Return the measured context that most batch sizes were measured near, the longest of several."""
    contexts = {row.context_tokens for row in rows if row.context_tokens is not None}

    def batches(context: int) -> int:
        return len({(row.layout, row.batch) for row in rows if _on_curve(row, context)})

    return max(sorted(contexts, reverse=True), key=batches, default=_TOKENS)


def _on_curve(row: Row, context: int) -> bool:
    if row.context_tokens is not None:
        return context / _NEAR <= row.context_tokens <= context * _NEAR
    return row.batch == 1 and not row.cached_tokens


# ---- what panels share


def _styled(report: FitReport) -> Iterator[tuple[int, Degree]]:
    """Yield each degree with the number of its colour and marker: for a power of two the same in every picture."""
    octaves = [tp.bit_length() - 1 for degree in report.degrees if not (tp := degree.cost.layout.tp) & (tp - 1)]
    free = (style for style in range(len(report.degrees) + len(octaves) + 10) if style not in octaves)
    for degree in report.degrees:
        tp = degree.cost.layout.tp
        yield (next(free) if tp & (tp - 1) else tp.bit_length() - 1) % len(COLORS), degree


def _points(style: int, filled: bool = True) -> dict[str, Any]:
    color = COLORS[style]
    face = color if filled else "none"
    return {
        "marker": _MARKERS[style],
        "color": color,
        "markersize": 4.5,
        "markerfacecolor": face,
        "markeredgewidth": 0.8,
        "alpha": 0.85,
    }


def _legend(report: FitReport, phase: str, rows: Sequence[Row]) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=COLORS[style], label=degree.layout, **_markers(style, degree.of(phase)))
        for style, degree in _styled(report)
    ]
    grey = "#57606a"
    label = "beyond what was measured" if rows else "nothing measured"
    handles.append(Line2D([], [], color=grey, linestyle="--", label=label))
    if any(not _on_curve(row, _typical_context(rows)) for row in rows):
        other = "other context" if phase == "decode" else _others(rows)
        handles.append(Line2D([], [], color=grey, linestyle="", marker="o", markerfacecolor="none", label=other))
    return handles


def _others(rows: Sequence[Row]) -> str:
    """Return how prefills differ that are not one prompt without a cached prefix."""
    ways = ["batch above 1"] * any(row.batch > 1 for row in rows) + ["cached prefix"] * any(
        r.cached_tokens for r in rows
    )
    return " or ".join(ways)


def _markers(style: int, rows: Sequence[Row]) -> dict[str, Any]:
    return {"marker": _MARKERS[style], "markersize": 4.5} if rows else {}


def _size_axis(axes: Axes, phase: str, sizes: Sequence[float]) -> None:
    label = "new tokens of the batch" if phase == "prefill" else "batch [requests]"
    ends = np.array([min(sizes) / 1.25, max(sizes) * 1.25])
    axes.set(xscale="log", xlim=ends, xlabel=label)
    plain_ticks(axes.xaxis, ends, octaves=True)


def _empty(axes: Axes) -> None:
    """Say that there is nothing to draw."""
    axes.text(0.5, 0.5, _NO_ROWS, transform=axes.transAxes, ha="center", va="center", color="#57606a")
    axes.set(xticks=[], yticks=[])
