"""A Hugging Face `config.json` -> ModelSpec.

The same figure has many names there, hides under `text_config` and the like in multimodal models, and is
often left to the default of its model family: `_FAMILIES` holds those. What had to be assumed ends up in
`notes`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from planner.errors import Fault, InputError
from planner.specs.base import Document, short, show_path, validate
from planner.specs.model import Attention, Biases, Dtype, ModelSpec

LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
HIDDEN = ("hidden_size", "d_model", "n_embd", "model_dim", "dim")
HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads")
KV_HEADS = (
    "num_key_value_heads",
    "n_kv_heads",
    "num_kv_heads",
    "n_head_kv",
    "kv_n_heads",
    "multi_query_group_num",
)
HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim")
MLP = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff", "hidden_dim")
VOCABULARY = ("vocab_size", "padded_vocab_size", "n_vocab")
POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k")
EXPERT_WIDTH = ("moe_intermediate_size", "moe_ffn_hidden_size", "expert_ffn_hidden_size", "ffn_hidden_size")
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")

_TEXT_PARTS = (
    "text_config",
    "llm_config",
    "language_config",
    "language_model",
    "text_model",
    "thinker_config",
)
_OTHER_PARTS = re.compile(
    "vision|visual|image|audio|speech|talker|2wav|vocoder|encoder|project|qformer|quant|rope|draft|depth"
)
_DTYPES: dict[str, Dtype] = {
    "float32": "float32",
    "float": "float32",
    "fp32": "float32",
    "float16": "float16",
    "half": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "int8": "int8",
}
_ATTENTION: dict[str, Attention] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "local_attention": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "linear",
}


class _Family(NamedTuple):
    """What a family's code does where its config is silent."""

    tied: bool = False
    gated: bool = True
    biases: Biases = "none"
    norm_biases: bool = False
    norms: int = 2
    qk_norm: bool = False
    position_offset: int | None = None
    """Rows of the learned position table beyond the last position; None: no such table."""
    mlp_multiple: int | None = None
    """MLP width over hidden size where no width is given."""
    router_bias: bool = False
    shared_experts: int = 0
    window_by_default: bool = True
    """False: `sliding_window` counts only beside `use_sliding_window: true`."""
    full_every: int | None = None
    """With a window: every how many layers one is full, where the config does not say."""


_PLAIN = _Family()
_GPT = _Family(tied=True, gated=False, biases="all", norm_biases=True, mlp_multiple=4)
_QWEN = _Family(window_by_default=False)
_FAMILIES: dict[str, _Family] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "phi3", "deepseek_v2", "olmo", "yi", "internlm2"), _PLAIN),
    "baichuan": _PLAIN,
    "bloom": _GPT,
    "chatglm": _Family(biases="qkv"),
    "codegen": _GPT._replace(tied=False, biases="mlp", norms=1),
    "cohere": _Family(tied=True, norms=1),
    "cohere2": _Family(tied=True, norms=1, full_every=4),
    "deepseek_v3": _Family(router_bias=True),
    "falcon": _GPT._replace(biases="none"),
    "gemma": _Family(tied=True),
    "gemma2": _Family(tied=True, norms=4, full_every=2),
    "gemma3": _Family(tied=True, norms=4, qk_norm=True, full_every=6),
    "glm4_moe": _Family(router_bias=True),
    "gpt2": _GPT._replace(position_offset=0),
    "gpt_bigcode": _GPT._replace(position_offset=0),
    "gpt_neox": _GPT._replace(tied=False),
    "gpt_oss": _Family(biases="all", router_bias=True, full_every=2),
    "gptj": _GPT._replace(tied=False, biases="mlp", norms=1),
    "kimi_k2": _Family(router_bias=True),
    "llama4": _Family(shared_experts=1, full_every=4),
    "mpt": _Family(tied=True, gated=False, mlp_multiple=4),
    "nemotron": _Family(gated=False, norm_biases=True),
    "opt": _GPT._replace(position_offset=2),
    "phi": _GPT._replace(tied=False, norms=1),
    "qwen2": _QWEN._replace(biases="qkv"),
    "qwen2_moe": _QWEN._replace(biases="qkv"),
    "qwen2_vl": _QWEN._replace(biases="qkv"),
    "qwen2_5_vl": _QWEN._replace(biases="qkv"),
    "qwen3": _QWEN._replace(qk_norm=True),
    "qwen3_moe": _QWEN._replace(qk_norm=True),
    "qwen3_next": _QWEN._replace(qk_norm=True),
    "qwen3_vl": _QWEN._replace(qk_norm=True),
    "stablelm": _Family(norm_biases=True),
    "starcoder2": _GPT._replace(mlp_multiple=None),
}


