"""Profiles out of the files of benchmark clients: a server whose law is known must give it back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cli import _run
from planner.errors import InputError
from planner.sources.bench_profile import Given, import_runs
from planner.sources.bench_runs import read_runs
from planner.sources.profiles import read_profile
from planner.specs.base import load
from planner.specs.profile import Profile
from tests.bench_server import decode_s, prefill_s, serve, sglang_json, vllm_json

GIVEN = Given("h100-80gb", tp=2)


def lengths(count: int, seed: int = 0, output: int | None = None) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(40, 1500, count).tolist()
    outputs = [output] * count if output else rng.integers(8, 90, count).tolist()
    return list(zip(prompts, outputs, strict=True))


def profile_of(tmp_path: Path, *records: dict, kind: str = "auto", given: Given = GIVEN) -> Profile:
    paths = []
    for index, record in enumerate(records):
        paths.append(tmp_path / f"run{index}.json")
        paths[-1].write_text(json.dumps(record))
    return import_runs(paths, kind, given)


def rows_of(profile: Profile) -> tuple[list, list]:
    rows = list(profile.samples.each)
    return [row for row in rows if row.phase == "prefill"], [row for row in rows if row.phase == "decode"]


def check(profile: Profile) -> None:
    """Every row must be what the law says of it."""
    prefills, decodes = rows_of(profile)
    for row in prefills:
        assert row.time_s == pytest.approx(prefill_s(row.prompt_tokens), rel=1e-6)
    for row in decodes:
        assert row.time_s == pytest.approx(decode_s(row.batch, row.batch * row.context_tokens), rel=0.01), row


@pytest.mark.parametrize("write", [vllm_json, sglang_json])
def test_one_client_at_a_time_gives_every_prefill_and_every_step(tmp_path, write):
    given = lengths(40)
    profile = profile_of(tmp_path, write(serve(given, limit=1), limit=1))
    prefills, decodes = rows_of(profile)
    assert sorted(row.prompt_tokens for row in prefills) == sorted(prompt for prompt, _ in given)
    assert {row.batch for row in prefills} == {row.batch for row in decodes} == {1}
    check(profile)


@pytest.mark.parametrize("write", [vllm_json, sglang_json])
def test_a_limit_gives_steps_of_that_batch_and_leaves_out_those_with_a_prefill(tmp_path, write):
    profile = profile_of(tmp_path, write(serve(lengths(48, output=64), limit=8), limit=8))
    _, decodes = rows_of(profile)
    assert max(row.batch for row in decodes) == 8 and len({row.context_tokens for row in decodes if row.batch == 8}) > 1
    check(profile)
    assert "gaps left out" in " ".join(profile.provenance.notes)


def test_requests_at_a_rate_are_told_apart_by_their_start_times(tmp_path):
    calls = serve(lengths(150), rate_rps=4.0)
    profile = profile_of(tmp_path, vllm_json(calls, rate=4.0))
    prefills, decodes = rows_of(profile)
    assert prefills and len({row.batch for row in decodes}) > 2
    check(profile)


@given(st.integers(0, 10**6), st.sampled_from([1, 3, 16]), st.sampled_from([None, 40]))
@settings(max_examples=15, deadline=None)
def test_whatever_the_lengths_no_row_holds_a_prefill_that_it_should_not(seed, limit, output):
    calls = serve(lengths(30, seed, output), limit=limit)
    for write in (vllm_json, sglang_json):
        path = Path("run.json")
        text = json.dumps(write(calls, limit=limit))
        runs = _read(text, path)
        assert runs[0].start_s - runs[0].start_s[0] == pytest.approx([call.start_s for call in calls], abs=1e-6)


def _read(text: str, path: Path):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / path).write_text(text)
        return read_runs(Path(folder) / path)


def test_tokens_of_one_step_may_reach_the_client_a_little_apart(tmp_path):
    record = vllm_json(serve(lengths(32, output=80), limit=4), limit=4)
    rng = np.random.default_rng(1)
    for at, gaps in enumerate(record["itls"]):
        late = rng.uniform(0.0, 5e-4, len(gaps) + 1)  # of steps of 6 ms
        record["itls"][at] = (np.array(gaps) + np.diff(late)).tolist()
        record["ttfts"][at] += late[0]
    _, decodes = rows_of(profile_of(tmp_path, record))
    full = [row for row in decodes if row.batch == 4]
    assert full
    for row in full:
        assert row.time_s == pytest.approx(decode_s(4, 4 * row.context_tokens), rel=0.03)


def test_a_chat_stream_begins_with_the_role_which_is_no_token(tmp_path):
    record = vllm_json(serve(lengths(20), limit=1), limit=1)
    record["itls"] = [[2e-5, *gaps] for gaps in record["itls"]]
    check(profile_of(tmp_path, record))


def test_requests_with_several_tokens_at_a_time_count_in_batches_but_are_no_steps(tmp_path):
    record = vllm_json(serve(lengths(24, output=60), limit=3), limit=3)
    pairs = np.array(record["itls"][0][: 2 * (len(record["itls"][0]) // 2)]).reshape(-1, 2)
    record["itls"][0] = pairs.sum(axis=1).tolist()
    profile = profile_of(tmp_path, record)
    check(profile)
    assert any("1 requests got several tokens at a time" in note for note in profile.provenance.notes)


def test_what_sglang_found_in_its_cache_is_not_counted_as_computed(tmp_path):
    calls = serve([(500, 20)] * 6, limit=1)
    profile = profile_of(tmp_path, sglang_json(calls, limit=1, cached_tokens=[0, *[400] * 5]))
    prefills, _ = rows_of(profile)
    assert [(row.prompt_tokens, row.cached_tokens) for row in prefills] == [(500, 0)] + [(100, 400)] * 5
    assert profile.kv_tokens[0].tokens == 450_000 and profile.kv_tokens[0].tp == 2
    assert (profile.engine, profile.dtype) == ("SGLang 0.5.9", "bfloat16")


def test_several_runs_make_one_profile_that_can_be_planned_with(tmp_path):
    runs = [vllm_json(serve(lengths(60, n, 64), limit=n), limit=n, tp="2") for n in (1, 4, 16)]
    for index, record in enumerate(runs):
        (tmp_path / f"{index}.json").write_text(json.dumps(record))
    files = [str(tmp_path / f"{index}.json") for index in range(3)]
    output = tmp_path / "profile.yaml"
    assert _run(["profile", "import", *files, "--gpu", "h100-80gb", "-o", str(output)]) == 0
    profile = read_profile(load(output))
    prefills, decodes = rows_of(profile)
    assert len(prefills) >= 60 and {row.batch for row in decodes} >= {1, 4, 16}
    assert profile.name == "llama-3.1-8b-instruct-h100-80gb-vllm" and profile.tps == (2,)
    check(profile)
    assert _run(["fit", str(output), "-q", "--json"]) == 0


def test_a_file_that_was_appended_to_holds_several_runs(tmp_path):
    path = tmp_path / "runs.jsonl"
    calls = serve(lengths(20), limit=1)
    path.write_text("\n".join(json.dumps(sglang_json(calls, limit=1)) for _ in range(3)))
    assert len(read_runs(path)) == 3


@pytest.mark.parametrize(
    ("change", "given", "says"),
    [
        ({"itls": None}, GIVEN, "itls, the gaps between tokens, are missing.*--save-result --save-detailed"),
        ({"input_lens": None}, GIVEN, "input_lens of each request is missing.*--save-detailed"),
        ({"ttfts": [0.1]}, GIVEN, "ttfts: expected 20 numbers, one per request, got 1"),
        ({"ttfts": ["fast"] * 20}, GIVEN, r"ttfts\[0\]: expected a number from 0, got 'fast'"),
        ({"itls": [[-0.1]] * 20}, GIVEN, r"itls\[0\]\[0\]: expected a number from 0, got -0.1"),
        ({"errors": ["timeout"] * 20}, GIVEN, "every request of this run failed"),
        ({}, Given("h100-80gb"), "does not say over how many GPUs.*--tp"),
        ({"tp": "4"}, GIVEN, "the file says tp 4, but --tp says 2"),
        ({"model_id": None}, GIVEN, "does not name the model; give --model"),
        ({"start_times": None, "request_rate": 3.0, "max_concurrency": 8}, GIVEN, "--request-rate inf"),
    ],
)
def test_a_run_without_what_is_needed_says_which_flag_saves_it(tmp_path, change, given, says):
    record = vllm_json(serve(lengths(20), limit=2), limit=2) | change
    with pytest.raises(InputError, match=says):
        profile_of(tmp_path, record, given=given)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"itls": None}, "--output-details"),
        ({"accept_length": 2.4}, "speculative decoding"),
        ({"request_rate": 4.0}, "at a rate of 4.0 requests/s nothing tells"),
        ({"server_info": {"tp_size": 2, "dp_size": 4}}, "4 replicas answered"),
    ],
)
def test_an_sglang_run_that_cannot_be_told_apart_is_refused(tmp_path, change, says):
    with pytest.raises(InputError, match=says):
        profile_of(tmp_path, sglang_json(serve(lengths(20), limit=2), limit=2) | change)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "got nothing"),
        ("{", r"1:\d+: not valid JSON"),
        ("[1, 2]", "expected a JSON object"),
        ('{"a": 1}', "say which with --from"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_of_another_kind_is_one_line(tmp_path, text, says):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        read_runs(path)


def test_when_nothing_can_be_told_apart_the_way_out_is_said(tmp_path):
    calls = serve([(100, 2)] * 30, limit=30)
    with pytest.raises(InputError, match="--max-concurrency 1 for prefills"):
        profile_of(tmp_path, vllm_json(calls, limit=30))


def test_the_command_names_an_unknown_client_and_never_overwrites_its_input(tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(vllm_json(serve(lengths(20), limit=1), limit=1)))
    common = ["profile", "import", str(path), "--gpu", "h200", "--tp", "1"]
    assert _run([*common, "--from", "vlm", "-o", str(tmp_path / "p.yaml")]) == 1
    assert "did you mean 'vllm'?" in capsys.readouterr().err
    assert _run([*common, "-o", str(path)]) == 1
    assert "would overwrite the input" in capsys.readouterr().err
