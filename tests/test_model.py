"""Models against their published figures, the reported cases, and the laws that any cut of a model obeys."""

from __future__ import annotations

import copy
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InputError
from planner.sources.hf_config import is_hf_config, read_hf_config, read_model
from planner.specs.base import load, load_preset, parse, preset_names, validate
from planner.specs.layout import Layout, split_layers
from planner.specs.model import ModelSpec

CASES = Path(__file__).parent / "cases"
GIB = 2**30


def case(folder: str, file: str = "config.json") -> ModelSpec:
    return read_model(load(CASES / folder / file))


def preset(name: str) -> ModelSpec:
    document = load_preset("models", name)
    assert document is not None
    return read_model(document)


def config(**keys: Any) -> ModelSpec:
    return read_model(parse(json.dumps(keys), "toy/config.json"))


def tiny(**keys: Any) -> ModelSpec:
    base = {
        "name": "tiny",
        "layers": 4,
        "hidden_size": 64,
        "intermediate_size": 96,
        "heads": 8,
        "vocab_size": 100,
    }
    return ModelSpec.model_validate(base | keys)


# -- published figures -----------------------------------------------------------------------------------

PUBLISHED = {  # what the published checkpoints hold
    "bloom-176b": 176_247_242_752,  # published 176,247,271,424: the norm of the embeddings, 2 h, is not modelled
    "deepseek-v3": 671_026_419_200,  # 671B in the paper; 37B active
    "llama2-70b": 68_976_648_192,
    "llama2-7b": 6_738_415_616,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "mixtral-8x7b": 46_702_792_704,
    "opt-13b": 12_853_473_280,
    "opt-175b": 174_604_468_224,  # 96 layers x 12 h^2 = 173.9 G, and 0.64 G of embeddings
    "opt-66b": 65_719_701_504,
    "qwen3-32b": 32_762_123_264,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
}


def test_every_preset_is_checked_against_a_published_count() -> None:
    assert sorted(PUBLISHED) == preset_names("models")


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    model = preset(name)
    assert model.name == name
    assert model.parameters == PUBLISHED[name]


QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "mlp_only_layers": [], "decoder_sparse_step": 1,
    "vocab_size": 151936, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA2_2B = {
    "model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000,
    "sliding_window": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "moe_intermediate_size": 1408, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
DBRX = {
    "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "vocab_size": 100352,
    "max_seq_len": 32768, "attn_config": {"kv_n_heads": 8, "clip_qkv": 8},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    "torch_dtype": "bfloat16",
}  # fmt: skip
FAMILIES: list[tuple[int, dict[str, Any]]] = [  # published parameters, the figures of the published config
    (30_532_122_624, QWEN3_30B),
    (2_614_341_888, GEMMA2_2B),
    (15_706_484_224, DEEPSEEK_V2_LITE),
    (131_596_523_520, DBRX),
    (124_439_808, {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
                   "n_positions": 1024}),
    (125_239_296, {"model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12,
                   "num_attention_heads": 12, "vocab_size": 50272, "max_position_embeddings": 2048,
                   "word_embed_proj_dim": 768}),
    (6_921_720_704, {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32,
                     "num_attention_heads": 71, "parallel_attn": True, "new_decoder_architecture": False,
                     "multi_query": True, "bias": False, "vocab_size": 65024}),
    (6_857_302_016, {"model_type": "gpt_neox", "hidden_size": 4096, "intermediate_size": 16384,
                     "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 50432}),
    (2_506_172_416, {"model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384,
                     "num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1,
                     "head_dim": 256, "vocab_size": 256000}),
    (494_032_768, {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24,
                   "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
                   "tie_word_embeddings": True}),
    (3_030_371_328, {"model_type": "starcoder2", "hidden_size": 3072, "intermediate_size": 12288,
                     "num_hidden_layers": 30, "num_attention_heads": 24, "num_key_value_heads": 2,
                     "vocab_size": 49152, "use_bias": True, "sliding_window": 4096}),
    (6_243_584_000, {"model_type": "chatglm", "hidden_size": 4096, "ffn_hidden_size": 13696, "num_layers": 28,
                     "num_attention_heads": 32, "kv_channels": 128, "multi_query_group_num": 2,
                     "padded_vocab_size": 65024, "add_bias_linear": False, "add_qkv_bias": True}),
]  # fmt: skip


@pytest.mark.parametrize(("parameters", "keys"), FAMILIES, ids=[keys["model_type"] for _, keys in FAMILIES])
def test_a_family_is_read_with_its_own_defaults(parameters: int, keys: dict[str, Any]) -> None:
    assert config(**keys).parameters == parameters


def test_the_preset_and_the_config_of_deepseek_are_one_model() -> None:
    apart = {"name", "aliases", "source", "notes", "max_positions", "kv_heads", "head_dim"}
    assert preset("deepseek-v3").model_dump(exclude=apart) == case("28-model-mla-deepseek").model_dump(exclude=apart)


def test_a_model_is_called_by_any_alias_whatever_the_case_or_the_organisation() -> None:
    model = preset("llama2-70b")
    for name in ("llama2-70b", "meta-llama/Llama-2-70b-hf", "LLAMA-2-70B-HF", "someone/Llama-2-70b-chat-hf"):
        assert model.is_called(name)
    assert not model.is_called("llama2-7b")
    assert not model.is_called("")
    assert preset("opt-13b").is_called("facebook/opt-13b")


# -- the reported cases ----------------------------------------------------------------------------------


def test_case_23_a_missing_kv_head_count_means_one_per_head() -> None:
    model = case("23-model-no-kv-heads-field")
    assert model.kv_heads == 32
    assert model.kv_bytes_per_token == 524_288  # 2 x 32 layers x 32 heads x 128 x 2 bytes
    assert not model.tied_embeddings
    assert "tie_word_embeddings absent: untied, the default of llama" in model.notes
    mpt = case("23-model-no-kv-heads-field", "config-mpt.json")
    assert mpt.kv_bytes_per_token == 524_288
    assert (mpt.hidden_size, mpt.intermediate_size, mpt.gated_mlp) == (4096, 16384, False)


def test_case_24_an_explicit_head_dim_wins_over_hidden_by_heads() -> None:
    wide = case("24-model-explicit-head-dim", "config-24b.json")
    assert wide.kv_bytes_per_token == 163_840  # 2 x 40 x 8 x 128 x 2; 5120 / 32 = 160 would give 204,800
    assert case("24-model-explicit-head-dim", "config-20b.json").kv_bytes_per_token == 49_152  # 2 x 24 x 8 x 64 x 2
    # attention: h x (32 + 2 x 8) x 128 and back from 32 x 128; MLP: 3 x h x 32768; two norms
    layer = 5120 * 128 * (32 + 16 + 32) + 3 * 5120 * 32768 + 2 * 5120
    assert wide.parameters == 40 * layer + 2 * 131072 * 5120 + 5120


def test_case_24_layers_listed_as_sliding_stop_at_their_window() -> None:
    keys = json.loads((CASES / "24-model-explicit-head-dim" / "config-20b.json").read_text())
    model = config(**keys, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 12)
    # a layer stores 2 x 8 x 64 x 2 = 2048 bytes per token: 12 of them for 1000 tokens, 12 for 128
    assert model.kv_bytes(1000) == 2048 * 12 * (1000 + 128)
    assert model.attention_pattern == ("sliding", "full")


def test_case_27_a_disabled_sliding_window_caps_nothing() -> None:
    model = case("27-model-use-sliding-window-false")
    for tokens in (1, 131_072, 500_000):
        assert model.kv_bytes(tokens) == 57_344 * tokens  # 2 x 28 x 4 x 128 x 2
    assert [tp for tp in range(1, 9) if model.tp_fault(tp) is None] == [1, 2, 4]
    assert model.tp_fault(8) == "28 attention heads do not divide by TP8"
    assert model.tp_fault(7) == "4 key-value heads neither divide by TP7 nor repeat evenly over it"


def test_case_28_mla_caches_one_latent_on_every_rank() -> None:
    model = case("28-model-mla-deepseek")
    assert model.kv_bytes_per_token == 70_272  # 61 x (512 + 64) x 2
    assert model.model_copy(update={"kv_dtype": "fp8"}).kv_bytes_per_token == 35_136
    for tp in (1, 2, 8, 16):
        assert model.stage_kv_bytes_per_token(Layout(tp)) == (70_272,)
    assert model.kv_bytes(32_768) / GIB == pytest.approx(2.14, abs=0.005)
    assert sum(model.stage_kv_bytes_per_token(Layout(8, 4))) == 70_272
    assert 36.5e9 < model.active_parameters < 38e9  # published: 37B


def test_case_29_the_text_part_of_a_multimodal_config_is_found() -> None:
    model = case("29-model-nested-text-config")
    assert (model.layers, model.kv_heads, model.head_dim) == (48, 8, 128)
    assert model.kv_bytes_per_token == 196_608  # 2 x 48 x 8 x 128 x 2
    assert model.dtype == "bfloat16"  # stands outside text_config
    assert all(model.tp_fault(tp) is None for tp in (1, 2, 4, 8))
    assert model.moe is not None and model.moe.intermediate_size == 8192 and model.intermediate_size == 16384
    assert case("29-model-nested-text-config", "config-deeper.json").kv_bytes_per_token == 57_344


def test_case_29_missing_figures_are_named_with_the_places_searched() -> None:
    text = json.dumps({"text_config": {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}}, indent=1)
    with pytest.raises(InputError) as error:
        read_model(parse(text, "config.json"))
    line = str(error.value)
    assert "num_hidden_layers or n_layers" in line and "intermediate_size or ffn_dim" in line
    assert "searched the top level, text_config" in line
    assert line.startswith("config.json:2:")


def test_case_31_a_tied_embedding_is_one_matrix_that_still_multiplies() -> None:
    model = case("31-model-tied-embeddings")
    assert model.parameters == 4_022_468_096
    assert model.weight_bytes / GIB == pytest.approx(7.49, abs=0.005)
    assert model.kv_bytes_per_token == 147_456  # 2 x 36 x 8 x 128 x 2
    untied = model.model_copy(update={"tied_embeddings": False})
    assert untied.parameters == 4_411_424_256
    assert model.matrix_flops_per_token == untied.matrix_flops_per_token
    assert model.head_flops_per_token == 2 * 151_936 * 2560
    assert model.streamed_weight_bytes(1) == untied.streamed_weight_bytes(1)
    matrix = 2 * 151_936 * 2560
    assert sum(model.stage_weight_bytes(Layout(1, 2))) == model.weight_bytes + matrix
    assert model.stage_weight_bytes(Layout(1, 1)) == (model.weight_bytes,)


def test_case_33_a_rank_must_hold_whole_blocks_of_quantised_experts() -> None:
    model = case("33-model-fp8-block-tp")
    assert [model.tp_fault(tp) for tp in (1, 2, 4)] == [None] * 3  # 1536, 768, 384 are multiples of 128
    assert model.tp_fault(8) == "expert width 1536 / TP8 = 192 is not a multiple of the fp8 block of 128"
    assert model.tp_fault(8, expert_parallel=True) is None
    assert model.model_copy(update={"quantisation": None}).tp_fault(8) is None
    # 4 key-value heads on 8 ranks: each rank stores one, so the eight hold twice the cache
    assert model.stage_kv_bytes_per_token(Layout(8)) == (2 * 94 * 1 * 128 * 2,)


def test_case_33_a_width_of_320_is_cut_nowhere_but_served_whole() -> None:
    model = case("33-model-fp8-block-tp", "config-320.json")
    for tp, share in ((2, 160), (4, 80), (8, 40)):
        assert f"expert width 320 / TP{tp} = {share} is not" in (model.tp_fault(tp) or "")
        assert model.tp_fault(tp, expert_parallel=True) is None
    assert model.tp_fault(1) is None
    assert model.padding_notes() == ("expert width 320 is not a multiple of the fp8 block of 128: padded",)
    assert model.model_copy(update={"quantisation": None}).tp_fault(8) is None


def _case_35() -> Iterator[tuple[str, ModelSpec]]:
    with (CASES / "35-model-heads-not-divisible" / "models.csv").open() as file:
        for row in csv.DictReader(file):
            heads = int(row["heads"])
            sizes = {"hidden_size": 128 * heads, "intermediate_size": 512 * heads, "vocab_size": 32000}
            counts = {"heads": heads, "kv_heads": int(row["kv_heads"]), "layers": int(row["layers"])}
            yield row["name"], tiny(name=row["name"], **sizes, **counts)


def test_case_35_only_degrees_that_divide_the_heads_are_legal() -> None:
    models = dict(_case_35())
    legal = {name: {tp for tp in range(1, 9) if model.tp_fault(tp) is None} for name, model in models.items()}
    assert legal == {"m40": {1, 2, 4, 5, 8}, "m52": {1, 2, 4}, "m64": {1, 2, 4, 8}}
    with (CASES / "35-model-heads-not-divisible" / "gpus.csv").open() as file:
        counts = [int(row["gpus"]) for row in csv.DictReader(file)]
    assert counts == [3, 6, 7, 8]
    whole = {gpus: {tp for tp in legal["m40"] if gpus % tp == 0} for gpus in counts}
    assert whole == {3: {1}, 6: {1, 2}, 7: {1}, 8: {1, 2, 4, 8}}  # 6 GPUs: TP2 x PP3 or three times TP2
    assert all(model.pp_fault(3) is None for model in models.values())


def test_case_36_uneven_stages_lose_no_layer_and_the_fullest_one_bounds() -> None:
    request = load(CASES / "36-model-61-layers-pp8" / "request.yaml").data
    model = case("28-model-mla-deepseek")
    assert model.layers == request["layers"] == 61
    splits = {pp: split_layers(61, pp) for pp in request["pp"]}
    assert splits == {2: (31, 30), 4: (16, 15, 15, 15), 8: (8, 8, 8, 8, 8, 7, 7, 7)}
    for pp, split in splits.items():
        assert model.stage_kv_bytes_per_token(Layout(1, pp)) == tuple(1152 * size for size in split)  # 576 x 2
    assert model.pp_fault(61) is None
    assert model.pp_fault(62) == "61 layers cannot fill PP62"


def test_case_36_the_first_stage_carries_the_embedding_and_the_last_the_projection() -> None:
    model = tiny(layers=61, hidden_size=64, vocab_size=1000)
    layer = 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64)
    table, norm = 2 * 64 * 1000, 2 * 64
    stages = model.stage_weight_bytes(Layout(1, 8))
    assert stages == (8 * layer + table, *[8 * layer] * 4, 7 * layer, 7 * layer, 7 * layer + table + norm)


def test_case_38_all_experts_are_resident_and_two_of_eight_compute() -> None:
    model = case("38-model-moe-count")
    assert model.parameters == 46_702_792_704
    assert 80e9 < model.weight_bytes == 2 * 46_702_792_704 < 160e9
    assert model.active_parameters == 12_879_925_248
    # 2 x (active - looked-up embedding - norms)
    assert model.matrix_flops_per_token == 2 * (12_879_925_248 - 32000 * 4096 - 65 * 4096)
    for tokens in (1, 100_000):
        assert model.kv_bytes(tokens) == 131_072 * tokens  # sliding_window: null


def test_case_38_a_step_streams_active_weights_alone_and_nearly_all_in_a_batch() -> None:
    model = case("38-model-moe-count")
    streamed = model.weight_bytes - 2 * 32000 * 4096  # without the embedding table
    assert model.shared_weight_bytes + model.expert_weight_bytes == streamed
    assert model.streamed_weight_bytes(1) == 2 * (12_879_925_248 - 32000 * 4096)
    assert model.streamed_weight_bytes(2) == model.shared_weight_bytes + 0.4375 * model.expert_weight_bytes
    assert model.streamed_weight_bytes(16) > 0.98 * streamed
    assert model.streamed_weight_bytes(10_000) == pytest.approx(streamed)


def test_case_40_four_bit_weights_leave_the_cache_and_the_embeddings_alone() -> None:
    model = case("40-model-awq-weights-fp16-kv")
    # 70.2 G in linears x (4 bits + 20 bits / 128), 2 x 1.25 G of embeddings x 2 bytes
    linears = 80 * (8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 29568)
    vectors = 80 * (8192 + 2048 + 2 * 8192) + 8192
    assert model.weight_bytes == linears * (4 + 20 / 128) / 8 + 2 * (2 * 152064 * 8192 + vectors)
    assert 39e9 < model.weight_bytes < 43e9
    assert model.kv_bytes_per_token == 327_680
    assert model.compute_bits == 16
    assert "weights are 4-bit, the KV cache stays float16" in model.notes
    assert model.model_copy(update={"kv_dtype": "fp8"}).kv_bytes_per_token == 163_840


def test_case_40_gptq_takes_the_same_path() -> None:
    keys = json.loads((CASES / "40-model-awq-weights-fp16-kv" / "config.json").read_text())
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": False}
    assert (
        config(**keys | {"quantization_config": gptq}).weight_bytes == case("40-model-awq-weights-fp16-kv").weight_bytes
    )
    whole = config(**keys | {"quantization_config": gptq | {"group_size": -1, "sym": True}})
    assert 39e9 < whole.weight_bytes < 41e9
    assert whole.tp_fault(2) is None
    # 29568 = 231 groups of 128: half of it is no whole number of groups, which engines refuse
    assert case("40-model-awq-weights-fp16-kv").tp_fault(2) == (
        "MLP width 29568 / TP2 = 14784 is not a multiple of the awq group of 128"
    )


# -- spellings -------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("quantisation", "bits", "extra"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 8, {"compute_bits": 8}),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4, {"compute_bits": 16}),
        ({"load_in_8bit": True, "load_in_4bit": False}, 8, {"compute_bits": 16}),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, 8,
         {"kv_dtype": "fp8"}),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"},
          "config_groups": {"group_0": {"weights": {"num_bits": 8, "symmetric": True, "strategy": "channel"},
                                        "input_activations": {"num_bits": 8}}}}, 8,
         {"kv_dtype": "fp8", "compute_bits": 8}),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128},
                                        "input_activations": None}}},
         4, {"compute_bits": 16, "kv_dtype": None}),
        ({"quant_method": "unheard_of", "bits": 3, "group_size": 64}, 3, {"compute_bits": 16}),
    ],
)  # fmt: skip
def test_quantisation_is_read_in_every_spelling(quantisation: dict[str, Any], bits: int, extra: dict[str, Any]) -> None:
    model = config(**LLAMA, quantization_config=quantisation)
    assert model.quantisation is not None and model.quantisation.bits == bits
    for name, value in extra.items():
        assert getattr(model, name) == value
    full = config(**LLAMA)
    linears = 6 * (512 * 512 * 2 + 2 * 512 * 128 + 3 * 512 * 1024)
    saved = full.weight_bytes - model.weight_bytes
    assert 0.8 * saved < linears * (16 - bits) / 8 < 1.2 * saved


