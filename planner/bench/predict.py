"""The same requests through the simulator: equal arrivals, lengths and classes, so that luck is no difference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from planner.bench.load import Load
from planner.deploy import system_of
from planner.errors import InputError
from planner.simulator.cluster import Run, System, simulate_clients
from planner.simulator.phase import simulate
from planner.specs.deployment import Claim, Deployment

_SAME_RATE = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What a deployment was predicted to do with a load."""

    deployment: Deployment
    run: Run
    pessimistic: Run | None
    """The run at the load that the lower end of the claim's interval is worth; None where it has none."""
    at_claim: bool
    """True when the load is the one that the file's figures are of, at their rate."""

    @property
    def claim(self) -> Claim:
        """The goodput that the file claims."""
        return self.deployment.prediction.claim


def predict(deployment: Deployment, load: Load) -> Prediction:
    """Return the simulated runs of a load. Raises InputError for a closed loop that is never answered."""
    system, stated = system_of(deployment), deployment.prediction
    if load.clients is not None:
        run = simulate_clients(system, load.requests, load.slos, load.clients)
        if not len(run.requests) or not np.isfinite(run.finish_s).any():
            raise InputError("in simulation no client of the closed loop is ever answered; check the deployment")
        return Prediction(deployment, run, None, False)
    assert load.rate_rps is not None
    at_claim = load.as_planned and abs(load.rate_rps - stated.rate_rps) <= _SAME_RATE * stated.rate_rps
    return Prediction(deployment, _run(system, load), _pessimistic(system, load, stated.claim), at_claim)


def _run(system: System, load: Load, faster: float = 1.0) -> Run:
    requests = replace(load.requests, arrival_s=load.requests.arrival_s / faster)
    return simulate(system, requests, load.slos)


def _pessimistic(system: System, load: Load, claim: Claim) -> Run | None:
    """Return the load as it weighs on a system whose goodput is at the lower end of the claim's interval.

    A claim of 10 requests/s with an interval from 8 says that the system may turn out to be worth 8 tenths of what was
    simulated. Five requests/s then weigh on it as 6.25 do in simulation.
    """
    low_rps = claim.low_rps if claim.wide_low_rps is None else claim.wide_low_rps
    if not 0 < low_rps < claim.goodput_rps:
        return None
    return _run(system, load, claim.goodput_rps / low_rps)