def is_hf_config(document: Document) -> bool:
    """True when `document` looks like a Hugging Face config and not like our own model YAML."""
    data = document.data
    if not isinstance(data, dict) or "layers" in data:
        return False
    signs = ("model_type", "architectures", "transformers_version", *LAYERS, *HEADS, *_TEXT_PARTS)
    return any(sign in data for sign in signs)


def read_model(document: Document) -> ModelSpec:
    """Return the model of a document that holds our own YAML or a Hugging Face config.

    References are resolved by the caller (`specs.base.resolve("models", ...)`). Raises InputError.
    """
    return read_hf_config(document) if is_hf_config(document) else validate(ModelSpec, document)


def read_hf_config(document: Document, name: str | None = None) -> ModelSpec:
    """Return the model of a Hugging Face config. Raises InputError with every missing or wrong key."""
    if not isinstance(document.data, dict):
        raise InputError(document.fault("expected a mapping, the content of a Hugging Face config.json"))
    config = _find_decoder(document)
    fields = _fields(config, name or _name(document))
    if config.faults:
        raise InputError(dict.fromkeys(config.faults))
    at = document.marks.get(document.prefix)
    return validate(ModelSpec, Document(fields, document.file, {(): at} if at else {}))


@dataclass(slots=True)
class _Config:
    """One mapping of the config with the ones around it, nearest first, and the mistakes met in reading."""

    document: Document
    outer: tuple[Document, ...] = ()
    searched: tuple[str, ...] = ()
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def data(self) -> dict[Any, Any]:
        return self.document.data

    def key(self, names: tuple[str, ...]) -> str | None:
        """Return the first of `names` that has a value."""
        return next((name for name in names if self.data.get(name) is not None), None)

    def fault(self, message: str, *path: str | int) -> None:
        self.faults.append(self.document.fault(message, *path))

    def integer(self, *names: str, least: int = 1) -> int | None:
        """Return the whole number under the first of `names`, or None. Anything else there is a mistake."""
        key = self.key(names)
        if key is None:
            return None
        value = self.data[key]
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= 10**9:
            return value
        self.fault(f"expected a whole number from {least} to 10^9, got {short(value)}", key)
        return least

    def required(self, *names: str) -> int:
        """Return the whole number under one of `names`; that none is there is a mistake."""
        value = self.integer(*names)
        if value is None:
            where = f" (searched {', '.join(self.searched)})" if len(self.searched) > 1 else ""
            self.fault(f"expected {' or '.join(names)}, found none{where}")
        return value or 1

    def flag(self, *names: str) -> bool | None:
        """Return the true or false under the first of `names`, or None."""
        key = self.key(names)
        value = self.data[key] if key else None
        if key is None or isinstance(value, bool):
            return value
        self.fault(f"expected true or false, got {short(value)}", key)
        return None

    def text(self, *names: str) -> str | None:
        """Return the text under the first of `names`, or None."""
        key = self.key(names)
        value = self.data[key] if key else None
        if key is None or isinstance(value, str):
            return value
        self.fault(f"expected text, got {short(value)}", key)
        return None

    def part(self, name: str) -> _Config | None:
        """Return the mapping under `name`, or None; its mistakes are collected here."""
        value = self.data.get(name)
        if isinstance(value, dict):
            return _Config(self.document.at(name), (), (), self.faults, self.notes)
        if value is not None:
            self.fault(f"expected a mapping, got {short(value)}", name)
        return None

    def items(self, name: str) -> list[Any] | None:
        """Return the list under `name`, or None."""
        value = self.data.get(name)
        if value is None or isinstance(value, list):
            return value
        self.fault(f"expected a list, got {short(value)}", name)
        return None

    def inherited(self, *names: str) -> _Config:
        """Return this mapping or the nearest one around it that has one of `names`."""
        around = (_Config(document, (), (), self.faults, self.notes) for document in self.outer)
        return next((config for config in (self, *around) if config.key(names)), self)


