"""What a setting will take, from the few that were measured: to order, to leave out, and to say how long is left."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.optimize import nnls

from planner.cost.base import BatchShape
from profiler.setting import Setting


class Expected:
    """Seconds of a step of one layout, by a line per phase that never falls below 0 in any term."""

    def __init__(self, times_s: Mapping[Setting, float]):
        self.settings = len(times_s)
        self._laws = {phase: _law({s: t for s, t in times_s.items() if s.phase == phase}) for phase in _PHASES}

    def __call__(self, setting: Setting) -> float:
        """Return the expected time [s] of one step; 0 while nothing like it was measured."""
        phases = _PHASES if setting.phase == "mixed" else (setting.phase,)
        return float(sum(self._laws[phase] @ _terms(setting) for phase in phases))


_PHASES = ("prefill", "decode")


def _terms(setting: Setting) -> np.ndarray:
    return np.array([1.0, *(float(value) for value in setting.shape)])


def _law(times_s: Mapping[Setting, float]) -> np.ndarray:
    """Return the coefficients that predict best in relative error, none below 0."""
    if not times_s:
        return np.zeros(1 + len(BatchShape._fields))
    rows = np.array([_terms(setting) for setting in times_s])
    time_s = np.array(list(times_s.values()))
    scale = np.maximum(rows.max(axis=0), 1.0)
    found, _ = nnls(rows / scale / time_s[:, None], np.ones(len(rows)))
    return np.asarray(found / scale)
