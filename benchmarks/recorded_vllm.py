"""Replay recorded vLLM 0.19 runs through an aggregated instance and print real beside simulated. `make recorded`.

Llama-3.1-8B on one RTX 4090 and one RTX PRO 6000 (tests/data/vllm_runs), 300 ShareGPT requests each. The latencies are
looked up in layer tables of the same cards. One number is fitted, on the run of `FITTED_ON` alone, and used for both:
the time of a step with prompt tokens that no layer table shows. The other run is held out.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from planner.cost.base import CostModel
from planner.cost.table import Unmeasured, table, with_unmeasured
from planner.simulator.cluster import Instance, Limits, System, simulate
from planner.sources.hf_config import read_model
from planner.sources.layer_tables import llmservingsim_steps
from planner.specs.base import load_preset
from planner.specs.cluster import find_gpu
from planner.specs.gpu import Gpu
from planner.specs.layout import Layout
from planner.specs.slo import Slo
from planner.specs.workload import Requests, make_requests

RUNS = Path(__file__).parents[1] / "tests" / "data" / "vllm_runs"
LIMITS = {
    "RTX4090": Limits(max_batch=256, max_tokens=2048, kv_blocks=2587),  # 2588 less the one that stands for nothing
    "RTXPRO6000": Limits(max_batch=128, max_tokens=2048, kv_blocks=30_000),  # not recorded; far more than it fills
}
FITTED_ON = "RTXPRO6000"
PRO_6000 = Gpu(  # NVIDIA RTX PRO 6000 Blackwell data sheet
    name="rtxpro6000", memory_bytes="96GiB", memory_bytes_per_s="1792GB/s", fp16_flop_per_s="500TFLOP/s",
    host_bytes_per_s="63GB/s",
)  # fmt: skip
TARGETS = {("ttft", "mean"): 0.03, ("tpot", "mean"): 0.02, ("latency", "mean"): 0.02, ("ttft", "P99"): 0.04}
"""Relative errors to stay within."""


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """Per request [s]: time to first token, time per further token, and from arrival to the last token."""

    ttft_s: np.ndarray
    tpot_s: np.ndarray
    latency_s: np.ndarray


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of a run, recorded and simulated [s]."""

    card: str
    time: str
    statistic: str
    real_s: float
    simulated_s: float

    @property
    def off(self) -> float:
        """Relative error."""
        return self.simulated_s / self.real_s - 1.0


@cache
def recorded(card: str) -> tuple[Requests, Times]:
    """Return a run's requests and what the real engine made of them.

    Requests arrive when the client sent them. The engine's own `queued_ts` is no arrival: it looks at its inbox once
    per step. The two clocks are set by the request that waited least in that inbox.
    """
    rows = sorted(
        csv.DictReader((RUNS / f"run_{card}.csv").read_text().splitlines()), key=lambda r: float(r["arrival_time"])
    )
    names = ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts", "input_toks", "output_toks")
    sent_s, queued_s, first_s, last_s, prompt, output = (np.array([float(row[name]) for row in rows]) for name in names)
    arrival_s = sent_s + (queued_s - sent_s).min()
    requests = make_requests(sent_s - sent_s[0], prompt.astype(np.int64), output.astype(np.int64))
    return requests, Times(first_s - arrival_s, (last_s - first_s) / (output - 1), last_s - arrival_s)


@cache
def looked_up(card: str) -> CostModel:
    """Return the cost model of a card's layer tables alone."""
    preset = load_preset("models", "llama3.1-8b")
    assert preset is not None
    dense, attention, per_sequence = (RUNS / f"{part}_{card}.csv" for part in ("dense", "attention", "per_sequence"))
    gpu = find_gpu(card) or PRO_6000
    tables = llmservingsim_steps(dense, read_model(preset), gpu, attention, per_sequence)
    return table(tables, Layout(1), LIMITS[card].max_batch)


def replayed(card: str, unmeasured: Unmeasured) -> Times:
    """Return the same requests on a simulated aggregated instance."""
    requests = recorded(card)[0]
    instance = Instance("aggregated", with_unmeasured(looked_up(card), unmeasured), LIMITS[card])
    run = simulate(System((instance,), kv_bytes_per_token=131_072.0), requests, (Slo(ttft_s=1.0, tpot_s=1.0),))
    return Times(run.ttft_s, run.tpot_s, run.finish_s - requests.arrival_s)


@cache
def fitted() -> Unmeasured:
    """Return the time of a step with prompt tokens that brings the run of `FITTED_ON` closest, by its four figures."""

    def misfit(prefill_s: float) -> float:
        off = [line.off for line in lines(FITTED_ON, Unmeasured(prefill_s)) if (line.time, line.statistic) in TARGETS]
        return float(np.sum(np.square(off)))

    grid_s = np.arange(0.0, 10.25e-3, 0.25e-3)
    return Unmeasured(float(grid_s[int(np.argmin([misfit(float(s)) for s in grid_s]))]))


def lines(card: str, unmeasured: Unmeasured) -> Iterator[Line]:
    """Yield mean and P99 of each time of a run."""
    real, mine = recorded(card)[1], replayed(card, unmeasured)
    for time in ("ttft", "tpot", "latency"):
        a, b = getattr(real, f"{time}_s"), getattr(mine, f"{time}_s")
        yield Line(card, time, "mean", float(np.mean(a)), float(np.mean(b)))
        yield Line(card, time, "P99", float(np.percentile(a, 99)), float(np.percentile(b, 99)))


def main() -> None:
    """Print what was fitted, and one line per card and figure."""
    unmeasured = fitted()
    print(f"Fitted on {FITTED_ON} alone: {unmeasured.prefill_s * 1e3:.2f} ms per step with prompt tokens.", end="\n\n")
    print("| card | time | real [s] | simulated [s] | off by | target |", "|---|---|---|---|---|---|", sep="\n")
    for card in LIMITS:
        for line in lines(card, unmeasured):
            target = TARGETS.get((line.time, line.statistic))
            shown = "" if target is None else f"{target:.0%}{'' if abs(line.off) <= target else ', missed'}"
            told = f"{card} | {line.statistic} {line.time} | {line.real_s:.4g} | {line.simulated_s:.4g}"
            print(f"| {told} | {line.off:+.1%} | {shown} |")


if __name__ == "__main__":
    main()
