"""Workloads and SLOs: files in every format, bad ones too, and the requests generated from them."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.errors import InputError
from planner.sources.traces import READERS
from planner.sources.workloads import read_workload
from planner.specs.base import Document, parse, preset_names, resolve, validate
from planner.specs.slo import Slo, attains, inclusive_tpot_s, tpot_s
from planner.specs.workload import Requests, Workload, make_requests, steady_rows

CASES = Path(__file__).parent / "cases"
AZURE_41 = CASES / "41-trace-azure-crlf-bom"
BURST_43 = CASES / "43-trace-burstgpt-zeros-rampup" / "trace.csv"
MESSY_44 = CASES / "44-trace-empty-unsorted-missing"
SINE_46 = CASES / "46-trace-sinusoid-burst" / "trace.csv"
TPOT_50 = CASES / "50-slo-tpot-definition"


def workload(**keys: Any) -> Workload:
    return read_workload(Document(keys, str(CASES / "workload.yaml")))


def preset(name: str) -> Workload:
    return read_workload(resolve("workloads", Document(name, "problem.yaml")))


def written(folder: Path, text: str | bytes, name: str = "trace.csv", **keys: Any) -> Workload:
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return read_workload(Document({"source": "trace", "file": name, **keys}, str(folder / "w.yaml")))


def messages(error: pytest.ExceptionInfo[InputError]) -> str:
    return "\n".join(str(fault) for fault in error.value.faults)


# ---------------------------------------------------------------- the formats, by the shared cases


@pytest.mark.parametrize("file", ["trace.csv", "trace-nonl.csv"])
def test_azure_rows_survive_a_bom_crlf_seven_digit_fractions_and_a_missing_last_newline(file: str) -> None:
    base = workload(source="azure", file=str(AZURE_41 / file)).base
    assert len(base) == 5
    assert base.arrival_s[0] == 0.0  # wall-clock times are shifted
    assert np.diff(base.arrival_s) == pytest.approx([4.314579, 0.227298, 10.777533, 0.0], abs=1e-6)
    assert base.prompt_tokens.tolist() == [381, 403, 886, 98, 4815]
    assert base.output_tokens.tolist() == [47, 112, 58, 19, 13]


def test_burstgpt_rows_without_a_response_are_failures_and_never_played() -> None:
    trace = workload(source="burstgpt", file=str(BURST_43))
    assert (len(trace.base), trace.failed, trace.prefill_only) == (260, 20, 0)
    assert any("failed" in note and "20 of 260" in note for note in trace.notes)
    assert trace.generate(3.0, 2000.0, 0).output_tokens.min() >= 1


def test_burstgpt_rows_of_one_second_keep_their_order_and_the_total_column_is_not_read() -> None:
    base = workload(source="burstgpt", file=str(BURST_43)).base
    # rows 2..6 of the file: seconds 8, 21, 50, 50, 74
    assert base.arrival_s[:5].tolist() == [0.0, 13.0, 42.0, 42.0, 66.0]
    assert base.prompt_tokens[:4].tolist() == [607, 668, 117, 530]
    assert base.output_tokens[:4].tolist() == [71, 247, 315, 137]


def test_a_long_idle_head_is_left_out_of_the_rate_that_sizing_starts_from() -> None:
    trace = workload(source="burstgpt", file=str(BURST_43))
    # 240 served rows in 1183 - 8 s; about 200 of them from second 1116 on: 200 / 67 s = 3.0 req/s
    assert trace.mean_rate_rps == pytest.approx(239 / 1175)
    assert trace.steady_rate_rps == pytest.approx(3.0, rel=0.02)
    head_rps = 40 / 1108
    assert trace.steady_rate_rps > 20 * head_rps
    assert trace.design_rate_rps == trace.steady_rate_rps
    assert any("steady part" in note and "0.203 req/s" in note for note in trace.notes)
    played = trace.generate(trace.steady_rate_rps, 67.0, 0)
    assert len(played) == pytest.approx(200, abs=2)


@pytest.mark.parametrize("file", ["empty.jsonl", "header-only.csv"])
def test_a_trace_without_rows_is_refused(file: str) -> None:
    with pytest.raises(InputError, match="no requests"):
        workload(source="trace", file=str(MESSY_44 / file))


def test_every_bad_row_is_named_by_its_line() -> None:
    with pytest.raises(InputError) as error:
        workload(source="trace", file=str(MESSY_44 / "messy.jsonl"))
    assert [fault.line for fault in error.value.faults] == [4, 5, 9]
    for words in ("output_length", "at least 0", "not valid JSON", "on_bad_row: skip"):
        assert words in messages(error)


def test_bad_rows_can_be_skipped_and_the_rest_is_sorted_counted_and_limited() -> None:
    file = str(MESSY_44 / "messy.jsonl")
    trace = workload(source="trace", file=file, on_bad_row="skip").limited_to(131_072)
    # left: t = 1, 4 (text), 5, 7 with 200, 64, 100, 50 prompt tokens; the one of 2,000,000 is not averaged in
    assert trace.base.arrival_s.tolist() == [0.0, 3.0, 4.0, 6.0]
    assert trace.mean_prompt_tokens == (200 + 64 + 100 + 50) / 4
    assert (trace.failed, trace.prefill_only) == (0, 1)
    assert trace.base.output_tokens.tolist() == [10, 8, 20, 0]
    assert trace.generate(1.0, 4.0, 0).output_tokens.tolist() == [10, 8, 20, 1]
    notes = "\n".join(trace.notes)
    for words in ("skipped: 3", "sorted by time: 1", "1 of 5 (the longest has 2000001)", "prefill-only"):
        assert words in notes
    assert workload(source="trace", file=file, on_bad_row="skip", max_tokens=131_072).notes == trace.notes


def test_a_sinusoid_is_kept_whole_and_its_peak_is_told() -> None:
    trace = workload(source="trace", file=str(SINE_46))
    # 1333 requests; 1 to 8 req/s over 300 s: mean 4.5, top of the wave 8
    assert len(trace.table) == len(trace.base) == 1333
    assert trace.mean_rate_rps == trace.steady_rate_rps == pytest.approx(4.45, rel=0.01)
    assert trace.peak_rate_rps(60.0) == pytest.approx(8.0, rel=0.08)
    assert not trace.notes


def test_tpot_is_decode_only_unless_the_slo_says_otherwise() -> None:
    case = yaml.safe_load((TPOT_50 / "request.yaml").read_text())
    first_s, tokens = case["ttft_ms"] / 1e3, case["osl"]
    last_s = first_s + case["per_token_gap_ms"] / 1e3 * (tokens - 1)
    assert last_s == pytest.approx(3.180)
    assert tpot_s(first_s, last_s, tokens) == pytest.approx(0.0200)
    assert inclusive_tpot_s(0.0, last_s, tokens) == pytest.approx(0.0318)
    slo = Slo(ttft_s=2, tpot_s=1)
    assert slo.tpot_definition == "decode" and slo.attainment == 0.9
    assert slo.request_tpot_s(0.0, first_s, last_s, tokens) == pytest.approx(0.0200)
    inclusive = Slo(ttft_s=2, tpot_s=1, tpot_definition="inclusive")
    assert inclusive.request_tpot_s(0.0, first_s, last_s, tokens) == pytest.approx(0.0318)


def test_one_token_has_no_tpot_and_meets_it() -> None:
    case = yaml.safe_load((TPOT_50 / "osl1.yaml").read_text())
    first_s = case["ttft_ms"] / 1e3
    assert math.isnan(tpot_s(first_s, first_s, case["osl"]))
    assert math.isnan(inclusive_tpot_s(0.0, first_s, case["osl"]))
    assert attains([first_s], [math.nan], Slo(ttft_s=2, tpot_s=0.01)).tolist() == [True]


# ---------------------------------------------------------------- SLO


def test_a_request_attains_only_if_it_meets_both_bounds_itself() -> None:
    slo = Slo(ttft_s=0.2, tpot_s=0.1)
    ttft = [0.1, 0.3, 0.1, 0.2, math.nan, 0.3]
    tpot = [0.05, 0.05, 0.2, 0.1, 0.05, math.nan]
    assert attains(ttft, tpot, slo).tolist() == [True, False, False, True, False, False]


def test_a_pace_exactly_at_its_bound_meets_it_whatever_the_rounding() -> None:
    tokens = np.arange(2, 2000)
    first = np.full(len(tokens), 0.1)
    last = first + 0.02 * (tokens - 1)
    assert attains(first, tpot_s(first, last, tokens), Slo(ttft_s=0.1, tpot_s=0.02)).all()


def test_an_slo_takes_friendly_units_and_refuses_what_is_out_of_range() -> None:
    slo = validate(Slo, parse("{ttft_s: 200ms, tpot_s: 0.1, attainment: 99%}", "slo.yaml"))
    assert (slo.ttft_s, slo.tpot_s, slo.attainment) == (0.2, 0.1, 0.99)
    with pytest.raises(InputError) as error:
        validate(Slo, parse("ttft_s: -1\ntpot_s: 3 parsec\nattainment: 1.5\ntpot_definition: mine", "slo.yaml"))
    assert [fault.line for fault in error.value.faults] == [1, 2, 3, 4]


# ---------------------------------------------------------------- presets


@pytest.mark.parametrize("name", preset_names("workloads"))
def test_every_preset_reads_clean_and_cites_its_source(name: str) -> None:
    shipped = preset(name)
    assert shipped.name == name and shipped.spec.citation and not shipped.notes
    assert len(shipped.generate(5.0, 100.0, 1)) == pytest.approx(500, rel=0.5)


def test_the_azure_presets_have_the_published_sizes() -> None:
    code, chat = preset("azure-code"), preset("azure-conversation")
    # computed from the files by an independent few lines of numpy
    assert (len(code.base), len(chat.base)) == (8819, 19366)
    assert (code.mean_prompt_tokens, code.mean_output_tokens) == pytest.approx((2047.848, 27.883), abs=1e-3)
    assert (chat.mean_prompt_tokens, chat.mean_output_tokens) == pytest.approx((1154.697, 211.126), abs=1e-3)
    assert code.mean_rate_rps == pytest.approx(8818 / 3435.948056, rel=1e-9)
    assert len(code.table) == 8819  # bursty, yet no idle end


def test_the_mooncake_excerpt_comes_in_batches_every_three_seconds_with_one_id_per_512_tokens() -> None:
    base = preset("mooncake-conversation").base
    times, sizes = np.unique(base.arrival_s, return_counts=True)
    # whole trace: batches every 3 s, mean 10.2, at most 28 requests; the excerpt is its first 396 s
    assert np.diff(times) == pytest.approx(3.0, abs=0.0011)
    assert sizes.mean() == pytest.approx(10.2, rel=0.2) and sizes.max() <= 28
    assert [len(ids) for ids in base.prefix_blocks] == [-(-n // 512) for n in base.prompt_tokens.tolist()]


def test_a_mooncake_row_with_too_few_hash_ids_is_noted(tmp_path: Path) -> None:
    row = '{"timestamp": %d, "input_length": 1025, "output_length": 3, "hash_ids": %s}\n'
    trace = written(tmp_path, row % (0, [1, 2, 3]) + row % (2500, [1, 2]), source="mooncake")
    assert trace.base.arrival_s.tolist() == [0.0, 2.5]
    assert trace.base.prefix_blocks == ((1, 2, 3), (1, 2))
    assert "512 tokens of input_length: 1 (first: line 2)" in trace.notes[0]


# ---------------------------------------------------------------- reading: other shapes, slices, limits


def test_a_generic_trace_takes_seconds_milliseconds_and_dates(tmp_path: Path) -> None:
    rows = "{},10,5\n{},20,6\n"
    seconds = written(tmp_path, "arrival_s,prompt_tokens,output_tokens\n" + rows.format(3, 4.5))
    millis = written(tmp_path, "timestamp_ms,Prompt Tokens,osl\n" + rows.format(3000, 4500))
    dates = written(
        tmp_path,
        'extra,isl,osl,timestamp\nx,10,5,2024-01-01T23:59:59.5Z\n"a,b",20,6,2024-01-02T01:00:01+01:00\n',
    )
    for trace in (seconds, millis, dates):
        assert trace.base.arrival_s == pytest.approx([0.0, 1.5])
        assert trace.base.prompt_tokens.tolist() == [10, 20]
        assert trace.base.output_tokens.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("timestamp,isl\n1,2\n", 1, "no column for the output tokens"),
        ("a;b;c\n1;2;3\n", 1, "no column for the arrival time"),
        ("timestamp,isl,osl\n1,2\n", 2, "expected 3 fields, got 2"),
        ("timestamp,isl,osl\n1,2,3,4\n", 2, "expected 3 fields, got 4"),
        ("timestamp,isl,osl\n1,nan,3\n", 2, "finite"),
        ("timestamp,isl,osl\ninf,2,3\n", 2, "finite"),
        ("timestamp,isl,osl\n1e400,2,3\n", 2, "finite"),
        ("timestamp,isl,osl\n-1,2,3\n", 2, "at least 0 for arrival time"),
        ("timestamp,isl,osl\n1,two,3\n", 2, "a number for prompt tokens, got 'two'"),
        ("timestamp,isl,osl\n1,2.5,3\n", 2, "whole number"),
        ("timestamp,isl,osl\n1,0,3\n", 2, "from 1"),
        ("timestamp,isl,osl\n1,9999999999,3\n", 2, "to 1000000000"),
        ("timestamp,isl,osl\n1,,3\n", 2, "prompt tokens is missing"),
        ("timestamp,isl,osl\n1700000000000,2,3\n", 2, "timestamp_ms"),
        ("timestamp,isl,osl\n1,2,3\n2024-01-01 00:00:00,2,3\n", 3, "as in the rows above"),
        ("timestamp,isl,osl\n2024-01-01 00:00:00,2,3\n7,2,3\n", 3, "such as 2023"),
        ("timestamp,isl,osl\n2024-13-01 00:00:00,2,3\n", 2, "date that exists"),
        ('{"timestamp": true, "isl": 2, "osl": 3}\n', 1, "a number for arrival time"),
        ('{"timestamp": 1, "isl": NaN, "osl": 3}\n', 1, "finite"),
        ('{"timestamp": 1, "isl": null, "osl": 3}\n', 1, "missing"),
        ('{"timestamp": 1, "isl": [2], "osl": 3}\n', 1, "got a list"),
        ('{"timestamp": 1, "isl": 1' + "0" * 400 + ', "osl": 3}\n', 1, "finite"),
        ('{"timestamp": 1, "isl": ' + "9" * 5000 + "}\n", 1, "not valid JSON"),
        ('{"a": ' + "[" * 100_000 + "\n", 1, "not valid JSON"),
        ('{"timestamp": 1, "isl": 2, "osl": 3}\n[1, 2]\n', 2, "a JSON object"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": []}', None, "source: mooncake"),
        ("timestamp,isl,osl\n1,2,3\n1,2,3\n", None, "one instant"),
        ("timestamp,isl,osl\n1,2,3\n", None, "one instant"),
        (b"timestamp,isl,osl\n1,\xff,3\n", 2, "UTF-8"),
        (b"\n\n \r\n", 1, "no requests"),
        (b"", 1, "no requests"),
    ],
)
def test_a_faulty_trace_gives_the_line_and_the_reason(
    tmp_path: Path, text: str | bytes, line: int | None, words: str
) -> None:
    with pytest.raises(InputError) as error:
        written(tmp_path, text)
    assert words in messages(error)
    assert error.value.faults[0].line == line


def test_after_twenty_bad_rows_the_rest_is_counted(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        written(tmp_path, "timestamp,isl,osl\n" + "1,x,1\n" * 57)
    assert len(error.value.faults) == 21 and "and 37 more" in messages(error)


def test_when_all_rows_are_skipped_nothing_is_left_to_plan(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no requests: all 2 rows are bad"):
        written(tmp_path, "timestamp,isl,osl\nx,1,1\ny,1,1\n", on_bad_row="skip")


def test_a_slice_counts_from_the_first_row_and_its_end_is_open(tmp_path: Path) -> None:
    text = "timestamp,isl,osl\n" + "".join(f"{100 + i},{i + 1},1\n" for i in range(10))
    trace = written(tmp_path, text, slice={"start_s": 2, "end_s": "5s"})
    assert trace.base.prompt_tokens.tolist() == [3, 4, 5]
    assert trace.base.arrival_s.tolist() == [0.0, 1.0, 2.0]
    assert len(written(tmp_path, text, slice={"max_requests": 4}).base) == 4
    with pytest.raises(InputError, match=r"no requests in this slice; the trace runs from 0 to 9 s"):
        written(tmp_path, text, slice={"start_s": 1000})


def test_a_target_rate_stretches_time_and_nothing_else() -> None:
    whole = workload(source="trace", file=str(SINE_46))
    fast = workload(source="trace", file=str(SINE_46), rate_rps=9)
    factor = whole.mean_rate_rps / 9
    assert fast.mean_rate_rps == pytest.approx(9.0) and fast.design_rate_rps == 9.0
    assert fast.base.arrival_s == pytest.approx(whole.base.arrival_s * factor)
    assert fast.peak_rate_rps(60 * factor) == pytest.approx(whole.peak_rate_rps(60.0) / factor, rel=0.01)
    assert fast.generate(2.0, 900.0, 5).arrival_s == pytest.approx(whole.generate(2.0, 900.0, 5).arrival_s)


def test_a_limit_that_leaves_nothing_playable_is_refused() -> None:
    with pytest.raises(InputError, match="no request fits in 50 tokens; the shortest has 117"):
        workload(source="azure", file=str(AZURE_41 / "trace.csv")).limited_to(50)
    with pytest.raises(InputError, match="one instant"):  # 98 + 19 tokens is the only row left: no rate
        workload(source="azure", file=str(AZURE_41 / "trace.csv")).limited_to(120)


def test_a_digest_is_the_sha256_of_the_file_and_of_the_lengths_where_there_is_none() -> None:
    expected = hashlib.sha256(SINE_46.read_bytes()).hexdigest()
    assert workload(source="trace", file=str(SINE_46)).digest == expected
    fixed = [workload(source="fixed", prompt_tokens=n, output_tokens=8).digest for n in (5, 5, 6)]
    assert fixed[0] == fixed[1] != fixed[2]


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("source: fixed", ["prompt_tokens: is required", "output_tokens: is required"]),
        ("source: azure", ["file: is required"]),
        ("source: lengths\nfile: x.csv\narrivals: trace", ["w.yaml:3:11: arrivals"]),
        ("source: fixed\nprompt_tokens: 1\noutput_tokens: 1\narrivals: gamma", ["cv: is required"]),
        ("source: fixed\nprompt_tokens: 1\noutput_tokens: 1\ncv: 2", ["w.yaml:4:5: cv: is only used"]),
        ("source: fixed\nprompt_tokens: 1\noutput_tokens: 1\nfile: x", ["w.yaml:4:7: file: is not used"]),
        ("source: trace\nfile: x\nprompt_tokens: 7", ["w.yaml:3:16: prompt_tokens: is only used"]),
        ("source: trace\nfile: nowhere.csv", ["w.yaml:2:7: file: no such file"]),
        ("source: trace\nfile: " + "x" * 5000, ["w.yaml:2:7: file: no such file"]),
        ('source: trace\nfile: "a\\0b"', ["w.yaml:2:7: file: no such file"]),
        (
            "source: trace\nfile: x\nslice: {start_s: 5, end_s: 5}",
            ["slice.end_s: expected more than start_s"],
        ),
        ("source: lengths\nfile: x\nslice: {start_s: 5}", ["slice: source: lengths has no times"]),
        ("source: trace\nfile: x\narrivals: poisson\nblock_s: 9", ["w.yaml:4:10: block_s: is only used"]),
        ("source: csv\nfile: x", ["w.yaml:1:9: source: expected 'azure'"]),
        (
            "source: trace\nfile: x\nrate_rps: fast\ncolour: red",
            ["w.yaml:3:11: rate_rps", "w.yaml:4:1: colour"],
        ),
        ("source: trace\nfile: x\ncv: true\narrivals: gamma", ["w.yaml:3:5: cv: expected a number"]),
    ],
)
def test_a_workload_that_does_not_fit_together_is_refused_at_its_line(
    tmp_path: Path, text: str, faults: list[str]
) -> None:
    with pytest.raises(InputError) as error:
        read_workload(parse(text, str(tmp_path / "w.yaml")))
    assert len(error.value.faults) == len(faults)
    for words in faults:
        assert words in messages(error)


VALID = (
    AZURE_41.joinpath("trace.csv").read_bytes(),
    MESSY_44.joinpath("messy.jsonl").read_bytes(),
    BURST_43.read_bytes()[:300],
    b'{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n' * 2,
)
PIECES = st.one_of(
    st.binary(max_size=6),
    st.sampled_from([b",", b"\n", b"\r", b'"', b"{", b"}", b"[", b"NaN", b"-1", b"1e999", b"\x00", b"0" * 30, b":"]),
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = draw(st.sampled_from(VALID))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        data = data[:start] + draw(PIECES) + data[start + draw(st.integers(0, 8)) :]
    return data


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.one_of(st.binary(max_size=80), mutated()),
    source=st.sampled_from(sorted(READERS)),
    on_bad_row=st.sampled_from(["reject", "skip"]),
)
def test_no_bytes_at_all_give_anything_but_requests_or_an_input_error(
    tmp_path: Path, data: bytes, source: str, on_bad_row: str
) -> None:
    try:
        trace = written(tmp_path, data, source=source, on_bad_row=on_bad_row)
    except InputError as error:
        assert error.faults and all(fault.message for fault in error.faults)
        return
    played = trace.generate(3.0, 50.0, 1)
    assert (played.output_tokens >= 1).all() and (np.diff(played.arrival_s) >= 0).all()
    assert "nan" not in repr((trace.mean_rate_rps, trace.peak_rate_rps(), trace.percentiles, trace.notes))


# ---------------------------------------------------------------- generating


def poisson(**keys: Any) -> Workload:
    return workload(**({"source": "fixed", "prompt_tokens": 512, "output_tokens": 64} | keys))


def every_process() -> list[Workload]:
    return [
        poisson(),
        poisson(arrivals="gamma", cv=3),
        poisson(arrivals="constant"),
        preset("sharegpt"),
        preset("azure-code"),
        preset("mooncake-conversation"),
        workload(source="trace", file=str(SINE_46), arrivals="poisson"),
    ]


def test_poisson_gaps_have_the_rate_asked_for_and_a_cv_of_one() -> None:
    requests = poisson().generate(20.0, 5000.0, 3)
    gaps = np.diff(requests.arrival_s)
    assert len(requests) == pytest.approx(100_000, abs=4 * math.sqrt(100_000))
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.02)
    assert requests.arrival_s.max() < 5000.0


@pytest.mark.parametrize("cv", [0.3, 2, 4])
def test_gamma_gaps_have_the_cv_asked_for(cv: float) -> None:
    requests = poisson(arrivals="gamma", cv=cv).generate(20.0, 20_000.0, 1)
    gaps = np.diff(requests.arrival_s)
    assert len(requests) == pytest.approx(400_000, abs=4 * cv * math.sqrt(400_000))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_constant_arrivals_are_exact() -> None:
    assert poisson(arrivals="constant").generate(4.0, 2.0, 9).arrival_s.tolist() == [i / 4 for i in range(8)]


def test_lengths_are_drawn_from_the_table_with_its_means() -> None:
    shipped = preset("sharegpt")
    requests = shipped.generate(50.0, 2000.0, 1)
    assert requests.prompt_tokens.mean() == pytest.approx(shipped.mean_prompt_tokens, rel=0.01)
    assert requests.output_tokens.mean() == pytest.approx(shipped.mean_output_tokens, rel=0.02)
    known = set(zip(shipped.base.prompt_tokens.tolist(), shipped.base.output_tokens.tolist(), strict=True))
    assert set(zip(requests.prompt_tokens.tolist(), requests.output_tokens.tolist(), strict=True)) <= known


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_request_i_is_the_same_at_every_rate_and_for_every_duration(seed: int) -> None:
    for shipped in every_process():
        slow, fast = shipped.generate(2.0, 400.0, seed), shipped.generate(16.0, 300.0, seed)
        common = len(slow)
        assert 400 < common < len(fast)
        assert np.array_equal(slow.prompt_tokens, fast.prompt_tokens[:common])
        assert np.array_equal(slow.output_tokens, fast.output_tokens[:common])
        # rates of powers of two: dividing the same unit times by them is exact
        assert np.array_equal(slow.arrival_s * 2.0, fast.arrival_s[:common] * 16.0)


@settings(max_examples=60, deadline=None)
@given(rate=st.floats(0.05, 50), duration=st.floats(1, 500), seed=st.integers(0, 5))
def test_generated_columns_are_in_order_in_range_and_of_one_length(rate: float, duration: float, seed: int) -> None:
    requests = BURSTY.generate(rate, duration, seed)
    assert len(requests.prompt_tokens) == len(requests.output_tokens) == len(requests.slo_class) == len(requests)
    assert (np.diff(requests.arrival_s) >= 0).all()
    assert len(requests) == 0 or 0 <= requests.arrival_s[0] <= requests.arrival_s[-1] <= duration


BURSTY = workload(source="burstgpt", file=str(BURST_43))


def same(one: Requests, other: Requests) -> bool:
    return np.array_equal(one.arrival_s, other.arrival_s) and np.array_equal(one.prompt_tokens, other.prompt_tokens)


def test_equal_seeds_repeat_and_other_seeds_differ() -> None:
    for shipped in every_process():
        if shipped.spec.process == "constant":
            continue
        first = shipped.generate(10.0, 200.0, 4)
        assert same(first, shipped.generate(10.0, 200.0, 4))
        assert not same(first, shipped.generate(10.0, 200.0, 5))


def test_seed_zero_plays_the_trace_itself_stretched_exactly() -> None:
    shipped = preset("azure-code")
    rate = shipped.mean_rate_rps
    requests = shipped.generate(3 * rate, 8819 / (3 * rate), 0)
    assert len(requests) == 8819
    assert requests.arrival_s == pytest.approx(shipped.base.arrival_s / 3, abs=1e-9)
    assert np.array_equal(requests.prompt_tokens, shipped.base.prompt_tokens)


@pytest.mark.parametrize("name", ["azure-code", "azure-conversation", "mooncake-conversation"])
def test_pieces_of_a_trace_keep_its_rate_its_lengths_and_its_bursts(name: str) -> None:
    shipped = preset(name)
    rate = shipped.mean_rate_rps
    original = dispersion(shipped.base.arrival_s)
    runs = [shipped.generate(rate, 20_000.0, seed) for seed in range(1, 5)]
    assert np.mean([len(run) for run in runs]) == pytest.approx(20_000 * rate, rel=0.05)
    assert np.mean([dispersion(run.arrival_s) for run in runs]) == pytest.approx(original, rel=0.15)
    prompts = np.concatenate([run.prompt_tokens for run in runs])
    assert prompts.mean() == pytest.approx(shipped.mean_prompt_tokens, rel=0.05)


def dispersion(arrival_s: np.ndarray) -> float:
    """Variance over mean of the arrivals in windows of 10 s: 1 for Poisson, more for bursts."""
    counts = np.bincount((arrival_s // 10.0).astype(int))[:-1]
    return float(counts.var() / counts.mean())


def test_a_row_played_again_is_no_hit_on_its_own_blocks() -> None:
    shipped = preset("mooncake-conversation")
    rate, rows = shipped.mean_rate_rps, len(shipped.base)
    played = shipped.generate(rate, 3 * rows / rate, 0, prefix_blocks=True)
    assert played.prefix_blocks[:rows] == shipped.base.prefix_blocks
    assert [len(ids) for ids in played.prefix_blocks] == [-(-n // 512) for n in played.prompt_tokens.tolist()]
    first = {block for ids in shipped.base.prefix_blocks for block in ids}
    assert not any(block in first for ids in played.prefix_blocks[rows:] for block in ids)
    # an unlimited cache hits no more often than on the trace, since repeats are made to differ
    assert prefix_hit(played) <= 1.1 * prefix_hit(shipped.base)
    assert shipped.generate(rate, 100.0, 0).prefix_blocks is None


def prefix_hit(requests: Requests) -> float:
    """Share of prompt tokens that one cache without limit, which sees every request at once, would hold."""
    seen: set[int] = set()
    hit = 0
    for ids, tokens in zip(requests.prefix_blocks, requests.prompt_tokens.tolist(), strict=True):
        matched = next((i for i, block in enumerate(ids) if block not in seen), len(ids))
        hit += min(512 * matched, tokens)
        seen.update(ids)
    return hit / int(requests.prompt_tokens.sum())


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (-1, 1, 1), (math.nan, 1, 1), (1, math.inf, 1), (1, 1, -1)])
def test_a_rate_duration_or_seed_out_of_range_is_refused(numbers: tuple[float, float, int]) -> None:
    with pytest.raises(InputError, match="expected a positive rate"):
        poisson().generate(*numbers)


# ---------------------------------------------------------------- the steady part


def test_steady_traffic_is_never_cut() -> None:
    for seed in range(20):
        times = np.cumsum(np.random.default_rng(seed).exponential(1.0, 500))
        assert steady_rows(times) == (0, 499)
    assert steady_rows(np.zeros(5)) == (0, 4)
    assert steady_rows(np.array([0.0, 1.0])) == (0, 1)


@pytest.mark.parametrize("rows", [100, 5000])
def test_one_straggler_long_after_the_rest_does_not_set_the_rate(rows: int) -> None:
    times = np.append(np.cumsum(np.random.default_rng(1).exponential(1.0, rows)), 1e6)
    first, last = steady_rows(times)
    assert last < rows and last - first > 0.97 * rows


def test_an_idle_head_and_tail_are_both_left_out() -> None:
    rng = np.random.default_rng(2)
    idle, busy = rng.exponential(100.0, (2, 20)), rng.exponential(0.1, 4000)
    times = np.cumsum(np.concatenate((idle[0], busy, idle[1])))
    first, last = steady_rows(times)
    assert first == pytest.approx(20, abs=15) and last == pytest.approx(4020, abs=15)


def test_the_rate_of_lengths_is_the_one_asked_for() -> None:
    assert poisson().design_rate_rps is None and poisson().peak_rate_rps() is None
    fixed = poisson(rate_rps="90/min")
    assert fixed.design_rate_rps == fixed.mean_rate_rps == fixed.peak_rate_rps() == 1.5


def test_taking_rows_keeps_every_column_together() -> None:
    requests = make_requests(np.arange(3.0), np.array([1, 2, 3]), np.array([4, 5, 6]), ((7,), (8,), (9,)))
    kept = requests.take(np.array([True, False, True]))
    assert (kept.prompt_tokens.tolist(), kept.output_tokens.tolist()) == ([1, 3], [4, 6])
    assert kept.prefix_blocks == ((7,), (9,)) and kept.slo_class.tolist() == [0, 0]
