"""A deployment under another load: the same simulation that proved it, from the file alone."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import isfinite, isnan
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.deploy import system_of
from planner.errors import InfeasibleError, InputError
from planner.search.concurrency import ClosedLoop, most_clients
from planner.search.goodput import Trial
from planner.simulator.cluster import Run, System
from planner.simulator.metrics import (
    Latencies,
    Throughput,
    attainment,
    binding_term,
    latencies,
    load_of,
    throughput,
)
from planner.sources.workloads import read_workload
from planner.specs.base import Document, resolve
from planner.specs.deployment import Deployment
from planner.specs.units import show_seconds
from planner.specs.workload import Clients, Workload

if TYPE_CHECKING:
    from rich.table import Table

_MOST_REQUESTS = 5_000_000
_MOST_CLIENTS = 100_000
_LONGEST_S = 4e6
"""Some 46 days: beyond them a clock in double precision no longer resolves the end of a transfer."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a simulated deployment did."""

    deployment: Deployment
    workload: Workload
    rate_rps: float
    """Requests per second that arrive; of a closed loop, that were answered."""
    run: Run
    trial: Trial
    warmup_s: float
    clients: Clients | None = None
    """Who sent the requests, in a closed loop."""

    @property
    def latencies(self) -> Latencies:
        """TTFT itemised, and TPOT."""
        return latencies([self.run], self.warmup_s)

    @property
    def throughput(self) -> Throughput:
        """What was answered between the warm-up and the end of the time in which requests are sent."""
        return throughput(self.run, self.deployment.slo, self.warmup_s, self.trial.duration_s)


def simulate_deployment(
    deployment: Deployment,
    workload: str,
    rate_rps: float | None,
    duration_s: float,
    seed: int,
    progress: Callable[[str], None] = lambda step: None,
) -> Outcome:
    """Return what happens when `workload` (a preset or a file) meets the deployment. Raises InputError."""
    loaded = read_workload(resolve("workloads", Document(workload, "--workload")))
    if loaded.clients is not None:
        if rate_rps is not None:
            raise InputError(
                f"workload {loaded.name} is a closed loop, whose rate follows from the answers; drop --rate"
            )
        return simulate_closed_loop(deployment, loaded, loaded.clients, duration_s, seed, progress)
    rate_rps = rate_rps if rate_rps is not None else loaded.design_rate_rps
    if rate_rps is None:
        raise InputError(f"workload {loaded.name} has no rate of its own; give --rate, or --concurrency")
    if not (isfinite(rate_rps) and rate_rps > 0 and isfinite(duration_s) and duration_s > 0):
        raise InputError(f"expected a rate and a duration above 0, got {rate_rps} requests/s for {duration_s} s")
    if rate_rps * duration_s > _MOST_REQUESTS:
        raise InputError(
            f"{rate_rps * duration_s:.3g} requests are more than {_MOST_REQUESTS:,}; give a shorter --duration"
        )
    if not (1e-4 <= rate_rps <= 1e6 and duration_s <= _LONGEST_S):
        raise InputError(
            f"expected 1e-4 to 1e6 requests/s and at most {_LONGEST_S:g} s, got {rate_rps:g} for {duration_s:g} s"
        )
    trial = Trial(loaded, deployment.slo, duration_s, seed, most_requests=_MOST_REQUESTS)
    progress(f"simulating {duration_s:g} s")
    run = trial.run(system_of(deployment), rate_rps)
    if not len(run.requests):
        raise InputError(f"no request arrives in {duration_s:g} s at {rate_rps:g} requests/s; give a longer --duration")
    return Outcome(deployment, loaded, rate_rps, run, trial, trial.warmup_s)


def simulate_concurrency(
    deployment: Deployment,
    workload: str,
    concurrency: str,
    duration_s: float,
    seed: int,
    progress: Callable[[str], None] = lambda step: None,
) -> Outcome:
    """Return what so many clients see in a closed loop with the lengths of `workload`, or the most that attain ("max").

    Think time and ramp-up are the workload's own, if it is a closed loop. Raises InputError, or InfeasibleError when
    not even one client attains the SLO.
    """
    loaded = read_workload(resolve("workloads", Document(workload, "--workload")))
    clients = loaded.clients or Clients(1)
    if concurrency != "max":
        if not (concurrency.isascii() and concurrency.isdigit() and 1 <= int(concurrency) <= _MOST_CLIENTS):
            raise InputError(f"--concurrency: expected 1 to {_MOST_CLIENTS:,} clients, or max, got {concurrency!r}")
        return simulate_closed_loop(
            deployment, loaded, replace(clients, count=int(concurrency)), duration_s, seed, progress
        )
    loop, system = _closed_loop(deployment, loaded, clients, duration_s, seed), system_of(deployment)
    most = most_clients(loop, system, _MOST_CLIENTS, progress)
    if most == 0:
        raise _not_even_one(deployment, loop.with_count(1), system)
    return _closed_outcome(deployment, loop.with_count(most), system)


def simulate_closed_loop(
    deployment: Deployment,
    workload: Workload,
    clients: Clients,
    duration_s: float,
    seed: int,
    progress: Callable[[str], None] = lambda step: None,
) -> Outcome:
    """Return what `clients` see who send for `duration_s`. Raises InputError for what cannot be simulated."""
    loop = _closed_loop(deployment, workload, clients, duration_s, seed)
    progress(f"simulating {clients.count} clients for {duration_s:g} s")
    return _closed_outcome(deployment, loop, system_of(deployment))