def test_mxfp4_covers_experts_only_and_may_be_cut_anywhere() -> None:
    keys = json.loads((CASES / "24-model-explicit-head-dim" / "config-20b.json").read_text())
    model = config(**keys, quantization_config={"quant_method": "mxfp4"})
    experts = 24 * 32 * 3 * 2880 * 2880
    assert model.expert_weight_bytes == experts * (4 + 8 / 32) / 8
    assert 13.5e9 < model.weight_bytes < 14e9  # published: 13.8 GB on disk
    assert model.tp_fault(4) is None


@pytest.mark.parametrize(
    ("keys", "pattern", "window"),
    [
        ({"sliding_window": None}, ("full",), None),
        ({"sliding_window": 64}, ("sliding",), 64),
        ({"sliding_window": 64, "use_sliding_window": False}, ("full",), None),
        ({"sliding_window": 64, "model_type": "qwen2"}, ("full",), None),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4},
         ("full",) * 4 + ("sliding",) * 2, 64),
        ({"sliding_window": 64, "sliding_window_pattern": 3}, ("sliding", "sliding", "full"), 64),
        ({"layer_types": ["linear_attention", "full_attention"] * 3}, ("linear", "full"), None),
        ({"full_attention_interval": 3}, ("linear", "linear", "full"), None),
        ({"model_type": "gemma3_text", "sliding_window": 64}, ("sliding",) * 5 + ("full",), 64),
        ({"model_type": "llama4_text", "attention_chunk_size": 64}, ("sliding",) * 3 + ("full",), 64),
    ],
)  # fmt: skip
def test_windows_are_read_in_every_spelling(keys: dict[str, Any], pattern: tuple[str, ...], window: int | None) -> None:
    model = config(**LLAMA | keys)
    shown = tuple(model.attention_pattern[layer % len(model.attention_pattern)] for layer in range(6))
    assert shown == tuple(pattern[layer % len(pattern)] for layer in range(6))
    assert model.window_tokens == window
    kept = {"full": 100, "sliding": min(100, window or 0), "linear": 0}
    assert model.kv_bytes(100) == sum(kept[kind] for kind in shown) * 2 * 2 * 64 * 2


