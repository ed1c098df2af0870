"""Profiles: our own format, and the loaders of published tables."""

from __future__ import annotations

import copy
import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InputError
from planner.sources.profiles import LOADERS, import_profile, main, read_profile, to_yaml
from planner.specs.base import Document, load, load_preset, parse, preset_names, topologies_folder, validate
from planner.specs.gpu import Gpu
from planner.specs.model import ModelSpec
from planner.specs.profile import Profile

DATA = Path(__file__).parent / "data" / "profiles"
SPLITWISE = DATA / "splitwise_perf_model.csv"


def preset(family: str, kind: type, name: str) -> Any:
    document = load_preset(family, name)
    assert document is not None
    return validate(kind, document)


def faults(error: pytest.ExceptionInfo[InputError]) -> list[str]:
    return [str(fault) for fault in error.value.faults]


# -- our own format --------------------------------------------------------------------------------------

GOOD = """\
name: mine
model: llama2-70b
gpu: h100-80gb
provenance: {method: measured, source: our own cluster}
samples:
  columns: [phase, tp, batch, prompt_tokens, context_tokens, time_s]
  rows:
  - [prefill, 2, 1, 512, 0, 0.08]
  - [decode, 2, 8, 0, 640, 0.04]
"""


def test_a_small_file_is_read_with_its_defaults():
    profile = read_profile(parse(GOOD, "mine.yaml"))
    (prefill,), (decode,) = profile.rows("prefill", 2), profile.rows("decode", 2)
    assert (prefill.pp, prefill.cached_tokens, prefill.time_s) == (1, 0, 0.08)
    assert (decode.batch, decode.context_tokens) == (8, 640)
    assert profile.tps == (2,) and profile.rows("prefill", 4) == []


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("prefill, 2, 1, 512, 0, 0.08", "prefil, 2, 1, 512, 0, 0.08", 8, "expected prefill or decode"),
        ("prefill, 2, 1, 512, 0, 0.08", "prefill, 2, 1, 512, 0", 8, "expected a list of 6 values"),
        ("prefill, 2, 1, 512, 0, 0.08", "prefill, 0, 1, 512, 0, 0.08", 8, "tp: expected 1 to"),
        (
            "prefill, 2, 1, 512, 0, 0.08",
            "prefill, 2, true, 512, 0, 0.08",
            8,
            "batch: expected a whole number",
        ),
        ("prefill, 2, 1, 512, 0, 0.08", "prefill, 2, 1.5, 512, 0, 0.08", 8, "batch: expected a whole number"),
        ("prefill, 2, 1, 512, 0, 0.08", "prefill, 2, 1, 0, 0, 0.08", 8, "prompt_tokens: a prefill row"),
        ("decode, 2, 8, 0, 640, 0.04", "decode, 2, 8, 0, 0, 0.04", 9, "context_tokens: a decode row"),
        ("decode, 2, 8, 0, 640, 0.04", "decode, 2, 8, 0, 640, -0.04", 9, "time_s: expected seconds above 0"),
        ("decode, 2, 8, 0, 640, 0.04", "decode, 2, 8, 0, 640, .nan", 9, "time_s: expected seconds above 0"),
        ("decode, 2, 8, 0, 640, 0.04", "decode, 2, 8, 0, 640, 40ms", 9, "time_s: expected seconds above 0"),
        ("phase, tp,", "phase, tensor,", 6, "expected columns out of"),
        ("tp, batch,", "tp, tp, batch,", 6, "each once"),
        ("batch, prompt", "pp, prompt", 6, "batch are required"),
        ("method: measured", "method: guessed", 4, "expected 'measured'"),
        ("name: mine", "nme: mine", 1, "did you mean 'name'"),
        ("gpu: h100-80gb", "gpu: 7", 3, "expected text"),
    ],
)
def test_each_mistake_has_its_line(old, new, line, says):
    with pytest.raises(InputError) as error:
        read_profile(parse(GOOD.replace(old, new), "mine.yaml"))
    assert any(text.startswith(f"mine.yaml:{line}:") and says in text for text in faults(error)), faults(error)


def test_a_profile_that_says_nothing_is_refused():
    with pytest.raises(InputError, match="expected samples or coefficients"):
        read_profile(parse(GOOD.partition("samples:")[0], "mine.yaml"))


