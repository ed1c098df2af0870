"""`planner bench` against real servers whose law is known: what it measures, counts, compares and refuses."""

from __future__ import annotations

import csv
import io
import json
import signal
import time
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import yaml
from rich.console import Console

from planner.bench.answer import Answer
from planner.bench.intervals import percentiles, share, wilson, worth
from planner.bench.load import Load, Question, load_of, seconds, slos_of
from planner.bench.plot import to_svg
from planner.bench.prompts import Prompts, parse_token_ids
from planner.bench.records import columns_of
from planner.bench.replay import Replayed, Sent
from planner.bench.result import Result, result_of
from planner.bench.run import Outcome, Target, bench
from planner.bench.server import Server
from planner.bench.view import render, to_json
from planner.cli import _run
from planner.deploy import deployment_of, system_of, to_yaml
from planner.errors import InputError
from planner.simulator.phase import simulate
from planner.specs.deployment import Deployment
from planner.specs.slo import Slo
from planner.specs.workload import make_requests
from tests.engine_service import served, tiny_engine
from tests.law_server import Asked, LawServer, steady
from tests.planning import slo, solved
from tests.test_cli import started

SLO = "ttft=500ms,tpot=50ms"
FIXED = "source: fixed\nprompt_tokens: 20\noutput_tokens: 5\nrate_rps: 40\narrivals: constant\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Work in a folder with a workload of equal requests in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fixed.yaml").write_text(FIXED)
    return tmp_path


def run(server: LawServer, **asked: object) -> Outcome:
    """Return a run of the workload of equal requests."""
    question = {"workload": "fixed.yaml", "slo": SLO, "requests": 20, "warmup_s": 0.0} | asked
    return bench(Target(server.url), Question(**question))


# --- what is measured ---


def test_times_are_those_at_which_the_server_wrote_its_tokens(folder):
    """Client and server read one clock, so each time stamp must lie behind the server's, and close."""
    with LawServer(steady(0.02, 0.05)) as server:
        found = run(server, workload="sharegpt", rate_rps=30.0, requests=30, max_output=10)
    start_s = found.result.measured.sent[0].answer.first_token_s - found.result.measured.first_token_s[0]
    asked = sorted(server.asked, key=lambda one: len(one.prompt))
    seen = sorted(found.result.measured.sent, key=lambda one: found.result.load.requests.prompt_tokens[one.row])
    for name, at in (("first_token_s", 0), ("last_token_s", -1)):
        late_s = [getattr(b.answer, name) - a.tokens_s[at] for a, b in zip(asked, seen, strict=True)]
        assert min(late_s) >= 0 and np.median(late_s) < 0.1  # a fifth of the time between the two
    arrived_s = np.sort([one.arrived_s for one in asked]) - start_s
    left_s = np.sort(found.result.measured.sent_s)
    assert (arrived_s >= left_s - 1e-9).all() and np.median(arrived_s - left_s) < 0.1
    tpot_s = found.result.tpot["p50"].measured.value
    assert tpot_s == pytest.approx(0.05, rel=0.3)


def test_an_open_loop_waits_for_no_answer(folder):
    with LawServer(steady(0.8, 0.0)) as server:  # all 20 requests are sent within 0.5 s
        run(server)
    assert server.most_running > 10  # one that waits has 1


def test_requests_leave_when_they_are_due_and_the_lateness_is_reported(folder):
    with LawServer(steady(0.01, 0.001)) as server:
        result = run(server).result
    measured = result.measured
    assert measured.due_s == pytest.approx(np.arange(20) / 40)
    late_s = measured.sent_s - measured.due_s
    assert (late_s >= 0).all() and result.client.late_max_s == late_s.max()
    assert (measured.ttft_s == measured.first_token_s - measured.due_s).all()  # lateness is not taken off


def test_a_closed_loop_keeps_so_many_clients_busy_and_no_more(folder):
    with LawServer(steady(0.03, 0.002)) as server:
        result = run(server, concurrency=3, requests=18).result
    assert server.most_running == 3 and len(server.asked) == 18
    due_s, ended_s = np.sort(result.measured.due_s), np.sort(result.measured.last_token_s)
    assert (due_s[3:] >= ended_s[:-3]).all()  # each but the first three waited for an answer


