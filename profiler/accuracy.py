"""What the measurements of one layout say when they are fitted, and how far that is off on settings kept apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.base import CostModel
from planner.cost.fit import fit_all
from planner.errors import InputError
from planner.specs.gpu import Gpu
from planner.specs.layout import Layout
from planner.specs.measured import Accuracy
from planner.specs.model import ModelSpec
from planner.specs.profile import Profile, Provenance, Sample, Samples
from profiler.grid import Known
from profiler.setting import Setting

PHASES = ("prefill", "decode")
Times = Mapping[Setting, Sequence[float]]
"""Repeats of each setting [s]."""


@dataclass(frozen=True, slots=True)
class Target:
    """Held-out errors at which a layout counts as known."""

    median: float = 0.04
    p95: float = 0.15

    def met(self, found: Accuracy | None) -> bool:
        """Return True when the errors are as small as asked."""
        return found is not None and found.median <= self.median and found.p95 <= self.p95


def fitted(times: Times, model: ModelSpec, gpu: Gpu, layout: Layout) -> CostModel:
    """Return the cost model of whole iterations of one layout, all stages and hand-offs included.

    Stages are not told apart: the fit sees an instance of the same tensor-parallel degree that takes this long. Raises
    InputError when the times say nothing.
    """
    rows = [setting.sample(layout.tp, 1, time_s) for setting, repeats in times.items() for time_s in repeats]
    cost = fit_all(_profile(rows, model, gpu), model, gpu, (layout.tp,))[layout.tp]
    return replace(cost, layout=layout, stage_share=(1.0,))


def _profile(rows: list[Sample], model: ModelSpec, gpu: Gpu) -> Profile:
    provenance = Provenance(method="measured", source="this run")
    return Profile(name="run", model=model.name, gpu=gpu.name, provenance=provenance, samples=Samples.of(rows))


def try_fit(times: Times, model: ModelSpec, gpu: Gpu, layout: Layout) -> CostModel | None:
    """Return the cost model, or None while there is too little to fit."""
    try:
        return fitted(times, model, gpu, layout)
    except InputError:
        return None


def held_out_accuracy(cost: CostModel, held_out: Times, phase: str) -> Accuracy | None:
    """Return the errors of `cost` on the settings of one phase that it has not seen; None without any."""
    mine = {setting: repeats for setting, repeats in held_out.items() if setting.phase == phase and repeats}
    if not mine:
        return None
    off = np.array([abs(cost.iteration_s(s.shape) / float(np.median(repeats)) - 1.0) for s, repeats in mine.items()])
    return Accuracy(
        tp=cost.layout.tp,
        pp=cost.layout.pp,
        phase=phase,  # type: ignore[arg-type]
        settings=len(off),
        median=float(np.median(off)),
        p95=float(np.percentile(off, 95)),
        worst=float(off.max()),
        repeats=_noise(mine.values()),
    )


def _noise(each: object) -> float | None:
    spreads = [spread(repeats) for repeats in each if len(repeats) > 1]  # type: ignore[attr-defined]
    return float(np.median(spreads)) if spreads else None


def spread(repeats: Sequence[float]) -> float:
    """Return how far repeats lie from their median, as a share: the median of that."""
    times = np.array(repeats)
    return float(np.median(np.abs(times / np.median(times) - 1.0)))


def known(cost: CostModel, times: Times, phase: str) -> Known:
    """Return the measured settings of a phase with how far a fit without each was off there."""
    settings = [setting for setting in times if setting.phase == phase]
    off: dict[tuple[float, ...], float] = {}
    if cost.checks is not None:
        errors = np.abs(cost.checks.predicted_s / cost.checks.measured_s - 1.0)
        off = {tuple(shape): float(error) for shape, error in zip(cost.checks.shapes, errors, strict=True)}
    each = np.array([off.get(tuple(float(v) for v in setting.shape), np.nan) for setting in settings])
    usual = float(np.nanmedian(each)) if np.isfinite(each).any() else 1.0
    return Known(settings, np.where(np.isfinite(each), each, usual))


def outliers(times: Times) -> dict[Setting, int]:
    """Return how many repeats of each setting took far longer than the others of it; settings without any are left out.

    Far: over a quarter above the median and over six times as far from it as repeats of the setting usually are.
    """
    found = {}
    for setting, repeats in times.items():
        middle = float(np.median(repeats))
        far = max(0.25, 6.0 * spread(repeats))
        if count := sum(time_s > (1.0 + far) * middle for time_s in repeats):
            found[setting] = count
    return found
