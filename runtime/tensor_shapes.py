"""The tensors that a checkpoint of each architecture holds: names as on the Hugging Face hub, and shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from planner.errors import Fault, InputError
from runtime.model_config import ModelConfig

Named = tuple[str, tuple[int, ...]]
POSITION_OFFSET = 2
"""OPT's table of positions starts with two rows that stand for padding."""


def tensor_shapes(config: ModelConfig) -> Iterator[Named]:
    """Yield (name, shape) of every tensor that the model needs; a tied output matrix is none of its own."""
    stack = "model.decoder" if config.architecture == "opt" else "model"
    hidden, vocabulary = config.hidden_size, config.vocab_size
    yield f"{stack}.embed_tokens.weight", (vocabulary, hidden)
    if config.architecture == "opt":
        yield f"{stack}.embed_positions.weight", (config.max_positions + POSITION_OFFSET, hidden)
    for layer in range(config.layers):
        block = _opt_layer if config.architecture == "opt" else _llama_layer
        yield from block(config, f"{stack}.layers.{layer}")
    if config.architecture == "opt":
        yield from _linear(f"{stack}.final_layer_norm", (hidden,), True)
    else:
        yield f"{stack}.norm.weight", (hidden,)
    if not config.tied_embeddings:
        yield "lm_head.weight", (vocabulary, hidden)


class Stored(Protocol):
    """Weights that lie in files, whose headers tell the shapes."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, or None when there is none of that name."""
        ...


def check_tensors(config: ModelConfig, stored: Stored, place: str | Path) -> None:
    """Raise InputError with the first tensor that is missing and the first of another shape than the config means."""
    found = [(name, shape, stored.shape(name)) for name, shape in tensor_shapes(config)]
    missing = [name for name, _, held in found if held is None]
    wrong = [(name, shape, held) for name, shape, held in found if held not in (None, shape)]
    faults = []
    if missing:
        faults.append(f"there is no tensor {missing[0]}{_more(missing)}, which the model's config means")
    if wrong:
        name, shape, held = wrong[0]
        faults.append(
            f"tensor {name}{_more(wrong)}: the model's config means {list(shape)}, the file holds {list(held or ())}"
        )
    if faults:
        raise InputError([Fault(message, str(place)) for message in faults])


def _more(items: Sequence[object]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""


def _opt_layer(config: ModelConfig, prefix: str) -> Iterator[Named]:
    hidden, width = config.hidden_size, config.intermediate_size
    yield from _attention(config, f"{prefix}.self_attn", "out_proj")
    yield from _linear(f"{prefix}.self_attn_layer_norm", (hidden,), True)
    yield from _linear(f"{prefix}.fc1", (width, hidden), config.mlp_bias)
    yield from _linear(f"{prefix}.fc2", (hidden, width), config.mlp_bias)
    yield from _linear(f"{prefix}.final_layer_norm", (hidden,), True)


def _llama_layer(config: ModelConfig, prefix: str) -> Iterator[Named]:
    hidden = config.hidden_size
    yield f"{prefix}.input_layernorm.weight", (hidden,)
    yield from _attention(config, f"{prefix}.self_attn", "o_proj")
    yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    if not config.experts:
        yield from _gated(config, f"{prefix}.mlp", ("gate_proj", "up_proj", "down_proj"))
        return
    yield f"{prefix}.block_sparse_moe.gate.weight", (config.experts, hidden)
    for expert in range(config.experts):
        yield from _gated(config, f"{prefix}.block_sparse_moe.experts.{expert}", ("w1", "w3", "w2"))


def _attention(config: ModelConfig, prefix: str, output: str) -> Iterator[Named]:
    hidden, queries, keys = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield from _linear(f"{prefix}.{name}", (rows, hidden), config.attention_bias)
    yield from _linear(f"{prefix}.{output}", (hidden, queries), config.output_bias)
    if config.qk_norm:
        yield f"{prefix}.q_norm.weight", (config.head_dim,)
        yield f"{prefix}.k_norm.weight", (config.head_dim,)


def _gated(config: ModelConfig, prefix: str, names: tuple[str, str, str]) -> Iterator[Named]:
    hidden, width = config.hidden_size, config.intermediate_size
    for name, shape in zip(names, ((width, hidden), (width, hidden), (hidden, width)), strict=True):
        yield from _linear(f"{prefix}.{name}", shape, config.mlp_bias)


def _linear(name: str, shape: tuple[int, ...], bias: bool) -> Iterator[Named]:
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]