def test_clients_of_a_closed_loop_think_between_requests(folder):
    with LawServer(steady(0.005, 0.001)) as server:
        result = run(server, concurrency=1, requests=4, think_s=0.1).result
    pauses_s = result.measured.due_s[1:] - result.measured.last_token_s[:-1]
    assert (pauses_s >= 0.1).all()


def test_a_closed_loop_for_a_time_stops_sending_then(folder):
    with LawServer(steady(0.02, 0.001)) as server:
        result = run(server, concurrency=2, requests=None, duration_s=0.5).result
    assert result.measured.due_s.max() < 0.5 and result.statuses == {"ok": len(server.asked)}


# --- prompts ---


def test_prompts_have_the_tokens_of_the_load_and_share_no_prefix_by_accident(folder):
    with LawServer(steady(0.001, 0.0)) as server:
        found = run(server, workload="sharegpt", rate_rps=100.0, max_output=3)
    sent = {len(one.prompt): one for one in server.asked}
    assert sorted(sent) == sorted(found.result.load.requests.prompt_tokens)
    assert len({tuple(one.prompt[:4]) for one in server.asked}) == 20
    assert all(1000 <= token < 31000 for one in server.asked for token in one.prompt)
    body = server.asked[0].body
    assert body["max_tokens"] == body["min_tokens"] and body["ignore_eos"] and body["stream_options"]["include_usage"]


def test_equal_prefix_blocks_are_equal_prompts_up_to_their_end():
    requests = make_requests(
        np.zeros(3), np.array([1200, 1100, 600]), np.ones(3, np.int64), ((7, 8, 9), (7, 8, 5), (6, 8))
    )
    prompts = Prompts(requests, seed=1)
    a, b, c = (prompts[row] for row in range(3))
    assert [len(a), len(b), len(c)] == [1200, 1100, 600]
    assert a[:1024] == b[:1024] and a[1024:1030] != b[1024:1030] and a[:8] != c[:8]


def test_the_prompts_of_a_run_are_those_of_its_seed_alone():
    requests = make_requests(np.zeros(2), np.array([50, 50]), np.ones(2, np.int64))
    assert Prompts(requests, 1)[0] == Prompts(requests, 1)[0] != Prompts(requests, 2)[0]


# --- servers that fail ---


def test_each_failure_is_counted_as_what_it_is_and_as_missed(folder):
    faults = {1: "500", 2: "429", 3: "drop", 4: "end", 5: "garble", 6: "error", 7: "401", 8: "hang", 9: "503"}
    with LawServer(steady(0.01, 0.002), faults) as server:
        result = bench(
            Target(server.url, timeout_s=1.0),
            Question(workload="fixed.yaml", slo="ttft=5s,tpot=5s", requests=20, warmup_s=0.0),
        ).result
    by_number = {one.row: one.answer for one in result.measured.sent}
    expected = {1: "refused", 2: "rejected", 3: "broken", 4: "broken", 5: "broken", 6: "broken", 7: "refused"}
    expected |= {8: "timeout", 9: "rejected"}
    assert {row: by_number[row].status for row in expected} == expected
    assert result.statuses == {"ok": 11, "refused": 2, "rejected": 2, "broken": 4, "timeout": 1}
    assert by_number[1].error == "HTTP 500: so it was told" and "lost its instance" in by_number[6].error
    assert result.attainment[0].measured.value == pytest.approx(11 / 20)
    assert not result.measured.met[list(expected)].any()
    told = "\n".join(result.warnings)
    assert "2 of 20 requests were rejected" in told and "4 of 20 requests broke off" in told


def test_a_server_that_does_not_give_the_tokens_asked_for_is_told_on(folder):
    faults = {0: "short", 1: "short", 2: "long-prompt", 3: "silent", 4: "silent", 5: "silent"}
    with LawServer(steady(0.005, 0.001), faults) as server:
        result = run(server).result
    told = [warning for warning in result.warnings if "tokens" in warning]
    assert len(told) == 3 and result.statuses == {"ok": 20}
    assert told[0].startswith("the server gives no usage for 3 of 20 answers")
    assert told[1].startswith("1 of 20 answers are not of the tokens asked for: prompt 21 instead of 20")
    assert told[2].startswith("2 of 20 answers are not of the tokens asked for: output 2 instead of 5")