def _find_decoder(document: Document) -> _Config:
    """Return the mapping with the decoder's figures: the outermost that has them all, else the closest to it.

    Text parts come first; vision, audio and the like use the same key names and are never read.
    """
    waiting: deque[tuple[Document, tuple[Document, ...]]] = deque([(document, ())])
    seen: list[str] = []
    best, best_score = _Config(document), -1
    while waiting:
        part, outer = waiting.popleft()
        seen.append(show_path(part.prefix[len(document.prefix) :]) or "the top level")
        score = sum(any(part.data.get(name) is not None for name in names) for names in (LAYERS, HIDDEN, HEADS))
        if score > best_score:
            best, best_score = _Config(part, outer), score
        if score == 3:
            break
        waiting.extend((part.at(key), (part, *outer)) for key in _parts(part.data))
    best.searched = tuple(seen[:8])
    return best


def _parts(data: dict[Any, Any]) -> list[str]:
    """Return the keys under which a decoder may be, the likeliest first."""
    keys = [key for key, value in data.items() if isinstance(key, str) and isinstance(value, dict)]
    ranks = {key: index for index, key in enumerate(_TEXT_PARTS)}
    return sorted((key for key in keys if not _OTHER_PARTS.search(key)), key=lambda key: (ranks.get(key, 99), key))


def _name(document: Document) -> str:
    """Return a name: the hub's, the file's, the folder's of a `config.json`, or the family's."""
    path, data = Path(document.file), document.data
    kind = data.get("model_type")
    file = path.parent.name if path.stem == "config" else path.stem
    for candidate in (data.get("_name_or_path"), file, kind):
        if isinstance(candidate, str) and (clean := _clean_name(candidate)):
            return clean
    return "model"


def _clean_name(text: str) -> str:
    bare = text.strip().rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", bare).lstrip("._+-")[:200]


def _fields(config: _Config, name: str) -> dict[str, Any]:
    """Return the fields of the ModelSpec."""
    label, family = _family(config)
    if config.inherited("is_encoder_decoder").flag("is_encoder_decoder"):
        config.fault("expected a decoder-only model, got an encoder-decoder", "is_encoder_decoder")
    hidden, layers = config.required(*HIDDEN), config.required(*LAYERS)
    positions = config.inherited(*POSITIONS).integer(*POSITIONS)
    moe = _mixture(config, family, layers)
    dtype = _dtype(config)
    quantisation = _quantisation(config)
    fields: dict[str, Any] = {
        "name": name,
        "layers": layers,
        "hidden_size": hidden,
        "intermediate_size": _mlp_width(config, family, hidden, all_mixture=_all_mixture(moe, layers)),
        "heads": config.required(*HEADS),
        "kv_heads": _kv_heads(config),
        "head_dim": config.integer(*HEAD_DIM),
        "vocab_size": config.inherited(*VOCABULARY).required(*VOCABULARY),
        "embedding_size": _embedding_size(config, hidden),
        "max_positions": positions,
        "position_rows": 0 if family.position_offset is None else (positions or 0) + family.position_offset,
        "tied_embeddings": _tied(config, label, family),
        "gated_mlp": family.gated,
        "biases": _biases(config, family),
        "norm_biases": family.norm_biases,
        "norms_per_layer": _norms(config, family),
        "qk_norm": family.qk_norm or bool(config.flag("use_qk_norm")),
        **_attention(config, family, layers),
        "mla": _latent(config),
        "moe": moe,
        "quantisation": quantisation,
        "dtype": dtype,
        "kv_dtype": _kv_dtype(config),
    }
    if quantisation and quantisation["bits"] < 16 and not fields["kv_dtype"]:
        config.notes.append(f"weights are {quantisation['bits']}-bit, the KV cache stays {dtype}")
    return fields | {"notes": tuple(config.notes)}


