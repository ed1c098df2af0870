"""Runs an unmodified load generator from the package index, guidellm, against `planner serve`, and prints its tables.

python -m benchmarks.load_generator GUIDELLM [REQUESTS]      GUIDELLM: its program, in an environment of its own
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from planner.deploy import to_yaml
from runtime.model_files import smollm2_path
from tests.serving import deployment, running_server


def main() -> None:
    """Serve SmolLM2, one prefill and one decode instance, and let it be asked."""
    program = sys.argv[1]
    requests = sys.argv[2] if len(sys.argv) > 2 else "40"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "deployment.yaml").write_text(to_yaml(deployment([("prefill", 1, 1), ("decode", 1, 1)])))
        tokenizer = folder / "tokenizer"  # guidellm counts tokens by itself, and wants files that transformers reads
        AutoTokenizer.from_pretrained(smollm2_path().parent, gguf_file=smollm2_path().name).save_pretrained(tokenizer)
        with running_server(folder / "deployment.yaml") as (url, _):
            command = [program, "run", "--backend", f"kind=openai_http,target={url}"]
            command += ["--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={requests}"]
            command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32"]
            command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--disable-progress"]
            subprocess.run(command, check=True, cwd=folder)


if __name__ == "__main__":
    main()
