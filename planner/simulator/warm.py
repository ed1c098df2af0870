"""Compile both simulators ahead of the first plan: `python -m planner.simulator.warm`."""

from __future__ import annotations

import numpy as np

from planner.cost.base import CostModel
from planner.cost.kernel import SIZE
from planner.simulator import cluster, phase
from planner.simulator.cluster import Instance, Limits, System
from planner.specs.layout import Layout, Phase
from planner.specs.slo import Slo
from planner.specs.workload import make_requests


def warm_up() -> None:
    """Run one request through the simulators, which compiles them and fills the cache."""
    law = np.zeros(SIZE)
    law[1:7] = 1e-3
    phases: tuple[Phase, ...] = ("prefill", "decode")
    instances = tuple(Instance(one, CostModel(Layout(1), law), Limits(1, 16, 64)) for one in phases)
    one = make_requests(np.zeros(1), np.full(1, 8, np.int64), np.full(1, 4, np.int64))
    for simulate in (cluster.simulate, phase.simulate):
        simulate(System(instances, 1.0), one, (Slo(ttft_s=1.0, tpot_s=1.0),))


if __name__ == "__main__":
    warm_up()