def test_regimes_need_a_batch_at_which_they_meet():
    text = GOOD.partition("samples:")[0] + (
        "coefficients:\n"
        "- tp: 1\n"
        "  prefill: {constant_s: 1, per_token_s: 1, per_attended_s: 0}\n"
        "  decode: {constant_s: 1, per_request_s: 1, per_context_token_s: 0}\n"
        "  large_from_batch: 95\n"
    )
    with pytest.raises(InputError, match="decode_large and large_from_batch together"):
        read_profile(parse(text, "mine.yaml"))


def test_the_digest_is_of_the_content_and_not_of_the_layout():
    one, same = read_profile(parse(GOOD, "a.yaml")), read_profile(parse(GOOD + "\n# remark\n", "b.yaml"))
    other = read_profile(parse(GOOD.replace("0.08", "0.081"), "a.yaml"))
    assert one.digest == same.digest != other.digest


@pytest.mark.parametrize("name", preset_names("profiles"))
def test_shipped_profiles_read_back_as_they_stand(name):
    path = topologies_folder() / "profiles" / f"{name}.yaml"
    profile = read_profile(load(path))
    assert to_yaml(profile) == path.read_text()
    assert profile.name == name and path.stat().st_size < 60_000
    assert profile.provenance.licence and profile.provenance.citation and profile.provenance.revision
    models = [preset("models", ModelSpec, model) for model in preset_names("models")]
    gpus = [preset("gpus", Gpu, gpu) for gpu in preset_names("gpus")]
    assert [model.name for model in models if model.is_called(profile.model)] != []
    assert [gpu.name for gpu in gpus if gpu.is_called(profile.gpu)] != []


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_the_shipped_splitwise_profiles_come_out_of_the_table(gpu):
    name = f"splitwise-llama2-70b-{gpu}"
    made = import_profile("splitwise", SPLITWISE, model="llama2-70b", gpu=f"{gpu}-80gb", name=name)
    assert to_yaml(made) == (topologies_folder() / "profiles" / f"{name}.yaml").read_text()


@pytest.mark.parametrize("size", ["13b", "66b"])
def test_the_shipped_distserve_profiles_come_out_of_the_published_files(size):
    name = f"distserve-opt-{size}-a100"
    made = import_profile(
        "distserve",
        DATA / "distserve_a100_fit.json",
        model=f"facebook/opt-{size}",
        kv_tokens=DATA / "distserve_a100_max_tokens.csv",
        name=name,
    )
    assert to_yaml(made) == (topologies_folder() / "profiles" / f"{name}.yaml").read_text()


WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**12),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.sampled_from(["tp", "rows", "x"]), st.integers(0, 2), max_size=2),
)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_mutated_profile_is_read_or_refused_but_never_a_traceback(data):
    path = topologies_folder() / "profiles" / "distserve-opt-13b-a100.yaml"
    document = load(path) if data.draw(st.booleans()) else parse(GOOD, "mine.yaml")
    tree = copy.deepcopy(document.data)
    node, keys = tree, []
    while isinstance(node, dict | list) and node and (not keys or data.draw(st.booleans())):
        key = data.draw(st.sampled_from(list(node) if isinstance(node, dict) else list(range(len(node)))))
        keys.append(key)
        parent, node = node, node[key]
    parent[keys[-1]] = data.draw(WRONG)
    try:
        read_profile(Document(tree, "mine.yaml", document.marks))
    except InputError as error:
        assert all(fault.file == "mine.yaml" for fault in error.faults)


# -- splitwise -------------------------------------------------------------------------------------------


def splitwise_table(tmp_path: Path, *hardware: tuple[str, float, float]) -> Path:
    """A table of invented times: each hardware with a factor on all times and one on prompt times alone.

    Batch 64 was queued: 0.5 s + 0.04 s x 127 = 5.6 s are told of runs that took 80 s.
    """
    rows = [
        (1, 128, 128, 0.05, 0.0301),
        (1, 512, 128, 0.0913, 0.0302),
        (4, 512, 128, 0.3111, 0.0317),
        (16, 512, 128, 1.2021, 0.0351),
        (64, 512, 128, 0.5, 0.04),
    ]
    text = io.StringIO()
    table = csv.writer(text)
    head = "model hardware prompt_size batch_size token_size prompt_time token_time e2e_time tensor_parallel"
    table.writerow(head.split())
    for name, factor, on_prompt in hardware:
        for batch, prompt, asked, prompt_s, token_s in rows:
            e2e_s = 80.0 if batch == 64 else prompt_s + token_s * (asked - 1)
            times = [1e3 * factor * prompt_s * on_prompt, 1e3 * factor * token_s, 1e3 * factor * e2e_s]
            table.writerow(["m", name, prompt, batch, asked, *times, 2])
    path = tmp_path / "table.csv"
    path.write_text(text.getvalue())
    return path


