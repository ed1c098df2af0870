"""Rates of pools of one phase alone, which is what the placement program reckons with.

A pool's rate is measured at the size that is used, and divided by that size: instances that share a queue do better
than one by itself. Prefill alone: requests end with their first token. Decode alone: prompts appear ready, at no cost.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.cost.base import CostModel
from planner.cost.kernel import SIZE
from planner.search.goodput import Trial, goodput_rps
from planner.search.layouts import Kind
from planner.simulator.cluster import Instance, Limits, System
from planner.specs.layout import Layout
from planner.specs.workload import Workload

_PLENTY = 1 << 30


def pool_rps(trial: Trial, kind: Kind, count: int, saturation_rps: float, settings: dict) -> float:
    """Return what one instance of `kind` sustains [requests/s] in a pool of `count`, with the other phase for free."""
    instances = [kind.instance()] * count
    if kind.phase == "prefill":
        trial = replace(trial, workload=first_token_only(trial.workload))
    elif kind.phase == "decode":
        instances.append(_instant_prefill(kind.limits.block_tokens))
    system = System(tuple(instances), **settings)
    return goodput_rps(trial, system, 0.7 * saturation_rps * count, precision=0.02) / count


def first_token_only(workload: Workload) -> Workload:
    """Return the workload with one output token per request."""
    table = replace(workload.table, output_tokens=np.ones_like(workload.table.output_tokens))
    return replace(workload, table=table)


def _instant_prefill(block_tokens: int) -> Instance:
    """Return a prefill instance that takes no time and never runs out of blocks."""
    limits = Limits(_PLENTY, _PLENTY, _PLENTY, block_tokens)
    return Instance("prefill", CostModel(Layout(1), np.zeros(SIZE)), limits)
