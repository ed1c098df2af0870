"""Replay recorded runs of real engines through the simulator and print real beside simulated. `make recorded`.

The constants of `benchmarks.recorded_engines` were chosen on some of the runs (`CHOSEN_ON`); the rest is held out.
`--choose` chooses them again and prints them instead.

With two decode stages, whether a second batch ever begins is decided by a race (docs/decisions/0009). Those runs are
played many times, each request delayed by a millisecond or so; the table shows the median, and below it the spread.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import differential_evolution, minimize

from benchmarks.recorded_engines import DistServe, Front, Times, Vllm, distserve, play, vllm
from planner.simulator.cluster import System
from planner.specs.workload import Requests, make_requests

RUNS = Path(__file__).parents[1] / "tests" / "data" / "distserve_runs"
GROUPS = ("decode PP1", "decode PP2", "colocated")
CHOSEN_ON = {
    "decode PP1": ("3", "6", "9", "12"),  # every constant but the next two
    "decode PP2": ("8", "10"),  # `look_again_s`
    "colocated": ("1", "3"),  # `Vllm`
}
BOUNDS_S = ((0.2, 0.1), (0.25, 0.1))
TARGETS = {"decode PP1": (2.0, 6.0), "decode PP2": (5.0, 12.0), "colocated": (3.0, 6.0)}
"""Points of attainment: RMSE over the runs of a group, and the most that one may be off."""
MEMBERS = 100
"""How often a run with two decode stages is played."""
PERCENTILES = (50, 90)


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One recorded run: its requests, and what the real engine made of them."""

    group: str
    rate: str
    requests: Requests
    real: Times

    @property
    def held_out(self) -> bool:
        """True when no constant was chosen on this run."""
        return self.rate not in CHOSEN_ON[self.group]


def recorded(*groups: str) -> list[Recorded]:
    """Return the runs of some groups, or all, by group and rate."""
    runs = [_read(path) for path in sorted(RUNS.glob("*.csv"))]
    runs = [run for run in runs if run.group in (groups or GROUPS)]
    return sorted(runs, key=lambda run: (GROUPS.index(run.group), float(run.rate)))


def _read(path: Path) -> Recorded:
    rows = sorted(csv.DictReader(path.read_text().splitlines()), key=lambda row: float(row["arrival_s"]))
    arrival_s, prompt, output, ttft_ms, tpot_ms = (
        np.array([float(row[name] or "nan") for row in rows])
        for name in ("arrival_s", "prompt_tokens", "output_tokens", "ttft_ms", "tpot_ms")
    )
    match = re.fullmatch(r"(?:disagg_p2x1_d1x(\d)|colocated_vllm_tp1)_\d+req_([\d.]+)rps", path.stem)
    assert match, path.name
    requests = make_requests(arrival_s - arrival_s[0], prompt.astype(np.int64), output.astype(np.int64))
    group = f"decode PP{match[1]}" if match[1] else "colocated"
    return Recorded(group, match[2], requests, Times(ttft_ms / 1e3, tpot_ms / 1e3))


def system(group: str, extra: DistServe = DistServe(), colocated: Vllm = Vllm()) -> System:  # noqa: B008
    """Return the engine that recorded the runs of a group."""
    return vllm(colocated) if group == "colocated" else distserve(int(group[-1]), extra)


def replay(run: Recorded, engine: System | None = None, seed: int = 0) -> Times:
    """Return the run as the simulator sees it."""
    return play(engine or system(run.group), run.requests, Front(), seed)


def members(run: Recorded) -> list[Times]:
    """Return the run as often as needed to see how it can end: once where nothing is left to chance."""
    seeds = range(1, MEMBERS + 1) if run.group == "decode PP2" else (0,)
    engine = system(run.group)
    return [replay(run, engine, seed) for seed in seeds]


