"""GGUF metadata -> ModelConfig."""

from __future__ import annotations

from collections import Counter
from math import prod

import numpy as np
from gguf import GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from planner.errors import InputError
from runtime.gguf_file import GgufFile
from runtime.model_config import ModelConfig, RopeScaling

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Those that are named alike in runtime/models. Mistral and Mixtral call themselves llama."""


def gguf_config(file: GgufFile) -> ModelConfig:
    """Return the configuration of the model in a GGUF file. Raises InputError for a model that nothing here computes.

    Whether there are biases, per-head norms or an output matrix of its own is told by the tensors alone.
    """
    try:
        return _config(file)
    except InputError as error:
        raise error if error.faults[0].file else file.fault(str(error)) from None


def _config(file: GgufFile) -> ModelConfig:
    name = file.require("general.architecture", str)
    if name not in ARCHITECTURES:
        raise file.fault(f"expected the architecture {', '.join(ARCHITECTURES)}, got {name!r}")
    if file.get("split.count", int, 1) > 1:
        raise file.fault("one of several parts: merge them first, with llama-gguf-split --merge")
    experts = _integer(file, f"{name}.expert_count", 0)
    heads, hidden = _integer(file, f"{name}.attention.head_count"), _integer(file, f"{name}.embedding_length")
    head_dim = _integer(file, f"{name}.attention.key_length", hidden // heads)
    if (value_dim := _integer(file, f"{name}.attention.value_length", head_dim)) != head_dim:
        raise file.fault(f"expected values as wide as the keys, {head_dim}, got {value_dim}")
    if (rotated := _integer(file, f"{name}.rope.dimension_count", head_dim)) != head_dim:
        raise file.fault(f"expected rotary positions over all {head_dim} dimensions of a head, got {rotated}")
    theta = _number(file, f"{name}.rope.freq_base", 10_000.0)
    return ModelConfig(
        architecture="mixtral" if experts else name,
        layers=_layers(file, name),
        hidden_size=hidden,
        intermediate_size=_integer(file, f"{name}.feed_forward_length"),
        heads=heads,
        kv_heads=_integer(file, f"{name}.attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=_vocabulary(file),
        max_positions=_positions(file, name),
        tied_embeddings="output.weight" not in file.tensors,
        norm_eps=_number(file, f"{name}.attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, name, theta, head_dim),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        experts=experts,
        experts_per_token=_integer(file, f"{name}.expert_used_count") if experts else 0,
        bos_id=file.get("tokenizer.ggml.bos_token_id", int),
        eos_ids=_ends(file),
        dtype=_published_in(file),
    )


def _layers(file: GgufFile, name: str) -> int:
    layers = _integer(file, f"{name}.block_count")
    if layers > len(file.tensors):
        raise file.fault(f"{name}.block_count: {layers} layers announced, with {len(file.tensors)} tensors in all")
    return layers


def _integer(file: GgufFile, key: str, default: int | None = None) -> int:
    """Return a count from 1 (from 0 where 0 is the default). Old files list the MLP width layer by layer."""
    if default is not None and key not in file.metadata:
        return default
    value = file.metadata.get(key)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if key not in file.metadata:
        return int(file.require(key, int))
    if isinstance(value, bool) or not isinstance(value, int) or not min(1, default or 1) <= value <= 2**31:
        raise file.fault(f"{key}: expected a whole number from 1, the same for all layers, got {str(value)[:60]}")
    return value


def _number(file: GgufFile, key: str, default: float | None = None) -> float:
    """Return a number that the file holds in 32 bits, as the shortest decimal that is it: 1e-05, not 9.99999974e-06."""
    value = file.require(key, (int, float)) if default is None else file.get(key, (int, float), default)
    if not 0.0 < value < float("inf"):
        raise file.fault(f"{key}: expected a number above 0, got {value}")
    return float(str(np.float32(value)))


def _vocabulary(file: GgufFile) -> int:
    """Return the rows of the embedding: some models have more of them than tokens."""
    if "token_embd.weight" not in file.tensors:
        raise file.fault("there is no tensor token_embd.weight")
    return file.tensors["token_embd.weight"].shape[0]


def _positions(file: GgufFile, name: str) -> int:
    """Return the longest context. Up to its window a sliding layer sees all of it, so that no mask is needed."""
    longest = _integer(file, f"{name}.context_length")
    return min(longest, _integer(file, f"{name}.attention.sliding_window", 0) or longest)


def _rope_scaling(file: GgufFile, name: str, theta: float, head_dim: int) -> RopeScaling | None:
    """Return how rotary frequencies are stretched.

    A Llama 3 file holds only what each frequency is divided by. All published ones stretch by the same law, with low
    factor 1, high factor 4 and 8,192 positions; whether it is that one is checked against the tensor.
    """
    if "rope_freqs.weight" in file.tensors:
        divisors = dequantize(file.rows("rope_freqs.weight"), file.tensors["rope_freqs.weight"].kind).reshape(-1)
        scaling = RopeScaling("llama3", factor=float(f"{divisors.max():.5g}"))  # 8, not 8.000001
        expected = _llama3_divisors(head_dim, theta, scaling)
        if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
            raise file.fault("rope_freqs.weight: its factors are not those of Llama 3, the only ones known here")
        return scaling
    kind = file.get(f"{name}.rope.scaling.type", str, "none")
    if kind not in ("none", "linear"):
        raise file.fault(f"{name}.rope.scaling.type: expected none or linear, got {kind!r}")
    return RopeScaling("linear", _number(file, f"{name}.rope.scaling.factor")) if kind == "linear" else None


def _llama3_divisors(head_dim: int, theta: float, scaling: RopeScaling) -> NDArray[np.float64]:
    """Return what each of the head_dim / 2 rotary frequencies is divided by (Llama 3.1, section 3.4.2)."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_positions * frequencies / (2 * np.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clip(0, 1)
    return 1.0 / (kept + (1.0 - kept) / scaling.factor)


def _ends(file: GgufFile) -> tuple[int, ...]:
    """Return the tokens that end an answer: of the text, and of a turn where that is another."""
    keys = ("eos_token_id", "eot_token_id")
    found = (file.get(f"tokenizer.ggml.{key}", int) for key in keys)
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _published_in(file: GgufFile) -> str:
    """Return the type that most values have; for quantised ones bfloat16, in which nearly all models are published."""
    values: Counter[GGMLQuantizationType] = Counter()
    for tensor in file.tensors.values():
        values[tensor.kind] += prod(tensor.shape)
    most = max(values, key=lambda kind: values[kind])
    return {GGMLQuantizationType.F32: "float32", GGMLQuantizationType.F16: "float16"}.get(most, "bfloat16")
