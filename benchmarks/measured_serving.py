"""Predict measured serving runs under closed-loop load and print the errors. `make serving`, `--rows` for each run.

Dense models on H100 and H200 under vLLM, SGLang and TensorRT-LLM (tests/data/serving): mean TTFT and TPOT of a fixed
number of clients. Nothing is fitted to these runs, and no profile of these engines is at hand: every latency is the
data-sheet roofline. What the runs did, as far as it is known:

    inferencex  scripts of InferenceMAX, 2025: lengths uniform from 0.8 to 1 times the nominal ones, 10 requests per
                client, all clients at once; 8192 tokens per step in vLLM, 16384 in TensorRT-LLM
    sweep       aiconfigurator's own: equal lengths, 10 requests per client, all clients at once after a warm-up
                (eval/benchmarks/genai_perf_runner.py); engines as they come, with 8192 tokens per step in vLLM
                (engine/arg_utils.py, 70 GB and more), SGLang (server_args.py) and TensorRT-LLM (max_num_tokens)

Assumed: each client takes 2 ms on average from an answer to its next request, and TensorRT-LLM keeps the KV of FP8
models in FP8, as its scripts say where they are known. SGLang runs waiting prompts before any decode step (mixed chunks
are off by default), vLLM and TensorRT-LLM mix. Known to be missing: the API server's own time (tokens, HTTP).
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from planner.cost import physics
from planner.cost.base import CostModel
from planner.cost.fit import unprofiled
from planner.search.layouts import kv_blocks
from planner.simulator.cluster import Instance, Limits, Run, System, simulate_clients
from planner.sources.hf_config import read_model
from planner.specs.base import Document, load_preset
from planner.specs.cluster import find_gpu
from planner.specs.engine import Engine
from planner.specs.gpu import Gpu
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec, Quantisation
from planner.specs.slo import Slo
from planner.specs.topology import read_cluster
from planner.specs.workload import Clients, Requests, make_requests

DATA = Path(__file__).parents[1] / "tests" / "data" / "serving"
MODELS = {
    "meta-llama/Llama-3.1-70B": "llama3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama3.1-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
}
CLUSTERS = {"a100-80gb": "a100-4x200", "h100-80gb": "h100-2x8", "h200": "h200-2x8"}
FP8 = {
    "fp8": Quantisation(method="fp8", bits=8, scale_bytes=4, activation_bits=8),
    "fp8_block": Quantisation(method="fp8", bits=8, block=(128, 128), scale_bytes=4, activation_bits=8),
}
COMPLETE, NO_VERSION, NO_PRECISION = "complete", "no engine version", "no precision (taken as bf16)"
PROVENANCE = "roofline, unprofiled"
"""What stands behind every prediction. Of GEMM times there is a table of A100 only, and no run was on A100."""
ANY = (Slo(ttft_s=1.0, tpot_s=1.0),)
_REQUESTS, _TURN_S = 10, 2e-3
_SHORTEST = 0.8
_MOST_SEQUENCES = 1024


@dataclass(frozen=True, slots=True)
class Row:
    """One measured run."""

    collection: str
    engine: str
    engine_version: str
    model: str
    gpu: str
    precision: str
    gemm: str
    mode: str
    isl: int
    osl: int
    concurrency: int
    tp: int
    ttft_s: float
    tpot_s: float

    @property
    def description(self) -> str:
        """How much of the run's description is there."""
        return NO_PRECISION if not self.precision else COMPLETE if self.engine_version else NO_VERSION

    @property
    def group(self) -> tuple[str, ...]:
        """What its error is reported with."""
        return self.description, MODELS[self.model], self.gpu, self.precision or "bf16", self.engine

    @property
    def spec(self) -> ModelSpec:
        """The model as it was served; where the precision is not stated, as its checkpoint is."""
        preset = load_preset("models", MODELS[self.model])
        assert preset is not None
        narrow_kv = self.engine == "trtllm" and self.precision == "fp8"
        changes = {"quantisation": FP8.get(self.gemm)} | ({"kv_dtype": "fp8"} if narrow_kv else {})
        return read_model(preset).model_copy(update=changes)

    @property
    def budget(self) -> int:
        """Tokens of one step."""
        return 16384 if (self.collection, self.engine) == ("inferencex", "trtllm") else 8192