def _family(config: _Config) -> tuple[str, _Family]:
    """Return the family's name and defaults, by `model_type` or else by the class name in `architectures`."""
    for part in (config.document, *config.outer):
        classes = part.data.get("architectures")
        first = classes[0] if isinstance(classes, list) and classes else None
        for text in (part.data.get("model_type"), first):
            if isinstance(text, str):
                label = re.sub(r"_?(text|model)$|For\w+$|LMHeadModel$", "", text).lower()
                if label in _FAMILIES:
                    return label, _FAMILIES[label]
    kind = config.inherited("model_type").data.get("model_type")
    label = kind if isinstance(kind, str) and kind else "unnamed"
    config.notes.append(f"model family {short(label)} is not known: read like llama")
    return label, _PLAIN


def _tied(config: _Config, label: str, family: _Family) -> bool:
    given = config.inherited("tie_word_embeddings").flag("tie_word_embeddings")
    if given is not None:
        return given
    why = f"the default of {label}" if label in _FAMILIES else "assumed"
    config.notes.append(f"tie_word_embeddings absent: {'tied' if family.tied else 'untied'}, {why}")
    return family.tied


def _dtype(config: _Config) -> Dtype:
    names = ("torch_dtype", "dtype")
    holder = config.inherited(*names)
    given = holder.text(*names)
    if given in (None, "auto"):
        config.notes.append("torch_dtype absent: bfloat16 assumed")
        return "bfloat16"
    dtype = _known_dtype(holder, given or "", holder.key(names) or names[0])
    if dtype == "float32":
        config.notes.append("float32 as stored; engines often serve it in 16 bits: set dtype to match yours")
    return dtype


def _known_dtype(config: _Config, text: str, key: str) -> Dtype:
    dtype = _DTYPES.get(text.lower().removeprefix("torch."))
    if dtype is None:
        config.fault(f"expected a number type such as bfloat16, float16 or fp8, got {short(text)}", key)
    return dtype or "bfloat16"


def _kv_dtype(config: _Config) -> Dtype | None:
    """Return the type of the KV cache where the file sets one: the weights' bits say nothing about it."""
    holder = config.inherited("kv_cache_dtype")
    given = holder.text("kv_cache_dtype")
    if given and given != "auto":
        return _known_dtype(holder, given, "kv_cache_dtype")
    quantised = config.inherited("quantization_config").part("quantization_config")
    scheme = quantised.part("kv_cache_scheme") if quantised else None
    if scheme and scheme.integer("num_bits") == 8:
        return "int8" if scheme.text("type") == "int" else "fp8"
    algorithm = quantised.text("kv_cache_quant_algo") if quantised else None
    return _DTYPES.get((algorithm or "").lower())


def _kv_heads(config: _Config) -> int | None:
    """Return the key-value heads; None for one per head. With MLA those of the file mean nothing."""
    if config.key(("kv_lora_rank",)):
        return None
    if config.flag("multi_query") and not config.flag("new_decoder_architecture"):
        return 1
    grouped = config.integer(*KV_HEADS)
    attention = config.part("attn_config")
    if grouped is None and attention:
        grouped = attention.integer(*KV_HEADS)
    if grouped is None:
        config.notes.append("num_key_value_heads absent: one per attention head")
    return grouped


