"""A closed loop simulated for a time, and the most clients that a system serves within their SLO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from planner.errors import InputError
from planner.search.goodput import WARMUP, Trial, classify
from planner.simulator.cluster import Run, System, simulate_clients
from planner.simulator.metrics import margin
from planner.specs.workload import Clients

_PER_CLIENT = 8
"""Requests per client to begin with; a run that sends them all is made again with more."""
_SPARE = 1.1


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Clients that send for the trial's time."""

    trial: Trial
    clients: Clients

    @property
    def warmup_s(self) -> float:
        """Requests sent before this time are not counted [s]: while clients start, and until the system is full."""
        ramp_s = self.clients.ramp_s
        return ramp_s + WARMUP * (self.trial.duration_s - ramp_s)

    def run(self, system: System) -> Run:
        """Return what the clients see. Raises InputError when they send more requests than the trial allows.

        How many they send is only known afterwards. Lengths are drawn so that more of them begin alike, and a run
        of more requests is the same up to the last one of a shorter run.
        """
        trial, until_s = self.trial, self.trial.duration_s
        count = _PER_CLIENT * self.clients.count
        while True:
            count = min(count, trial.most_requests)
            requests = classify(trial.workload.draw(count, trial.seed), trial.slos, trial.seed)
            clients = replace(self.clients, until_s=until_s, seed=trial.seed)
            run = simulate_clients(system, requests, trial.slos, clients)
            sent = run.requests.arrival_s
            trial.tally[0] += 1
            trial.tally[1] += len(sent)
            if len(sent) < count or not np.isfinite(run.finish_s).any():  # who is always refused sends without end
                return run
            if count == trial.most_requests:
                raise InputError(
                    f"{self.clients.count} clients send more than {trial.most_requests:,} requests in {until_s:g} s; "
                    "give a shorter --duration"
                )
            spent_s = max(float(sent[-1]), until_s / 1000)
            count = int(max(2 * count, _SPARE * count * until_s / spent_s)) + self.clients.count

    def with_count(self, count: int) -> ClosedLoop:
        """Return the same with so many clients."""
        return replace(self, clients=replace(self.clients, count=count))


def attains(loop: ClosedLoop, system: System) -> bool:
    """Return True when every class of the clients' requests reaches its attainment."""
    run = loop.run(system)
    counted = run.requests.arrival_s >= loop.warmup_s
    return bool(counted.any()) and margin([run], loop.trial.slos, loop.warmup_s) >= 0.0


def most_clients(loop: ClosedLoop, system: System, most: int, progress: Callable[[str], None]) -> int:
    """Return the most clients, up to `most`, that the system serves within the SLO; 0 if not even one.

    Attainment falls with the clients but for chance, so doubling brackets the answer and halving finds it, to 1 %.
    """

    def passes(count: int) -> bool:
        progress(f"simulating {count} clients")
        return attains(loop.with_count(count), system)

    low, high = 0, 1
    while high <= most and passes(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low