# --- what is counted ---


def test_requests_of_the_warm_up_are_recorded_and_not_counted(folder):
    with LawServer(steady(0.01, 0.001)) as server:
        result = run(server, warmup_s=0.25).result  # 40 a second: the first ten
    assert result.counted == 10 and len(result.measured.sent) == 20
    assert result.measured.counted.tolist() == [False] * 10 + [True] * 10


def hand_made(statuses: list[str], ttft_s: float = 0.1, interrupted: bool = False) -> Result:
    """Return the result of requests due each second, answered after `ttft_s` and 10 ms a token."""
    count = len(statuses)
    requests = make_requests(np.arange(count, dtype=float), np.full(count, 9), np.full(count, 5))
    load = Load("made", requests, slos_of(SLO, None), 1.0, None, count - 1.0, 0.0, seed=0)
    sent = []
    for at, status in enumerate(statuses):
        first_s = 100.0 + at + ttft_s
        answer = Answer(status, "", first_s, first_s + 0.04, 0.01, 5, 9, 5)
        sent.append(Sent(at, float(at), float(at), answer if status == "ok" else Answer(status)))
    return result_of(Replayed(100.0, sent, interrupted=interrupted), load, None)


def test_an_interrupted_run_counts_what_was_sent_before_the_first_request_without_an_end():
    result = hand_made(["ok", "ok", "cut", "ok", "cut"], interrupted=True)
    assert result.measured.counted.tolist() == [True, True, False, False, False]
    assert result.attainment[0].measured.value == 1.0


@pytest.mark.parametrize("statuses", [[], ["cut"] * 3, ["broken"] * 3, ["rejected", "cut"]], ids=str)
def test_a_run_without_an_answer_is_shown_all_the_same(statuses):
    result, server = hand_made(statuses, interrupted=True), Server("http://x", "lawful")
    console = Console(width=80, file=io.StringIO())
    for piece in render(result, server):
        console.print(piece)
    assert "no request was counted" in console.file.getvalue() or "broken" in statuses or "rejected" in statuses
    data = json.loads(json.dumps(to_json(result, server, 0), allow_nan=False))
    assert data["ttft"]["p50"]["measured_s"] is None and data["held"] is None
    assert len(columns_of(result)["status"]) == len(statuses) and to_svg(result).startswith("<?xml")


def test_a_bound_that_is_just_met_counts_and_one_beyond_does_not():
    assert hand_made(["ok"] * 4, ttft_s=0.5).attainment[0].measured.value == 1.0
    assert hand_made(["ok"] * 4, ttft_s=0.5001).attainment[0].measured.value == 0.0


# --- intervals ---


def test_the_interval_of_a_share_is_wilsons_where_requests_are_independent():
    met = np.random.default_rng(0).random(400) < 0.9
    found, textbook = share(met, np.zeros(400)), wilson(met.mean(), 400)
    assert worth(met.astype(float)) < 1.35
    assert found.high - found.low == pytest.approx(textbook.high - textbook.low, rel=0.2)
    # Newcombe (1998), table I: 81 of 263 has the score interval 0.2553 to 0.3662
    assert (wilson(81 / 263, 263).low, wilson(81 / 263, 263).high) == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_neighbours_that_say_the_same_are_worth_one():
    independent = np.random.default_rng(1).random(500)
    assert worth(np.repeat(independent, 8)) == pytest.approx(8, rel=0.3)


def test_the_interval_holds_the_truth_although_neighbours_queue_together():
    """An AR(1) series whose values are below a bound in 90 % of the time; 300 runs of 300 requests."""
    stream, held, naive = np.random.default_rng(2), 0, 0
    bound = 1.2816  # of a standard normal, 90 % lie below
    for _ in range(300):
        series = np.empty(300)
        series[0] = stream.standard_normal()
        for at in range(1, 300):
            series[at] = 0.9 * series[at - 1] + np.sqrt(1 - 0.81) * stream.standard_normal()
        met = series < bound
        mine, other = share(met, series), wilson(met.mean(), 300)
        held += mine.low <= 0.9 <= mine.high
        naive += other.low <= 0.9 <= other.high
    assert held > 0.8 * 300 and naive < 0.6 * 300