def _mlp_width(config: _Config, family: _Family, hidden: int, all_mixture: bool) -> int | None:
    """Return the width of a plain MLP; None when no layer has one and none is given."""
    given = config.integer("intermediate_size_mlp", *MLP)
    ratio = config.integer("expansion_ratio") or family.mlp_multiple
    if given is None and ratio:
        return ratio * hidden
    return config.required(*MLP) if given is None and not all_mixture else given


def _embedding_size(config: _Config, hidden: int) -> int | None:
    given = config.integer("word_embed_proj_dim")
    return None if given == hidden else given


def _biases(config: _Config, family: _Family) -> Biases:
    everywhere = config.flag("enable_bias", "use_bias", "bias")
    if (no_bias := config.flag("no_bias")) is not None:
        everywhere = not no_bias
    if everywhere is not None:
        return "all" if everywhere else "none"
    attention, mlp = config.flag("attention_bias"), config.flag("mlp_bias")
    if family.biases == "all" or (attention and mlp):
        return "all"
    if attention or mlp:
        return "attention" if attention else "mlp"
    queries = config.flag("add_qkv_bias", "qkv_bias", "use_qkv_bias", "attention_qkv_bias")
    return family.biases if queries is None else "qkv" if queries else "none"


def _norms(config: _Config, family: _Family) -> int:
    """Return the norms per layer: a layer whose attention and MLP run side by side has one (falcon)."""
    side_by_side = config.flag("parallel_attn") and not config.flag("new_decoder_architecture")
    return 1 if side_by_side else family.norms


def _latent(config: _Config) -> dict[str, Any] | None:
    if config.integer("kv_lora_rank") is None:
        return None
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {"q_lora_rank": config.integer("q_lora_rank")} | {name: config.required(name) for name in names}


# -- mixtures of experts ---------------------------------------------------------------------------------


def _mixture(config: _Config, family: _Family, layers: int) -> dict[str, Any] | None:
    """Return the fields of Moe, or None for a dense model. Some configs keep them under `ffn_config`."""
    inner = config.part("ffn_config")
    holder = inner if inner and inner.key(EXPERTS) else config
    experts = holder.integer(*EXPERTS, least=0) or 0
    if experts <= 1:
        return None
    width = holder.integer(*EXPERT_WIDTH)
    shared, shared_width = _shared_experts(config, family)
    return {
        "experts": experts,
        "experts_per_token": holder.required(*EXPERTS_PER_TOKEN),
        "intermediate_size": holder.required(*MLP) if width is None else width,
        "shared_experts": shared,
        "shared_intermediate_size": shared_width,
        "router_bias": family.router_bias,
        "first_dense_layers": config.integer("first_k_dense_replace", "moe_layer_start_index", least=0) or 0,
        "every": config.integer("interleave_moe_layer_step", "decoder_sparse_step") or 1,
        "dense_layers": tuple(sorted(set(_dense_layers(config, layers)))),
    }


def _shared_experts(config: _Config, family: _Family) -> tuple[int, int | None]:
    """Return how many shared experts there are and the width of one (None: as routed ones)."""
    width = config.integer("shared_expert_intermediate_size", least=0) or None
    count = config.integer(*SHARED_EXPERTS, least=0)
    if count is None:
        count = 1 if width else family.shared_experts
    return count, width


def _dense_layers(config: _Config, layers: int) -> Iterator[int]:
    """Yield the layers that have a plain MLP although the step says otherwise."""
    for index, layer in enumerate(config.items("mlp_only_layers") or []):
        if isinstance(layer, int) and not isinstance(layer, bool) and 0 <= layer < layers:
            yield layer
        else:
            config.fault(f"expected a layer from 0 to {layers - 1}, got {short(layer)}", "mlp_only_layers", index)
    frequency = config.data.get("moe_layer_freq")
    if isinstance(frequency, list):
        yield from (layer for layer, mixture in enumerate(frequency[:layers]) if not mixture)
    elif (step := config.integer("moe_layer_freq")) and step > 1:
        yield from (layer for layer in range(min(layers, 10_000)) if layer % step)


