"""deployment.yaml: its schema, the way back into a system, and the simulation of a deployment from the file alone."""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import yaml

from planner import InputError, deployment_of, parse
from planner.cli import _run
from planner.deploy import read_deployment, to_yaml
from planner.errors import PlannerError
from planner.options import Option
from planner.pipeline import Plan
from planner.replay import report
from planner.schemas import schema_of
from planner.specs.deployment import Deployment
from tests.planning import PAIR, PROBLEMS, fixed, problem, slo, solved

LOAD = "published fit on one node"


def everyone() -> pytest.MarkDecorator:
    """Run a test for one problem per kind of cluster."""
    return pytest.mark.parametrize("name", PROBLEMS)


def both_ways(found: Plan) -> list[Deployment]:
    """Return the deployments of both ways."""
    return [deployment_of(found.prefer(mode)) for mode in ("disaggregated", "aggregated")]


@cache
def written() -> str:
    """Return a disaggregated deployment file."""
    return to_yaml(deployment_of(solved(**PROBLEMS[LOAD]).prefer("disaggregated")))


@pytest.fixture
def file(tmp_path) -> Path:
    """Return a disaggregated deployment file on disk."""
    path = tmp_path / "deployment.yaml"
    path.write_text(written())
    return path


def simulated(file: Path, capsys, *arguments: str) -> dict:
    """Return what `planner simulate --json` prints."""
    assert _run(["simulate", str(file), "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


# --- the file ---


@everyone()
def test_the_file_is_valid_by_the_schema_that_the_command_line_prints(name, capsys):
    assert _run(["schema", "deployment"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == schema_of("deployment")
    jsonschema.Draft202012Validator.check_schema(schema)
    for deployment in both_ways(solved(**PROBLEMS[name])):
        jsonschema.validate(yaml.safe_load(to_yaml(deployment)), schema, cls=jsonschema.Draft202012Validator)


@everyone()
def test_what_is_read_back_is_what_was_written(name):
    for deployment in both_ways(solved(**PROBLEMS[name])):
        text = to_yaml(deployment)
        again = read_deployment(parse(text, "deployment.yaml"))
        assert again == deployment and to_yaml(again) == text


@everyone()
def test_the_file_names_its_parts_consistently(name):
    found = solved(**PROBLEMS[name])
    cluster = {node.name: node.indices for node in found.problem.topology.nodes}
    for deployment in both_ways(found):
        names = [one.name for one in deployment.instances]
        assert len(names) == len(set(names))
        assert {route.source for route in deployment.routes} | {r.target for r in deployment.routes} <= set(names)
        for one in deployment.instances:
            assert one.cost in deployment.costs and len(one.stages) == one.pp
            assert [sum(len(d.gpus) for d in stage) for stage in one.stages] == [one.tp] * one.pp
            assert all(set(d.gpus) <= set(cluster[d.node]) for stage in one.stages for d in stage)
        claim = deployment.prediction.claim
        assert claim.gpus == sum(one.tp * one.pp for one in deployment.instances)
        assert claim.goodput_rps_per_gpu == pytest.approx(claim.goodput_rps / claim.gpus)


def test_the_file_says_where_it_comes_from():
    found = solved(**PROBLEMS[LOAD])
    provenance = deployment_of(found).provenance
    assert set(provenance.digests) == {"problem", "model", "cluster", "workload", "profile distserve-opt-13b-a100"}
    assert all(len(digest) == 64 for digest in provenance.digests.values())
    assert provenance.seeds == (0, 1, 2)
    other = problem(**{**PROBLEMS[LOAD], "slo": slo("300ms", "100ms")})
    changed = {key for key, digest in other.digests.items() if digest != provenance.digests[key]}
    assert changed == {"problem"}


def test_a_file_of_a_newer_version_or_with_an_unknown_key_is_refused_with_its_line():
    newer = written().replace("version: 1", "version: 99", 1)
    with pytest.raises(InputError, match=r"deployment.yaml:1:\d+: version"):
        read_deployment(parse(newer, "deployment.yaml"))
    with pytest.raises(InputError, match="unknown key"):
        read_deployment(parse(written() + "surprise: 1\n", "deployment.yaml"))


# --- simulate ---


def test_simulate_reproduces_the_claims_attainment_and_goes_up_well_below_it(file, capsys):
    prediction = yaml.safe_load(file.read_text())["prediction"]
    rate = prediction["claim"]["goodput_rps"]
    at = ["--workload", "sharegpt", "--duration", "600"]
    there = simulated(file, capsys, *at, "--rate", str(rate))
    below = simulated(file, capsys, *at, "--rate", str(rate / 2))
    # some 5000 requests: their share is known to about 1 %, and the claim's rate to its interval
    assert there["attainment"]["all"] == pytest.approx(prediction["attainment"]["all"], abs=0.06)
    assert below["attainment"]["all"] > 0.95 > there["attainment"]["all"]
    assert there["requests"] == pytest.approx(600 * rate, rel=0.1)
    for term in ("prefill", "handoff", "tpot"):
        predicted = prediction["tpot"] if term == "tpot" else prediction["ttft_terms"][term]
        assert there["times"][term]["mean_s"] == pytest.approx(predicted["mean_s"], rel=0.15), term


def test_simulate_gives_the_predicted_figures_exactly_under_the_same_luck():
    """One seed of the plan's own trial, through the file, is one of the runs that the prediction pools."""
    from planner.deploy import system_of

    found = solved(**PROBLEMS[LOAD])
    option: Option = found.chosen
    deployment = read_deployment(parse(to_yaml(deployment_of(found)), "deployment.yaml"))
    again = report(found.problem, found.trials.quoting, _on(option, system_of(deployment)), option.report.rate_rps)
    assert again.latencies == option.report.latencies and again.attainment == option.report.attainment


def _on(option: Option, system):
    """Return the option's placement with another system in it."""
    from dataclasses import replace

    return replace(option.placed, system=system)


def test_records_have_a_line_per_request_with_times_in_order(file, capsys, tmp_path):
    out = tmp_path / "records.csv"
    arguments = ["--workload", "sharegpt", "--rate", "4", "--duration", "200", "--records", str(out)]
    told = simulated(file, capsys, *arguments)
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert len(rows) == told["requests"]
    deployment = read_deployment(parse(file.read_text(), "deployment.yaml"))
    phases = [one.phase for one in deployment.instances]
    met = 0
    bounds = deployment.slo[0]
    for row in rows:
        ended = "pull_end_s" if int(row["output_tokens"]) > 1 else "prefill_end_s"  # one token needs no decode side
        times = [float(row[name]) for name in ("arrival_s", "prefill_start_s", "prefill_end_s", ended)]
        assert times == sorted(times)
        first, last, tokens = float(row["first_token_s"]), float(row["finish_s"]), int(row["output_tokens"])
        assert times[-1] <= first <= last
        assert float(row["ttft_s"]) == pytest.approx(first - times[0], abs=1e-9)
        if tokens > 1:
            assert float(row["tpot_s"]) == pytest.approx((last - first) / (tokens - 1), abs=1e-9)
        assert phases[int(row["prefill_at"])] == "prefill"
        assert int(row["decode_at"]) == -1 if tokens == 1 else phases[int(row["decode_at"])] == "decode"
        slow = row["tpot_s"] != "" and float(row["tpot_s"]) > bounds.tpot_s
        met += float(row["ttft_s"]) <= bounds.ttft_s and not slow and times[0] >= 0.15 * 200
    counted = sum(float(row["arrival_s"]) >= 0.15 * 200 for row in rows)
    assert met / counted == pytest.approx(told["attainment"]["all"], abs=1e-9)


def test_simulate_takes_a_workload_file_with_its_own_rate(file, capsys, tmp_path):
    load = tmp_path / "load.yaml"
    load.write_text("source: fixed\nprompt_tokens: 500\noutput_tokens: 50\nrate_rps: 3rps\n")
    told = simulated(file, capsys, "--workload", str(load), "--duration", "100")
    assert told["rate_rps"] == 3.0 and told["requests"] == pytest.approx(300, abs=60)
    assert told["times"]["prefill"]["mean_s"] > 0


def test_simulate_of_an_overload_shows_the_queue(file, capsys):
    told = simulated(file, capsys, "--workload", "sharegpt", "--rate", "60", "--duration", "60")
    assert told["attainment"]["all"] < 0.3 and told["missed_more"] == "TTFT"
    assert told["times"]["queue"]["p99_s"] > 1.0


def test_the_same_seed_gives_the_same_records_and_another_one_does_not(file, capsys, tmp_path):
    texts = []
    for at, seed in enumerate(("0", "0", "1")):
        out = tmp_path / f"{at}.csv"
        simulated(
            file, capsys, "-w", "sharegpt", "--rate", "3", "--duration", "60", "--seed", seed, "--records", str(out)
        )
        texts.append(out.read_text())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "sharegpt"], "no rate of its own"),
        (["--workload", "sharegpt", "--rate", "0"], "above 0"),
        (["--workload", "sharegpt", "--rate", "nan"], "above 0"),
        (["--workload", "sharegpt", "--rate", "1", "--duration", "-5"], "above 0"),
        (["--workload", "sharegpt", "--rate", "1e9"], "shorter --duration"),
        (["--workload", "sharegtp", "--rate", "1"], "sharegpt"),
        (["--rate", "1"], "--workload"),
    ],
)
def test_simulate_says_what_is_wrong_in_one_line(file, capsys, arguments, message):
    assert _run(["simulate", str(file), *arguments]) == 1
    printed = capsys.readouterr()
    assert message in printed.err and "Traceback" not in printed.err and printed.out == ""
    assert len(printed.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data["instances"][0].update(cost="nowhere"),
        lambda data: data["routes"][0].update(source="nobody"),
        lambda data: data["routes"][0].update(target=data["routes"][0]["source"]),
        lambda data: data["routes"][0]["hops"][0].update(link="no such link"),
        lambda data: data["links"][0].update(bytes_per_s=0.0),
        lambda data: data["links"][0].update(bytes_per_s=-1.0),
        lambda data: data["instances"][0]["limits"].update(kv_blocks=0),
        lambda data: data["instances"][0]["limits"].update(max_batch=0),
        lambda data: data["instances"][0]["limits"].update(max_tokens=-1),
        lambda data: data["instances"][0]["limits"].update(block_tokens=0),
        lambda data: data["instances"][0]["limits"].update(swap_bytes_per_s=0.0),
        lambda data: next(iter(data["costs"].values())).update(parameters=[1.0]),
        lambda data: next(iter(data["costs"].values())).update(parameters=[]),
        lambda data: next(iter(data["costs"].values())).update(stage_share=[]),
        lambda data: data["instances"][1].update(name=data["instances"][0]["name"]),
        lambda data: data.update(instances=[]),
        lambda data: data.update(routes=[]),
        lambda data: data.update(kv_bytes_per_token=-1.0),
        lambda data: data.update(slo=[]),
        lambda data: data["instances"][0].update(tp=0),
        lambda data: [one.update(phase="decode") for one in data["instances"]],
        lambda data: [one.update(phase="prefill") for one in data["instances"]],
    ],
)
def test_a_deployment_that_was_edited_into_nonsense_is_refused_without_a_traceback(edit, tmp_path, capsys):
    data = yaml.safe_load(written())
    edit(data)
    path = tmp_path / "deployment.yaml"
    path.write_text(yaml.safe_dump(data))
    code = _run(["simulate", str(path), "--workload", "sharegpt", "--rate", "1", "--duration", "20"])
    error = capsys.readouterr().err
    assert code == 1 and "deployment.yaml" in error and "Traceback" not in error


def test_an_aggregated_deployment_has_no_routes_and_simulates_too(tmp_path, capsys):
    found = solved(model="llama3.1-8b", cluster=PAIR, workload=fixed(2000, 100), slo=slo("1s", "30ms"))
    path = tmp_path / "deployment.yaml"
    deployment = deployment_of(found.prefer("aggregated"))
    path.write_text(to_yaml(deployment))
    assert deployment.routes == () and deployment.links == ()
    told = simulated(path, capsys, "--workload", "sharegpt", "--rate", "2", "--duration", "60")
    assert told["times"]["handoff"]["mean_s"] == 0.0 and told["attainment"]["all"] > 0.9


def test_errors_of_the_planner_share_one_base():
    with pytest.raises(PlannerError):
        read_deployment(parse("version: 1", "deployment.yaml"))
