"""Small random models of each architecture, saved as transformers saves them; transformers is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

_SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES),
    "llama, one KV head": lambda: transformers.LlamaConfig(**_SIZES | {"num_key_value_heads": 1, "head_dim": 16}),
    "llama3 rope, tied": lambda: transformers.LlamaConfig(
        **_SIZES, rope_parameters=_ROPE | {"original_max_position_embeddings": 64}, tie_word_embeddings=True
    ),
    "llama, linear rope": lambda: transformers.LlamaConfig(
        **_SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
    ),
    "mistral": lambda: transformers.MistralConfig(**_SIZES, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES, layer_types=None),
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES, head_dim=16),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=211, hidden_size=64, word_embed_proj_dim=64, ffn_dim=88, num_hidden_layers=4, num_attention_heads=8,
        max_position_embeddings=256, init_std=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    ),
    "mixtral": lambda: transformers.MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip


def tiny(name: str, seed: int = 0) -> Any:
    """Return a random model in fp32; its biases and norms are random, too, which transformers leaves at 0 and 1."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def saved(name: str, folder: Path) -> tuple[Any, str]:
    """Return the model, and the folder that it was saved to."""
    model = tiny(name)
    model.save_pretrained(folder)
    return model, str(folder)


def greedy(model: Any, prompt: list[int], tokens: int) -> tuple[int, ...]:
    """Return what transformers' `generate` answers."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return tuple(out[0, len(prompt) :].tolist())


def beams(model: Any, prompt: list[int], tokens: int, width: int, answers: int) -> list[tuple[int, ...]]:
    """Return what transformers' beam search answers, the best first."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, num_beams=width,
        num_return_sequences=answers,
    )  # fmt: skip
    return [tuple(row[len(prompt) :].tolist()) for row in out]
