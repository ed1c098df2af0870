"""Print simulated requests per CPU second of both simulators, of a plan on its links, and of the search. `make bench`.

CPU time of one process, after one run to load what is compiled; the ratios compare simulators in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from planner import Problem, parse, plan, problem_of, read_problem
from planner.options import rough_network, space_of, trials_for
from planner.pipeline import Plan
from planner.replay import Placed, system_settings
from planner.search.goodput import Rate, Trial, pool, replicated
from planner.search.joint import Combination, aggregated, disaggregated, largest, most_goodput
from planner.search.kinds import find_kinds
from planner.simulator import cluster, phase
from planner.simulator.cluster import Run, System
from planner.specs.layout import Layout
from planner.specs.workload import Requests
from tests.reference_simulator import Reference

EXAMPLES = Path(__file__).parents[1] / "examples"
PROBLEM = "model: llama2-70b\ncluster: h100-4x8\nworkload: {load}\nslo: {{ttft_s: 1s, tpot_s: 60ms}}\n"
THIN = "model: llama3.1-8b\ncluster: l40s-4x4\nworkload: azure-conversation\nslo: {ttft_s: 2s, tpot_s: 100ms}\n"
"""Sixteen instances, and a network on which their KV takes time."""
TRIES = 5
"""The best of so many runs counts: what else the machine does only ever adds to CPU time."""
PLAIN_REQUESTS = 2000
INTERVAL, SEEDS = 0.03, (5, 12, 24)
"""The interval to reach, and how many seeds are tried one after the other until it is."""


def main() -> None:
    """Print the tables in Markdown."""
    simulators()
    plans = {path.name: plan(read_problem(path)) for path in sorted(EXAMPLES.glob("*.yaml"))}
    on_links({**plans, "Llama-3.1-8B on four nodes of L40S": plan(problem_of(parse(THIN, "speed.yaml")))})
    searched()
    examples(plans)


def table(*columns: str) -> None:
    """Print the head of a table."""
    print("", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n")


# ---- both simulators and a plain one, on the same requests


def simulators() -> None:
    """Print how fast each load is simulated, and how much faster that is than in plain Python."""
    table("load", "system", "requests/s", "requests", "simulated per CPU second", "cluster simulator", "plain Python")
    for load in ("azure-conversation", "azure-code", "sharegpt"):
        for name, system, trial, rate_rps in systems(load):
            requests = trial.workload.generate(rate_rps, trial.duration_s, 0)
            fast, whole = (
                speed(simulator, system, requests, trial) for simulator in (phase.simulate, cluster.simulate)
            )
            plain = plain_speed(system, requests.take(np.arange(len(requests)) < PLAIN_REQUESTS))
            ratios = f"{whole:,.0f} (1/{fast / whole:.2f}) | {plain:,.0f} (1/{fast / plain:,.0f})"
            print(f"| {load} | {name} | {rate_rps:g} | {len(requests):,} | {fast:,.0f} | {ratios} |", flush=True)


def systems(load: str) -> list[tuple[str, System, Trial, float]]:
    """Return what to simulate: 4 prefill and 4 decode instances at half load and in overload, and 4 aggregated ones."""
    problem = problem_of(parse(PROBLEM.format(load=load), "speed.yaml"))
    kinds = find_kinds(problem)
    by_key = {(kind.phase, kind.layout): kind for kind in kinds.all_legal}
    split = pool([(by_key["prefill", Layout(4)], 4), (by_key["decode", Layout(4)], 4)], **system_settings(problem))
    whole = pool([(by_key["aggregated", Layout(4)], 4)], **system_settings(problem))
    trial = Trial(problem.workload, problem.slos, 1000.0)
    return [
        ("4 prefill + 4 decode", split, trial, 20.0),
        ("the same, overloaded", split, trial, 80.0),
        ("4 aggregated", whole, trial, 10.0),
    ]


def speed(simulate: Callable[..., Run], system: System, requests: Requests, trial: Trial) -> float:
    """Return how many requests are simulated per CPU second."""
    return len(requests) / min(cpu_s(simulate, system, requests, trial.slos, trial.warmup_s)[0] for _ in range(TRIES))


def plain_speed(system: System, requests: Requests) -> float:
    """Return the same for the plain simulator, which looks through all events for the next one."""
    return len(requests) / cpu_s(Reference(system, requests).run)[0]


def cpu_s(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return the CPU time [s] of a call, and what it returned."""
    started_s = time.process_time()
    result = function(*arguments)
    return time.process_time() - started_s, result


