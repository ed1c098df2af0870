"""Predict single measurements that users reported and print them side by side. Part of `make serving`.

tests/cases/51-pred-measured-points: named models on named GPUs, from issue threads. Nothing is fitted to them. Rows
whose description is complete are predicted; of the others the direction at most can be checked, and the table says
what they lack.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.measured_serving import FP8, PROVENANCE, gpu_called, play
from planner.cost import physics
from planner.sources.hf_config import read_model
from planner.specs.base import load_preset, parse
from planner.specs.gpu import Gpu
from planner.specs.model import ModelSpec, Quantisation
from planner.specs.workload import Requests, make_requests

CASE = Path(__file__).parents[1] / "tests" / "cases" / "51-pred-measured-points" / "measured.csv"
_QWEN = "name: {}\nlayers: {}\nhidden_size: {}\nintermediate_size: {}\nheads: {}\nkv_heads: 8\nhead_dim: 128\n"
QWEN = {  # the published config.json of each
    "Qwen2.5-72B": _QWEN.format("qwen2.5-72b", 80, 8192, 29568, 64) + "vocab_size: 152064\nbiases: qkv\n",
    "Qwen3-1.7B": _QWEN.format("qwen3-1.7b", 28, 2048, 6144, 16) + "vocab_size: 151936\ntied_embeddings: true\n",
    "Qwen3-4B": _QWEN.format("qwen3-4b", 36, 2560, 9728, 32) + "vocab_size: 151936\ntied_embeddings: true\n",
}
GPUS = {"H100-80G": "h100-80gb", "A100": "a100-80gb", "H200": "h200"}
LACKS = {
    "f1": "the network between its nodes",
    **dict.fromkeys(("g1", "g2", "g3", "g4"), "the speed of its network"),
    "h1": "lengths and load",
    "i1": "the GPU",
    "j1": "the GPU",
    "k1": "the model",
    **dict.fromkeys(("l1", "l2"), "the precision, and for certain the model"),
    "m1": "lengths",
    "n1": "how its decode side is laid out",
}
"""What each incomplete row does not say."""
SEEN = f"{PROVENANCE}; its kernels per mixture were set with these rows in sight"
_BUDGET = 8192
_ALONE, _PER_CLIENT = 3, 10


@dataclass(frozen=True, slots=True)
class Point:
    """A complete row, and what the simulation says: times [s], throughput in the row's own unit."""

    id: str
    name: str
    unit: str
    ttft_s: tuple[float, float] | None
    tpot_s: tuple[float, float] | None
    throughput: tuple[float, float] | None
    """Each predicted and measured; None where nothing was reported."""
    provenance: str

    @property
    def errors(self) -> dict[str, float]:
        """Predicted over measured minus 1, of what was reported."""
        pairs = {name: getattr(self, name) for name in ("ttft_s", "tpot_s", "throughput")}
        return {name: pair[0] / pair[1] - 1 for name, pair in pairs.items() if pair is not None}


def read_rows() -> list[dict[str, str]]:
    """Return the rows of the case."""
    return list(csv.DictReader(CASE.read_text().splitlines()))


def model_of(row: dict[str, str]) -> ModelSpec:
    """Return the model of a complete row, as it was served."""
    if (text := QWEN.get(row["model"])) is not None:
        return read_model(parse(text, "model.yaml"))
    preset = load_preset("models", "deepseek-v3")
    assert preset is not None and row["model"].startswith("DeepSeek-R1")
    awq = Quantisation(method="awq", bits=4, group_size=64, zero_points=True)
    stored = awq if row["weight_dtype"] == "int4" else FP8["fp8_block"]
    return read_model(preset).model_copy(update={"quantisation": stored})


def gpu_of(row: dict[str, str]) -> Gpu:
    """Return the GPU type of a complete row."""
    return gpu_called(GPUS[row["gpu"]])


def clients_of(row: dict[str, str]) -> int:
    """Return how many clients a complete row has (`conc=8`)."""
    return int(row["load"].removeprefix("conc="))


def load_of(row: dict[str, str]) -> Requests:
    """Return the requests of a complete row.

    Alone, requests are alike. InferenceX draws lengths from 0.8 of the nominal ones on, SGLang's own benchmark from 1
    on (its random_range_ratio is 0 by default), which halves the mean.
    """
    isl, osl, clients = int(row["isl"]), int(row["osl"]), clients_of(row)
    count = _ALONE if clients == 1 else _PER_CLIENT * clients
    shortest = 1.0 if clients == 1 else 0.8 if row["source"].startswith("SemiAnalysis") else 0.0
    luck = np.random.default_rng(0)
    prompt, output = (luck.integers(max(int(n * shortest), 1), n + 1, count) for n in (isl, osl))
    return make_requests(np.full(count, np.inf), prompt, output)


def predict(row: dict[str, str]) -> Point:
    """Return a complete row beside its prediction."""
    requests, gpus = load_of(row), int(row["gpus"])
    run = play(model_of(row), gpu_of(row), gpus, _BUDGET, requests, clients_of(row))
    per_s = len(requests) / float(run.finish_s.max())
    if "tok/s/GPU" in row["unit"]:
        per_s *= float((requests.prompt_tokens + requests.output_tokens).mean()) / gpus

    def pair(predicted: float, measured: str, scale: float) -> tuple[float, float] | None:
        return (predicted, float(measured) * scale) if measured else None

    return Point(
        row["id"],
        f"{row['model']} {row['weight_dtype']}, {gpus} x {row['gpu']}, {row['isl']}/{row['osl']}, {row['load']}",
        row["unit"],
        pair(float(run.ttft_s.mean()), row["ttft_ms"], 1e-3),
        pair(float(run.tpot_s[requests.output_tokens > 1].mean()), row["tpot_ms"], 1e-3),
        pair(per_s, row["throughput"], 1.0),
        SEEN if row["source"].startswith("SemiAnalysis") else PROVENANCE,
    )


def floors_s(row: dict[str, str]) -> tuple[float, float]:
    """Return the least TTFT and TPOT [s] of one request that a complete row's GPUs allow at their data-sheet peak."""
    model, gpu, gpus = model_of(row), gpu_of(row), int(row["gpus"])
    ttft_s = physics.prefill_floor_s(model, gpu, gpus, (1, int(row["isl"]), 0))
    return ttft_s, physics.decode_floor_s(model, gpu, gpus, 1, int(row["isl"]))


def table() -> Iterator[str]:
    """Yield one line per reported number of each row, in Markdown."""
    yield "| row | what | predicted | measured | off | behind it |\n|---|---|---|---|---|---|"
    for row in read_rows():
        if row["id"] in LACKS:
            yield f"| {row['id']} {row['model']} | | | | | not predicted: the report does not say {LACKS[row['id']]} |"
            continue
        point = predict(row)
        for name, off in point.errors.items():
            predicted, measured = getattr(point, name)
            label, scale = (f"{name[:4].upper()} [ms]", 1e3) if name != "throughput" else (point.unit, 1.0)
            values = f"{predicted * scale:.4g} | {measured * scale:.4g}"
            yield f"| {point.id} {point.name} | {label} | {values} | {off:+.0%} | {point.provenance} |"


def main() -> None:
    """Print the table."""
    print(*table(), sep="\n")


if __name__ == "__main__":
    main()
