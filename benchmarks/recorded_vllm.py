"""Replay recorded vLLM 0.19 runs through an aggregated instance and print real beside simulated. `make recorded`.

Llama-3.1-8B on one RTX 4090 and one RTX PRO 6000 (tests/data/vllm_runs). The latencies are put together from layer
tables of the same cards, which hold no host work between kernels, and nothing is fitted to the runs: the simulation
must come out too fast, and by how much says what that host work and our law for mixed steps are worth.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planner.cost.fit import fit
from planner.simulator.cluster import Instance, Limits, System, simulate
from planner.sources.hf_config import read_model
from planner.sources.layer_tables import llmservingsim
from planner.specs.base import load_preset
from planner.specs.cluster import find_gpu
from planner.specs.gpu import Gpu
from planner.specs.slo import Slo
from planner.specs.workload import Requests, make_requests

RUNS = Path(__file__).parents[1] / "tests" / "data" / "vllm_runs"
LIMITS = {
    "RTX4090": Limits(max_batch=256, max_tokens=2048, kv_blocks=2588),
    "RTXPRO6000": Limits(max_batch=128, max_tokens=2048, kv_blocks=30_000),  # not recorded; far more than it fills
}
PRO_6000 = Gpu(  # NVIDIA RTX PRO 6000 Blackwell data sheet
    name="rtxpro6000", memory_bytes="96GiB", memory_bytes_per_s="1792GB/s", fp16_flop_per_s="500TFLOP/s",
    host_bytes_per_s="63GB/s",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """Per request [s]: time to first token, time per further token, and from arrival to the last token."""

    ttft_s: np.ndarray
    tpot_s: np.ndarray
    latency_s: np.ndarray


def recorded(card: str) -> tuple[Requests, Times]:
    """Return a run's requests and what the real engine made of them."""
    rows = sorted(
        csv.DictReader((RUNS / f"run_{card}.csv").read_text().splitlines()), key=lambda r: float(r["queued_ts"])
    )
    names = ("queued_ts", "first_token_ts", "last_token_ts", "input_toks", "output_toks")
    queued_s, first_s, last_s, prompt, output = (np.array([float(row[name]) for row in rows]) for name in names)
    requests = make_requests(queued_s - queued_s[0], prompt.astype(np.int64), output.astype(np.int64))
    return requests, Times(first_s - queued_s, (last_s - first_s) / (output - 1), last_s - queued_s)


def replayed(card: str, requests: Requests) -> Times:
    """Return the same requests on a simulated aggregated instance."""
    preset = load_preset("models", "llama3.1-8b")
    gpu = find_gpu(card) or PRO_6000
    assert preset is not None
    model = read_model(preset)
    profile = llmservingsim(
        RUNS / f"dense_{card}.csv", model, gpu, RUNS / f"attention_{card}.csv", RUNS / f"per_sequence_{card}.csv"
    )
    instance = Instance("aggregated", fit(profile, model, gpu, 1), LIMITS[card])
    run = simulate(System((instance,), model.kv_bytes_per_token), requests, (Slo(ttft_s=1.0, tpot_s=1.0),))
    return Times(run.ttft_s, run.tpot_s, run.finish_s - requests.arrival_s)


def main() -> None:
    """Print one line per card and time."""
    print(
        "| card | time | mean: real, simulated [s] | p50 | p99 | mean off by |", "|---|---|---|---|---|---|", sep="\n"
    )
    for card in LIMITS:
        requests, real = recorded(card)
        mine = replayed(card, requests)
        for name in ("ttft_s", "tpot_s", "latency_s"):
            a, b = getattr(real, name), getattr(mine, name)
            pairs = [(np.mean(a), np.mean(b)), *((np.percentile(a, q), np.percentile(b, q)) for q in (50, 99))]
            shown = " | ".join(f"{x:.3g}, {y:.3g}" for x, y in pairs)
            print(f"| {card} | {name[:-2]} | {shown} | {np.mean(b) / np.mean(a) - 1:+.1%} |")


if __name__ == "__main__":
    main()
