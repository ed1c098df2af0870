"""The model that the runtime computes -> the model that the planner costs."""

from __future__ import annotations

from planner.specs.base import load_preset, preset_names, validate
from planner.specs.model import ModelSpec, Moe
from runtime.model_config import ModelConfig
from runtime.tensor_shapes import POSITION_OFFSET


def spec_of(config: ModelConfig, name: str, dtype: str) -> ModelSpec:
    """Return the model as the planner knows one, with weights and KV cache in `dtype`."""
    opt = config.architecture == "opt"
    return ModelSpec(
        name=name,
        layers=config.layers,
        hidden_size=config.hidden_size,
        intermediate_size=None if config.experts else config.intermediate_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        position_rows=config.max_positions + POSITION_OFFSET if opt else 0,
        tied_embeddings=config.tied_embeddings,
        gated_mlp=not opt,
        biases=_biases(config),  # type: ignore[arg-type]
        norm_biases=opt,
        qk_norm=config.qk_norm,
        moe=_mixture(config),
        dtype=dtype,  # type: ignore[arg-type]
        source="the configuration that was profiled",
    )


def _mixture(config: ModelConfig) -> Moe | None:
    if not config.experts:
        return None
    return Moe(
        experts=config.experts, experts_per_token=config.experts_per_token, intermediate_size=config.intermediate_size
    )


def _biases(config: ModelConfig) -> str:
    has = config.attention_bias, config.output_bias, config.mlp_bias
    return {
        (True, True, True): "all",
        (True, True, False): "attention",
        (True, False, False): "qkv",
        (False, False, True): "mlp",
    }.get(has, "none")


def same_preset(spec: ModelSpec) -> ModelSpec | None:
    """Return the shipped model that differs from `spec` in words alone, or None: then the profile carries its own."""
    return next((preset for preset in _presets() if _figures(preset) == _figures(spec)), None)


def named_as_preset(spec: ModelSpec) -> ModelSpec:
    """Return the model by the name of the shipped one that it is, whatever the type of its weights; else as it is."""
    same = (
        preset for preset in _presets() if _figures(preset, "dtype", "kv_dtype") == _figures(spec, "dtype", "kv_dtype")
    )
    preset = next(same, None)
    return spec if preset is None else spec.model_copy(update={"name": preset.name, "aliases": preset.aliases})


def _presets() -> list[ModelSpec]:
    return [validate(ModelSpec, d) for name in preset_names("models") if (d := load_preset("models", name))]


def _figures(spec: ModelSpec, *without: str) -> dict[str, object]:
    return spec.model_dump(exclude={"name", "aliases", "source", "notes", *without})
