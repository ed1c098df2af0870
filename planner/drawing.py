"""What our pictures have in common: colours, fonts, plain ticks, and equal bytes for equal figures.

matplotlib is used without its global state and without anybody's configuration file.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Told apart by the colour-blind as well (Okabe and Ito, 2008)."""

_SETTINGS: Any = {
    "svg.hashsalt": "planner fit",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


def to_svg(draw: Callable[[], Figure]) -> str:
    """Return the figure that `draw` makes as SVG text."""
    buffer = io.StringIO()
    with _drawing():
        draw().savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def to_png(draw: Callable[[], Figure]) -> bytes:
    """Return the figure that `draw` makes as PNG, 120 pixels an inch."""
    buffer = io.BytesIO()
    with _drawing():
        draw().savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


@contextmanager
def _drawing() -> Iterator[None]:
    """Draw with our settings and nobody's configuration file."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def plain_ticks(axis: Any, ends: Sequence[float] | np.ndarray, octaves: bool = False) -> None:
    """Label a logarithmic axis with plain numbers: powers of two, or round ones."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = float(ends[0]), float(ends[1])
    ticks = _octaves(low, high) if octaves else _round(low, high)
    axis.set_major_locator(FixedLocator(ticks.tolist()))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 100 else f"{value:.3g}"))


def _octaves(low: float, high: float) -> np.ndarray:
    """Return the powers of two between the ends, every other one and so on where there are many."""
    ticks = 2.0 ** np.arange(np.ceil(np.log2(low)), np.floor(np.log2(high)) + 1)
    return np.asarray(ticks[:: max(1, -(-len(ticks) // 8))])


def _round(low: float, high: float) -> np.ndarray:
    """Return round numbers between the ends: decades, parts of them where there are few, even steps in a narrow
    range."""
    from matplotlib.ticker import MaxNLocator

    decades = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5)):
        ticks = np.outer(decades, steps).ravel()
        ticks = ticks[(ticks >= low) & (ticks <= high)]
        if len(ticks) >= 4:
            return ticks
    even = np.asarray(MaxNLocator(5).tick_values(low, high))
    return even[(even >= low) & (even <= high)]
