"""Print the mean wait of a constant-service prefill instance beside the M/D/1 formula. `make md1`."""

from __future__ import annotations

import numpy as np

from planner.cost.base import CostModel
from planner.cost.kernel import SIZE
from planner.simulator.cluster import Instance, Limits, System, simulate
from planner.specs.layout import Layout
from planner.specs.slo import Slo
from planner.specs.workload import make_requests

SERVICE_S = 0.1
SEEDS, REQUESTS = 100, 400_000


def main() -> None:
    """Print one line per load."""
    law = np.zeros(SIZE)
    law[1] = SERVICE_S  # a prefill of any length takes as long
    system = System((Instance("prefill", CostModel(Layout(1), law), Limits(1, 1, 1 << 30)),), 0.0)
    print("| load | simulated mean wait [ms] | M/D/1 [ms] | difference |", "|---|---|---|---|", sep="\n")
    for load in (0.5, 0.8, 0.9):
        expected_s = load * SERVICE_S / (2 * (1 - load))
        mean_s = float(np.mean([mean_wait_s(system, load, seed) for seed in range(SEEDS)]))
        print(
            f"| {load:.0%} | {mean_s * 1e3:.2f} | {expected_s * 1e3:.2f} | {mean_s / expected_s - 1:+.2%} |", flush=True
        )


def mean_wait_s(system: System, load: float, seed: int) -> float:
    """Return the mean time [s] from arrival to the start of service under Poisson arrivals."""
    gaps_s = np.random.default_rng(seed).exponential(SERVICE_S / load, REQUESTS)
    ones = np.ones(REQUESTS, np.int64)
    run = simulate(system, make_requests(np.cumsum(gaps_s), ones, ones), (Slo(ttft_s=1.0, tpot_s=1.0),))
    return float((run.prefill_start_s - run.requests.arrival_s).mean())


if __name__ == "__main__":
    main()
