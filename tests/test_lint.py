"""Profile lint: faults are found by their kind, wherever they stand, and sound tables raise no alarm."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cli import _run
from planner.errors import InputError
from planner.lint import check, readers
from planner.lint.base import Finding, ranges, rounding
from planner.lint.check import Report, lines_of, lint, sound_samples
from planner.lint.given import Given, find_gpu, find_model
from planner.lint.view import lines, to_json
from planner.sources import layer_tables, splitwise
from planner.sources.profiles import import_profile, to_yaml
from planner.sources.tables import read_table
from planner.specs.base import preset_names, topologies_folder
from planner.specs.gpu import Gpu
from planner.specs.profile import Coefficients, DecodeFit, PrefillFit, Profile, Provenance, Sample, Samples

HERE = Path(__file__).parent / "data"
SPLITWISE = HERE / "profiles" / "splitwise_perf_model.csv"
FIT, VLLM_FIT = HERE / "profiles" / "distserve_a100_fit.json", HERE / "profiles" / "distserve_a100_vllm_fit.json"
ATTENTION = HERE / "vllm_runs" / "attention_RTX4090.csv"
ATTENTION_PRO = HERE / "vllm_runs" / "attention_RTXPRO6000.csv"
SERVING = HERE / "lint" / "measured_serving.csv"
PRO = Gpu(
    name="rtx-pro-6000", memory_bytes=96 * 10**9, memory_bytes_per_s=1.792e12, fp16_flop_per_s=503.8e12,
    host_bytes_per_s=63e9,
)  # fmt: skip
LLAMA8 = find_model("llama3.1-8b")
LLAMA70 = find_model("llama2-70b")
RTX, A100, H100 = find_gpu("rtx4090"), find_gpu("a100-80gb"), find_gpu("h100-80gb")


def rows_of(report: Report, rule: str, severity: str = "reject") -> set[int]:
    found = [f for f in report.findings if (f.rule, f.severity) == (rule, severity)]
    return {row for finding in found for row in finding.rows}


def rules(report: Report, severity: str) -> set[str]:
    return {finding.rule for finding in report.findings if finding.severity == severity}


@dataclass
class Csv:
    """A table to break: rows count as file lines do, the first below the header is 2."""

    header: list[str]
    rows: list[list[str]]

    @classmethod
    def read(cls, path: Path) -> Csv:
        header, *rows = csv.reader(path.read_text().splitlines())
        return cls(header, rows)

    def set(self, line: int, column: str, value: object) -> None:
        self.rows[line - 2][self.header.index(column)] = str(value)

    def get(self, line: int, column: str) -> str:
        return self.rows[line - 2][self.header.index(column)]

    def scale(self, line: int, column: str, factor: float) -> None:
        self.set(line, column, repr(float(self.get(line, column)) * factor))

    def where(self, **cells: str) -> list[int]:
        return [line for line in range(2, len(self.rows) + 2) if all(self.get(line, c) == v for c, v in cells.items())]

    def write(self, folder: Path, name: str = "table.csv") -> Path:
        path = folder / name
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([self.header, *self.rows])
        return path


# -- the known faults of the published tables, on the originals -------------------------------------------


def test_rows_that_are_another_hardwares_times_a_constant_are_rejected_with_the_constant():
    report = lint(SPLITWISE)
    table = Csv.read(SPLITWISE)
    copies = set(table.where(hardware="h100-80gb-pcap"))
    assert rows_of(report, "copies") == copies and len(copies) == 300
    (finding,) = [f for f in report.findings if f.rule == "copies"]
    assert "prompt_time is 1.3 x that of h100-80gb" in finding.what


def test_rows_whose_parts_are_far_below_their_end_to_end_time_are_rejected():
    report = lint(SPLITWISE)
    # 64 requests at TP2: 467 ms + 127 x 42 ms = 5.8 s of 83 s; every other row adds up to 0.98 of its whole or more
    table = Csv.read(SPLITWISE)
    queued = table.where(batch_size="64", tensor_parallel="2")
    assert rows_of(report, "parts") == set(queued) and len(queued) == 5


def test_a_table_that_varies_one_factor_at_a_time_cannot_tell_what_reading_kv_costs():
    report = lint(SPLITWISE)
    (finding,) = [f for f in report.findings if f.rule == "identify"]
    assert "decode KV read" in finding.what and "1 batch size" in finding.what
    assert "llama2-70b on a100-80gb TP4" in finding.what and "h100-80gb TP8" in finding.what


def test_prefills_that_no_linear_law_fits_are_flagged_with_where_they_break_away():
    said = [f.what for f in lint(SPLITWISE).findings if f.rule == "knee"]
    broken = {what.split(":")[0] for what in said}
    assert {f"llama2-70b on {gpu}-80gb TP{tp}" for gpu in ("a100", "h100") for tp in (4, 8)} <= broken
    assert not any(f"llama2-70b on {gpu}-80gb TP2" in broken for gpu in ("a100", "h100"))
    at = [what for what in said if what.startswith("llama2-70b on h100-80gb")]
    assert len(at) == 2 and all("between 2048 and 4096 tokens" in what for what in at)


def test_single_rows_above_the_memory_bandwidth_of_the_card_are_rejected():
    # one request over 16,384 tokens of 4,096 bytes per layer: 67.1 MB in 56.62 us is 1,185 of 1,008 GB/s
    report = lint(ATTENTION, Given(RTX, LLAMA8))
    assert rows_of(report, "rates") == {12} and report.count("reject") == 1
    assert "memory bandwidth" in next(f.what for f in report.findings if f.rule == "rates")


def test_rows_without_version_or_precision_are_flagged_and_unfinished_runs_rejected():
    report, table = lint(SERVING), Csv.read(SERVING)
    missing = table.where(backend_version=""), table.where(precision="")
    assert all(missing) and rows_of(report, "missing", "flag") == {*missing[0], *missing[1]}
    source = [table.get(line, "silicon_data_source") for line in range(2, len(table.rows) + 2)]
    wip = {line for line, text in enumerate(source, 2) if "wip=True" in text}
    assert wip and rows_of(report, "unfinished") == wip
    assert report.count("reject") == len(wip)


def test_one_run_that_stands_under_two_models_is_flagged():
    # the same two times, to 16 digits, under DeepSeek-R1 and DeepSeek-V3
    said = [f for f in lint(SERVING).findings if f.rule == "twice"]
    assert any("under another setting" in f.what for f in said)


def test_negative_and_unphysical_published_coefficients_and_regimes_that_do_not_meet_are_flagged():
    own, vllm = lint(FIT), lint(VLLM_FIT)
    lines_ = VLLM_FIT.read_text().splitlines()
    negative = [f for f in vllm.findings if "below 0" in f.what]
    assert [f.what.split(":")[0] for f in negative] == ["facebook/opt-66b TP2"]
    assert '"2": {' in lines_[negative[0].rows[0] - 1]
    # OPT-66B at TP2: 2 x 64 layers x 9216 x 2 bytes / 2 ranks = 1.18 MB per token, 579 ns at 2,039 GB/s; published 474
    assert any("474 ns of at least 579" in f.what for f in own.findings)
    assert {f.what.split(":")[0] for f in own.findings if f.rule == "regimes"} == {
        "facebook/opt-13b TP1", "facebook/opt-13b TP2", "facebook/opt-66b TP2", "facebook/opt-66b TP3",
        "facebook/opt-66b TP8",
    }  # fmt: skip
    assert own.count("reject") == vllm.count("reject") == 0


@pytest.mark.parametrize("name", ["a100_sxm_custom_allreduce_vllm_0.14.0", "h200_sxm_nccl_2.29.2"])
def test_message_sizes_that_count_elements_are_flagged(name):
    report = lint(HERE / "lint" / f"{name}.csv")
    assert rules(report, "reject") == set() and "elements" in rules(report, "flag")


@pytest.mark.parametrize("name", ["apex_all_reduce_H100-SXM-80GB", "vidur_all_reduce_a100", "vidur_send_recv_a100"])
def test_message_sizes_that_count_bytes_are_not(name):
    report = lint(HERE / "lint" / f"{name}.csv", Given(A100))
    assert "elements" not in rules(report, "flag")


def test_sizes_below_which_only_launches_are_measured_are_noted():
    notes = [f for f in lint(HERE / "lint" / "apex_all_reduce_H100-SXM-80GB.csv").findings if f.rule == "launch"]
    # 8 GPUs, half: 14 us from 0 to 64 kB
    assert notes and "launches" in notes[0].what
    dense = lint(HERE / "vllm_runs" / "dense_RTX4090.csv", Given(RTX, LLAMA8))
    (note,) = [f for f in dense.findings if f.rule == "launch"]
    assert "act_fn" in note.what and "qkv_proj" not in note.what, "a flat product reads its weights, it is no launch"


# -- no false alarms -------------------------------------------------------------------------------------

SOUND = [
    (ATTENTION_PRO, Given(PRO, LLAMA8)),
    (HERE / "vllm_runs" / "dense_RTX4090.csv", Given(RTX, LLAMA8)),
    (HERE / "vllm_runs" / "dense_RTXPRO6000.csv", Given(PRO, LLAMA8)),
    (HERE / "vllm_runs" / "per_sequence_RTX4090.csv", Given(RTX, LLAMA8)),
    (HERE / "vllm_runs" / "per_sequence_RTXPRO6000.csv", Given(PRO, LLAMA8)),
    (HERE / "lint" / "vidur_mlp_llama2-70b_a100.csv", Given(A100)),
    (HERE / "lint" / "vidur_all_reduce_a100.csv", Given(A100)),
    (HERE / "lint" / "vidur_send_recv_a100.csv", Given(A100)),
    (HERE / "lint" / "frontier_attention_a800.csv", Given(A100)),
    (HERE / "lint" / "apex_all_reduce_H100-SXM-80GB.csv", Given()),
    (HERE / "lint" / "apex_alltoall_H100-SXM-80GB.csv", Given()),
    (HERE / "lint" / "a100_sxm_gemm_vllm_0.14.0.csv", Given()),
    (HERE / "lint" / "h200_sxm_nccl_2.29.2.csv", Given()),
    (HERE / "lint" / "h200_sxm_generation_attention_vllm_0.24.0.csv", Given()),
    (HERE / "lint" / "h200_sxm_context_attention_vllm_0.24.0.csv", Given()),
    (FIT, Given()),
    (VLLM_FIT, Given()),
    *((topologies_folder() / "profiles" / f"{name}.yaml", Given()) for name in preset_names("profiles")),
]


@pytest.mark.parametrize(("path", "known"), SOUND, ids=[path.name for path, _ in SOUND])
def test_nothing_in_a_sound_table_is_rejected(path, known):
    report = lint(path, known)
    assert [f.what for f in report.findings if f.severity == "reject"] == []


@given(st.integers(0, 2**32 - 1), st.floats(0.2e-3, 20e-3), st.floats(0.2, 0.9), st.floats(1e-3, 0.02))
@settings(max_examples=12, deadline=None)
def test_a_full_grid_of_a_linear_law_with_noise_raises_no_alarm_at_all(seed, start_s, efficiency, noise):
    profile = linear(seed, start_s, efficiency, noise)
    kept, findings = sound_samples(profile, LLAMA70, H100)
    assert [f.what for f in findings if f.severity != "note"] == []
    assert kept == list(profile.samples.each)


def linear(seed: int = 0, start_s: float = 5e-3, efficiency: float = 0.5, noise: float = 0.01) -> Profile:
    """Return prefills and steps of Llama-2-70B on H100 as a law gives them, three repeats of each."""
    rng = np.random.default_rng(seed)
    samples = []

    def add(phase, tp, batch, prompt, context, time_s):
        for _ in range(3):
            samples.append(
                Sample(phase, tp, 1, batch, prompt, 0, context, float(time_s * (1 + noise * rng.uniform(-1, 1))))
            )

    for tp in (2, 4):
        per_token_s = 2 * 69e9 / (tp * 989e12 * efficiency)
        for batch, prompt in [(1, 256), (1, 1024), (4, 256), (1, 2048), (8, 512), (1, 4096), (2, 2048), (1, 8192)]:
            attended = batch * prompt**2 * 2 * 80 * 8192 / (tp * 989e12 * 0.4)
            add("prefill", tp, batch, prompt, 0, start_s + per_token_s * batch * prompt + attended)
        for batch in (1, 8, 32):
            for context in (256, 1024, 4096):
                read = (138e9 + batch * context * 327_680) / (tp * 3.35e12 * efficiency)
                add("decode", tp, batch, 0, context, start_s + read)
    return Profile(
        name="grid", model="llama2-70b", gpu="h100-80gb",
        provenance=Provenance(method="measured", source="a law"), samples=Samples.of(samples),
    )  # fmt: skip


# -- the same kinds of faults, put into other rows, columns and files --------------------------------------


@given(
    st.sampled_from(["hardware", "tensor_parallel"]),
    st.floats(0.3, 4.0).filter(lambda f: abs(f - 1) > 0.01),
    st.sampled_from(["prompt_time", "token_time"]),
)
@settings(max_examples=8, deadline=None)
def test_a_copied_group_is_found_whatever_the_group_the_column_and_the_factor(tmp_path_factory, key, factor, column):
    table = Csv.read(SPLITWISE)
    table.rows = [row for row in table.rows if row[:2] == ["llama2-70b", "a100-80gb"]]
    new = {"hardware": "made-up-gpu", "tensor_parallel": "16"}[key]
    source = [list(table.rows[line - 2]) for line in table.where(tensor_parallel="4")]
    first = len(table.rows) + 2
    table.rows += source
    for line in range(first, len(table.rows) + 2):
        table.set(line, key, new)
        table.scale(line, column, factor)
        for other in {"prompt_time", "token_time"} - {column}:
            table.scale(line, other, 1 + 0.01 * math.sin(line * 7.3))
        told = float(table.get(line, "prompt_time")) + 127 * float(table.get(line, "token_time"))
        table.set(line, "e2e_time", repr(max(told, float(table.get(line, "e2e_time")))))
    report = lint(table.write(tmp_path_factory.mktemp("copies")))
    found = rows_of(report, "copies")
    copied, original = (
        set(range(first, len(table.rows) + 2)),
        set(table.where(tensor_parallel="4")) - set(range(first, len(table.rows) + 2)),
    )
    assert found in (copied, original), "one of the two groups is the copy; which, the table need not tell"
    what = next(f.what for f in report.findings if f.rule == "copies")
    assert f"{factor:.6g} x" in what or f"{1 / factor:.6g} x" in what


def test_times_that_agree_only_by_their_coarse_timer_are_no_copies(tmp_path):
    table = Csv.read(HERE / "lint" / "apex_all_reduce_H100-SXM-80GB.csv")
    for row in [list(row) for row in table.rows]:
        table.rows.append([row[0] + "-b", *row[1:]])  # another GPU with equal small times: 6, 7, 10 us
    small = [line for line in range(2, len(table.rows) + 2) if int(table.get(line, "size(kb)")) <= 64]
    table.rows = [table.rows[line - 2] for line in small]
    assert rows_of(lint(table.write(tmp_path)), "copies") == set()


@given(st.lists(st.integers(2, 551), min_size=1, max_size=6, unique=True), st.floats(1.2, 30.0))
@settings(max_examples=6, deadline=None)
def test_runs_that_took_longer_than_their_parts_are_found_row_by_row(tmp_path_factory, chosen, factor):
    table = Csv.read(SPLITWISE)
    table.rows = table.rows[:550]  # up to line 551: all of these add up
    for line in chosen:
        told = float(table.get(line, "prompt_time")) + float(table.get(line, "token_time")) * (
            int(table.get(line, "token_size")) - 1
        )
        table.set(line, "e2e_time", repr(factor * told))
    assert rows_of(lint(table.write(tmp_path_factory.mktemp("parts"))), "parts") == set(chosen)


@pytest.mark.parametrize(
    ("path", "known", "column", "line"),
    [
        (ATTENTION, Given(RTX, LLAMA8), "time_us", 8600),
        (HERE / "vllm_runs" / "dense_RTXPRO6000.csv", Given(PRO, LLAMA8), "time_us", 1215),
        (HERE / "lint" / "vidur_mlp_llama2-70b_a100.csv", Given(A100), "time_stats.mlp_up_proj.median", 3),
        (HERE / "lint" / "vidur_all_reduce_a100.csv", Given(A100), "time_stats.all_reduce.median", 83),
        (HERE / "lint" / "frontier_attention_a800.csv", Given(A100), "time_stats.attn_decode.median", 590),
        (HERE / "lint" / "a100_sxm_gemm_vllm_0.14.0.csv", Given(), "latency", 2),
        (SPLITWISE, Given(), "prompt_time", 42),
        (SPLITWISE, Given(), "token_time", 42),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_a_single_row_that_beats_the_data_sheet_is_found_in_any_table(tmp_path, path, known, column, line):
    table = Csv.read(path)
    before = rows_of(lint(path, known), "rates")
    for part in ("min", "max"):  # of the same row, so that it does not contradict itself
        if (name := column.replace("median", part)) in table.header and name != column:
            table.scale(line, name, 1 / 100)
    table.scale(line, column, 1 / 100)
    assert rows_of(lint(table.write(tmp_path), known), "rates") == before | {line}


@pytest.mark.parametrize("factor", [1e-3, 1e3, 1e6])
@pytest.mark.parametrize(
    ("path", "known", "column"),
    [
        (ATTENTION, Given(RTX, LLAMA8), "time_us"),
        (HERE / "lint" / "a100_sxm_gemm_vllm_0.14.0.csv", Given(), "latency"),
        (HERE / "lint" / "h200_sxm_nccl_2.29.2.csv", Given(), "latency"),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_a_table_in_another_unit_of_time_is_rejected_as_a_whole(tmp_path, path, known, column, factor):
    table = Csv.read(path)
    for line in range(2, len(table.rows) + 2):
        table.scale(line, column, factor)
    report = lint(table.write(tmp_path), known)
    assert {"unit"} <= rules(report, "reject")
    assert report.count("reject") > 0.5 * len(table.rows)
    said = next(f.what for f in report.findings if f.rule == "unit")
    assert ("too slow" if factor > 1 else "too fast") in said
    assert f"about {factor:g} of" in said or f"about 1/{1 / factor:g} of" in said


def test_a_repeat_in_another_unit_is_flagged_as_such(tmp_path):
    table = Csv.read(SPLITWISE)
    table.rows = table.rows[:550]
    table.scale(9, "prompt_time", 1000)
    table.set(9, "e2e_time", repr(float(table.get(9, "prompt_time")) + 127 * float(table.get(9, "token_time"))))
    said = [f for f in lint(table.write(tmp_path)).findings if f.rule == "repeats" and 9 in f.rows]
    assert said and "another unit?" in said[0].what and said[0].rows == (9,)


@pytest.mark.parametrize(
    ("name", "value", "bad"),
    [
        ("wip", "True", True), ("wip", "False", False), ("status", "aborted", True), ("status", "done", False),
        ("finished", "no", True), ("complete", "yes", False), ("state", "running", True), ("timed_out", "1", True),
        ("status", "ok", False), ("in_progress_note", "True", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("as_remark", [True, False])
def test_unfinished_runs_are_known_by_any_of_the_usual_marks(tmp_path, name, value, bad, as_remark):
    table = Csv.read(SPLITWISE)
    table.rows = table.rows[:60]
    table.header.append("remark" if as_remark else name)
    for row in table.rows:
        row.append("host=a; checked=2024-01-01")
    for line in range(2, 62):
        table.set(line, table.header[-1], f"host=b; {name}={value}; x=1" if as_remark else value)
    found = rows_of(lint(table.write(tmp_path)), "unfinished")
    assert found == (set(range(2, 62)) if bad else set())


@pytest.mark.parametrize(("column", "cell"), [("prompt_time", ""), ("batch_size", "four"), ("token_time", "-3"),
                                              ("e2e_time", "nan"), ("tensor_parallel", "2.5")])  # fmt: skip
def test_cells_that_hold_no_sound_number_reject_their_row_and_no_other(tmp_path, column, cell):
    table = Csv.read(SPLITWISE)
    table.rows = table.rows[:550]
    table.set(17, column, cell)
    report = lint(table.write(tmp_path))
    assert rows_of(report, "cells") == {17} and report.count("reject") == 1


def test_short_lines_are_rejected_with_their_number(tmp_path):
    table = Csv.read(SPLITWISE)
    table.rows = table.rows[:100]
    table.rows[30] = table.rows[30][:4]
    assert rows_of(lint(table.write(tmp_path)), "cells") == {32}


def test_a_median_outside_of_smallest_and_largest_is_rejected(tmp_path):
    path = HERE / "lint" / "vidur_all_reduce_a100.csv"
    table = Csv.read(path)
    table.set(40, "time_stats.all_reduce.min", float(table.get(40, "time_stats.all_reduce.median")) + 0.5)
    table.set(40, "time_stats.all_reduce.max", float(table.get(40, "time_stats.all_reduce.median")) + 0.9)
    assert rows_of(lint(table.write(tmp_path), Given(A100)), "parts") == {40}


@pytest.mark.parametrize(("line", "factor"), [(60, 3.0), (61, 0.3)])
def test_more_work_in_less_time_is_flagged_at_the_row_that_is_out_of_line(tmp_path, line, factor):
    path = HERE / "lint" / "vidur_send_recv_a100.csv"
    before = rows_of(lint(path, Given(A100)), "more work", "flag")
    table = Csv.read(path)
    for part in ("min", "median", "max", "mean"):
        table.scale(line, f"time_stats.send_recv.{part}", factor)
    found = rows_of(lint(table.write(tmp_path), Given(A100)), "more work", "flag")
    assert found - before == {line}


def test_more_ranks_that_take_longer_are_flagged(tmp_path):
    table = Csv.read(HERE / "lint" / "vidur_mlp_llama2-70b_a100.csv")
    line = table.where(num_tensor_parallel_workers="8")[2]  # large: TP4 of the same tokens is in the table, too
    tokens = table.get(line, "num_tokens")
    assert table.where(num_tensor_parallel_workers="8", num_tokens=tokens)
    for part in ("min", "median", "max", "mean"):
        table.scale(line, f"time_stats.mlp_down_proj.{part}", 20)
    report = lint(table.write(tmp_path), Given(A100))
    assert line in rows_of(report, "more ranks", "flag") or line in rows_of(report, "more work", "flag")


def test_a_narrower_type_that_is_slower_is_flagged(tmp_path):
    table = Csv.read(HERE / "lint" / "a100_sxm_gemm_vllm_0.14.0.csv")
    sound = [list(row) for row in table.rows]
    line = len(sound) + 2
    table.rows += [list(row) for row in sound]
    for twin in range(line, line + len(sound)):
        table.set(twin, "gemm_dtype", "int8")
        table.scale(twin, "latency", 0.6 + 0.05 * math.sin(7.3 * twin))
    slow = line + 5
    table.scale(slow, "latency", 4)
    report = lint(table.write(tmp_path))
    (finding,) = [f for f in report.findings if f.rule == "narrower type"]
    assert finding.rows == (7, slow), "the row and its wider twin: which of the two is off, two cannot tell"
    assert rows_of(report, "copies") == set()


def test_rows_that_stand_twice_are_flagged_and_not_taken_for_noise(tmp_path):
    table = Csv.read(SPLITWISE)
    table.rows = table.rows[:20]
    table.rows += [list(row) for row in table.rows[3:6]]
    report = lint(table.write(tmp_path))
    assert rows_of(report, "twice", "flag") >= {22, 23, 24}


def test_the_noise_floor_is_the_median_spread_of_repeats():
    (note,) = [f for f in sound_samples(linear(noise=0.02), LLAMA70, H100)[1] if f.rule == "noise"]
    # three uniform draws from +-2 % spread over 2 % on average
    share = float(note.what.split("decode ")[1].split("%")[0])
    assert 1.0 < share < 3.0


def test_a_table_of_small_messages_alone_says_nothing_of_elements(tmp_path):
    table = Csv.read(HERE / "lint" / "a100_sxm_custom_allreduce_vllm_0.14.0.csv")
    table.rows = [table.rows[line - 2] for line in range(2, 140) if int(table.get(line, "message_size")) <= 65536]
    assert "elements" not in rules(lint(table.write(tmp_path)), "flag")


def test_sizes_that_count_elements_are_known_by_the_types_alone(tmp_path):
    table = Csv.read(HERE / "lint" / "apex_all_reduce_H100-SXM-80GB.csv")
    for line in range(2, len(table.rows) + 2):
        if table.get(line, "dtype") == "float":
            table.set(line, "time(us)", 10 + 2 * int(table.get(line, "size(kb)")) / 100)
        else:
            table.set(line, "time(us)", 10 + int(table.get(line, "size(kb)")) / 100)
    report = lint(table.write(tmp_path))
    assert "elements" in rules(report, "flag")
    assert "width of the type" in next(f.what for f in report.findings if f.rule == "elements")


# -- published coefficients --------------------------------------------------------------------------------


def law(tp: int = 2, prefill=(8e-3, 0.3e-3, 1e-8), decode=(60e-3, 0.1e-3, 2e-6), large=None) -> Coefficients:
    def one(values):
        return DecodeFit(constant_s=values[0], per_request_s=values[1], per_context_token_s=values[2])

    return Coefficients(
        tp=tp,
        prefill=PrefillFit(constant_s=prefill[0], per_token_s=prefill[1], per_attended_s=prefill[2]),
        decode=one(decode),
        decode_large=one(large) if large else None,
        large_from_batch=64 if large else None,
    )


def of_laws(*laws: Coefficients) -> tuple[Finding, ...]:
    profile = Profile(
        name="fits", model="llama2-70b", gpu="h100-80gb",
        provenance=Provenance(method="published fit", source="a paper"), coefficients=laws,
    )  # fmt: skip
    return sound_samples(profile, LLAMA70, H100)[1]


def test_a_sound_law_raises_no_alarm():
    assert of_laws(law()) == ()


@pytest.mark.parametrize(
    ("laws", "rule", "severity"),
    [
        ((law(prefill=(8e-3, 0.3e-3, -1e-9)),), "coefficients", "flag"),
        ((law(decode=(60e-3, -0.1e-3, 2e-6)),), "coefficients", "flag"),
        ((law(decode=(60e-3, 0.1e-3, 2e-6), large=(20e-3, 0.1e-3, 2e-6)),), "regimes", "flag"),
        # 138 GB over 2 x 3.35 TB/s: no step is under 20 ms, and no token of a prefill under 68 us
        ((law(decode=(6e-3, 0.01e-3, 2e-6)),), "coefficients", "reject"),
        ((law(prefill=(1e-3, 0.03e-3, 0)),), "coefficients", "reject"),
        ((law(), law(4, (9.2e-3, 0.345e-3, 1.15e-8), (40e-3, 0.07e-3, 1e-6))), "copies", "reject"),
        ((law(), law(4, (8e-3, 0.36e-3, 1e-8), (40e-3, 0.07e-3, 1e-6))), "more ranks", "flag"),
    ],
)
def test_each_fault_of_a_published_law_is_found(laws, rule, severity):
    assert (rule, severity) in {(f.rule, f.severity) for f in of_laws(*laws)}


def test_laws_that_meet_are_not_flagged():
    # at 64 requests: 60 + 6.4 + 2e-3 x 64 c ms, and 57 + 9.6 + 2e-3 x 64 c ms: 0.2 ms apart
    assert of_laws(law(large=(57e-3, 0.15e-3, 2e-6))) == ()


# -- one source of truth with the loaders and the fit --------------------------------------------------------


def test_the_lint_rejects_the_rows_of_splitwise_that_its_loader_leaves_out():
    runs = splitwise._read(SPLITWISE)
    kept: set[int] = set()
    for gpu in ("a100-80gb", "h100-80gb"):
        for model in ("llama2-70b", "bloom-176b"):
            profile = import_profile("splitwise", SPLITWISE, model=model, gpu=gpu)
            assert not any("left out" in note and "queued" in note for note in profile.provenance.notes)
            kept |= {line for line, run in enumerate(runs, 2) if (run.model, run.hardware) == (model, gpu)}
    assert {line for line, _ in enumerate(runs, 2)} - kept == rows_of(lint(SPLITWISE), "copies")


def test_the_lint_rejects_no_attention_row_that_the_loader_keeps():
    rows = read_table(ATTENTION, ("prefill_chunk", "n_decode", "time_us"))
    pure = {row.line: row for row in rows if (row.count("prefill_chunk", 0) > 0) != (row.count("n_decode", 0) > 0)}
    out = {line for line, row in pure.items() if not layer_tables._possible(row, LLAMA8, RTX, 1)}
    assert rows_of(lint(ATTENTION, Given(RTX, LLAMA8)), "rates") & pure.keys() == out


def test_sound_samples_leaves_out_what_the_lint_rejects_and_says_so():
    profile = linear()
    samples = list(profile.samples.each)
    bad = [5, 30]
    for row in bad:
        samples[row] = samples[row]._replace(time_s=samples[row].time_s / 50)
    broken = profile.model_copy(update={"samples": Samples.of(samples)})
    kept, findings = sound_samples(broken, LLAMA70, H100)
    assert kept == [sample for row, sample in enumerate(samples) if row not in bad]
    assert {row for f in findings if f.severity == "reject" for row in f.rows} == {row + 1 for row in bad}
    assert all(text.startswith("left out 1 row (rates)") for text in lines_of(findings))
    assert len(list(lines_of(findings))) == 2


def test_a_profile_in_our_own_format_is_linted_with_its_file_lines(tmp_path):
    text = to_yaml(linear()).splitlines()
    line = next(n for n, row in enumerate(text, 1) if row.strip().startswith("- [prefill"))
    phase, tp, batch, prompt, context, time_s = text[line - 1].strip("- []").split(", ")
    text[line - 1] = text[line - 1].replace(time_s, repr(float(time_s) / 100))
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(text))
    assert rows_of(lint(path), "rates") == {line}, (phase, tp, batch, prompt, context)


def test_a_rejected_law_takes_no_sample_with_it():
    profile = linear().model_copy(update={"coefficients": (law(decode=(6e-3, 0.01e-3, 2e-6)),)})
    kept, findings = sound_samples(profile, LLAMA70, H100)
    assert [f.rule for f in findings if f.severity == "reject"] == ["coefficients"]
    assert len(kept) == len(profile.samples.rows)


def test_rows_on_one_line_of_a_file_are_counted_instead(tmp_path):
    profile = linear()
    samples = list(profile.samples.each)
    samples[7] = samples[7]._replace(time_s=samples[7].time_s / 50)
    path = tmp_path / "mine.json"
    path.write_text(profile.model_copy(update={"samples": Samples.of(samples)}).model_dump_json())
    assert rows_of(lint(path), "rates") == {8}


def test_every_check_is_registered_once():
    every = [*check.REJECTING, *check.TELLING]
    assert len({(one.__module__, one.__name__) for one in every}) == len(every) >= 18


def test_no_check_names_a_row_a_file_or_a_label_of_the_known_tables():
    source = "\n".join(path.read_text() for path in (Path(check.__file__).parent).glob("*.py"))
    for name in ("pcap", "llama", "bloom", "opt-", "rtx", "a100-80gb", "h100-80gb", "deepseek", "wip=True", "16384"):
        assert name not in source.lower(), name


# -- small parts -----------------------------------------------------------------------------------------------


@given(st.sets(st.integers(2, 60), min_size=1))
def test_ranges_name_each_row_once(rows):
    told = []
    for piece in ranges(rows).split(", "):
        first, _, last = piece.partition("-")
        told += list(range(int(first), int(last or first) + 1))
    assert told == sorted(rows)


def test_ranges_say_how_many_rows_they_leave_unsaid():
    assert ranges([2, 3, 4, 7, 9, 10], most=2) == "2-4, 7 and 2 more"


@pytest.mark.parametrize(
    ("times", "half"),
    [([0.013, 0.014, 0.02], 5e-4), ([1.0, 2.0, 14.0], 0.5), ([9.31067e-6, 9.34367e-6, 8.1e-6], 5e-12)],
)
def test_rounding_is_half_of_the_last_digit(times, half):
    # 9.31067 us has five decimals of a microsecond, 1e-11 s; half of it is 5e-12
    assert rounding(np.array(times))[0] == pytest.approx(half, rel=1e-6)


def test_names_of_gpus_and_models_are_found_as_files_write_them():
    assert find_gpu("h200_sxm").name == "h200" and find_gpu("NVIDIA A100-SXM4-80GB").name == "a100-80gb"
    assert find_model("meta-llama/Llama-3.1-70B").name == "llama3.1-70b" and find_gpu("mi300x") is None


# -- the command ------------------------------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = _run(["profile", "lint", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_exits_with_1_when_rows_are_rejected_and_0_when_only_flagged(capsys):
    code, out, err = told(capsys, str(SPLITWISE))
    assert code == 1 and err == "" and "300 rejected" in " ".join(out.split())
    code, out, _ = told(capsys, str(FIT))
    assert code == 0 and "0 rejected, 5 flagged" in " ".join(out.split())


def test_what_is_printed_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = told(capsys, str(SPLITWISE))
    long = [line for line in out.splitlines() if len(line) > 80 and str(SPLITWISE) not in line]
    assert long == []
    assert all(line.startswith(("reject ", "flag ", "note ", "  ", "/")) for line in out.splitlines()[:-1])


def test_json_is_one_document_with_every_row(capsys):
    code, out, err = told(capsys, str(SPLITWISE), "--json")
    data = json.loads(out)
    assert code == 1 and err == "" and data["rejected"] == 300 and data["rows"] == 850
    assert {"severity", "rule", "rows", "count", "what", "way_out"} == set(data["findings"][0])
    copies = next(f for f in data["findings"] if f["rule"] == "copies")
    assert copies["rows"] == "552-851" and copies["count"] == 300


def test_gpu_and_model_are_taken_from_flags_where_the_file_is_silent(capsys):
    code, out, _ = told(capsys, str(ATTENTION))
    assert code == 0 and "--model and --gpu" in " ".join(out.split())
    code, out, _ = told(capsys, str(ATTENTION), "--gpu", "rtx4090", "--model", "llama3.1-8b")
    assert code == 1 and "reject rates: row 12:" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none.csv"], "none.csv"),
        ([str(SPLITWISE), "--gpu", "h1000"], "no preset named 'h1000'"),
        ([str(HERE / "profiles" / "distserve_a100_max_tokens.csv")], "no known kind of table"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_1(capsys, arguments, says):
    code, out, err = told(capsys, *arguments)
    assert code == 1 and out == "" and says in err and len(err.splitlines()) == 1


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m planner profile lint {SPLITWISE} | head -1; echo ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=os.environ, check=True)
    assert (
        found.stderr == "" and found.stdout.splitlines()[0].startswith("reject") and len(found.stdout.splitlines()) == 2
    )


def test_the_same_file_gives_the_same_report():
    one, two = lint(SPLITWISE), lint(SPLITWISE)
    assert one == two and list(lines(one, 80)) == list(lines(two, 80)) and to_json(one) == to_json(two)


def test_a_table_that_is_no_table_is_an_input_error(tmp_path):
    empty = tmp_path / "empty.csv"
    empty.write_text("model,hardware\n")
    with pytest.raises(InputError, match="expected rows under the header"):
        lint(empty)


KINDS = [
    *((path, known) for path, known in SOUND if path.suffix == ".csv"),
    (SPLITWISE, Given()),
    (SERVING, Given()),
    (HERE / "lint" / "a100_sxm_custom_allreduce_vllm_0.14.0.csv", Given()),
    (HERE / "lint" / "h200_sxm_generation_attention_vllm_0.24.0.csv", Given()),
    (HERE / "lint" / "h200_sxm_context_attention_vllm_0.24.0.csv", Given()),
]
ODD = ["", " ", "nan", "inf", "-inf", "-1", "0", "1e400", "1e300", "1e-320", "abc", "٣", "2.5", "True", "1" * 30]


@pytest.mark.parametrize("kind", readers.KINDS, ids=lambda kind: kind.name)
def test_a_table_that_lacks_a_column_of_its_kind_names_it(tmp_path, kind):
    path = next(path for path, _ in KINDS if set(kind.columns) <= set(Csv.read(path).header))
    table = Csv.read(path)
    for column in kind.columns:
        less = Csv([name for name in table.header if name != column], [])
        less.rows = [
            [cell for name, cell in zip(table.header, row, strict=True) if name != column] for row in table.rows[:9]
        ]
        if any(set(other.columns) <= set(less.header) for other in readers.KINDS):
            continue  # the rest is still a table of another kind
        with pytest.raises(InputError, match=r"expected more columns|no known kind") as error:
            lint(less.write(tmp_path))
        assert column in str(error.value)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_cells_of_any_content_end_in_a_report_and_never_in_a_traceback(tmp_path_factory, data):
    path, known = data.draw(st.sampled_from(KINDS))
    table = Csv.read(path)
    table.rows = table.rows[:: max(1, len(table.rows) // 40)]
    broken = data.draw(st.lists(st.tuples(st.integers(2, len(table.rows) + 1), st.sampled_from(table.header),
                                          st.sampled_from(ODD)), max_size=12))  # fmt: skip
    for line, column, cell in broken:
        table.set(line, column, cell)
    report = lint(table.write(tmp_path_factory.mktemp("odd")), known)
    assert all(2 <= row <= len(table.rows) + 1 for finding in report.findings for row in finding.rows)
    json.dumps(to_json(report), allow_nan=False)
    assert list(lines(report, 80))


def test_parquet_is_read_where_pyarrow_is_installed(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = Csv.read(HERE / "lint" / "a100_sxm_gemm_vllm_0.14.0.csv")
    columns = {name: [row[i] for row in table.rows] for i, name in enumerate(table.header)}
    path = tmp_path / "gemm.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    assert lint(path).rows == len(table.rows)