def _all_mixture(moe: dict[str, Any] | None, layers: int) -> bool:
    if moe is None:
        return False
    return moe["first_dense_layers"] == 0 and moe["every"] == 1 and not moe["dense_layers"]


# -- sliding windows -------------------------------------------------------------------------------------


def _attention(config: _Config, family: _Family, layers: int) -> dict[str, Any]:
    """Return `attention_pattern` and `window_tokens`. No window, or a disabled one, is full attention."""
    window = config.integer("sliding_window", "attention_chunk_size", "sliding_window_size", least=0) or None
    enabled = config.flag("use_sliding_window")
    if enabled is False or (enabled is None and not family.window_by_default):
        window = None
    layers = min(layers, 10_000)
    pattern = _layer_types(config, layers) or _implied_pattern(config, family, layers, window)
    if window is None:
        pattern = ["full" if kind == "sliding" else kind for kind in pattern]
    if "linear" in pattern:
        config.notes.append("linear-attention layers: no growing cache; their weights are counted as full attention")
    return {
        "attention_pattern": _shortest_period(pattern),
        "window_tokens": window if "sliding" in pattern else None,
    }


def _layer_types(config: _Config, layers: int) -> list[Attention] | None:
    types = config.items("layer_types")
    if types is None:
        return None
    for index, kind in enumerate(types):
        if not isinstance(kind, str) or kind not in _ATTENTION:
            config.fault(f"expected one of {', '.join(_ATTENTION)}, got {short(kind)}", "layer_types", index)
            return None
    if len(types) != layers:
        config.fault(f"expected {layers} entries, one per layer, got {len(types)}", "layer_types")
        return None
    return [_ATTENTION[kind] for kind in types]


def _implied_pattern(config: _Config, family: _Family, layers: int, window: int | None) -> list[Attention]:
    """Return the kinds of layers that are not listed: by a step, a threshold, or the family's habit."""
    if (interval := config.integer("full_attention_interval")) is not None:
        return ["linear" if (layer + 1) % interval else "full" for layer in range(layers)]
    if window is None:
        return ["full"]
    first = config.integer("max_window_layers", least=0) if config.flag("use_sliding_window") else None
    if first is not None:
        return ["full" if layer < first else "sliding" for layer in range(layers)]
    every = config.integer("sliding_window_pattern", "no_rope_layer_interval") or family.full_every
    return ["sliding" if every is None or (layer + 1) % every else "full" for layer in range(layers)]


def _shortest_period(pattern: list[Attention]) -> tuple[Attention, ...]:
    """Return the shortest run that, repeated, gives the pattern."""
    for size in range(1, len(pattern)):
        if pattern[size:] == pattern[:-size]:
            return tuple(pattern[:size])
    return tuple(pattern)


# -- quantisation ----------------------------------------------------------------------------------------


def _quantisation(config: _Config) -> dict[str, Any] | None:
    """Return the fields of Quantisation, or None when weights are stored in the model's dtype."""
    names = ("quantization_config", "compression_config")
    holder = config.inherited(*names)
    quantised = next((part for name in names if (part := holder.part(name))), None)
    if quantised is None or not quantised.data:
        return None
    method = (quantised.text("quant_method") or "").lower().replace("_", "-")
    if not method:
        method = "bitsandbytes" if quantised.key(("load_in_4bit", "load_in_8bit")) else "grouped"
    read = {
        "fp8": _fp8,
        "fbgemm-fp8": _fp8,
        "bitsandbytes": _bitsandbytes,
        "compressed-tensors": _compressed_tensors,
        "modelopt": _modelopt,
        "mxfp4": lambda _: {"bits": 4, "group_size": 32, "scale_bytes": 1, "experts_only": True},
    }.get(method, _grouped)
    fields = read(quantised)
    return {"method": _clean_name(method) or "unnamed", **fields} if fields else None