def test_a_run_without_a_miss_is_not_certain():
    found = share(np.ones(50, bool), np.random.default_rng(0).random(50))
    assert found.high == 1.0 and 0.85 < found.low < 0.95


def test_the_interval_of_a_median_holds_it_and_widens_with_correlation():
    values = np.random.default_rng(3).exponential(size=400)
    plain, same = percentiles(values, [50], 0)[0], percentiles(np.repeat(values[:40], 10), [50], 0)[0]
    assert plain.low < np.log(2) < plain.high and same.high - same.low > 1.5 * (plain.high - plain.low)


# --- measured beside predicted ---


@cache
def deployment() -> Deployment:
    """A plan of four A100s with OPT-13B, whose steps take some 30 ms."""
    parts = {"model": "opt-13b", "cluster": "a100-4gpu", "workload": "sharegpt", "slo": slo("400ms", "100ms")}
    return deployment_of(solved(**parts).prefer("disaggregated"))


QUESTION = Question(requests=30, max_output=4, warmup_s=0.5, rate_rps=15.0, slo="ttft=2s,tpot=1s")
"""Bounds that a loaded machine does not miss by itself."""


def as_simulated(slower: float = 1.0) -> LawServer:
    """Return a server that takes exactly as long as simulation says of QUESTION, or so much longer.

    It also says so, as the included runtime does.
    """
    load = load_of(QUESTION, deployment())
    done = simulate(system_of(deployment()), load.requests, load.slos)

    def law(asked: Asked) -> list[float]:
        if asked.number < 0:
            return [0.0, 0.0]
        at = asked.number
        first_s, last_s = (slower * (t[at] - load.requests.arrival_s[at]) for t in (done.first_token_s, done.finish_s))
        return np.linspace(first_s, last_s, asked.body["max_tokens"]).tolist()

    def times(asked: Asked) -> dict:
        at, start_s = asked.number, load.requests.arrival_s[asked.number]
        queue_s, prefill_s = done.prefill_start_s[at] - start_s, done.prefill_end_s[at] - done.prefill_start_s[at]
        handed = bool(np.isfinite(done.pull_end_s[at])) and done.first_token_s[at] == done.first_step_s[at]
        return {
            "queue_s": slower * queue_s,
            "prefill_s": slower * prefill_s,
            "handoff_s": slower * (done.pull_end_s[at] - done.prefill_end_s[at]) if handed else None,
            "first_decode_wait_s": slower * (done.first_step_s[at] - done.pull_end_s[at]) if handed else None,
            "ttft_s": slower * (done.first_token_s[at] - start_s),
            "prefill_at": "prefill-0",
            "decode_at": "decode-0",
            "retries": 0,
            "cached_tokens": 0,
        }

    return LawServer(law, model={"id": "opt-13b", "owned_by": "goodput-planner"}, times=times)


@cache
def faithful() -> Outcome:
    """A run against a server that does as predicted."""
    with as_simulated() as server:
        return bench(Target(server.url), QUESTION, deployment())


def test_a_server_that_does_as_simulated_is_measured_as_predicted():
    result = faithful().result
    one = result.attainment[0]
    assert one.measured.value == pytest.approx(one.predicted, abs=0.05) and result.held
    for pair in (result.ttft["p50"], result.tpot["p50"]):
        assert pair.measured.value == pytest.approx(pair.predicted, rel=0.15, abs=0.1)
    for name in ("queue", "prefill", "handoff", "first_decode_wait"):  # the server's own words, so exactly
        assert result.terms[name].measured.value == pytest.approx(result.terms[name].predicted, rel=1e-6, abs=1e-9)
    inside = sum(result.terms[name].measured.value for name in ("queue", "prefill", "handoff", "first_decode_wait"))
    whole = inside + result.terms["outside"].measured.value
    assert whole == pytest.approx(result.terms["mean"].measured.value, rel=1e-6)
    assert 0 <= result.terms["outside"].measured.value < 0.2


