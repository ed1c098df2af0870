"""Print simulated requests per CPU second, and the CPU time of each example's plan. `make bench`.

CPU time of one process, after one run to load what is compiled; the last column compares systems in the same run.
"""

from __future__ import annotations

import time
from pathlib import Path

from planner import parse, plan, problem_of, read_problem
from planner.replay import system_settings
from planner.search.goodput import Trial, pool
from planner.search.kinds import find_kinds
from planner.simulator.cluster import System
from planner.specs.layout import Layout

EXAMPLES = Path(__file__).parents[1] / "examples"
PROBLEM = "model: llama2-70b\ncluster: h100-4x8\nworkload: {load}\nslo: {{ttft_s: 1s, tpot_s: 60ms}}\n"


def main() -> None:
    """Print both tables in Markdown."""
    print(
        "| load | system | requests/s | requests | CPU s | simulated requests per CPU second |",
        "|---|---|---|---|---|---|",
        sep="\n",
    )
    for load in ("azure-conversation", "azure-code", "sharegpt"):
        for name, system, trial, rate_rps in systems(load):
            print(speed(load, name, system, trial, rate_rps), flush=True)
    print()
    print("| example | CPU s to plan | simulations | requests simulated |", "|---|---|---|---|", sep="\n")
    for path in sorted(EXAMPLES.glob("*.yaml")):
        found = plan(read_problem(path))
        runs, requests = (
            sum(pair) for pair in zip(found.trials.ranking.tally, found.trials.quoting.tally, strict=True)
        )
        print(f"| {path.name} | {found.cpu_s:.1f} | {runs} | {requests:,} |", flush=True)


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


def speed(load: str, name: str, system: System, trial: Trial, rate_rps: float) -> str:
    """Return one line: how fast `system` is simulated at `rate_rps`."""
    trial.run(system, rate_rps / 10)
    started_s = time.process_time()
    run = trial.run(system, rate_rps)
    took_s = time.process_time() - started_s
    count = len(run.requests)
    return f"| {load} | {name} | {rate_rps:g} | {count:,} | {took_s:.3f} | {count / took_s:,.0f} |"


if __name__ == "__main__":
    main()