def _fp8(config: _Config) -> dict[str, Any]:
    return {"bits": 8, "block": _block(config, "weight_block_size"), "scale_bytes": 4, "activation_bits": 8}


def _block(config: _Config, name: str) -> tuple[int, int] | None:
    block = config.items(name)
    if block is None:
        return None
    if len(block) == 2 and all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in block):
        return block[0], block[1]
    config.fault(f"expected two block sides such as [128, 128], got {short(block)}", name)
    return None


def _group_size(config: _Config, *names: str) -> int | None:
    """Return the inputs per scale; -1 (one scale per output) is None."""
    key = config.key(names)
    return None if key is None or config.data[key] == -1 else config.integer(key)


def _grouped(config: _Config) -> dict[str, Any] | None:
    """AWQ, GPTQ and whatever else states its bits. `desc_act` reorders inputs; its size does not matter."""
    bits = _bits(config, "bits", "w_bit", "num_bits", "weight_bits", "nbits")
    if bits is None:
        config.fault(
            "unknown quantisation: expected quant_method fp8, awq, gptq, bitsandbytes, compressed-tensors, "
            "modelopt or mxfp4, or another one beside its bits and group_size"
        )
        return None
    zero_point, symmetric = config.flag("zero_point"), config.flag("sym")
    return {
        "bits": bits,
        "group_size": _group_size(config, "group_size", "q_group_size"),
        "zero_points": zero_point if zero_point is not None else symmetric is False,
    }


def _bits(config: _Config, *names: str) -> int | None:
    bits = config.integer(*names)
    if bits is not None and bits > 32:
        config.fault(f"expected 1 to 32 bits, got {bits}", config.key(names) or names[0])
        return 32
    return bits


def _bitsandbytes(config: _Config) -> dict[str, Any]:
    """4-bit: a scale per 64 values, itself in 8 bits with double quantisation. 8-bit: a scale per output."""
    if config.flag("load_in_4bit"):
        double = config.flag("bnb_4bit_use_double_quant")
        return {"bits": 4, "group_size": 64, "scale_bytes": 1 if double else 4}
    return {"bits": 8, "scale_bytes": 4}


def _compressed_tensors(config: _Config) -> dict[str, Any] | None:
    groups = config.part("config_groups")
    names = sorted(name for name in groups.data if isinstance(name, str)) if groups else []
    parts = [part for name in names if groups and (part := groups.part(name))]
    weights = next((part for group in parts if (part := group.part("weights"))), None)
    bits = _bits(weights, "num_bits") if weights else None
    if weights is None or bits is None:
        config.fault("expected config_groups with weights and their num_bits")
        return None
    if len(parts) > 1:
        config.notes.append(f"quantisation has {len(parts)} groups of layers: all read like {names[0]!r}")
    activations = parts[0].part("input_activations")
    return {
        "bits": bits,
        "group_size": _group_size(weights, "group_size"),
        "block": _block(weights, "block_structure"),
        "zero_points": weights.flag("symmetric") is False,
        "activation_bits": (_bits(activations, "num_bits") if activations else None) or 16,
    }


def _modelopt(config: _Config) -> dict[str, Any] | None:
    algorithm = (config.text("quant_algo") or "").upper()
    if algorithm.startswith("FP8"):
        return {"bits": 8, "scale_bytes": 4, "activation_bits": 8}
    if algorithm == "NVFP4":
        return {"bits": 4, "group_size": 16, "scale_bytes": 1, "activation_bits": 4}
    return _compressed_tensors(config) if config.key(("config_groups",)) else _grouped(config)
