"""A model preset of the planner -> ModelConfig, for a model whose weights are not at hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.errors import InputError
from planner.specs.base import load_preset, preset_names, suggest, validate
from planner.specs.model import ModelSpec
from runtime.model_config import ModelConfig

_DTYPES = ("float32", "bfloat16", "float16")


def preset_config(name: str) -> ModelConfig:
    """Return the configuration of a shipped preset. Raises InputError when there is none, or nothing here computes it.

    A preset holds what sizes and costs follow from. The base of the rotary frequencies and the ends of text are not
    among them, so this serves random weights alone.
    """
    document = load_preset("models", name)
    if document is None:
        names = preset_names("models")
        raise InputError(f"no model preset named {name!r}{suggest(name, names)}; shipped: {', '.join(names)}")
    return spec_config(validate(ModelSpec, document))


def spec_config(spec: ModelSpec) -> ModelConfig:
    """Return the configuration of a model of that size. Raises InputError when nothing here computes its like."""
    if why := next(_odd(spec), None):
        raise InputError(f"model {spec.name}: the runtime does not compute {why}")
    common: dict[str, Any] = {
        "layers": spec.layers,
        "hidden_size": spec.hidden_size,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_positions": _positions(spec),
        "tied_embeddings": spec.tied_embeddings,
        "attention_bias": spec.biases in ("qkv", "attention", "all"),
        "output_bias": spec.biases in ("attention", "all"),
        "mlp_bias": spec.biases in ("mlp", "all"),
        "dtype": spec.dtype,
    }
    if spec.moe:
        return ModelConfig(
            architecture="mixtral",
            intermediate_size=spec.moe.intermediate_size,
            experts=spec.moe.experts,
            experts_per_token=spec.moe.experts_per_token,
            **common,
        )
    width = spec.intermediate_size or 0
    name = "opt" if _is_opt(spec) else "qwen3" if spec.qk_norm else "qwen2" if spec.biases == "qkv" else "llama"
    return ModelConfig(architecture=name, intermediate_size=width, qk_norm=spec.qk_norm, **common)


def _is_opt(spec: ModelSpec) -> bool:
    return spec.position_rows > 0


def _positions(spec: ModelSpec) -> int:
    """Return the longest context, within which a sliding window hides nothing; 2,048 where the preset is silent."""
    longest = spec.max_positions or 2048
    return min(longest, spec.window_tokens or longest)


def _odd(spec: ModelSpec) -> Iterator[str]:
    """Yield what sets the model apart from all that is written in runtime/models."""
    if spec.mla:
        yield "latent attention (MLA)"
    if "linear" in spec.attention_pattern:
        yield "linear attention"
    if spec.quantisation:
        yield f"weights quantised by {spec.quantisation.method}"
    if spec.dtype not in _DTYPES:
        yield f"weights in {spec.dtype}"
    if spec.embedding_size and spec.embedding_size != spec.hidden_size:
        yield "an embedding narrower than the hidden state"
    if spec.norms_per_layer != 2:
        yield f"{spec.norms_per_layer} norms per layer"
    yield from _odd_mixture(spec)
    yield from _odd_mlp(spec)


def _odd_mixture(spec: ModelSpec) -> Iterator[str]:
    if spec.moe is None:
        return
    if spec.moe.shared_width or spec.moe.router_bias or not all(spec.moe.covers(layer) for layer in range(spec.layers)):
        yield "a mixture with shared experts, router biases or dense layers between"
    if spec.qk_norm or spec.biases != "none" or not spec.gated_mlp:
        yield "a mixture that is not built like Mixtral"


def _odd_mlp(spec: ModelSpec) -> Iterator[str]:
    if _is_opt(spec):
        if spec.gated_mlp or spec.biases != "all" or not spec.norm_biases or spec.qk_norm:
            yield "learned positions in a model that is not built like OPT"
        if spec.position_rows != (spec.max_positions or 0) + 2:
            yield "a table of positions that is not two rows longer than its positions"
    elif not spec.gated_mlp or spec.norm_biases:
        yield "a plain MLP, or norms with biases, without OPT's learned positions"
