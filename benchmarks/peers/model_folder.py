"""SmolLM2-135M-Instruct as a Hugging Face folder, for engines that read no GGUF file: made once, in fp32."""

from __future__ import annotations

import os
from pathlib import Path


def model_folder() -> Path:
    """Return the folder; writes it (538 MB) under the user's cache the first time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from runtime.model_files import smollm2_path

    root = os.environ.get("GOODPUT_CACHE_DIR") or Path.home() / ".cache" / "goodput-planner"
    folder, file = Path(root) / "smollm2-135m-instruct", smollm2_path()
    if not (folder / "tokenizer.json").exists():  # written last
        source, name = str(file.parent), file.name
        # without dequantize=True transformers computes the same and then refuses to save it
        quantization = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=name, dtype="float32", quantization_config=quantization
        )
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)
    return folder
