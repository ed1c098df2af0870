"""Whole instances: Splitwise's table, every setting predicted without itself. See `held_out.py`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.cost.base import CostModel
from planner.cost.fit import PHASES, fit_all
from planner.sources.hf_config import read_model
from planner.sources.profiles import read_profile
from planner.specs.base import Document, load_preset
from planner.specs.cluster import find_gpu

TABLES = [(model, gpu) for model in ("llama2-70b", "bloom-176b") for gpu in ("a100", "h100")]
TARGETS = {"prefill": (0.05, 0.20), "decode": (0.015, 0.095)}


def costs() -> Iterator[tuple[str, CostModel]]:
    """Yield the name of model and GPU, and the cost model of each degree."""
    for model_name, gpu_name in TABLES:
        gpu = find_gpu(f"{gpu_name}-80gb")
        assert gpu is not None
        profile = read_profile(_preset("profiles", f"splitwise-{model_name}-{gpu_name}"))
        for cost in fit_all(profile, read_model(_preset("models", model_name)), gpu).values():
            yield f"{model_name} {gpu_name}", cost


def _preset(family: str, name: str) -> Document:
    document = load_preset(family, name)
    assert document is not None
    return document


def rows() -> list[tuple[str, int, np.ndarray, tuple[float, float] | None]]:
    """Return a line per phase over all tables, then one per table and degree."""
    found = list(costs())
    lines: list[tuple[str, int, np.ndarray, tuple[float, float] | None]] = []
    for phase in PHASES:
        each = [(name, cost, np.abs(cost.checks.errors(phase))) for name, cost in found if cost.checks is not None]
        pooled = np.concatenate([errors for _, _, errors in each])
        lines.append((f"splitwise {phase}", len(pooled) - 1, pooled, TARGETS[phase]))
        lines += [
            (f"  {name} {cost.layout} {cost.family}", len(errors) - 1, errors, None) for name, cost, errors in each
        ]
    return lines
