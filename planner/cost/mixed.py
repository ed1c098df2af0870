"""How far a cost law is off on steps that prefill and decode at once, where a profile has measured some."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost.base import BatchShape, CostModel
from planner.specs.profile import Profile


@dataclass(frozen=True, slots=True)
class MixedError:
    """Predicted over measured time, minus 1, over settings that no fit has seen."""

    settings: int
    median: float
    """Signed: above 0 the law is too slow."""
    worst: float


def mixed_error(cost: CostModel, profile: Profile) -> MixedError | None:
    """Return how far the law of a layout is off on its mixed steps; None where none was measured."""
    repeats: dict[BatchShape, list[float]] = {}
    for tp, pp, prefills, new, cached, decodes, context, time_s in profile.mixed.rows if profile.mixed else ():
        if (tp, pp) == (cost.layout.tp, cost.layout.pp):
            alone = BatchShape.prefill(new, prefills, cached)
            shape = alone._replace(decodes=decodes, context=decodes * context)
            repeats.setdefault(shape, []).append(time_s)
    if not repeats:
        return None
    off = np.array([cost.iteration_s(shape) / float(np.median(times)) - 1.0 for shape, times in repeats.items()])
    return MixedError(len(off), float(np.median(off)), float(off[np.abs(off).argmax()]))