@dataclass(frozen=True, slots=True)
class Predicted:
    """A run and what the simulation says of it."""

    row: Row
    ttft_s: float
    tpot_s: float

    @property
    def errors(self) -> tuple[float, float]:
        """Predicted over measured minus 1, of TTFT and TPOT."""
        return self.ttft_s / self.row.ttft_s - 1, self.tpot_s / self.row.tpot_s - 1


def read_rows() -> tuple[list[Row], Counter[str]]:
    """Return the runs that can be predicted, and how many were left out for each reason."""
    rows, left_out = [], Counter[str]()
    for raw in csv.DictReader((DATA / "measured_serving.csv").read_text().splitlines()):
        row = _row(raw)
        if reason := _why_not(raw, row):
            left_out[reason] += 1
        else:
            rows.append(row)
    for raw in csv.DictReader((DATA / "left_out.csv").read_text().splitlines()):
        left_out[raw["reason"]] += int(raw["rows"])
    return rows, left_out


def _row(raw: dict[str, str]) -> Row:
    texts = ("collection", "engine", "engine_version", "model", "gpu", "precision", "gemm", "mode")
    counts = {name: int(raw[name] or 0) for name in ("isl", "osl", "concurrency", "tp")}
    times_s = {name: float(raw[f"{name}_ms"]) / 1e3 for name in ("ttft", "tpot")}
    return Row(**{name: raw[name] for name in texts}, **counts, ttft_s=times_s["ttft"], tpot_s=times_s["tpot"])


def _why_not(raw: dict[str, str], row: Row) -> str:
    """Return why a run cannot be predicted, or nothing."""
    if raw["unfinished"]:
        return "unfinished run"
    if row.collection == "dynamo":
        return "deployment of several instances, their number or that of the clients not stated"
    if (row.collection, row.engine, row.isl, row.osl) == ("inferencex", "trtllm", 1024, 1024) and row.tp < 8:
        return "engine told to hold prompts back for up to 20 steps, which is not simulated"
    if prefill_share(row) > physics.COMPUTE_EFFICIENCY:
        return f"prompts at more than {physics.COMPUTE_EFFICIENCY:.0%} of the peak: some came out of a prefix cache"
    return ""


def prefill_share(row: Row) -> float:
    """Return which share of the GPUs' dense peak the prompts take at the rate that Little's law gives."""
    rate_rps = row.concurrency / (row.ttft_s + (row.osl - 1) * row.tpot_s)
    isl = row.isl * (1 + _SHORTEST) / 2 if row.collection == "inferencex" else row.isl
    return rate_rps * physics.prefill_floor_s(row.spec, gpu_called(row.gpu), row.tp, (1, int(isl), 0))


def gpu_called(name: str) -> Gpu:
    """Return the GPU type that a table means."""
    gpu = find_gpu(name)
    assert gpu is not None
    return gpu


@cache
def _ring(gpu: str, tp: int) -> tuple[float, float]:
    """Return line rate [bytes/s] and latency [s] between `tp` GPUs of a node."""
    topology = read_cluster(Document(CLUSTERS[gpu], "cluster"))
    group = topology.units()[0].gpus[:tp]
    if tp == 1:
        return float("inf"), 0.0
    path = topology.path(group[0], group[1])
    return min(topology.links[link].nominal_bytes_per_s for link in path), topology.rank_link(group)[1]


def cost_of(model: ModelSpec, gpu: Gpu, tp: int) -> CostModel:
    """Return the latencies of one instance, out of data sheets."""
    return unprofiled(model, gpu, tp, *_ring(gpu.name, tp))