def test_experts_are_read_in_every_spelling() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    where = {"decoder_sparse_step": 2, "mlp_only_layers": [1]}
    model = config(**LLAMA, **experts, **where, shared_expert_intermediate_size=256)
    assert model.moe is not None
    assert [layer for layer in range(6) if model.moe.covers(layer)] == [3, 5]
    assert model.moe.shared_width == 256
    freq = config(**LLAMA, n_routed_experts=4, num_experts_per_tok=2, moe_layer_freq=[0, 1, 1, 0, 1, 1])
    assert freq.moe is not None
    assert [layer for layer in range(6) if freq.moe.covers(layer)] == [1, 2, 4, 5]


def test_a_null_like_expert_count_is_a_dense_model() -> None:
    for none in (None, 0, 1):
        assert config(**LLAMA, num_experts=none).moe is None


def test_our_yaml_and_a_config_are_told_apart_and_give_the_same_model() -> None:
    ours = parse(
        "name: toy\nlayers: 6\nhidden_size: 512\nintermediate_size: 1024\nheads: 8\nkv_heads: 2\nvocab_size: 1000\n",
        "toy.yaml",
    )
    theirs = parse(json.dumps(LLAMA), "toy/config.json")
    assert (is_hf_config(ours), is_hf_config(theirs)) == (False, True)
    assert read_model(ours) == read_model(theirs).model_copy(update={"notes": ()})
    assert read_hf_config(theirs, "other").name == "other"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": "eight"}, "expected a whole number from 1 to 10^9, got 'eight'"),
        ({"num_attention_heads": -8}, "num_attention_heads: expected a whole number from 1 to 10^9, got -8"),
        ({"num_key_value_heads": 3}, "expected kv_heads that divide the 8 heads, got 3"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7},
         "512 does not divide by 7 heads; give head_dim"),
        ({"torch_dtype": "complex64"}, "torch_dtype: expected a number type such as bfloat16"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false, got 'yes'"),
        ({"quantization_config": {"quant_method": "secret"}}, "quantization_config: unknown quantisation"),
        ({"quantization_config": "fp8"}, "quantization_config: expected a mapping, got 'fp8'"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected 6 entries, one per layer, got 1"),
        ({"num_experts": 4}, "expected num_experts_per_tok or"),
        ({"num_hidden_layers": 10**8}, "layers: expected at most 10000"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: expected a decoder-only model"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_config_is_named_with_its_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        read_model(parse(json.dumps(LLAMA | change, indent=1), "config.json"))
    assert message in str(error.value)
    assert all(fault.line for fault in error.value.faults)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate_size": None}, "intermediate_size is required"),
        ({"attention_pattern": ["sliding"]}, "sliding attention needs window_tokens"),
        (
            {"moe": {"experts": 2, "experts_per_token": 3, "intermediate_size": 8}},
            "up to the 2 experts, got 3",
        ),
        ({"head": 3}, "unknown key; did you mean 'heads'?"),
        ({"layers": 2.5}, "expected an integer, got 2.5"),
        ({"dtype": "fp7"}, "expected 'float32'"),
    ],
)
def test_a_mistake_in_our_yaml_is_named(change: dict[str, Any], message: str) -> None:
    text = json.dumps(tiny().model_dump(mode="json") | change)
    with pytest.raises(InputError) as error:
        read_model(parse(text, "m.yaml"))
    assert message in str(error.value)


# -- laws ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [("full",), ("sliding",), ("sliding", "full"), ("linear", "full")])
def test_attention_work_is_that_of_the_pairs_counted_one_by_one(pattern: tuple[str, ...]) -> None:
    model = tiny(attention_pattern=pattern, window_tokens=10)
    for new, cached in ((1, 0), (1, 50), (7, 0), (7, 8), (40, 3), (40, 100)):
        windows = [{"full": 10**9, "sliding": 10, "linear": 0}[pattern[i % len(pattern)]] for i in range(4)]
        pairs = sum(min(position, window) for window in windows for position in range(cached + 1, cached + new + 1))
        flops = 2 * model.heads * 2 * model.head_dim
        assert 0 <= pairs - model.attention_flops(new, cached) / flops <= 4 * new / 2
    assert tiny().attention_flops(10, 4) == 4 * 8 * 8 * 4 * (10 * 4 + 10 * 10 / 2)


def test_ranks_round_a_share_up_and_repeat_what_they_cannot_share() -> None:
    model = tiny(hidden_size=60, heads=6, kv_heads=2, head_dim=10, intermediate_size=10, vocab_size=7, layers=1)
    # TP4: 2 of 6 heads, 1 of 2 key-value heads, 3 of 10 MLP columns, 2 of 7 words; three norms whole
    attention = 60 * 20 + 2 * 60 * 10 + 20 * 60
    assert model.stage_weight_bytes(Layout(4)) == (2 * (attention + 3 * 60 * 3 + 2 * 60 * 2 + 3 * 60),)
    assert model.tp_fault(4) == "6 attention heads do not divide by TP4"
    assert tiny(intermediate_size=90).tp_fault(4) == "MLP width 90 does not divide by TP4"
    assert tiny().tp_fault(0) == "expected at least one rank, got TP0"
    assert tiny().pp_fault(0) == "expected at least one stage, got PP0"


def test_a_prefill_leaves_the_projection_out_of_the_last_stage() -> None:
    model = preset("smollm2-135m")
    even, decode = model.stage_share(3, projected_share=0.0), model.stage_share(3)
    assert even == pytest.approx((1 / 3,) * 3)
    # 10 layers of 7.08 M weights against 28.3 M of vocabulary: 0.474 of a decode step is in the last stage
    assert decode[2] == pytest.approx((even[2] * 106.17 + 28.31) / (106.17 + 28.31), rel=1e-3)


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Small models of every kind."""
    size = st.integers(1, 40)
    kv_heads = draw(st.integers(1, 6))
    keys: dict[str, Any] = {
        "layers": draw(st.integers(1, 12)),
        "hidden_size": draw(size),
        "intermediate_size": draw(size),
        "kv_heads": kv_heads,
        "heads": kv_heads * draw(st.integers(1, 4)),
        "head_dim": draw(size),
        "vocab_size": draw(size),
        "embedding_size": draw(st.none() | size),
        "position_rows": draw(st.integers(0, 9)),
        "attention_pattern": draw(st.lists(st.sampled_from(["full", "sliding", "linear"]), min_size=1, max_size=4)),
        "window_tokens": draw(size),
        "biases": draw(st.sampled_from(["none", "qkv", "attention", "mlp", "all"])),
        "kv_dtype": draw(st.sampled_from([None, "fp8", "float32"])),
    }
    for flag in ("tied_embeddings", "gated_mlp", "qk_norm", "norm_biases"):
        keys[flag] = draw(st.booleans())
    if draw(st.booleans()):
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        keys["mla"] = {"q_lora_rank": draw(st.none() | size)} | {name: draw(size) for name in names}
    if draw(st.booleans()):
        experts = draw(st.integers(1, 8))
        counts = {"shared_experts": draw(st.integers(0, 2)), "first_dense_layers": draw(st.integers(0, 3))}
        step = {"every": draw(st.integers(1, 3)), "experts": experts, "intermediate_size": draw(size)}
        keys["moe"] = counts | step | {"experts_per_token": draw(st.integers(1, experts))}
    if draw(st.booleans()):
        block = draw(st.none() | st.tuples(size, size))
        keys["quantisation"] = {"method": "any", "bits": draw(st.integers(1, 8)), "block": block}
        keys["quantisation"] |= {"group_size": draw(st.none() | size), "zero_points": draw(st.booleans())}
    return tiny(**keys)


@settings(max_examples=150, deadline=None)
@given(models(), st.integers(1, 9), st.integers(1, 12), st.integers(0, 60))
def test_the_parts_hold_at_least_the_whole(model: ModelSpec, tp: int, pp: int, tokens: int) -> None:
    layout = Layout(tp, min(pp, model.layers))
    assert tp * sum(model.stage_weight_bytes(layout)) >= model.weight_bytes
    assert tp * sum(model.stage_kv_bytes(layout, tokens)) >= model.kv_bytes(tokens)
    assert sum(model.stage_kv_bytes(Layout(1, layout.pp), tokens)) == model.kv_bytes(tokens)
    assert sum(model.stage_share(layout.pp)) == pytest.approx(1.0)
    assert model.active_parameters <= model.parameters
    assert len(model.stage_weight_bytes(layout)) == layout.pp


@settings(max_examples=100, deadline=None)
@given(models(), st.integers(1, 12), st.floats(0, 1000), st.floats(0, 1000))
def test_a_step_streams_more_with_more_tokens_and_never_more_than_is_there(
    model: ModelSpec, pp: int, few: float, more: float
) -> None:
    few, more = sorted((few, more))
    assert model.streamed_weight_bytes(few) <= model.streamed_weight_bytes(more) * (1 + 1e-12)
    assert model.streamed_weight_bytes(more) <= model.weight_bytes * (1 + 1e-12)
    untied = model.model_copy(update={"tied_embeddings": False})
    whole = sum(untied.stage_weight_bytes(Layout(1, min(pp, model.layers))))
    assert whole == untied.weight_bytes


@settings(max_examples=100, deadline=None)
@given(models())
def test_a_model_survives_its_file(model: ModelSpec) -> None:
    assert read_model(parse(json.dumps(model.model_dump(mode="json")), "m.yaml")) == model
    assert validate(ModelSpec, parse(json.dumps(model.model_dump(mode="json", exclude_none=True)), "m.yaml")) == model


SEEDS: list[dict[str, Any]] = [
    *(json.loads(path.read_text()) for path in sorted(CASES.glob("*-model-*/config*.json"))),
    *(keys for _, keys in FAMILIES),
    LLAMA
    | {"layer_types": ["full_attention"] * 6, "mlp_only_layers": [1], "num_experts": 4, "moe_layer_freq": [1]}
    | {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}},
    LLAMA | {"quantization_config": {"config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 128}}}}},
]
_NUMBERS: list[Any] = [None, True, False, 0, 1, 2, -1, 3, 7, 10**9, 10**30, 0.5, 1e300]
_OTHERS: list[Any] = ["", "x", "fp8", "auto", [], [1, 2], [[]], {}, {"a": 1}, [None]]
JUNK = st.sampled_from([*_NUMBERS, *_OTHERS]).map(copy.deepcopy)  # what is drawn gets changed


def _spots(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield (*path, key)
            yield from _spots(value, (*path, key))


@st.composite
def broken_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Real configs with a few keys lost, renamed or replaced by junk."""
    data = copy.deepcopy(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        spots = list(_spots(data))
        if not spots:
            break
        *path, key = draw(st.sampled_from(spots))
        holder = data
        for step in path:
            holder = holder[step]
        action = draw(st.sampled_from(["drop", "junk", "rename"]))
        value = holder.pop(key)
        if action == "junk":
            holder[key] = draw(JUNK)
        elif action == "rename":
            holder[draw(st.sampled_from(["text_config", "head_dim", "kv_lora_rank", "num_experts", "bits", "zzz"]))] = (
                value
            )
    return data


@settings(max_examples=400, deadline=None)
@given(broken_configs())
def test_a_broken_config_gives_a_model_or_an_input_error_and_nothing_else(data: dict[str, Any]) -> None:
    try:
        model = read_hf_config(parse(json.dumps(data), "config.json"))
    except InputError as error:
        assert error.faults and all("\n" not in str(fault) for fault in error.faults)
        return
    layout = Layout(4, min(3, model.layers))
    assert model.parameters > 0 and model.kv_bytes_per_token >= 0
    assert min(model.stage_weight_bytes(layout)) > 0
    assert sum(model.stage_share(layout.pp)) == pytest.approx(1.0)
    assert model.tp_fault(4) is None or model.tp_fault(1) is None
    assert model.attention_flops(10, 10) >= 0


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        JUNK,
        lambda inner: st.dictionaries(
            st.text(max_size=3) | st.sampled_from(["layers", "model_type", "text_config", "moe"]),
            inner,
            max_size=4,
        ),
        max_leaves=8,
    )
)
def test_any_document_gives_a_model_or_an_input_error(data: Any) -> None:
    text = json.dumps(data)
    for read in (read_model, read_hf_config):
        with pytest.raises(InputError):
            read(parse(text, "m.yaml"))
