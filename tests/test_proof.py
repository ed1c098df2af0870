"""The driver of the proof: what it starts, what it makes of the answers, and that nothing is left running."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import proof
from benchmarks.proof import Claim, Figure, Measured, Options, measured_goodput_rps, sign_of
from planner.deploy import to_yaml as deployment_yaml
from planner.errors import InputError
from planner.sources.profiles import to_yaml
from planner.specs.base import dump_yaml
from tests.planning import QUICK, fixed
from tests.serving import deployment
from tests.test_cores import profile

STAND_IN = str(Path(__file__).with_name("stand_in_planner.py"))


@pytest.fixture
def options(tmp_path, monkeypatch) -> Options:
    """Return the options of a proof with a profile of today, whose serving and measuring is a stand-in's."""
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    (tmp_path / "profile.yaml").write_text(to_yaml(profile()))
    (tmp_path / "load.yaml").write_text(dump_yaml(fixed(80, 20)))
    parts = {
        "model": {"like": "smollm2-135m", "dtype": "float32"},
        "cluster": "localhost-cpu",
        "profiles": "profile.yaml",
        "workload": "load.yaml",
        "slo": {"ttft_s": "2s", "tpot_s": "150ms"},
        "objective": "max_goodput",
        "engine": {"first_token_at": "prefill", "max_batch": 32, "chunk_tokens": [128]},
        "search": QUICK,
    }
    (tmp_path / "problem.yaml").write_text(dump_yaml(parts))
    command = (sys.executable, STAND_IN)
    return Options(tmp_path / "problem.yaml", tmp_path / "out", 60.0, 5.0, 1.0, 7, False, command)


@pytest.fixture
def claims(options) -> list[Claim]:
    """Return what is claimed for that problem, without planning it again."""
    options.out.mkdir()
    made = []
    for mode, goodput_rps, layout, kinds in (
        ("disaggregated", 2.5, "1 x prefill TP1 + 1 x decode TP1", ("prefill", "decode")),
        ("aggregated", 1.6, "2 x aggregated TP1 (128 tokens)", ("aggregated", "aggregated")),
    ):
        made_of = deployment([(phase, 1, 1) for phase in kinds], first_token_at="prefill")
        (options.out / f"{mode}.yaml").write_text(deployment_yaml(made_of))
        made.append(Claim(mode, options.out / f"{mode}.yaml", goodput_rps, layout))
    return made


def run(mode: str, rate_rps: float, attainment: float | None) -> Measured:
    figures = (Figure("attainment", attainment, 0.9), Figure("median TTFT", 0.1, 0.1), Figure("median TPOT", 0.1, 0.1))
    return Measured(mode, 1.0, rate_rps, 100, 0.9, figures)


def test_both_ways_are_served_and_measured_at_every_load(options, tmp_path):
    claims, runs = proof.prove(options)
    assert [claim.mode for claim in claims] == ["disaggregated", "aggregated"]
    assert [(run.mode, run.load) for run in runs] == [(c.mode, share) for c in claims for share in (0.5, 1.0, 1.3)]
    assert (tmp_path / "stopped").read_text() == "xx"  # each server by SIGTERM
    asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    first = dict(zip(asked[0][::2], asked[0][1::2], strict=False))
    assert float(first["--rate"]) == pytest.approx(claims[0].goodput_rps / 2, rel=1e-5)
    assert first["--url"].startswith("http://127.0.0.1:") and first["--duration"] == "5s" and first["--seed"] == "7"
    assert first["--workload"] == str((tmp_path / "load.yaml").resolve())
    assert Path(first["--deployment"]).read_text().startswith("version: 1")
    # the stand-in's median TTFT is 10 % above the prediction, TPOT 30 %, attainment 2 points below
    assert [[one.holds for one in run.figures] for run in runs] == [[True, True, False]] * 6


