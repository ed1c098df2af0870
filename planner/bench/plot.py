"""Measured and predicted TTFT and TPOT as two curves each: the share of requests that took at most so long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from planner import drawing
from planner.bench.result import Result
from planner.drawing import COLORS, plain_ticks
from planner.specs.units import show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_IN, _HEIGHT_IN = 10.0, 4.2
_GREY = "#57606a"


def to_svg(result: Result) -> str:
    """Return the picture as SVG text."""
    return drawing.to_svg(lambda: draw(result))


def to_png(result: Result) -> bytes:
    """Return the picture as PNG, 1,200 pixels wide."""
    return drawing.to_png(lambda: draw(result))


def draw(result: Result) -> Figure:
    """Return the figure: TTFT on the left, TPOT on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN))
    load, measured = result.load, result.measured
    how = f"at {load.rate_rps:.3g} requests/s" if load.clients is None else f"from {load.clients.count} clients"
    figure.text(0.5, 0.95, f"{load.name} {how}", fontsize=12, fontweight="bold", ha="center", va="center")
    rows = measured.counted & measured.ok
    for column, name in enumerate(("ttft", "tpot")):
        axes = figure.add_axes((0.065 + 0.5 * column, 0.13, 0.42, 0.7))
        axes.set_title(name.upper())
        predicted = getattr(result.predicted, f"{name}_s") if result.predicted is not None else None
        bounds_s = [getattr(slo, f"{name}_s") for slo in load.slos]
        _curves(axes, getattr(measured, f"{name}_s")[rows], predicted, bounds_s)
        for slo, bound_s in zip(load.slos, bounds_s, strict=True):
            axes.axvline(1e3 * bound_s, color=_GREY, linewidth=1.0, linestyle=":")
            axes.annotate(
                f"{slo.name or 'SLO'}: {show_seconds(bound_s)} ",
                (1e3 * bound_s, 1.0),
                color=_GREY,
                fontsize=8,
                rotation=90,
                ha="right",
                va="top",
            )
        axes.set(ylim=(0, 1.02), xlabel="time [ms]", ylabel="share of answered requests")
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="upper right", bbox_to_anchor=(0.985, 0.99), ncols=2)
    return figure


def _curves(axes: Axes, measured: np.ndarray, predicted: np.ndarray | None, bounds_s: list[float]) -> None:
    """Draw the curves over a logarithmic axis from the first hundredth of both to the end of both, and the bounds."""
    ends = list(bounds_s)
    for values, color, style, label in (
        (measured, COLORS[0], "-", "measured"),
        (predicted, COLORS[1], "--", "predicted"),
    ):
        if values is None or not len(finite := np.sort(values[np.isfinite(values) & (values > 0)])):
            continue
        shares = np.arange(1, len(finite) + 1) / len(finite)
        axes.step(1e3 * finite, shares, style, where="post", color=color, linewidth=1.6, label=label)
        ends += [float(np.percentile(finite, 1)), float(finite[-1])]
    limits = 1e3 * np.array([min(ends) / 1.15, max(ends) * 1.15])
    axes.set(xscale="log", xlim=limits)
    plain_ticks(axes.xaxis, limits)
