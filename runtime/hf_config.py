"""A Hugging Face `config.json` -> ModelConfig. What would be computed differently from what it says is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from planner.errors import Fault, InputError
from planner.specs.base import Document, parse, read_text, short
from runtime.json_file import read_json
from runtime.model_config import ModelConfig, RopeScaling

_MOST_LAYERS = _MOST_EXPERTS = 1000
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture's code in transformers does where its config is silent."""

    name: str
    """That of the file in runtime/models."""
    positions: int | None = None
    kv_heads: int | None = None
    """None: one per head."""
    head_dim: int | None = None
    """None: hidden size / heads."""
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    window: int | None = None
    window_needs_flag: bool = False
    """True: `sliding_window` counts only beside `use_sliding_window: true`."""
    qkv_bias: bool = False
    bias_keys: bool = False
    """True: `attention_bias` gives biases to q, k, v and the output."""
    mlp_bias_key: bool = False
    qk_norm: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", positions=2048, bias_keys=True, mlp_bias_key=True),
    "MistralForCausalLM": _Family("mistral", positions=131_072, kv_heads=8, window=4096),
    "Qwen2ForCausalLM": _Family("qwen2", positions=32_768, window=4096, window_needs_flag=True, qkv_bias=True),
    "Qwen3ForCausalLM": _Family(
        "qwen3", positions=32_768, head_dim=128, window=4096, window_needs_flag=True, bias_keys=True, qk_norm=True
    ),
    "MixtralForCausalLM": _Family("mixtral", positions=131_072, kv_heads=8, norm_eps=1e-5, rope_theta=1e6),
}
_OPT = "OPTForCausalLM"
ARCHITECTURES = (*_FAMILIES, _OPT)


def read_hf_config(path: str | Path) -> ModelConfig:
    """Return the configuration in a config.json. Raises InputError with a line for each key that is missing or wrong.

    A `generation_config.json` beside it has the last word on which tokens end an answer.
    """
    config = _Keys(replace(parse(read_text(path), str(path)), data=read_json(path)))
    names = config.value("architectures", list, [])
    name = next((name for name in names if name in ARCHITECTURES), None)
    if name is None:
        got = f"got {names[0]!r}" if names else "found none"
        config.fault(f"expected one of {', '.join(ARCHITECTURES)}, {got}", "architectures")
        raise InputError(config.faults)
    _refuse_quantised(config)
    fields = _opt(config) if name == _OPT else _decoder(config, _FAMILIES[name])
    fields |= {
        "vocab_size": config.count("vocab_size"),
        "dtype": _dtype(config),
        "bos_id": config.token("bos_token_id"),
    }
    ends = config.tokens("eos_token_id")
    if config.faults:
        raise InputError(dict.fromkeys(config.faults))
    try:
        return ModelConfig(**fields, eos_ids=_ends(Path(path)) or ends)
    except InputError as error:
        raise InputError(Fault(str(error), str(path))) from None