def nearest(run: Recorded, played: list[Times]) -> Times:
    """Return the play whose TPOTs are nearest to the recorded ones: hindsight, not a prediction."""
    return min(played, key=lambda times: median_error(times.tpot_s, run.real.tpot_s))


def median_of(played: list[Times]) -> Times:
    """Return the median over the members of what each request saw."""
    return Times(*(np.median([getattr(times, name) for times in played], axis=0) for name in ("ttft_s", "tpot_s")))


# ---- how far off


def attainment(times: Times, bounds_s: tuple[float, float]) -> float:
    """Return the share of requests within both bounds [%]."""
    return float(100 * np.mean((times.ttft_s <= bounds_s[0]) & ~(times.tpot_s > bounds_s[1])))


def off_by(run: Recorded, played: list[Times]) -> list[float]:
    """Return simulated minus recorded attainment at both bounds [points]; of several members the median counts."""
    return [float(np.median([attainment(times, b) for times in played])) - attainment(run.real, b) for b in BOUNDS_S]


def median_error(mine: np.ndarray, real: np.ndarray) -> float:
    """Return the median relative error per request."""
    return float(np.nanmedian(np.abs(mine / real - 1)))


def rmse(off: list[float]) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.mean(np.square(off))))


# ---- the constants

_PP1 = (
    (0.0, 8e-3), (0.0, 20e-6), (0.85, 1.05), (0.0, 10e-3), (0.95, 1.2), (0.0, 0.15e-3), (0.0, 6e-3), (50e9, 400e9),
    (25e9, 400e9),
)  # fmt: skip
"""Where to look for `Front` and all of `DistServe` but the last."""
_VLLM = ((0.6, 1.1), (0.0, 25e-3), (0.8, 1.3), (0.0, 0.8e-3), (3000.0, 4134.0))


def choose() -> tuple[Front, DistServe, Vllm]:
    """Return the constants that miss least on the runs to choose on."""
    runs = [run for run in recorded("decode PP1") if not run.held_out]
    x = _least(_PP1, lambda x: miss(runs, distserve(1, DistServe(*x[2:])), Front(*x[:2])))
    front, extra = Front(*x[:2]), DistServe(*x[2:])
    alone = [run for run in recorded("colocated") if not run.held_out]
    y = _least(_VLLM, lambda y: miss(alone, vllm(Vllm(*y)), front))
    grid_s = (50e-6, 0.1e-3, 0.15e-3, 0.2e-3, 0.3e-3, 0.5e-3, 1e-3)
    look_again_s = max(grid_s, key=lambda s: likelihood(distserve(2, extra._replace(look_again_s=s)), front))
    return front, extra._replace(look_again_s=look_again_s), Vllm(*y)


def _least(bounds: tuple[tuple[float, float], ...], loss: Callable[[np.ndarray], float]) -> np.ndarray:
    """Return where the loss is least: found by evolution, for it has many hollows, then by descent."""
    found = differential_evolution(loss, bounds, popsize=10, maxiter=60, tol=0, seed=0, polish=False)
    found = minimize(loss, found.x, method="Nelder-Mead", bounds=bounds, options={"maxiter": 400})
    print(f"loss {found.fun:.4f}", file=sys.stderr)
    return found.x


def miss(runs: list[Recorded], engine: System, front: Front) -> float:
    """Return how far simulations are off: attainment, and median and mean errors per request.

    Each run is played three times, or a lucky touch of a full KV cache would choose the constants.
    """
    total = 0.0
    for run in runs:
        for seed in (1, 2, 3):
            mine = play(engine, run.requests, front, seed)
            total += rmse([attainment(mine, b) - attainment(run.real, b) for b in BOUNDS_S]) / 100
            for name in ("ttft_s", "tpot_s"):
                simulated, real = getattr(mine, name), getattr(run.real, name)
                total += median_error(simulated, real) + float(np.nanmean(np.abs(np.log(simulated / real))))
    return total / len(runs) / 3