# ---- placed plans on their links


def on_links(plans: dict[str, Plan]) -> None:
    """Print how fast each disaggregated plan is simulated where it stands, at its goodput and in overload."""
    table("placed plan", "requests/s", "busiest link", "waited for the decode side", "cluster simulator", "fast path")
    for name, found in plans.items():
        option = found.disaggregated
        for factor in (1.0, 1.5) if option is not None else ():
            print(f"| {name} {line_on_links(option.placed, found.trials.quoting, factor * option.rate.goodput_rps)} |")


def line_on_links(placed: Placed, trial: Trial, rate_rps: float) -> str:
    """Return one line: what was in play, and requests per CPU second of either simulator."""
    requests = trial.workload.generate(rate_rps, trial.duration_s, 0)
    run = cluster.simulate(placed.system, requests, trial.slos)
    used = run.link_bytes / (np.nanmax(run.finish_s) * np.array(placed.system.link_bytes_per_s))
    pulled = np.isfinite(run.pull_start_s)
    waited = float((run.pull_start_s > run.prefill_end_s + 1e-9)[pulled].mean())
    whole, fast = (speed(simulator, placed.system, requests, trial) for simulator in (cluster.simulate, phase.simulate))
    preempted = f", {int(run.preemptions.sum())} preempted" if run.preemptions.any() else ""
    return f"| {rate_rps:.1f} | {used.max():.0%} | {waited:.1%}{preempted} | {whole:,.0f} | {fast:,.0f}"


# ---- the search over 32 GPUs


def searched() -> None:
    """Print the CPU time of the search over all legal layouts on 32 GPUs to 1 %, each winner with its interval."""
    problem = problem_of(parse(PROBLEM.format(load="azure-conversation"), "speed.yaml"))
    spent_s, kinds = cpu_s(find_kinds, problem)
    more_s, trials = cpu_s(trials_for, problem, kinds)
    of = {
        name: [kind for kind in kinds.all_legal if kind.phase == name] for name in ("prefill", "decode", "aggregated")
    }
    space = space_of(problem)
    table("search on 32 GPUs", "layouts", "combinations", "goodput [requests/s]", "interval", "seeds", "CPU s")
    print(f"| fits, and the length of trials | {len(kinds.all_legal)} | | | | | {spent_s + more_s:.1f} |")
    total_s = spent_s + more_s
    ways = {
        "disaggregated": disaggregated(of["prefill"], of["decode"], kinds.saturation, space),
        "aggregated": aggregated(of["aggregated"], kinds.saturation, space),
    }
    for name, combinations in ways.items():
        took_s, (best, rate, seeds) = cpu_s(searched_way, problem, trials.ranking, trials.quoting, combinations)
        total_s += took_s
        layouts = len({kind for one in combinations for kind, _ in one.kinds})
        found = f"{rate.goodput_rps:.2f} | {rate.width:.1%} | {seeds} | {took_s:.1f}"
        print(f"| {name}: {best} | {layouts} | {len(combinations)} | {found} |", flush=True)
    print(f"| in all | | | | | | {total_s:.1f} |", flush=True)


def searched_way(
    problem: Problem, ranking: Trial, quoting: Trial, combinations: Sequence[Combination]
) -> tuple[Combination, Rate, int]:
    """Return the best combination, its goodput with an interval narrow enough, and the seeds that took."""
    build = rough_network(problem).system
    best = most_goodput(ranking, largest(combinations), build, precision=0.01)[0]
    for seeds in SEEDS:
        rate = replicated(quoting, build(best.combination), best.goodput_rps, range(seeds), precision=0.01)
        if rate.width < INTERVAL:
            break
    return best.combination, rate, seeds


# ---- the examples


def examples(plans: dict[str, Plan]) -> None:
    """Print the CPU time of each example's plan."""
    table("example", "CPU s to plan", "simulations", "requests simulated")
    for name, found in plans.items():
        tallies = zip(found.trials.ranking.tally, found.trials.quoting.tally, strict=True)
        runs, requests = (sum(pair) for pair in tallies)
        print(f"| {name} | {found.cpu_s:.1f} | {runs} | {requests:,} |", flush=True)


if __name__ == "__main__":
    main()
