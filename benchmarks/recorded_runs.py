"""Replay recorded runs of a real engine through the simulator and print real beside simulated. `make recorded`.

OPT-13B on A100-80GB under DistServe's engine (tests/data/distserve_runs). Latencies are the published coefficients with
what that engine adds around the profiled calls (`Overheads`): five constants for all runs, chosen from a grid on the
runs at 3, 6, 9 and 12 requests/s (`--choose` searches it again). All other runs are held out.
"""

from __future__ import annotations

import csv
import itertools
import re
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from planner.cost.base import CostModel
from planner.cost.fit import fit, with_stages
from planner.simulator.cluster import Instance, Limits, LoopPulls, Run, System, simulate
from planner.sources.hf_config import read_model
from planner.sources.profiles import read_profile
from planner.specs.base import Document, load_preset
from planner.specs.cluster import find_gpu
from planner.specs.model import ModelSpec
from planner.specs.slo import Slo
from planner.specs.workload import Requests, make_requests

RUNS = Path(__file__).parents[1] / "tests" / "data" / "distserve_runs"
TUNED_ON = {("1", "3"), ("1", "6"), ("1", "9"), ("1", "12")}
"""(decode PP, rate) of the runs that the constants were chosen on."""
BOUNDS_S = ((0.2, 0.1), (0.25, 0.1))


class Overheads(NamedTuple):
    """What the engine adds to the published latencies."""

    prefill_factor: float = 0.95
    prefill_s: float = 6e-3
    decode_factor: float = 1.15
    per_request_s: float = 40e-6
    """Of each request in each decode step."""
    migration_s: float = 2e-3


GRID = ((0.91, 0.95, 1.0, 1.05), (0.0, 3e-3, 6e-3, 9e-3), (1.05, 1.1, 1.15), (0.0, 40e-6, 80e-6), (0.5e-3, 1e-3, 2e-3))


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One recorded run: its requests, and what the real engine made of them."""

    name: str
    decode_pp: int
    rate: str
    requests: Requests
    ttft_s: np.ndarray
    tpot_s: np.ndarray

    @property
    def held_out(self) -> bool:
        """True when no constant was chosen on this run."""
        return (str(self.decode_pp), self.rate) not in TUNED_ON


def recorded() -> list[Recorded]:
    """Return the disaggregated runs, by decode PP and rate."""
    runs = [_read(path) for path in sorted(RUNS.glob("disagg_*.csv"))]
    return sorted(runs, key=lambda run: (run.decode_pp, float(run.rate)))


def _read(path: Path) -> Recorded:
    rows = sorted(csv.DictReader(path.read_text().splitlines()), key=lambda row: float(row["arrival_s"]))
    arrival_s, prompt, output, ttft_ms, tpot_ms = (
        np.array([float(row[name] or "nan") for row in rows])
        for name in ("arrival_s", "prompt_tokens", "output_tokens", "ttft_ms", "tpot_ms")
    )
    match = re.fullmatch(r"disagg_p2x1_d1x(\d)_\d+req_([\d.]+)rps", path.stem)
    assert match, path.name
    requests = make_requests(arrival_s - arrival_s[0], prompt.astype(np.int64), output.astype(np.int64))
    return Recorded(path.stem, int(match[1]), match[2], requests, ttft_ms / 1e3, tpot_ms / 1e3)


def replay(run: Recorded, extra: Overheads) -> Run:
    """Return the run as the simulator sees it."""
    blocks = {1: 4134, 2: 10188}[run.decode_pp]  # distserve_a100_max_tokens.csv
    instances = (
        Instance("prefill", cost(2, 1, extra), Limits(128, 8192, 163008 // 16)),
        Instance("decode", cost(1, run.decode_pp, extra), Limits(1024, 65536, blocks)),
    )
    pulls = LoopPulls(extra.migration_s)
    system = System(instances, _opt().kv_bytes_per_token, first_token_at="prefill", loop_pulls=pulls)
    return simulate(system, run.requests, (Slo(ttft_s=0.2, tpot_s=0.1),))


def cost(tp: int, pp: int, extra: Overheads) -> CostModel:
    """Return the published latencies at one layout, with the engine's overheads."""
    published = _published(tp)
    p = published.parameters.copy()
    p[1:4] *= extra.prefill_factor
    p[1] += extra.prefill_s
    p[4:10] *= extra.decode_factor
    p[[5, 8]] += extra.per_request_s
    return with_stages(replace(published, parameters=p), _opt(), pp, 234e9, 1e-6)


