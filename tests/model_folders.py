"""Tiny models written to disk for tests: Hugging Face folders and GGUF files of random tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from runtime.model_config import ModelConfig
from runtime.tensor_shapes import tensor_shapes

TINY = ModelConfig(
    architecture="llama",
    layers=2,
    hidden_size=64,
    intermediate_size=96,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=288,
    max_positions=128,
    norm_eps=1e-6,
    bos_id=1,
    eos_ids=(2,),
    dtype="float32",
)
TINY_JSON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 288,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a tensor of normal values for each that the model needs."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(config)}


def write_folder(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], shards: int = 1, **settings: Any
) -> Path:
    """Write a Hugging Face folder, its tensors in one file or dealt over shards with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **settings}, indent=2))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{shard + 1:05}-of-{shards:05}.safetensors" for shard in range(shards)]
    table = {name: names[index % shards] for index, name in enumerate(tensors)}
    for shard in names:
        save_file({name: tensors[name] for name, file in table.items() if file == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return folder


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return rows in llama.cpp's order: a head's two halves, interleaved."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: dict[str, torch.Tensor],
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write a GGUF file by the package's own writer; matrices in blocks of type `kind`, where rows divide into them."""
    name = "llama" if config.architecture in ("llama", "mistral", "mixtral") else config.architecture
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if config.experts:
        writer.add_expert_count(config.experts)
        writer.add_expert_used_count(config.experts_per_token)
    writer.add_bos_token_id(config.bos_id or 0)
    writer.add_eos_token_id(config.eos_ids[0])
    _add_tokenizer(writer, config)
    for key, value in (metadata or {}).items():
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](key, value)
    names = gguf.get_tensor_name_map(
        next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name), config.layers
    )
    for label, values in _stacked(config, tensors).items():
        bare, _, end = label.rpartition(".")
        heads = config.heads if "q_proj" in label else config.kv_heads if "k_proj" in label else 0
        stored = permuted(values, heads) if heads and name == "llama" else values
        quantised = gguf.GGMLQuantizationType[kind] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        stored_name = f"{names.get_name(bare) or bare}.{end}"
        writer.add_tensor(stored_name, gguf.quantize(stored, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Add byte-level BPE with an end of text, a begin, an end and the 256 bytes, and two merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|end|>", "<|begin|>", "<|turn|>", *sorted(ByteLevel.alphabet()), "he", "hel"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "he l"])


def _stacked(config: ModelConfig, tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return the tensors with the experts of each layer in one."""
    arrays = {name: tensor.numpy() for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(config.layers if config.experts else 0):
        prefix = f"model.layers.{layer}.block_sparse_moe.experts"
        for matrix in ("w1", "w2", "w3"):
            each = [tensors[f"{prefix}.{expert}.{matrix}.weight"].numpy() for expert in range(config.experts)]
            arrays[f"{prefix}.{matrix}.weight"] = np.stack(each)
    return arrays