def test_records_have_each_request_with_its_instances_and_what_was_predicted_of_it():
    outcome = faithful()
    columns = columns_of(outcome.result)
    assert {len(column) for column in columns.values()} == {30}
    assert set(columns["prefill_at"]) == {"prefill-0"} and set(columns["status"]) == {"ok"}
    assert columns["server_output_tokens"] == columns["output_tokens"]
    apart_s = np.array(columns["ttft_s"]) - np.array(columns["predicted_ttft_s"])
    assert apart_s.min() > -1e-6 and np.median(apart_s) < 0.2


def test_the_json_has_every_figure_with_its_prediction_and_no_nan():
    outcome = faithful()
    data = json.loads(json.dumps(to_json(outcome.result, outcome.server, outcome.prompt_seed), allow_nan=False))
    assert data["held"] is True and data["requests"] == {
        "sent": 30,
        "counted": outcome.result.counted,
        "ok": data["requests"]["counted"],
    }
    for family in ("ttft", "tpot"):
        assert all(one["measured_s"] > 0 and one["predicted_s"] > 0 for one in data[family].values())
    assert data["claim"]["layout"] == deployment().prediction.claim.layout
    assert not data["at_claim"]  # the outputs were cut: the file says nothing of such a load


def test_the_picture_shows_both_curves_and_the_bound_alike_each_time():
    svg = to_svg(faithful().result)
    assert svg == to_svg(faithful().result)
    for color in ("#0072b2", "#d55e00", "#57606a"):
        assert f"stroke: {color}" in svg


