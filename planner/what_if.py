"""A deployment under another load: the same simulation that proved it, from the file alone."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import isfinite, isnan
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.deploy import system_of
from planner.errors import InputError
from planner.search.goodput import Trial
from planner.simulator.cluster import Run
from planner.simulator.metrics import Latencies, attainment, binding_term, latencies, load_of
from planner.sources.workloads import read_workload
from planner.specs.base import Document, resolve
from planner.specs.deployment import Deployment
from planner.specs.units import show_seconds
from planner.specs.workload import Workload

if TYPE_CHECKING:
    from rich.table import Table

_MOST_REQUESTS = 5_000_000
_LONGEST_S = 4e6
"""Some 46 days: beyond them a clock in double precision no longer resolves the end of a transfer."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a simulated deployment did."""

    deployment: Deployment
    workload: Workload
    rate_rps: float
    run: Run
    trial: Trial

    @property
    def latencies(self) -> Latencies:
        """TTFT itemised, and TPOT."""
        return latencies([self.run], self.trial.warmup_s)


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
    rate_rps = rate_rps if rate_rps is not None else loaded.design_rate_rps
    if rate_rps is None:
        raise InputError(f"workload {loaded.name} has no rate of its own; give --rate")
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
    return Outcome(deployment, loaded, rate_rps, run, trial)


def summary(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as plain data (times in seconds; null where there is no value)."""
    names = [slo.name or "all" for slo in outcome.deployment.slo]
    shares = attainment([outcome.run], outcome.deployment.slo, outcome.trial.warmup_s)
    binding, late, slow = binding_term([outcome.run], outcome.deployment.slo, outcome.trial.warmup_s)
    times = {
        name: {key: value if isfinite(value) else None for key, value in spread.items()}
        for name, spread in asdict(outcome.latencies).items()
    }
    return {
        "rate_rps": outcome.rate_rps,
        "requests": len(outcome.run.requests),
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
    title = f"{outcome.deployment.name} at {load}: {shares} attain"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("term")
    for column in ("mean", "p50", "p90", "p99"):
        table.add_column(column, justify="right")
    for name, values in data["times"].items():
        table.add_row(name.replace("_", " "), *(show_seconds(v) if v is not None else "-" for v in values.values()))
    busy = ", ".join(f"{name} {share:.0%}" for name, share in data["utilisation"].items())
    table.caption = f"busy: {busy}; misses: TTFT {data['missed_ttft']:.1%}, TPOT {data['missed_tpot']:.1%}"
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