def test_queued_batches_are_left_out_and_counted(tmp_path):
    profile = import_profile("splitwise", splitwise_table(tmp_path, ("alpha", 1.0, 1.0)))
    assert sorted({sample.batch for sample in profile.rows("prefill", 2)}) == [1, 4, 16]
    assert any(note.startswith("left out 1 of 5 rows") for note in profile.provenance.notes)


@pytest.mark.parametrize("order", [("real", "copy"), ("copy", "real")])
def test_rows_that_are_anothers_times_a_constant_are_left_out_whatever_they_are_called(tmp_path, order):
    factor = {"real": ("real", 1.0, 1.0), "copy": ("copy", 1.0, 1.17)}
    path = splitwise_table(tmp_path, *(factor[name] for name in order))
    profile = import_profile("splitwise", path, gpu="real")
    assert "left out 5 rows of copy: real's times 1.17" in profile.provenance.notes
    with pytest.raises(InputError, match=r"those of real times 1\.17"):
        import_profile("splitwise", path, gpu="copy")


def test_hardware_that_was_measured_itself_is_no_copy(tmp_path):
    path = splitwise_table(tmp_path, ("alpha", 1.0, 1.0), ("beta", 1.0, 1.0))
    lines = path.read_text().splitlines()
    for index, line in enumerate(lines):
        cells = line.split(",")
        if cells[1] == "beta":  # half as fast, give or take 0.1 %, as a measurement would be
            cells[5:8] = [str(float(cell) * 2 * (1 + 0.001 * ((index + j) % 3))) for j, cell in enumerate(cells[5:8])]
            lines[index] = ",".join(cells)
    path.write_text("\n".join(lines))
    for name in ("alpha", "beta"):
        assert len(import_profile("splitwise", path, gpu=name).rows("prefill", 2)) == 4


def test_the_published_table_names_its_copy():
    with pytest.raises(InputError, match=r"those of h100-80gb times 1\.3"):
        import_profile("splitwise", SPLITWISE, model="bloom-176b", gpu="h100-80gb-pcap")
    assert import_profile("splitwise", SPLITWISE, model="bloom-176b", gpu="H100-80GB").tps == (8,)


def test_decode_context_ends_where_the_request_ended(tmp_path):
    """Asked for 1024 tokens, but 0.2 + 0.05 x 99 = 5.15 s make only 100: context 512 + 100 / 2 = 562."""
    path = tmp_path / "table.csv"
    head = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,e2e_time,tensor_parallel\n"
    path.write_text(head + "m,g,512,1,1024,200,50,5150,2\n")
    (sample,) = import_profile("splitwise", path).rows("decode", 2)
    assert sample.context_tokens == 562 and sample.time_s == 0.05


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("1,128,50.0", "1,128,fast", "table.csv:2: prompt_time: expected a number above 0, got 'fast'"),
        ("hardware", "hw", "table.csv:1: expected the columns hardware"),
        ("m,alpha,128", "m,alpha,128.5", "table.csv:2: prompt_size: expected a whole number"),
        ("m,alpha,128", "m,alpha,-128", "table.csv:2: prompt_size: expected a number above 0"),
        ("m,alpha,128", ",alpha,128", "table.csv:2: model: is empty"),
        ("m,alpha,128,1", "m,alpha,128,1,1", "table.csv:2: has more or fewer cells"),
        ("m,alpha,128", "m,beta,128", "gpu: expected one of alpha, beta; none was given"),
    ],
)
def test_a_bad_table_is_refused_with_its_line(tmp_path, old, new, says):
    path = splitwise_table(tmp_path, ("alpha", 1.0, 1.0))
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError) as error:
        import_profile("splitwise", path)
    assert any(says in text for text in faults(error)), faults(error)


# -- the other tables ------------------------------------------------------------------------------------


def test_distserve_coefficients_are_seconds_and_in_our_order():
    """OPT-13B TP1: small [19.93, 0.000627 per context token, 0.0385 per request] ms."""
    profile = import_profile("distserve", DATA / "distserve_a100_fit.json", model="facebook/opt-13b")
    fit = profile.coefficients_at(1)
    assert fit is not None and fit.large_from_batch == 95
    assert fit.decode.per_request_s == pytest.approx(0.03850697740828398e-3, rel=1e-12)
    assert fit.decode.per_context_token_s == pytest.approx(0.0006269356524350583e-3, rel=1e-12)
    assert any("1.10" in note for note in profile.provenance.notes)


