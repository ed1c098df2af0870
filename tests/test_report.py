"""The report: its arithmetic, its width, and the same numbers in JSON and HTML."""

from __future__ import annotations

import io
import json
import re
from math import isclose

import pytest
import yaml
from rich.console import Console

from planner import Plan, deployment_of
from planner.cli import _run
from planner.pipeline import Option
from planner.report import render, to_json
from planner.specs.base import dump_json
from planner.specs.units import show_seconds
from tests.planning import PAIR, PROBLEMS, fixed, slo, solved, text

SMALL = {"model": "llama3.1-8b", "cluster": PAIR, "workload": fixed(2000, 100), "slo": slo("1s", "30ms")}
COMPARED = {
    **PROBLEMS["published fit on one node"],
    "compare": [{"name": "mine", "prefill": {"tp": 2}, "decode": {"tp": 1, "count": 2}}],
}


def everyone() -> pytest.MarkDecorator:
    """Run a test for one problem per kind of cluster."""
    return pytest.mark.parametrize("name", PROBLEMS)


def shown(found: Plan, width: int = 80) -> str:
    """Return the report as a terminal of that width shows it."""
    console = Console(width=width, file=io.StringIO(), highlight=False, markup=False)
    for piece in render(found):
        console.print(piece)
    return console.file.getvalue()


def options(found: Plan) -> list[Option]:
    """Return both ways, as far as there is one."""
    return [option for option in (found.disaggregated, found.aggregated) if option is not None]


# --- arithmetic ---


@everyone()
def test_the_terms_of_ttft_add_up_to_it(name):
    for option in options(solved(**PROBLEMS[name])):
        terms = option.report.latencies
        parts = (terms.queue, terms.prefill, terms.handoff, terms.first_decode_wait)
        assert sum(part.mean_s for part in parts) == pytest.approx(terms.ttft.mean_s, rel=1e-9)
        for spread in (*parts, terms.ttft, terms.tpot):
            assert 0 <= spread.p50_s <= spread.p90_s <= spread.p99_s


@everyone()
def test_the_headlines_gain_is_that_of_the_claims_beside_it(name):
    found = solved(**PROBLEMS[name])
    d, a = found.disaggregated, found.aggregated
    assert d is not None and a is not None
    # to get the most out of a cluster both have all of it; to serve a load each has the GPUs that it takes
    d_gpus, a_gpus = (d.gpus, a.gpus) if found.problem.objective == "min_gpus" else (1, 1)
    gain = d.rate.goodput_rps / d_gpus / (a.rate.goodput_rps / a_gpus) - 1
    verdict = found.verdict
    assert verdict.gain == pytest.approx(gain)
    assert verdict.gain_low is not None and verdict.gain_high is not None
    assert -1 < verdict.gain_low <= verdict.gain <= verdict.gain_high
    numbers = [int(number) for number in re.findall(r"[+-]\d+(?=%)", verdict.headline)]
    assert numbers == [round(100 * value) for value in (verdict.gain, verdict.gain_low, verdict.gain_high)]
    # the interval is at least as wide as either claim's own
    for option in (d, a):
        own = option.rate.high_rps / option.rate.low_rps
        assert (1 + verdict.gain_high) / (1 + verdict.gain_low) >= own * (1 - 1e-9)


@everyone()
def test_a_verdict_never_recommends_what_the_interval_does_not_support(name):
    found = solved(**PROBLEMS[name])
    verdict = found.verdict
    assert verdict.gain is not None and verdict.gain_low is not None and verdict.gain_high is not None
    if "the load decides" not in verdict.reason:
        assert verdict.tie == (verdict.gain_low <= 0 <= verdict.gain_high)
        assert (verdict.mode == "disaggregated") <= (verdict.gain > 0)
        if not verdict.tie:
            assert (verdict.mode == "disaggregated") == (verdict.gain_low > 0)
    assert verdict.headline.startswith("Disaggregate" if verdict.mode == "disaggregated" else "Do not disaggregate")


@everyone()
def test_utilisations_are_shares_and_saturation_multiplies_up(name):
    found = solved(**PROBLEMS[name])
    for option in options(found):
        for load in option.report.load.values():
            assert 0 < load.busy <= 1 and load.batch > 0 and 0 < load.kv_peak <= 1
        assert all(0 <= share <= 1 + 1e-6 for _, share in option.report.link_utilisation)
    lines = [line for line in shown(found, 200).splitlines() if " at saturation = " in line]
    assert lines
    for line in lines:
        count, each, total = re.search(r": (\d+) x ([\d.]+) .* = ([\d.]+)", line).groups()  # type: ignore[union-attr]
        assert isclose(int(count) * float(each), float(total), rel_tol=0.01)


# --- what is shown ---


@everyone()
def test_no_line_is_wider_than_eighty_columns(name):
    lines = shown(solved(**PROBLEMS[name])).splitlines()
    assert lines and max(map(len, lines)) <= 80


@everyone()
def test_the_report_starts_with_the_verdict_and_names_every_instance(name):
    found = solved(**PROBLEMS[name])
    page = shown(found, 160)
    assert page.startswith(found.verdict.headline)
    for one in found.chosen.placed.placement.instances:
        assert re.search(rf"^ {one.name} +{re.escape(str(one.layout))} ", page, re.MULTILINE), one.name
    for heading in ("Goodput, replayed", "Instances", "= TTFT", "Capacity bound", "Fit, error", "Runners-up"):
        assert heading in page
    assert "nan" not in page.lower().replace("finance", "") and "None" not in page


