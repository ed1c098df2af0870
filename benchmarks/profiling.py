"""Profiles SmolLM2 at TP1 and PP2, and a Llama of like size at TP2, on this CPU; prints errors on settings kept apart.

python -m benchmarks.profiling [MINUTES]     ten in all by default; wants an idle machine
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from profiler.accuracy import Target
from profiler.cli import Options, run

LIKE_SMOLLM2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
"""SmolLM2's depth and vocabulary, with heads that two ranks can share: its own are nine and three."""


def main() -> None:
    """Run both profiles and print what they are worth."""
    os.environ.setdefault("OMP_WAIT_POLICY", "active")  # nobody else wants the cores; read when torch is loaded
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "like-smollm2" / "config.json"
        config.parent.mkdir()
        config.write_text(json.dumps(LIKE_SMOLLM2))
        common = {"dtype": "float32", "device": "cpu", "links": False, "fresh": True}
        begun = time.monotonic()
        shown(Options("smollm2", Path(folder) / "smollm2.yaml", pps=(1, 2), budget_s=40.0 * minutes, **common))
        shown(
            Options(
                str(config),
                Path(folder) / "llama.yaml",
                tps=(2,),
                load_format="dummy",
                budget_s=60.0 * minutes - (time.monotonic() - begun),  # what the others left, if they met their targets
                **common,
            )
        )
        print(f"{(time.monotonic() - begun) / 60:.1f} minutes in all")


def shown(options: Options) -> None:
    """Profile and print one line per layout and phase."""
    profile = run(options).profile
    for each in profile.accuracy:
        what = f"{profile.model} TP{each.tp} PP{each.pp} {each.phase}"
        errors = f"median {each.median:.1%}, p95 {each.p95:.1%}, worst {each.worst:.1%}"
        noise = "" if each.repeats is None else f", repeats {each.repeats:.1%}"
        met = "met" if Target().met(each) else "missed"
        print(f"{what}: {errors} of {each.settings} settings{noise}; target {met}", flush=True)
    for note in profile.environment.notes if profile.environment else ():
        print(f"  {note}")


if __name__ == "__main__":
    main()