def test_distserve_kv_capacity_is_kept_per_layout():
    profile = import_profile(
        "distserve",
        DATA / "distserve_a100_fit.json",
        model="facebook/opt-66b",
        kv_tokens=DATA / "distserve_a100_max_tokens.csv",
    )
    assert profile.kv_tokens_at(2) == 11600 and profile.kv_tokens_at(2, 2) == 78512
    assert profile.kv_tokens_at(7) is None


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"m": []}',
        '{"m": {"one": {}}}',
        '{"m": {"1": {"prefill": [1, 2]}}}',
        '{"m": {"1": {"prefill": [1, 2, NaN], "decoding_smallbs": [1, 2, 3]}}}',
        '{"m": {"1": {"prefill": [1, 2, "3"], "decoding_smallbs": [1, 2, 3]}}}',
        '{"m": {"1": {"prefill": [1, 2, 3], "decoding_smallbs": [1, 2, 3], "decoding_largebs": [1, 2, 3]}}}',
        '{"m": ',
        "[" * 5000,
    ],
)
def test_broken_coefficients_are_refused(tmp_path, text):
    path = tmp_path / "fit.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"fit\.json"):
        import_profile("distserve", path)


def dynamo() -> Profile:
    return import_profile("dynamo", DATA / "dynamo", model="llama3.1-8b", gpu="h200", dtype="fp8")


def test_dynamo_decode_batches_follow_littles_law():
    """13423.7 token/s x 19.111 ms = 256.5 requests; the KV in use alone would say 263."""
    profile = dynamo()
    sample = next(s for s in profile.rows("decode", 1) if s.time_s == pytest.approx(0.0191112))
    assert (sample.batch, sample.context_tokens) == (257, 350)
    assert profile.kv_tokens_at(1) == 945029
    assert len(profile.rows("prefill", 1)) == 17


def test_dynamo_points_whose_requests_waited_are_left_out():
    assert "left out 3 of 41 decode points: more requests held KV than decoded" in dynamo().provenance.notes


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"prefill_isl": [1.0, 2.0]},
        {"prefill_isl": [1.0, 2.0], "prefill_ttft": [1.0]},
        {"prefill_isl": [1.0, 2.0], "prefill_ttft": [1.0, float("nan")]},
        {"prefill_isl": [], "prefill_ttft": []},
        {"x_kv_usage": [0.1], "y_context_length": [100.0], "z_itl": [3.0]},
        {"x_kv_usage": [0.1], "y_context_length": [100.0], "z_itl": [3.0], "max_kv_tokens": [1e13]},
        {"prefill_isl": np.array(["a"]), "prefill_ttft": np.array(["b"])},
        {"prefill_isl": np.array([{}], dtype=object), "prefill_ttft": [1.0]},
    ],
)
def test_broken_arrays_are_refused(tmp_path, arrays):
    path = tmp_path / "points.npz"
    np.savez(path, **arrays)
    with pytest.raises(InputError, match=r"points\.npz"):
        import_profile("dynamo", path, model="m", gpu="g")


def test_what_is_no_array_file_is_refused(tmp_path):
    path = tmp_path / "points.npz"
    for content in (b"", b"PK\x03\x04 no", b"text"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"points\.npz"):
            import_profile("dynamo", path, model="m", gpu="g")
    with pytest.raises(InputError, match="no such file"):
        import_profile("dynamo", tmp_path / "none.npz", model="m", gpu="g")


def vidur() -> Profile:
    return import_profile(
        "vidur",
        DATA / "vidur_mlp_llama2-70b_h100.csv",
        model=preset("models", ModelSpec, "llama2-70b"),
        gpu=preset("gpus", Gpu, "h100-80gb"),
        all_reduce=DATA / "vidur_all_reduce_h100_dgx.csv",
    )


def test_vidur_tables_become_whole_steps_marked_as_assembled():
    """One token at TP4: 80 layers x 0.177 ms of operators are 14.2 ms, 160 all-reduces of 38 us 6.1 ms."""
    profile = vidur()
    step = next(s for s in profile.rows("decode", 4) if (s.batch, s.context_tokens) == (1, 256))
    assert profile.provenance.method == "assembled"
    assert step.time_s == pytest.approx(0.0205, rel=0.05)


def test_vidur_tables_without_collectives_are_refused():
    with pytest.raises(InputError, match="TP4 needs the table of all-reduce times"):
        import_profile(
            "vidur",
            DATA / "vidur_mlp_llama2-70b_h100.csv",
            model=preset("models", ModelSpec, "llama2-70b"),
            gpu=preset("gpus", Gpu, "h100-80gb"),
        )