def likelihood(engine: System, front: Front) -> float:
    """Return how likely the runs to choose on all end within 12 % of their recorded TPOT."""
    shares = []
    for run in recorded("decode PP2"):
        if not run.held_out:
            played = [play(engine, run.requests, front, seed) for seed in range(1, 2 * MEMBERS + 1)]
            shares.append(np.mean([median_error(times.tpot_s, run.real.tpot_s) < 0.12 for times in played]))
    return float(np.prod(shares))


# ---- the report


def main() -> None:
    """Print the tables and the errors by group."""
    if "--choose" in sys.argv:
        print(*choose(), sep="\n")
        return
    runs = recorded()
    ends = {id(run): members(run) for run in runs}
    print("real, simulated; attainment at TTFT 200 or 250 ms and TPOT 100 ms\n\n" + HEADER)
    for run in runs:
        print(line(run, ends[id(run)]))
    print()
    for group in GROUPS:
        print(summary(group, [(run, ends[id(run)]) for run in runs if run.group == group]))
    print(f"\ndecode PP2: whether a second batch begins is a race; {MEMBERS} plays of each run, at 200/100 ms")
    pipelined = [run for run in runs if run.group == "decode PP2"]
    for run in pipelined:
        print(spread(run, ends[id(run)]))
    print("\nand in hindsight, the one play nearest to each log\n\n" + HEADER)
    hindsight = [(run, [nearest(run, ends[id(run)])]) for run in pipelined]
    for run, played in hindsight:
        print(line(run, played))
    print("\n" + summary("decode PP2", hindsight))


HEADER = (
    "| group | req/s | held out | 200/100 | 250/100 | TTFT p50 [s] | p90 | TPOT p50 [s] | p90 | TTFT, TPOT off |\n"
    + "|" + "---|" * 10
)  # fmt: skip


def line(run: Recorded, played: list[Times]) -> str:
    """Return one line of the table."""
    mine, real = median_of(played), run.real
    shares = [
        f"{attainment(real, b):.1f}, {attainment(real, b) + off:.1f} %"
        for b, off in zip(BOUNDS_S, off_by(run, played), strict=True)
    ]
    times = [
        f"{np.nanpercentile(getattr(real, name), q):.3g}, {np.nanpercentile(getattr(mine, name), q):.3g}"
        for name in ("ttft_s", "tpot_s")
        for q in PERCENTILES
    ]
    off = ", ".join(f"{median_error(getattr(mine, name), getattr(real, name)):.1%}" for name in ("ttft_s", "tpot_s"))
    columns = [run.group, run.rate, "yes" if run.held_out else "no", *shares, *times, off]
    return "| " + " | ".join(columns) + " |"


def summary(group: str, ends: list[tuple[Recorded, list[Times]]]) -> str:
    """Return what was to be reached over a group, and what is."""
    target, most = TARGETS[group]
    parts = []
    for label, few in (("all", ends), ("held out", [end for end in ends if end[0].held_out])):
        off = [points for run, played in few for points in off_by(run, played)]
        parts.append(f"{label} RMSE {rmse(off):.1f}, worst {max(off, key=abs):+.1f}")
    return f"{group}: {'; '.join(parts)} points (target {target:g}, at most {most:g})"


def spread(run: Recorded, played: list[Times]) -> str:
    """Return how differently the plays of a run end."""
    shares, real = [attainment(times, BOUNDS_S[0]) for times in played], attainment(run.real, BOUNDS_S[0])
    near = np.mean([median_error(times.tpot_s, run.real.tpot_s) <= 0.12 for times in played])
    low, middle, high = np.percentile(shares, (5, 50, 95))
    return (
        f"{run.rate:>4}/s: 5th, 50th, 95th percentile {low:.1f}, {middle:.1f}, {high:.1f} %, recorded {real:.1f} %; "
        f"TPOT within 12 % in {near:.0%} of the plays"
    )


if __name__ == "__main__":
    main()