def play(
    model: ModelSpec, gpu: Gpu, tp: int, budget: int, requests: Requests, clients: int, prompts_first: bool = False
) -> Run:
    """Return what so many clients see of one aggregated instance.

    It holds the longest request at least: the run was made, whatever share of the memory its engine was given.
    """
    longest = int((requests.prompt_tokens + requests.output_tokens).max())
    room = max(kv_blocks(model, gpu, Layout(tp), Engine(), budget), longest // Engine().block_tokens + 2)
    instance = Instance(
        "aggregated", cost_of(model, gpu, tp), Limits(_MOST_SEQUENCES, budget, room), 0 if prompts_first else None
    )
    system = System((instance,), model.kv_bytes_per_token)
    return simulate_clients(system, requests, ANY, Clients(clients, think_s=_TURN_S, cv=1.0))


def load_of(row: Row) -> Requests:
    """Return the requests of a run."""
    count, luck = _REQUESTS * row.concurrency, np.random.default_rng(0)
    shortest = _SHORTEST if row.collection == "inferencex" else 1.0
    prompt, output = (luck.integers(int(n * shortest), n + 1, count) for n in (row.isl, row.osl))
    return make_requests(np.full(count, np.inf), prompt.astype(np.int64), output.astype(np.int64))


def predict(row: Row) -> Predicted:
    """Return the mean TTFT and TPOT of a run."""
    first = row.engine == "sglang"
    run = play(row.spec, gpu_called(row.gpu), row.tp, row.budget, load_of(row), row.concurrency, first)
    return Predicted(row, float(run.ttft_s.mean()), float(run.tpot_s.mean()))


def by_group(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Predicted]]:
    """Return the predictions by description, model, GPU, precision and engine: complete descriptions first."""
    groups: dict[tuple[str, ...], list[Predicted]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(predict(row))
    order = (COMPLETE, NO_VERSION, NO_PRECISION)
    return dict(sorted(groups.items(), key=lambda item: (order.index(item[0][0]), item[0])))


def report(groups: dict[tuple[str, ...], list[Predicted]], left_out: Counter[str]) -> Iterator[str]:
    """Yield both tables in Markdown."""
    columns = ("description", "model", "GPU", "precision", "engine", "runs", "TTFT off by", "TPOT off by", "behind it")
    yield f"| {' | '.join(columns)} |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for group, members in groups.items():
        yield f"| {' | '.join(group)} | {_errors(members)} | {PROVENANCE} |"
    for description in dict.fromkeys(group[0] for group in groups):
        members = [one for group, ones in groups.items() if group[0] == description for one in ones]
        yield f"| {description}, all | | | | | {_errors(members)} | {PROVENANCE} |"
    yield "\nOff by: median of the absolute errors, and in brackets of the errors with their sign."
    yield f"Behind all {sum(map(len, groups.values()))} runs: {PROVENANCE}. Behind 0: measured tables of all operators."
    yield "(The one table of GEMM times is of A100, where none of these runs was.)\n"
    yield "| left out, because | runs |\n|---|---|"
    for reason, count in left_out.most_common():
        yield f"| {reason} | {count} |"


def _errors(members: Sequence[Predicted]) -> str:
    errors = np.array([one.errors for one in members]).T
    shown = (f"{np.median(np.abs(e)):.0%} ({np.median(e):+.0%})" for e in errors)
    return f"{len(members)} | {' | '.join(shown)}"


def lines(groups: dict[tuple[str, ...], list[Predicted]]) -> Iterator[str]:
    """Yield one line per run: predicted, measured, error, and what stands behind it."""
    yield "| run | TTFT [ms]: predicted, measured | off | TPOT [ms]: predicted, measured | off | behind it |"
    yield "|---|---|---|---|---|---|"
    for one in (one for members in groups.values() for one in members):
        row, (ttft, tpot) = one.row, one.errors
        name = f"{MODELS[row.model]} {row.precision or 'bf16?'}, {row.gpu} TP{row.tp}, {row.engine}"
        load = f"{row.isl}/{row.osl}, {row.concurrency} clients"
        yield (
            f"| {name}, {load} | {one.ttft_s * 1e3:.0f}, {row.ttft_s * 1e3:.0f} | {ttft:+.0%} "
            f"| {one.tpot_s * 1e3:.1f}, {row.tpot_s * 1e3:.1f} | {tpot:+.0%} | {PROVENANCE} |"
        )


def main() -> None:
    """Print the errors by group, or with `--rows` of every run."""
    rows, left_out = read_rows()
    groups = by_group(rows)
    print(*(lines(groups) if "--rows" in sys.argv[1:] else report(groups, left_out)), sep="\n")


if __name__ == "__main__":
    main()