def llmservingsim(attention: Path = DATA / "llmservingsim_attention_rtx4090.csv") -> Profile:
    return import_profile(
        "llmservingsim",
        DATA / "llmservingsim_dense_rtx4090.csv",
        model=preset("models", ModelSpec, "llama3.1-8b"),
        gpu=preset("gpus", Gpu, "rtx4090"),
        attention=attention,
        per_sequence=DATA / "llmservingsim_per_sequence_rtx4090.csv",
    )


def test_attention_rows_faster_than_the_memory_are_left_out_and_counted():
    notes = llmservingsim().provenance.notes
    assert "left out 1 attention rows faster than the GPU's memory or peak" in notes
    assert any(note.endswith("attention rows that mix phases") for note in notes)


def test_layer_tables_keep_cached_prefixes_apart_from_new_tokens(tmp_path):
    samples = llmservingsim().rows("prefill", 1)
    assert {sample.cached_tokens for sample in samples if sample.prompt_tokens == 1024} >= {0, 1024, 16384}


def test_a_table_without_a_usable_row_is_refused(tmp_path):
    path = tmp_path / "attention.csv"
    path.write_text("prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n16,0,1,16,10\n")
    with pytest.raises(InputError, match="no usable row"):
        llmservingsim(path)


@given(
    st.integers(0, 400),
    st.sampled_from(["", "x", "-1", "nan", "1e999", "\x00", '"', ",", "\n", "é"]),
    st.data(),
)
@settings(max_examples=80, deadline=None)
def test_a_mutated_table_is_read_or_refused_but_never_a_traceback(tmp_path_factory, position, text, data):
    folder = tmp_path_factory.mktemp("tables")
    source = data.draw(st.sampled_from([SPLITWISE, DATA / "distserve_a100_fit.json"]))
    content = source.read_text()[:4000] if source is SPLITWISE else source.read_text()
    path = folder / source.name
    path.write_text(content[:position] + text + content[position + data.draw(st.integers(0, 3)) :])
    kind = "splitwise" if source is SPLITWISE else "distserve"
    try:
        import_profile(kind, path, model=None if kind == "splitwise" else "facebook/opt-13b")
    except InputError as error:
        assert error.faults


# -- the registry and the command ------------------------------------------------------------------------


def test_an_unknown_kind_or_selector_says_what_is_known():
    with pytest.raises(InputError, match="did you mean 'splitwise'"):
        import_profile("splitwize", SPLITWISE)
    with pytest.raises(InputError, match="unknown selector 'hardware'; expected model, gpu"):
        import_profile("splitwise", SPLITWISE, hardware="a100")
    with pytest.raises(InputError, match="dynamo: needs model, gpu"):
        import_profile("dynamo", DATA / "dynamo")
    with pytest.raises(InputError, match="name"):
        import_profile("splitwise", SPLITWISE, model="llama2-70b", gpu="a100-80gb", name="not a name")


@pytest.mark.parametrize("kind", sorted(LOADERS))
def test_every_loader_refuses_a_missing_file(kind):
    selectors = {"model": preset("models", ModelSpec, "llama3.1-8b"), "gpu": preset("gpus", Gpu, "rtx4090")}
    if kind in ("splitwise", "distserve", "dynamo"):
        selectors = {"model": "m", "gpu": "g"}
    if kind == "llmservingsim":
        selectors |= {"attention": "none.csv", "per_sequence": "none.csv"}
    with pytest.raises(InputError, match="no such file"):
        import_profile(kind, "none.csv", **selectors)


def test_the_command_writes_a_file_that_reads_back(tmp_path, capsys):
    path = tmp_path / "out.yaml"
    arguments = ["dynamo", str(DATA / "dynamo"), "model=llama3.1-8b", "gpu=h200", "tp=1", "-o", str(path)]
    assert main(arguments) == 0
    assert read_profile(load(path)).tps == (1,)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing", "x.csv"],
        ["splitwise", "none.csv"],
        ["splitwise", str(SPLITWISE), "model"],
        ["dynamo", str(DATA / "dynamo"), "model=m", "gpu=g", "tp=two"],
        ["vidur", "none.csv", "model=llama9", "gpu=h100-80gb"],
    ],
)
def test_the_command_reports_bad_input_in_one_line(arguments, capsys):
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.strip().splitlines()) == 1