def test_the_tables_say_measured_predicted_and_difference_in_80_columns(options, claims):
    from rich.console import Console

    runs = proof.measure_all(options, claims, loads=(0.5, 1.0))
    console = Console(width=80, file=io.StringIO())
    console.print(proof.table(claims, runs))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    line = next(line for line in text.splitlines() if "median TPOT" in line).split()
    assert line[:8] == ["median", "TPOT", "130", "ms", "100", "ms", "+30%", "!"]
    assert "within 5 points of attainment or 15% of a median: 8 of 12 figures" in text
    document = proof.to_json(claims, runs, 1.0)
    assert document["runs"][0]["figures"]["median TTFT"]["difference"] == pytest.approx(0.1)
    assert document["holds"] is False and json.dumps(document)


@pytest.mark.parametrize(
    ("mood", "says"),
    [
        ("dies", r"the server ended before it was ready; .*disaggregated\.log ends: no such deployment"),
        ("garbled", "printed no JSON document but 'no document"),
        ("refused", r"bench --url ended with 1; .*-0\.5\.log ends: http://127.0.0.1:1234: connection refused"),
    ],
)
def test_a_step_that_fails_ends_the_proof_with_its_reason(options, claims, monkeypatch, tmp_path, mood, says):
    monkeypatch.setenv("STAND_IN_MOOD", mood)
    with pytest.raises(InputError, match=says):
        proof.measure_all(options, claims)
    assert (tmp_path / "stopped").exists() == (mood != "dies")  # no server is left


def test_a_server_that_is_not_ready_in_time_is_stopped(options, claims, monkeypatch):
    monkeypatch.setattr(proof, "_START_S", 0.0)
    with pytest.raises(InputError, match="not ready after 0 s"), proof.serving(options, claims[0]):
        raise AssertionError("never served")


@pytest.mark.parametrize(
    ("points", "goodput"),
    [
        ([(1.0, 1.0), (2.0, 0.95), (3.0, 0.85)], (2.5, "")),  # halfway from 95 % to 85 %
        ([(1.0, 1.0), (2.0, 0.9), (2.6, 0.3)], (2.0, "")),
        ([(1.0, 1.0), (2.0, 0.99), (2.6, 0.95)], (2.6, ">")),
        ([(1.0, 0.8), (2.0, 0.5), (2.6, 0.2)], (1.0, "<")),
        ([(1.0, 0.95), (2.0, None), (2.6, None)], (1.0 + 0.05 / 0.95, "")),  # nothing answered counts as missed
    ],
)
def test_the_measured_goodput_lies_where_attainment_crosses_its_target(points, goodput):
    found = measured_goodput_rps([run("aggregated", *point) for point in points])
    assert found == (pytest.approx(goodput[0]), goodput[1])


def test_the_sign_holds_only_when_the_same_way_wins_by_both_accounts():
    claims = [Claim("disaggregated", Path("d"), 2.0, "1 + 1"), Claim("aggregated", Path("a"), 1.5, "2")]
    good = [run("disaggregated", r, a) for r, a in ((1.0, 1.0), (2.0, 0.9), (2.6, 0.5))]
    slow = [run("aggregated", r, a) for r, a in ((0.75, 1.0), (1.5, 0.9), (1.95, 0.5))]
    fast = [run("aggregated", r, 1.0) for r in (0.75, 1.5, 2.4)]
    assert sign_of(claims, [*good, *slow]).holds
    other = sign_of(claims, [*good, *fast])
    assert (other.predicted, other.measured, other.holds) == ("disaggregated", "aggregated", False)


@pytest.mark.parametrize(
    ("disaggregated", "aggregated", "better"),
    [
        ([0.5, 0.4, 0.3], [0.6, 0.5, 0.4], "open"),  # both below their lowest load: which is more, nobody knows
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], "open"),  # both above their highest
        ([1.0, 1.0, 1.0], [1.0, 0.9, 0.5], "disaggregated"),  # above 2.6, and 1.5
        ([0.5, 0.4, 0.3], [1.0, 0.9, 0.5], "aggregated"),  # below 1.0, and 1.5
        ([1.0, 0.9, 0.5], [0.5, 0.4, 0.3], "disaggregated"),  # 2.0, and below 0.75
        ([1.0, 0.9, 0.5], [1.0, 1.0, 1.0], "open"),  # 2.0, and above 1.95
    ],
)
def test_the_sign_stays_open_where_the_loads_do_not_tell_it(disaggregated, aggregated, better):
    claims = [Claim("disaggregated", Path("d"), 2.0, "1 + 1"), Claim("aggregated", Path("a"), 1.5, "2")]
    rates = {"disaggregated": (1.0, 2.0, 2.6), "aggregated": (0.75, 1.5, 1.95)}
    runs = [
        run(mode, rate_rps, attained)
        for mode, each in (("disaggregated", disaggregated), ("aggregated", aggregated))
        for rate_rps, attained in zip(rates[mode], each, strict=True)
    ]
    assert sign_of(claims, runs).measured == better