@dataclass(slots=True)
class _Keys:
    """The keys of the file, each read with a check, and the mistakes met so far."""

    document: Document
    faults: list[Fault] = field(default_factory=list)

    def fault(self, message: str, *path: str | int) -> None:
        self.faults.append(self.document.fault(message, *path))

    def value(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return what stands under `key`, or `default` where it is absent or null. Another type is a mistake."""
        found = self.document.data.get(key)
        if found is None:
            return default
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            self.fault(f"expected {_NAMES[kind]}, got {short(found)}", key)
            return default
        return found

    def count(self, key: str, default: int | None = None, most: int = 2**31) -> int:
        """Return a whole number from 1 to `most`; that there is none, nor a default, is a mistake."""
        found = self.value(key, int)
        if found is None and default is None and self.document.data.get(key) is None:
            self.fault("is required", key)
        if found is not None and not 1 <= found <= most:
            self.fault(f"expected a whole number from 1 to {most}, got {found}", key)
            return 1
        return int(found or default or 1)

    def number(self, key: str, default: float) -> float:
        """Return a number above 0."""
        found = self.value(key, (int, float), default)
        if not 0 < found < float("inf"):
            self.fault(f"expected a number above 0, got {found}", key)
        return float(found)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false."""
        return bool(self.value(key, bool, default))

    def must_be(self, key: str, wanted: Any, why: str) -> None:
        """Record a fault unless `key` is absent, null or `wanted`."""
        found = self.document.data.get(key)
        if found is not None and found != wanted:
            self.fault(f"expected {json.dumps(wanted)}, got {short(found)}: {why}", key)

    def token(self, key: str) -> int | None:
        """Return a token id, or None."""
        found: int | None = self.value(key, int)
        return found

    def tokens(self, key: str) -> tuple[int, ...]:
        """Return a token id or a list of them."""
        found = self.document.data.get(key)
        listed = found if isinstance(found, list) else [] if found is None else [found]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
            self.fault(f"expected a token id or a list of them, got {short(found)}", key)
            return ()
        return tuple(dict.fromkeys(listed))


def _decoder(config: _Keys, family: _Family) -> dict[str, Any]:
    """Return the fields of a model built like Llama."""
    config.must_be("hidden_act", "silu", "no other activation is computed")
    config.must_be("partial_rotary_factor", 1, "all of a head is turned")
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    biases = family.bias_keys and config.flag("attention_bias")
    mixture = family.name == "mixtral"
    theta, scaling = _rope(config, family)
    return {
        "architecture": family.name,
        "layers": config.count("num_hidden_layers", most=_MOST_LAYERS),
        "hidden_size": hidden,
        "intermediate_size": config.count("intermediate_size"),
        "heads": heads,
        "kv_heads": config.count("num_key_value_heads", family.kv_heads or heads),
        "head_dim": config.count("head_dim", family.head_dim or max(1, hidden // heads)),
        "max_positions": _positions(config, family),
        "tied_embeddings": config.flag("tie_word_embeddings"),
        "norm_eps": config.number("rms_norm_eps", family.norm_eps),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "attention_bias": family.qkv_bias or biases,
        "output_bias": biases,
        "mlp_bias": family.mlp_bias_key and config.flag("mlp_bias"),
        "qk_norm": family.qk_norm,
        "experts": config.count("num_local_experts", 8, most=_MOST_EXPERTS) if mixture else 0,
        "experts_per_token": config.count("num_experts_per_tok", 2) if mixture else 0,
    }


def _positions(config: _Keys, family: _Family) -> int:
    """Return the longest context. Up to its window a sliding layer sees all of it, so that no mask is needed."""
    longest = config.count("max_position_embeddings", family.positions)
    if family.window_needs_flag and not config.flag("use_sliding_window"):
        return longest
    absent = "sliding_window" not in config.document.data
    window = family.window if absent else config.value("sliding_window", int)
    for index, kind in enumerate(config.value("layer_types", list, [])):
        if kind not in ("full_attention", "sliding_attention"):
            config.fault(f"expected full_attention or sliding_attention, got {short(kind)}", "layer_types", index)
    return min(longest, window or longest)


def _rope(config: _Keys, family: _Family) -> tuple[float, RopeScaling | None]:
    """Return the base of the rotary frequencies and how they are stretched.

    transformers 5 writes both under `rope_parameters`, older ones `rope_theta` beside `rope_scaling`.
    """
    key = "rope_parameters" if config.document.data.get("rope_parameters") else "rope_scaling"
    given = config.value(key, dict, {})
    if not given:
        return config.number("rope_theta", family.rope_theta), None
    inner = _Keys(config.document.at(key), config.faults)
    theta = inner.number("rope_theta", config.number("rope_theta", family.rope_theta))
    inner.must_be("partial_rotary_factor", 1, "all of a head is turned")
    kind = inner.value("rope_type", str, inner.value("type", str, "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        inner.fault(
            f"expected default, linear or llama3, got {kind!r}", "rope_type" if "rope_type" in given else "type"
        )
        return theta, None
    if "factor" not in given:
        inner.fault("is required", "factor")
    factor = inner.number("factor", 1.0)
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    return theta, RopeScaling(
        "llama3",
        factor,
        low_freq_factor=inner.number("low_freq_factor", 1.0),
        high_freq_factor=inner.number("high_freq_factor", 4.0),
        original_positions=inner.count("original_max_position_embeddings"),
    )


def _opt(config: _Keys) -> dict[str, Any]:
    """Return the fields of an OPT; OPT-350M, with its norms after each block and a narrower embedding, is refused."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    config.must_be("do_layer_norm_before", True, "norms after a block are not supported")
    config.must_be("word_embed_proj_dim", hidden, "an embedding narrower than the hidden state is not supported")
    config.must_be("activation_function", "relu", "no other activation is computed")
    config.must_be("layer_norm_elementwise_affine", True, "norms without weights are not supported")
    config.must_be("_remove_final_layer_norm", False, "the last norm is always computed")
    biases = config.flag("enable_bias", True)
    return {
        "architecture": "opt",
        "layers": config.count("num_hidden_layers", most=_MOST_LAYERS),
        "hidden_size": hidden,
        "intermediate_size": config.count("ffn_dim"),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": max(1, hidden // heads),
        "max_positions": config.count("max_position_embeddings", 2048),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "norm_eps": 1e-5,
        "attention_bias": biases,
        "output_bias": biases,
        "mlp_bias": biases,
    }


def _refuse_quantised(config: _Keys) -> None:
    for key in ("quantization_config", "compression_config"):
        if given := config.value(key, dict):
            method = given.get("quant_method", "unnamed")
            config.fault(f"weights quantised by {short(method)} are not supported; take the unquantised model", key)


def _dtype(config: _Keys) -> str:
    """Return the type of the weights: `dtype` since transformers 5, `torch_dtype` before, float32 where neither is."""
    key = "dtype" if config.document.data.get("dtype") else "torch_dtype"
    name = str(config.value(key, str, "float32")).removeprefix("torch.")
    if name not in _DTYPES:
        config.fault(f"expected {', '.join(_DTYPES)}, got {short(name)}", key)
    return name


def _ends(path: Path) -> tuple[int, ...]:
    beside = path.with_name("generation_config.json")
    if not beside.is_file():
        return ()
    keys = _Keys(Document(read_json(beside), str(beside)))
    ends = keys.tokens("eos_token_id")
    if keys.faults:
        raise InputError(keys.faults)
    return ends


_NAMES: dict[Any, str] = {
    int: "a whole number",
    (int, float): "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a mapping",
}