@cache
def _opt() -> ModelSpec:
    return read_model(_preset("models", "opt-13b"))


@cache
def _published(tp: int) -> CostModel:
    gpu = find_gpu("a100-80gb")
    assert gpu is not None
    return fit(read_profile(_preset("profiles", "distserve-opt-13b-a100")), _opt(), gpu, tp)


def _preset(family: str, name: str) -> Document:
    document = load_preset(family, name)
    assert document is not None
    return document


def attainment(ttft_s: np.ndarray, tpot_s: np.ndarray, bounds_s: tuple[float, float]) -> float:
    """Return the share of requests within both bounds [%]."""
    return float(100 * np.mean((ttft_s <= bounds_s[0]) & ~(tpot_s > bounds_s[1])))


def miss(runs: list[Recorded], extra: Overheads) -> float:
    """Return how far the simulation is off: RMSE of attainment plus median relative errors of TTFT and TPOT."""
    shares, ttft, tpot = [], [], []
    for run in runs:
        mine = replay(run, extra)
        shares += [attainment(mine.ttft_s, mine.tpot_s, b) - attainment(run.ttft_s, run.tpot_s, b) for b in BOUNDS_S]
        ttft.append(median_error(mine.ttft_s, run.ttft_s))
        tpot.append(median_error(mine.tpot_s, run.tpot_s))
    return float(np.sqrt(np.mean(np.square(shares))) / 100 + np.mean(ttft) + np.mean(tpot))


def median_error(mine: np.ndarray, real: np.ndarray) -> float:
    """Return the median relative error per request."""
    return float(np.nanmedian(np.abs(mine / real - 1)))


def choose() -> Overheads:
    """Return the point of the grid that misses least on the runs to choose on."""
    runs = [run for run in recorded() if not run.held_out]
    return min((Overheads(*point) for point in itertools.product(*GRID)), key=lambda extra: miss(runs, extra))


def main() -> None:
    """Print the table and the errors by group."""
    extra = choose() if "--choose" in sys.argv else Overheads()
    print(extra, end="\n\n")
    print(
        "| decode PP | requests/s | held out | attain 200/100 ms: real, simulated | 250/100 ms | TTFT p50 [s] | "
        "TTFT p90 [s] | TPOT p50 [s] | TPOT p90 [s] | median error TTFT, TPOT |",
        "|" + "---|" * 10,
        sep="\n",
    )
    errors: dict[str, list[float]] = {}
    for run in recorded():
        mine = replay(run, extra)
        print(line(run, mine))
        off = [attainment(mine.ttft_s, mine.tpot_s, b) - attainment(run.ttft_s, run.tpot_s, b) for b in BOUNDS_S]
        errors.setdefault(f"decode PP{run.decode_pp}", []).extend(off)
        if run.held_out and run.decode_pp == 1:
            errors.setdefault("decode PP1, held out", []).extend(off)
    print()
    for group, found in sorted(errors.items()):
        rmse, worst = np.sqrt(np.mean(np.square(found))), np.max(np.abs(found))
        print(f"{group}: RMSE {rmse:.1f} points of attainment, worst {worst:.1f}")


def line(run: Recorded, mine: Run) -> str:
    """Return one line of the table."""
    columns = ((run.ttft_s, mine.ttft_s), (run.tpot_s, mine.tpot_s))
    shares = [
        f"{attainment(run.ttft_s, run.tpot_s, b):.1f} %, {attainment(mine.ttft_s, mine.tpot_s, b):.1f} %"
        for b in BOUNDS_S
    ]
    times = [
        f"{np.nanpercentile(real, q):.3g}, {np.nanpercentile(simulated, q):.3g}"
        for real, simulated in columns
        for q in (50, 90)
    ]
    off = ", ".join(f"{median_error(simulated, real):.1%}" for real, simulated in columns)
    return (
        f"| {run.decode_pp} | {run.rate} | {'yes' if run.held_out else 'no'} | "
        + " | ".join([*shares, *times, off])
        + " |"
    )


if __name__ == "__main__":
    main()