def test_the_profile_is_asked_for_what_the_problem_needs(options):
    arguments = proof.profile_arguments(options, proof.profile_path(options.problem))
    found = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert (found["--threads"], found["--beside"]) == ("1", "1")  # two cores: one more copy is at work
    assert found["--max-context"] == "128"  # 80 + 20 tokens


@pytest.mark.parametrize(
    ("age_s", "given", "asked"),
    [(60.0, False, None), (60.0, True, True), (25 * 3600.0, False, True), (None, False, False)],
    ids=["of today", "of today, but anew", "old", "never ended"],
)
def test_a_profile_is_measured_unless_it_is_of_today(options, tmp_path, age_s, given, asked):
    path = tmp_path / "profile.yaml"
    options.out.mkdir()
    if age_s is None:
        path.unlink()
    else:
        os.utime(path, (time.time() - age_s,) * 2)
    assert proof.profile(replace(options, fresh=given)) == path.resolve()
    ran = tmp_path / "profiled"
    assert (ran.exists() and "--fresh" in ran.read_text()) == bool(asked) and ran.exists() == (asked is not None)


def test_no_server_is_left_when_the_proof_is_ended(options, claims, tmp_path):
    code = (
        "import sys; from pathlib import Path; from benchmarks import proof\n"
        "claim = proof.Claim('aggregated', Path('d.yaml'), 1.0, '2')\n"
        f"problem, out, command = Path({str(options.problem)!r}), Path({str(options.out)!r}), {options.planner!r}\n"
        "options = proof.Options(problem, out, 1, 1, 1, 0, False, command)\n"
        "proof.prove = lambda given: proof.measure_all(options, [claim], [1.0])\n"
        "sys.exit(proof.main([]))"
    )
    mood = {"STAND_IN": str(tmp_path), "STAND_IN_MOOD": "slow"}
    driver = subprocess.Popen([sys.executable, "-c", code], env=os.environ | mood, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "asked").exists():
            assert time.monotonic() < deadline and driver.poll() is None
            time.sleep(0.05)
        driver.terminate()
        assert driver.wait(30) == 143
    finally:
        driver.kill()
        driver.wait()
    assert (tmp_path / "stopped").read_text() == "x"


def test_a_problem_without_a_profile_of_its_own_is_refused(options, tmp_path):
    text = (tmp_path / "problem.yaml").read_text().replace("profile.yaml", "auto")
    (tmp_path / "problem.yaml").write_text(text)
    with pytest.raises(InputError, match="expected one profile, a file"):
        proof.prove(options)


def test_a_slower_machine_is_told_from_a_wrong_prediction(options, claims, monkeypatch):
    speeds = iter([proof.Speed(0.2, 0.05), proof.Speed(0.22, 0.05), proof.Speed(0.26, 0.06)])
    monkeypatch.setattr(proof.Speed, "of", classmethod(lambda cls, url: next(speeds)))
    (found,) = proof.measure_all(options, claims[:1], loads=(0.5,))
    assert (found.prefill_slower, found.step_slower) == (pytest.approx(0.2), pytest.approx(0.1))
    plain = proof.at_speed(options, claims[0], found, (0.0, 0.0))
    ratios = [now.at_speed / then.at_speed for now, then in zip(found.figures[1:], plain.figures[1:], strict=True)]
    assert 1.15 < ratios[0] < 1.5 and ratios[1] == pytest.approx(1.1, rel=0.03)  # queues stretch TTFT, too