def _closed_loop(
    deployment: Deployment, workload: Workload, clients: Clients, duration_s: float, seed: int
) -> ClosedLoop:
    if not 0 < duration_s <= _LONGEST_S:
        raise InputError(f"expected a duration above 0 and at most {_LONGEST_S:g} s, got {duration_s:g} s")
    if clients.count > _MOST_CLIENTS:
        raise InputError(f"expected at most {_MOST_CLIENTS:,} clients, got {clients.count:,}")
    if clients.ramp_s >= duration_s:
        raise InputError(f"the clients start over {clients.ramp_s:g} s (ramp_s); give a longer --duration than that")
    return ClosedLoop(Trial(workload, deployment.slo, duration_s, seed, most_requests=_MOST_REQUESTS), clients)


def _closed_outcome(deployment: Deployment, loop: ClosedLoop, system: System) -> Outcome:
    run, trial = loop.run(system), loop.trial
    if not (run.requests.arrival_s >= loop.warmup_s).any():
        raise InputError(
            f"no client sends a request after the warm-up ({loop.warmup_s:g} of {trial.duration_s:g} s); "
            "give a longer --duration"
        )
    rate_rps = throughput(run, trial.slos, loop.warmup_s, trial.duration_s).requests_per_s
    return Outcome(deployment, trial.workload, rate_rps, run, trial, loop.warmup_s, loop.clients)


def _not_even_one(deployment: Deployment, loop: ClosedLoop, system: System) -> InfeasibleError:
    """Return the error that says which bound one client alone misses, and by how much."""
    run = loop.run(system)
    term, late, slow = binding_term([run], deployment.slo, loop.warmup_s)
    spread = getattr(latencies([run], loop.warmup_s), term.lower())
    bound_s = min(getattr(slo, f"{term.lower()}_s") for slo in deployment.slo)
    message = (
        f"infeasible: not even one client attains the SLO; {max(late, slow):.0%} of its requests miss {term} "
        f"(p90 {show_seconds(spread.p90_s)}, the bound is {show_seconds(bound_s)})"
    )
    way_out = f"relax {term.lower()}_s, or plan a layout with faster iterations"
    return InfeasibleError(message, binding=term, best_s=spread.p90_s, bound_s=bound_s, way_out=way_out)


def summary(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as plain data (times in seconds; null where there is no value)."""
    names = [slo.name or "all" for slo in outcome.deployment.slo]
    shares = attainment([outcome.run], outcome.deployment.slo, outcome.warmup_s)
    binding, late, slow = binding_term([outcome.run], outcome.deployment.slo, outcome.warmup_s)
    clients = outcome.clients
    times = {
        name: {key: value if isfinite(value) else None for key, value in spread.items()}
        for name, spread in asdict(outcome.latencies).items()
    }
    return {
        "rate_rps": outcome.rate_rps,
        "requests": len(outcome.run.requests),
        "clients": clients and {name: getattr(clients, name) for name in ("count", "think_s", "cv", "ramp_s")},
        "throughput": asdict(outcome.throughput),
        "attainment": dict(zip(names, shares, strict=True)),
        "missed_more": binding,
        "missed_ttft": late,
        "missed_tpot": slow,
        "times": times,
        "utilisation": {
            instance.name: load_of([outcome.run], [at], [instance.limits.kv_blocks]).busy
            for at, instance in enumerate(outcome.deployment.instances)
        },
        "preemptions": int(outcome.run.preemptions.sum()),
    }


def summary_table(outcome: Outcome) -> Table:
    """Return the outcome as a table."""
    from rich import box
    from rich.table import Table

    data = summary(outcome)
    shares = ", ".join(f"{name} {share:.1%}" for name, share in data["attainment"].items())
    load = f"{outcome.rate_rps:.3g} requests/s, {data['requests']:,} requests"
    if outcome.clients is not None:
        load = f"{outcome.clients.count} client{'s' * (outcome.clients.count > 1)}, {load}"
    title = f"{outcome.deployment.name} at {load}: {shares} attain"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("term")
    for column in ("mean", "p50", "p90", "p99"):
        table.add_column(column, justify="right")
    for name, values in data["times"].items():
        table.add_row(name.replace("_", " "), *(show_seconds(v) if v is not None else "-" for v in values.values()))
    busy = ", ".join(f"{name} {share:.0%}" for name, share in data["utilisation"].items())
    table.caption = f"busy: {busy}; misses: TTFT {data['missed_ttft']:.1%}, TPOT {data['missed_tpot']:.1%}"
    if outcome.clients is not None:
        answered = outcome.throughput
        table.caption += (
            f"; answered: {answered.requests_per_s:.3g} requests/s ({answered.attaining_requests_per_s:.3g} within the "
            f"SLO), {answered.output_tokens_per_s:.4g} output tokens/s"
        )
    table.caption_justify = "left"
    return table


def records_csv(outcome: Outcome) -> str:
    """Return one line per request: lengths, instances, and the times of its life [s]; empty where it never happened."""
    run = outcome.run
    columns = {
        "arrival_s": run.requests.arrival_s,
        "prompt_tokens": run.requests.prompt_tokens,
        "output_tokens": run.requests.output_tokens,
        "prefill_at": run.prefill_at,
        "decode_at": run.decode_at,
        "prefill_start_s": run.prefill_start_s,
        "prefill_end_s": run.prefill_end_s,
        "pull_end_s": run.pull_end_s,
        "first_token_s": run.first_token_s,
        "finish_s": run.finish_s,
        "ttft_s": run.ttft_s,
        "tpot_s": run.tpot_s,
    }
    text = io.StringIO()
    text.write(",".join(columns) + "\n")
    for row in zip(*(np.asarray(column).tolist() for column in columns.values()), strict=True):
        text.write(",".join("" if isnan(value) else repr(value) for value in row) + "\n")
    return text.getvalue()