def test_the_claims_in_the_table_are_the_plans_own():
    found = solved(**COMPARED)
    page = shown(found, 160)
    page = page[page.index("Goodput, replayed") : page.index("If a latency is off")]
    rows = {
        line.split()[0]: line for line in page.splitlines() if re.match(r"^ (disaggregated|aggregated|mine) ", line)
    }
    compared = found.compared["mine"]
    for name, option in (("disaggregated", found.disaggregated), ("aggregated", found.aggregated), ("mine", compared)):
        assert option is not None
        rate = option.rate
        interval = f"{rate.goodput_rps:.3g} [{rate.low_rps:.3g}, {rate.high_rps:.3g}]"
        assert option.placed.layout in rows[name] and interval in rows[name] and rate.binding in rows[name]
    chosen = "disaggregated" if found.mode == "disaggregated" else "aggregated"
    assert f"{chosen} *" in rows[chosen]


def test_the_table_of_ttft_shows_the_reports_values():
    found = solved(**PROBLEMS["published fit on one node"])
    page = shown(found, 160)
    times = found.chosen.report.latencies
    for label, spread in (("queue", times.queue), ("= TTFT", times.ttft), ("TPOT", times.tpot)):
        line = next(line for line in page.splitlines() if re.match(rf"^ {label} +\d", line))
        assert re.split(r"\s{2,}", line.strip())[1:] == [
            show_seconds(value) for value in (spread.mean_s, spread.p50_s, spread.p90_s, spread.p99_s)
        ]


def test_runners_up_are_different_layouts_and_say_why_they_lost():
    found = solved(**PROBLEMS["published fit on one node"])
    rows = to_json(found)["runners_up"]
    layouts = [row["layout"] for row in rows]
    assert rows and len(layouts) == len(set(layouts))
    assert not {option.placed.layout for option in options(found)} & set(layouts)
    assert all(row["why"] and row["gpus"] <= 4 for row in rows)


def test_several_classes_are_all_in_the_question():
    page = " ".join(shown(solved(**PROBLEMS["two classes"])).split())
    assert "chat: TTFT 250 ms" in page and "batch: TTFT 5 s" in page and "99% of requests" in page


# --- for machines ---


@everyone()
def test_json_is_strict_and_has_the_reports_numbers(name):
    found = solved(**PROBLEMS[name])

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    data = json.loads(dump_json(to_json(found)), parse_constant=refuse)
    assert data["deployment"] == json.loads(deployment_of(found).model_dump_json())
    assert (data["verdict"]["mode"], data["verdict"]["gain"]) == (found.verdict.mode, found.verdict.gain)
    for mode, option in (("disaggregated", found.disaggregated), ("aggregated", found.aggregated)):
        assert option is not None
        claim = data["options"][mode]
        assert claim["layout"] == option.placed.layout and claim["gpus"] == option.gpus
        assert claim["goodput_rps"] == pytest.approx(option.rate.goodput_rps, rel=1e-8)
        assert claim["goodput_rps_per_gpu"] == pytest.approx(option.rate.goodput_rps / option.gpus, rel=1e-8)
        assert (
            claim["wide_low_rps"] <= claim["low_rps"] * 1.0001 and claim["high_rps"] <= claim["wide_high_rps"] * 1.0001
        )
    assert {one["way"] for one in data["latency_errors"]} == {"disaggregated", "aggregated"}
    for one in data["latency_errors"]:
        assert one["error"] > 0 and -1 <= one["goodput_if_slower"] <= 0 <= one["goodput_if_faster"]
    assert data["options"][found.mode] == data["deployment"]["prediction"]["claim"]
    assert data["capacity_bound_rps"] >= data["options"][found.mode]["goodput_rps"] * (1 - 1e-6)


def test_the_json_flag_prints_one_document_and_nothing_else(tmp_path, capsys):
    file = tmp_path / "problem.yaml"
    file.write_text(text(**SMALL))
    assert _run(["plan", str(file), "--json", "-o", str(tmp_path / "out.yaml")]) == 0
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    assert yaml.safe_load((tmp_path / "out.yaml").read_text()) == data["deployment"]
    assert "planner: " in printed.err  # progress goes to stderr


def test_html_holds_the_report_and_a_picture_of_the_cluster(tmp_path, capsys):
    file = tmp_path / "problem.yaml"
    file.write_text(text(**SMALL))
    assert _run(["plan", str(file), "-q", "--html", str(tmp_path / "report.html")]) == 0
    printed = capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>") and page.count("<svg") == 1 and "</svg>" in page
    assert printed.splitlines()[0].strip() in re.sub(r"<[^>]+>", "", page)
    assert "http://" not in page.replace("http://www.w3.org", "") and "<script" not in page  # opens without a network


def test_a_piped_report_is_plain_text_and_progress_stays_out_of_it(tmp_path, capsys):
    file = tmp_path / "problem.yaml"
    file.write_text(text(**SMALL))
    assert _run(["plan", str(file)]) == 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out and "ranking" not in printed.out and "ranking" in printed.err


def test_a_forced_mode_shows_its_own_instances_and_keeps_the_verdict():
    found = solved(**SMALL)
    other = found.prefer("aggregated" if found.mode == "disaggregated" else "disaggregated")
    page = shown(other, 160)
    assert page.startswith(found.verdict.headline)
    assert all(one.name in page for one in other.chosen.placed.placement.instances)
    assert f"Claim ({other.mode}, replayed)" in page