def test_a_server_that_is_far_slower_than_predicted_ends_with_3(folder, capsys):
    (folder / "deployment.yaml").write_text(to_yaml(deployment()))
    arguments = ["--requests", "30", "--max-output", "4", "--warmup", "500ms", "--rate", "15", "--records", "out.csv"]
    with as_simulated(slower=6.0) as server:
        code = _run(["bench", "-q", "--url", server.url, "-d", "deployment.yaml", *arguments])
    out = capsys.readouterr().out
    assert code == 3 and "MISSED" in out
    assert "hand-off" in out and max(map(len, out.splitlines())) <= 100
    with open(folder / "out.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 30 and sum(row["attained"] == "1" for row in rows) < 15
    assert all(float(row["ttft_s"]) > float(row["predicted_ttft_s"]) for row in rows)


def test_the_pessimistic_end_is_the_load_on_a_system_worth_the_claims_lower_end():
    """A claim of 10 requests/s from 8 on: the load weighs as one and a quarter times as much."""
    from planner.bench.predict import predict

    claim = deployment().prediction.claim.model_copy(update={"goodput_rps": 10.0, "low_rps": 8.0, "wide_low_rps": None})
    prediction = deployment().prediction.model_copy(update={"claim": claim})
    load = load_of(replace(QUESTION, rate_rps=4.0), deployment())
    found = predict(deployment().model_copy(update={"prediction": prediction}), load)
    heavier = load_of(replace(QUESTION, rate_rps=5.0), deployment())
    expected = simulate(system_of(deployment()), heavier.requests, heavier.slos)
    assert found.pessimistic is not None
    assert found.pessimistic.ttft_s == pytest.approx(expected.ttft_s)
    assert found.run.ttft_s != pytest.approx(expected.ttft_s)


def test_a_closed_loop_is_compared_with_the_same_clients_in_simulation(folder):
    question = replace(QUESTION, requests=12, concurrency=4, warmup_s=0.0, max_output=3, rate_rps=None)
    with LawServer(steady(0.15, 0.02)) as server:
        result = bench(Target(server.url), question, deployment()).result
    assert result.prediction.run.requests.prompt_tokens.tolist() == result.load.requests.prompt_tokens.tolist()
    assert result.attainment[0].predicted > 0 and result.ttft["p50"].predicted > 0


# --- the included runtime ---


def test_the_included_runtime_gives_the_tokens_asked_for_and_the_terms_of_ttft(folder):
    """A real engine behind the real API: every token counted, every answer itemised."""
    with served(tiny_engine(folder)) as server:
        target = Target(server.url, token_ids=(20, 200))
        question = Question(workload="fixed.yaml", slo="ttft=9s,tpot=9s", requests=15, warmup_s=0.0, max_output=4)
        outcome = bench(target, question)
    result = outcome.result
    assert outcome.server.ours and result.statuses == {"ok": 15}
    assert not [warning for warning in result.warnings if "tokens" in warning]
    assert {one.answer.pieces for one in result.measured.sent} == {4}
    columns = columns_of(result)
    assert set(columns["prefill_at"]) == {"engine-0"} and set(columns["cached_tokens"]) == {0}
    terms = {name: result.terms[name].measured.value for name in ("queue", "prefill", "outside", "mean")}
    assert min(terms.values()) > 0
    assert terms["queue"] + terms["prefill"] + terms["outside"] == pytest.approx(terms["mean"], abs=1e-3)


# --- the load ---


def test_the_deployment_names_workload_rate_and_slo():
    load = load_of(Question(requests=500), deployment())
    assert load.name == "sharegpt" and load.rate_rps == deployment().prediction.rate_rps
    assert load.slos == deployment().slo and load.as_planned
    assert not load_of(Question(requests=500, max_output=10), deployment()).as_planned
    assert not load_of(Question(requests=500, slo=SLO), deployment()).as_planned


def test_a_trace_is_played_at_another_rate_with_its_bursts(folder):
    (folder / "trace.csv").write_text("timestamp_s,prompt_tokens,output_tokens\n0,10,2\n1,20,3\n4,30,4\n5,40,5\n")
    load = load_of(Question(workload="trace.csv", slo=SLO, rate_rps=6.0, requests=4), None)
    # the file has 3 gaps in 5 s, so at 6 requests/s all takes a tenth of the time
    assert load.requests.arrival_s == pytest.approx([0.0, 0.1, 0.4, 0.5])
    assert load.requests.prompt_tokens.tolist() == [10, 20, 30, 40]


def test_lengths_are_cut_and_it_is_said(folder):
    load = load_of(Question(workload="mooncake-conversation", slo=SLO, requests=50, max_prompt=700, max_output=9), None)
    assert load.requests.prompt_tokens.max() == 700 and load.requests.output_tokens.max() == 9
    assert max(map(len, load.requests.prefix_blocks)) == 2
    assert any("prompts were cut to 700 tokens" in note for note in load.notes)


def test_an_slo_in_short_is_the_slo_in_a_file():
    assert slos_of("ttft=2s, tpot=200ms,attainment=90%", None) == (Slo(ttft_s=2.0, tpot_s=0.2, attainment=0.9),)


def test_times_are_read_as_people_write_them():
    assert [seconds(text, "--x") for text in ("90", "90s", "5m", "1.5h", "500ms", "0")] == [90, 90, 300, 5400, 0.5, 0]


BAD = {
    "no workload": (["--slo", SLO], "expected --workload"),
    "no slo": (["-w", "sharegpt"], "expected --slo"),
    "slo without tpot": (["-w", "sharegpt", "--slo", "ttft=2s"], "--slo: tpot_s: is required"),
    "slo of another word": (["-w", "sharegpt", "--slo", "latency=2s"], "--slo: expected ttft=2s"),
    "slo without a unit": (["-w", "sharegpt", "--slo", "ttft=2x,tpot=1s"], "--slo: ttft_s: unknown unit 'x'"),
    "no such workload": (["-w", "sharegtp", "--slo", SLO], "did you mean 'sharegpt'"),
    "rate and clients": (["-w", "sharegpt", "--slo", SLO, "--rate", "1", "--concurrency", "2"], "exclude each other"),
    "requests and time": (
        ["-w", "sharegpt", "--slo", SLO, "--requests", "1", "--duration", "1s"],
        "exclude each other",
    ),
    "no rate": (["-w", "sharegpt", "--slo", SLO], "give --rate, or --concurrency"),
    "no clients to think": (["-w", "sharegpt", "--slo", SLO, "--rate", "1", "--think", "1s"], "--concurrency as well"),
    "warm-up of all": (
        ["-w", "fixed.yaml", "--slo", SLO, "--requests", "9", "--warmup", "1m"],
        "--warmup: expected less",
    ),
    "time": (["-w", "fixed.yaml", "--slo", SLO, "--duration", "5 parsecs"], "--duration: expected a time"),
    "url": (["-w", "fixed.yaml", "--slo", SLO, "--url", "ftp://x"], "--url: expected an address"),
    "nobody there": (["-w", "fixed.yaml", "--slo", SLO, "--url", "127.0.0.1:9"], "start one with: planner serve"),
    "records": (["-w", "fixed.yaml", "--slo", SLO, "--records", "out.xls"], "--records: expected a file that ends in"),
    "plot": (["-w", "fixed.yaml", "--slo", SLO, "--plot", "out.gif"], "--plot: expected a file that ends in"),
    "ids": (["-w", "fixed.yaml", "--slo", SLO, "--token-ids", "9-3"], "--token-ids: expected the first"),
}


@pytest.mark.parametrize(("arguments", "told"), BAD.values(), ids=BAD)
def test_what_cannot_be_is_one_line_with_the_way_out(arguments, told, folder, capsys):
    assert _run(["bench", "-q", *arguments]) == 1
    printed = capsys.readouterr()
    assert told in printed.err and len(printed.err.splitlines()) == 1 and not printed.out


@pytest.mark.parametrize(
    ("model", "law", "arguments", "told"),
    [
        ({"id": "a", "owned_by": "x"}, {}, ["--model", "b"], "does not serve 'b'; it has a"),
        ({"id": "a", "max_model_len": 22}, {}, [], "20 of 20 requests are longer than the 22 tokens that a can hold"),
        ({"id": "a"}, {-1: "401"}, [], "does not answer a prompt of token ids: HTTP 401"),
        ({"id": "a"}, {-1: "503"}, [], "takes no requests now: HTTP 503"),
        ({"name": "a"}, {}, [], "is no OpenAI-compatible server"),
    ],
)
def test_a_server_that_cannot_take_the_load_is_refused_before_the_run(model, law, arguments, told, folder, capsys):
    with LawServer(steady(0.0, 0.0), law, model) as server:
        command = ["bench", "-q", "--url", server.url, "-w", "fixed.yaml", "--slo", SLO, "--requests", "20"]
        assert _run([*command, *arguments]) == 1
    printed = capsys.readouterr()
    assert told in printed.err and len(printed.err.splitlines()) == 1 and not server.asked


def test_token_ids_are_a_range_with_both_ends():
    assert parse_token_ids("100-199") == (100, 200)
    with pytest.raises(InputError, match="--token-ids"):
        parse_token_ids("100")


# --- records and interruption ---


def test_records_come_as_parquet_with_the_same_columns(folder, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    with LawServer(steady(0.005, 0.001)) as server:
        command = ["bench", "-q", "--json", "--url", server.url, "-w", "fixed.yaml", "--slo", SLO, "--requests", "12"]
        assert _run([*command, "--records", "out.parquet"]) == 0
    json.loads(capsys.readouterr().out)
    table = parquet.read_table(folder / "out.parquet")
    assert table.num_rows == 12 and set(table["status"].to_pylist()) == {"ok"}
    assert {"due_s", "ttft_s", "tpot_s", "max_gap_s", "slo_class", "attained"} <= set(table.column_names)


@pytest.mark.slow
def test_ctrl_c_prints_what_was_measured_so_far_and_ends_with_130(folder):
    (folder / "fixed.yaml").write_text(yaml.safe_dump(yaml.safe_load(FIXED) | {"rate_rps": 20}))
    with LawServer(steady(0.05, 0.01)) as server:
        command = ["bench", "--url", server.url, "-w", "fixed.yaml", "--slo", SLO, "--duration", "1h", "--json"]
        with started(*command, "--warmup", "0", "--records", "out.csv", folder=folder) as running:
            until = time.monotonic() + 60
            while len(server.asked) < 20 and time.monotonic() < until:
                time.sleep(0.05)
            running.send_signal(signal.SIGINT)
            out, err = running.communicate(timeout=60)
    assert running.returncode == 130 and err.endswith("interrupted\n")
    data = json.loads(out)
    assert data["interrupted"] and data["requests"]["ok"] == data["requests"]["counted"] >= 10
    with open(folder / "out.csv") as file:
        statuses = [row["status"] for row in csv.DictReader(file)]
    assert len(statuses) == data["requests"]["sent"] and set(statuses) <= {"ok", "cut"}
    assert server.running == 0  # what was under way was hung up on
