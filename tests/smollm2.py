"""SmolLM2-135M-Instruct for tests, as our files give it and as transformers computes it: the oracle of numerics.

transformers takes 12 s to load the GGUF file itself. Built from our tensors it takes about 2 s, and that our tensors
are bit for bit those of transformers is a test of its own (tests/test_weights.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from runtime.model_config import ModelConfig
from runtime.model_files import ModelFiles, open_model
from runtime.tensor_shapes import tensor_shapes


@cache
def smollm2_files(dtype: torch.dtype = torch.float32) -> ModelFiles:
    """Return configuration, weights and tokenizer, opened once per process."""
    return open_model("smollm2", dtype)


@cache
def smollm2_oracle() -> Any:
    """Return transformers' LlamaForCausalLM in fp32, in eval mode, built once per process."""
    files = smollm2_files()
    return llama_oracle(files.config, {name: files.weights.take(name, s) for name, s in tensor_shapes(files.config)})


def llama_oracle(config: ModelConfig, tensors: dict[str, torch.Tensor]) -> Any:
    """Return transformers' LlamaForCausalLM of these tensors, which it then shares."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied_embeddings,
        bos_token_id=config.bos_id,
        eos_token_id=list(config.eos_ids),
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(theirs)
    model.load_state_dict(tensors, strict=not config.tied_embeddings, assign=True)
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(theirs)  # its frequencies are no weights, and were made on no device
    return model.eval()
