"""The table family: a step put together from measured parts, each interpolated straight. Nothing is fitted.

Attention is taken from a dense grid over chunk, cached tokens, batch and context, the points that mix a chunk with
decoding requests included: on the two cards that were looked at, such a step's attention takes 1.3 to 2.4 times what
chunk and decoding take apart. What is in no table (the host's work between kernels) is `Unmeasured`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from planner.cost import kernel
from planner.cost.base import CostModel, TermError
from planner.specs.layout import Layout
from planner.specs.step_tables import StepTables

_GRAPHS = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Numbers of tokens that vLLM captures CUDA graphs for: a step of fewer tokens is padded up to the next."""
_LEAST_VALUES = 4


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """Time of a step [s] that no layer table shows: kernels waiting for the host."""

    prefill_s: float = 0.0
    """Of a step with any prompt tokens, whose kernels are launched one by one."""
    decode_s: float = 0.0
    """Of a step of decoding requests alone, one CUDA graph planned a step ahead."""


def table(tables: StepTables, layout: Layout, max_batch: int = 256) -> CostModel:
    """Return the cost model that looks each step up in `tables`, and nothing else: see `with_unmeasured`.

    `max_batch`: of the engine; it captures CUDA graphs up to twice as many tokens, at most 512.
    """
    axes, grid, kept_out = _grid(tables.attention)
    dense = _dense(*tables.by_tokens, min(2 * max_batch, _GRAPHS[-1]))
    sequences = _each(*tables.by_sequences)
    p = np.zeros(kernel.SIZE)
    p[kernel.FAMILY] = kernel.MEASURED
    p[3:9] = len(dense), len(sequences), *grid.shape
    parameters = np.concatenate([p, dense, sequences, *axes, grid.ravel()])
    prompts = tables.attention[tables.attention[:, 0] > 0, 0]
    return CostModel(
        layout,
        parameters,
        family="table",
        prefill_error=_error(parameters, tables.attention, kept_out & (tables.attention[:, 0] > 0)),
        decode_error=_error(parameters, tables.attention, kept_out & (tables.attention[:, 0] == 0)),
        measured_tokens=(int(prompts.min()), int(prompts.max())),
        notes=("put together from layer tables, not measured end to end", *tables.notes),
    )


def with_unmeasured(cost: CostModel, unmeasured: Unmeasured) -> CostModel:
    """Return a table's cost model with the time that no layer table shows."""
    parameters = cost.parameters.copy()
    parameters[1:3] = unmeasured.prefill_s, unmeasured.decode_s
    return replace(cost, parameters=parameters)


def _each(where: np.ndarray, time_s: np.ndarray) -> np.ndarray:
    """Return the curve at 0, 1, 2 ... up to its last point; flat below the first."""
    return np.interp(np.arange(where[-1] + 1), where, time_s)


def _dense(where: np.ndarray, time_s: np.ndarray, largest_graph: int) -> np.ndarray:
    """Return the time [s] of a step of 0, 1, 2 ... tokens, padded as the engine pads it.

    Beyond the largest graph the next point that was measured counts: matrix kernels work in tiles, so times jump
    right behind a multiple of the tile and are level up to the next.
    """
    tokens = np.arange(int(where[-1]) + 1)
    graphs = np.array([size for size in _GRAPHS if size <= largest_graph])
    padded = np.where(
        tokens <= graphs[-1],
        graphs[np.searchsorted(graphs, tokens).clip(max=len(graphs) - 1)],
        where[np.searchsorted(where, tokens).clip(max=len(where) - 1)],
    )
    return np.interp(padded, where, time_s)


def _grid(rows: np.ndarray) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Return the axes, the time [s] on their grid, and which rows are not on it.

    An axis takes the values that are powers of two, or all if they are few: the tables hold a grid by twos and a finer
    one of part of the range, whose rows are left to test the interpolation on.
    """
    axes = [_axis(rows[:, column]) for column in range(4)]
    at = [np.searchsorted(axis, rows[:, column]).clip(max=len(axis) - 1) for column, axis in enumerate(axes)]
    on_grid = np.all(
        [axis[i] == rows[:, column] for column, (axis, i) in enumerate(zip(axes, at, strict=True))], axis=0
    )
    grid = np.full([len(axis) for axis in axes], np.nan)
    grid[tuple(i[on_grid] for i in at)] = rows[on_grid, 4]
    return axes, _filled(axes, grid), ~on_grid


def _axis(values: np.ndarray) -> np.ndarray:
    """Return the positive values that are powers of two, or all of them, behind a zero."""
    positive = np.unique(values[values > 0])
    twos = positive[np.log2(positive) % 1 == 0]
    return np.concatenate([[0.0], twos if len(twos) >= _LEAST_VALUES else positive])


def _filled(axes: list[np.ndarray], grid: np.ndarray) -> np.ndarray:
    """Return the grid without holes: no chunk has no cache, no batch no context, and what was not measured is inferred.

    A hole is interpolated along context; a line with hardly any point grows from the one of the next smaller batch as
    decoding alone does.
    """
    grid[0, :, 0, :] = 0.0
    grid[0, 1:] = grid[0, 0]
    grid[:, :, 0, :] = grid[:, :, 0, :1]
    contexts = axes[3]
    for i, j, n in product(*(range(size) for size in grid.shape[:3])):
        line = grid[i, j, n]
        known = np.isfinite(line)
        if known.sum() >= 2:
            grid[i, j, n] = _straight(contexts, contexts[known], line[known])
        else:
            grid[i, j, n] = grid[i, j, n - 1] + grid[0, 0, n] - grid[0, 0, n - 1]
    return np.maximum(grid, 0.0)


def _straight(at: np.ndarray, where: np.ndarray, time_s: np.ndarray) -> np.ndarray:
    """Return the curve at `at`: flat before its first point, straight on behind its last."""
    slope = max(0.0, (time_s[-1] - time_s[-2]) / (where[-1] - where[-2]))
    return np.asarray(np.interp(at, where, time_s) + slope * np.maximum(at - where[-1], 0.0))


def _error(parameters: np.ndarray, rows: np.ndarray, held_out: np.ndarray) -> TermError | None:
    """Return how far interpolated attention is off on rows that are not on the grid; None without any.

    Of attention alone: the other parts are measured at every few tokens.
    """
    rows = rows[held_out]
    if not len(rows):
        return None
    alone = parameters.copy()
    alone[kernel.SIZE : kernel.SIZE + int(alone[3] + alone[4])] = 0.0
    chunk, cached, decodes, context = rows[:, :4].T
    shapes = np.column_stack([chunk > 0, chunk, chunk * (chunk + 2 * cached), decodes, decodes * context, chunk * 0])
    out = np.empty(len(rows))
    kernel.iterations_s(alone, shapes, out)
    off = np.abs(out / rows[:, 4] - 1.0)
    return TermError(float(np.median(off)), float(np.percentile(off, 95)), float(off.max()), len(off))
