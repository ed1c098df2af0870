"""Compile the simulator ahead of the first plan: `python -m planner.simulator.warm`."""

from __future__ import annotations

import numpy as np

from planner.cost.base import CostModel
from planner.cost.kernel import SIZE
from planner.simulator.cluster import Instance, Limits, System, simulate
from planner.specs.layout import Layout
from planner.specs.slo import Slo
from planner.specs.workload import make_requests


def warm_up() -> None:
    """Run one request through the simulator, which compiles it and fills the cache."""
    law = np.zeros(SIZE)
    law[1:7] = 1e-3
    instances = tuple(Instance(phase, CostModel(Layout(1), law), Limits(1, 16, 64)) for phase in ("prefill", "decode"))
    one = make_requests(np.zeros(1), np.full(1, 8, np.int64), np.full(1, 4, np.int64))
    simulate(System(instances, 1.0), one, (Slo(ttft_s=1.0, tpot_s=1.0),))


if __name__ == "__main__":
    warm_up()
