"""The whole planner: cases from the field, invariants of every plan, and what decides between the two ways."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import isclose
from pathlib import Path

import numpy as np
import pytest
import yaml

from planner import InfeasibleError, InputError, Plan, deployment_of, parse, plan
from planner.cli import _run
from planner.deploy import system_of, to_yaml
from planner.options import Option, rough_network, space_of, trials_for
from planner.placement.base import Candidate, Program
from planner.placement.check import check
from planner.replay import attains_at
from planner.report import to_json
from planner.search.joint import aggregated
from planner.search.kinds import find_kinds
from planner.simulator.metrics import attained, latencies
from planner.specs.slo import Slo
from tests.planning import BOX, PAIR, PROBLEMS, QUICK, far, fixed, planned, problem, slo, solved, text

CASES = Path(__file__).parent / "cases"
THOROUGH = {**QUICK, "requests": 500, "replay_requests": 2000}


def options(found: Plan) -> Iterator[Option]:
    """Yield both ways, as far as there is one."""
    yield from (option for option in (found.disaggregated, found.aggregated) if option is not None)


def everyone() -> pytest.MarkDecorator:
    """Run a test for one problem per kind of cluster."""
    return pytest.mark.parametrize("name", PROBLEMS)


# --- case 47: the prompt alone takes longer than the TTFT target on every layout ---


def case_47(ttft_s: str, tpot_s: str) -> str:
    """Return the case as a problem: its measurements as a published fit, its 32,768 tokens as the prompt."""
    asked = yaml.safe_load((CASES / "47-slo-infeasible-single-request" / "request.yaml").read_text())
    isl = asked["isl"]
    rows = [
        {
            "tp": row["tp"],
            "prefill": {"constant_s": 0.0, "per_token_s": row["ttft_alone_ms"] / 1000 / isl, "per_attended_s": 0.0},
            "decode": {"constant_s": row["tpot_ms"] / 1000, "per_request_s": 0.0, "per_context_token_s": 0.0},
        }
        for row in asked["profile"]
    ]
    profile = {
        "name": "case-47", "model": "llama3.1-8b", "gpu": "h100-80gb", "coefficients": rows,
        "provenance": {"method": "published fit", "source": "case 47"},
    }  # fmt: skip
    return text(
        model="llama3.1-8b", cluster="h100-2x8", profiles=profile, workload=fixed(isl, asked["osl"]),
        slo=slo(ttft_s, tpot_s), rate_rps=f"{asked['rate_rps']}rps",
    )  # fmt: skip


def test_case_47_a_ttft_that_no_layout_meets_is_infeasible_whatever_the_replicas():
    with pytest.raises(InfeasibleError) as raised:
        planned(case_47("150ms", "20ms"))
    error = raised.value
    assert (error.binding, error.bound_s) == ("TTFT", 0.15)
    assert error.best_s == pytest.approx(0.9)  # measured at TP8; two stages of it would not be faster for one prompt
    assert "900 ms" in str(error) and "TP8" in str(error) and "6x the bound" in str(error)
    assert "replicas do not help" in error.way_out


def test_case_47_a_tpot_that_no_layout_meets_names_tpot():
    with pytest.raises(InfeasibleError) as raised:
        planned(case_47("10s", "5ms"))
    assert (raised.value.binding, raised.value.bound_s) == ("TPOT", 0.005)
    assert raised.value.best_s == pytest.approx(0.006)


def test_case_47_with_bounds_that_can_be_met_serves_the_load():
    found = planned(case_47("4s", "20ms"))
    assert found.chosen.rate.goodput_rps >= 0.5
    # TP1 needs 5.2 s for a prompt, so nothing of it takes prompts
    assert all(kind.layout.tp > 1 for o in options(found) for kind in o.placed.kinds if kind.phase != "decode")
    assert any("a prompt of 32768 tokens alone takes 5.2 s" in r.reason for r in found.kinds.rejected)


def test_an_infeasible_problem_ends_with_2_and_writes_nothing(tmp_path, capsys):
    file = tmp_path / "problem.yaml"
    file.write_text(case_47("150ms", "20ms"))
    out = tmp_path / "deployment.yaml"
    code = _run(["plan", str(file), "-q", "-o", str(out), "--html", str(tmp_path / "report.html")])
    printed = capsys.readouterr()
    assert code == 2 and printed.out == "" and "900 ms" in printed.err and "Traceback" not in printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["problem.yaml"]


def test_a_load_beyond_the_cluster_ends_with_2_and_says_how_much_it_can_take(tmp_path, capsys):
    parts = {"model": "llama3.1-8b", "cluster": PAIR, "workload": fixed(256, 128), "slo": slo("1s", "50ms")}
    most = solved(**parts).chosen.rate
    file = tmp_path / "problem.yaml"
    file.write_text(text(**parts, rate_rps=f"{2 * most.high_rps}rps"))
    assert _run(["plan", str(file), "-q"]) == 2
    error = capsys.readouterr().err
    assert "the most is" in error and "2 x aggregated TP1" in error and "TTFT binds" in error
    # twice the goodput of two GPUs takes about four (up to the width of the interval)
    assert "about 4 such GPUs" in error or "about 5 such GPUs" in error


# --- case 46: the mean rate equals the capacity of one prefill replica, the peak is nearly twice that ---


def case_46(decode_gpus: int = 4) -> dict:
    """Return the case as parts of a problem: a GPU that prefills 8000 tokens in 220 ms, and decodes with ease."""
    measured = yaml.safe_load((CASES / "46-trace-sinusoid-burst" / "profile.yaml").read_text())
    bounds, alone_s = measured["slo"], measured["single_request_ttft_ms"] / 1000
    fit = {
        "tp": 1,
        "prefill": {"constant_s": 0.0, "per_token_s": alone_s / 8000, "per_attended_s": 0.0},
        "decode": {"constant_s": 0.005, "per_request_s": 0.00005, "per_context_token_s": 0.0},
    }
    profile = {
        "name": "case-46", "model": "qwen3-8b", "gpu": "h200", "coefficients": [fit],
        "provenance": {"method": "published fit", "source": "case 46"},
    }  # fmt: skip
    node = {"name": "n", "gpu": "h200", "gpus": 2 + decode_gpus, "links": {"kind": "nvswitch"}}
    return {
        "model": "qwen3-8b", "cluster": {"name": "six", "nodes": [node]}, "profiles": profile,
        "workload": {"source": "trace", "file": str(CASES / "46-trace-sinusoid-burst" / "trace.csv")},
        "slo": slo(f"{bounds['ttft_ms']}ms", f"{bounds['tpot_ms']}ms"), "search": {**QUICK, "max_pp": 1, "max_tp": 1},
    }  # fmt: skip


def test_case_46_a_sinusoid_at_one_replicas_capacity_needs_two_prefill_replicas():
    found = solved(**case_46(), rate_rps="4.5rps", compare=[
        {"name": "one prefill", "prefill": {"count": 1}, "decode": {"count": 3}},
        {"name": "two prefill", "prefill": {"count": 2}, "decode": {"count": 3}},
    ])  # fmt: skip
    d = found.disaggregated
    assert d is not None and d.rate.goodput_rps >= 4.5
    assert Counter(kind.phase for kind in d.placed.kinds)["prefill"] >= 2
    # 1 / 0.22 s = 4.5 requests/s is all that one replica can do: at 4.5 on average it cannot swing above it
    one, two = found.compared["one prefill"], found.compared["two prefill"]
    assert one is not None and two is not None
    assert one.rate.goodput_rps < 4.5 <= two.rate.goodput_rps
    # with two, each works half of the time on average, and nearly all of it at the peak of 8 requests/s
    assert two.report.load["prefill"].busy == pytest.approx(4.5 * 0.22 / 2, rel=0.15)


def test_case_46_ttft_of_one_replica_is_queueing_and_not_the_220_ms_of_service():
    found = solved(**case_46(), compare=[{"name": "one", "prefill": {"count": 1}, "decode": {"count": 3}}])
    one = found.compared["one"]
    assert one is not None
    trial = replace(found.trials.quoting, duration_s=300.0)  # the trace as it is: one cycle
    run = trial.run(one.placed.system, 4.5)
    times = latencies([run], trial.warmup_s)
    assert times.prefill.p50_s >= 0.22 - 1e-9  # prompts of 8000 tokens run one by one, 220 ms each
    assert times.ttft.p99_s > 3.0 and times.queue.p99_s > 10 * 0.22


# --- case 54: loads where users found disaggregation useless or harmful ---


def case_54() -> dict[str, dict]:
    """Return each workload of the case as parts of a problem."""
    loads = {
        load["id"]: load
        for load in yaml.safe_load((CASES / "54-when-not-to-disaggregate" / "workloads.yaml").read_text())
    }
    problems = {}
    for name, load in loads.items():
        if load["gpus"] == 2:
            cluster = far("l40s", "10Gb/s") if load["link"] == "tcp-10g" else PAIR
            problems[name] = {
                "model": "llama3.1-8b", "cluster": cluster, "workload": fixed(load["isl"], load["osl"]),
                "slo": slo("1s", "50ms"), "rate_rps": f"{load['rate_rps']}rps",
            }  # fmt: skip
    # Of 300,000 tokens 91 % are cached, so 27,000 are new: this planner knows no prefix cache, and the attention to
    # the cached part is left out. 70B in 16 bits need four of these GPUs. No rate is given: the most goodput counts.
    w3 = loads["w3"]
    new_tokens = round(w3["isl"] * (1 - w3["prefix_hit"]))
    problems["w3"] = {
        "model": "llama3.1-70b",
        "cluster": BOX,
        "workload": fixed(new_tokens, w3["osl"]),
        "slo": slo("30s", "100ms"),
    }
    return problems


@pytest.mark.parametrize("name", ["w1", "w2", "w3", "w4", "w5"])
def test_case_54_loads_that_gain_nothing_are_told_not_to_disaggregate(name):
    found = solved(**case_54()[name])
    assert found.verdict.mode == "aggregated" and found.mode == "aggregated"
    assert found.verdict.headline.startswith("Do not disaggregate")
    assert "decides" in found.verdict.reason or "little interference" in found.verdict.reason
    # the best disaggregated option is shown with its loss
    assert found.disaggregated is not None and found.verdict.gain is not None and found.verdict.gain < 0
    assert to_json(found)["options"]["disaggregated"]["goodput_rps"] > 0


@pytest.mark.parametrize(("name", "gpus"), [("w1", 1), ("w2", 1), ("w5", 1)])
def test_case_54_an_idle_system_needs_one_gpu_where_splitting_needs_two(name, gpus):
    found = solved(**case_54()[name])
    assert found.chosen.gpus == gpus and found.disaggregated is not None and found.disaggregated.gpus == 2
    assert "the load decides" in found.verdict.reason and "needs 2" in found.verdict.reason


def test_case_54_w3_has_room_for_one_prefill_and_one_decode_instance_only():
    found = solved(**case_54()["w3"])
    assert found.disaggregated is not None
    assert sorted(kind.phase for kind in found.disaggregated.placed.kinds) == ["decode", "prefill"]
    assert all(kind.gpus >= 4 for option in options(found) for kind in option.placed.kinds)
    assert "lost pooling decides" in found.verdict.reason


def test_a_slow_network_under_long_prompts_is_named_as_what_decides():
    # 8000 tokens x 131,072 B = 1.05 GB of KV per request; 10 Gb/s at 60 % carry 0.75 GB/s: 1.4 s each, 0.7 requests/s
    parts = {"model": "llama3.1-8b", "workload": fixed(8000, 200), "slo": slo("4s", "15ms"), "search": THOROUGH}
    found = solved(cluster=far("h100-80gb", "10Gb/s"), **parts)
    assert found.verdict.mode == "aggregated" and not found.verdict.tie
    assert "KV transfer decides" in found.verdict.reason
    assert found.disaggregated is not None and found.disaggregated.rate.goodput_rps < 0.72
    # the same two GPUs on NVLink do not suffer from it
    near = solved(cluster=PAIR, **parts)
    assert "KV transfer" not in near.verdict.reason
    assert near.disaggregated is not None and near.disaggregated.rate.goodput_rps > 2.0


@pytest.mark.parametrize(
    "parts",
    [
        {"model": "llama3.1-8b", "cluster": BOX, "workload": fixed(8000, 200), "slo": slo("3s", "10ms")},
        {
            "model": "llama2-70b", "cluster": "h100-2x8", "profiles": "splitwise-llama2-70b-h100",
            "workload": "sharegpt", "slo": slo("1s", "50ms"),
        },
    ],
    ids=["long prompts, tight TPOT", "Llama-2-70B on H100"],
)  # fmt: skip
def test_long_prompts_under_a_tight_tpot_are_told_to_disaggregate(parts):
    found = solved(**parts, search=THOROUGH)
    verdict = found.verdict
    assert verdict.mode == "disaggregated" and verdict.gain is not None and verdict.gain > 0.05
    assert "interference decides" in verdict.reason
    assert found.chosen is found.disaggregated


def test_answers_of_one_token_leave_nothing_to_disaggregate():
    found = solved(model="llama3.1-8b", cluster=PAIR, workload=fixed(4000, 1), slo=slo("1s", "15ms"))
    assert found.verdict.mode == "aggregated" and found.disaggregated is None
    assert "one token" in found.verdict.reason


# --- invariants ---


@everyone()
def test_every_gpu_is_used_at_most_once_and_groups_stay_within_a_unit(name):
    found = solved(**PROBLEMS[name])
    units = {gpu: unit for unit in found.problem.topology.units() for gpu in unit.gpus}
    for option in options(found):
        placed = option.placed.placement.instances
        used = [gpu for one in placed for gpu in one.gpus]
        assert len(used) == len(set(used)) == option.gpus and set(used) <= set(units)
        for one, kind in zip(placed, option.placed.kinds, strict=True):
            assert (one.phase, one.layout, one.gpu) == (kind.phase, kind.layout, kind.gpu)
            assert [len(stage) for stage in one.stages] == [one.layout.tp] * one.layout.pp
            for stage in one.stages:
                assert len({units[gpu].name for gpu in stage}) == 1
                assert all(units[gpu].gpu.name == one.gpu for gpu in stage)


@everyone()
def test_placements_pass_the_check_without_the_solver(name):
    found = solved(**PROBLEMS[name])
    for option in options(found):
        placement = option.placed.placement
        counts = Counter(one.kind for one in placement.instances)
        # an aggregated instance has no flows to check, only its part of the sum
        rates = {kind: 1e6 if option is found.disaggregated else placement.value_rps / len(counts) / count
                 for kind, count in counts.items()}  # fmt: skip
        candidates = tuple(Candidate(*kind, rates[kind]) for kind in sorted(counts))
        kv_bytes = found.problem.model.kv_bytes_per_token * found.problem.workload.mean_prompt_tokens
        program = Program(found.problem.topology, candidates, kv_bytes, counts=dict(counts))
        assert check(program, placement) == []


@everyone()
def test_the_claim_attains_the_target_and_stays_below_the_capacity_bound(name):
    found = solved(**PROBLEMS[name])
    for mode, option in (("disaggregated", found.disaggregated), ("aggregated", found.aggregated)):
        assert option is not None and option.rate.goodput_rps > 0
        assert option.rate.low_rps <= option.rate.goodput_rps <= option.rate.high_rps
        assert option.rate.goodput_rps <= found.capacity_bounds_rps[mode] * (1 + 1e-6)
        assert option.report.rate_rps <= option.rate.goodput_rps
        for share, bounds in zip(option.report.attainment, found.problem.slos, strict=True):
            assert share >= bounds.attainment
    if found.problem.objective == "min_gpus":
        assert found.chosen.rate.goodput_rps >= found.problem.rate_rps == found.chosen.report.rate_rps


@everyone()
def test_the_deployment_simulates_to_the_very_same_run(name):
    found = solved(**PROBLEMS[name])
    for mode in ("disaggregated", "aggregated"):
        chosen = found.prefer(mode)
        deployment = deployment_of(chosen)
        for spec, kind in zip(deployment.instances, chosen.chosen.placed.kinds, strict=True):
            assert spec.limits.model_dump() == {
                field: getattr(kind.limits, field) for field in type(kind.limits).__slots__
            }
        trial, rate = found.trials.ranking, chosen.chosen.rate.goodput_rps
        planned_run = trial.run(chosen.chosen.placed.system, rate)
        file_run = trial.run(system_of(deployment), rate)
        for column in ("first_token_s", "finish_s", "prefill_at", "decode_at", "busy_s", "link_bytes"):
            np.testing.assert_array_equal(getattr(planned_run, column), getattr(file_run, column), err_msg=column)


@everyone()
def test_routes_leave_each_prefill_instance_with_weights_that_sum_to_one(name):
    found = solved(**PROBLEMS[name])
    deployment = deployment_of(found.prefer("disaggregated"))
    phases = {one.name: one.phase for one in deployment.instances}
    weights: dict[str, float] = {}
    for route in deployment.routes:
        assert (phases[route.source], phases[route.target]) == ("prefill", "decode")
        weights[route.source] = weights.get(route.source, 0.0) + route.weight
        assert {hop.link for hop in route.hops} <= {link.name for link in deployment.links}
    assert set(weights) == {name for name, phase in phases.items() if phase == "prefill"}
    assert all(isclose(weight, 1.0, abs_tol=1e-6) for weight in weights.values())


def test_case_21_the_drained_gpu_is_never_used_and_no_group_of_eight_lies_on_its_node():
    found = solved(**PROBLEMS["case 21: nodes that look alike"])
    assert len(found.problem.topology.gpus) == 23
    for option in options(found):
        for one in option.placed.placement.instances:
            for stage in one.stages:
                assert all((gpu.node, gpu.index) != ("n2", 5) for gpu in stage)
                assert len(stage) < 8 or {gpu.node for gpu in stage} <= {"n0", "n1"}
    devices = [d for i in deployment_of(found).instances for stage in i.stages for d in stage if d.node == "n2"]
    assert devices and all(5 not in device.gpus for device in devices)


def test_an_unprofiled_plan_says_so_in_the_file_and_in_the_report():
    from rich.console import Console

    from planner.report import render

    found = solved(**PROBLEMS["PCIe only"])
    assert all(cost.unprofiled for cost in deployment_of(found).costs.values())
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    for piece in render(found):
        console.print(piece)
    console.file.close()
    assert "unprofiled" in console.export_text()
    profiled = solved(**PROBLEMS["published fit on one node"])
    assert not any(cost.unprofiled for cost in deployment_of(profiled).costs.values())


def test_in_a_mixed_cluster_the_aggregated_way_may_use_both_types_too():
    found = solved(**PROBLEMS["two GPU types"])
    kinds = find_kinds(found.problem)
    combos = aggregated(kinds.aggregated, kinds.saturation, space_of(found.problem))
    types = {frozenset(kind.gpu for kind, _ in one.kinds) for one in combos}
    assert types == {frozenset({"h100-80gb"}), frozenset({"a100-80gb"}), frozenset({"h100-80gb", "a100-80gb"})}
    for one in combos:
        assert isclose(one.bound_rps, sum(kinds.saturation[kind] * count for kind, count in one.kinds))
        assert one.gpus <= 12
    assert found.aggregated is not None and found.aggregated.gpus == 12
    assert " on h100-80gb" in found.aggregated.placed.layout and " on a100-80gb" in found.aggregated.placed.layout


# --- determinism ---

SMALL = {"model": "llama3.1-8b", "cluster": PAIR, "workload": fixed(2000, 100), "slo": slo("1s", "30ms")}


def test_the_same_inputs_give_the_same_bytes_in_a_fresh_process_with_another_hash_seed(tmp_path):
    parts = {**SMALL, "workload": "sharegpt"}
    here = to_yaml(deployment_of(plan(problem(**parts))))
    file = tmp_path / "problem.yaml"
    file.write_text(text(**parts))
    code = "import sys; from planner.cli import main; sys.argv = ['planner', *sys.argv[1:]]; main()"
    arguments = ["plan", str(file), "-q", "-o", str(tmp_path / "out.yaml")]
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, env=environment, capture_output=True)
    assert (tmp_path / "out.yaml").read_text() == here


def test_another_seed_is_another_provenance():
    first, second = (deployment_of(plan(problem(**SMALL, seed=seed))) for seed in (0, 1))
    assert first.provenance.seeds == (0, 1, 2) and second.provenance.seeds == (1, 2, 3)
    assert first.provenance.digests["problem"] != second.provenance.digests["problem"]
    assert first.prediction.attainment != second.prediction.attainment


def test_the_seed_flag_is_in_the_provenance_too(tmp_path, capsys):
    file = tmp_path / "problem.yaml"
    file.write_text(text(**SMALL))
    assert _run(["plan", str(file), "-q", "--seed", "7", "-o", str(tmp_path / "out.yaml")]) == 0
    capsys.readouterr()
    assert yaml.safe_load((tmp_path / "out.yaml").read_text())["provenance"]["seeds"] == [7, 8, 9]


# --- what is asked for ---


def test_of_several_classes_the_worst_one_decides():
    chat, batch = slo("250ms", "100ms", name="chat"), slo("5s", "200ms", name="batch")
    base = PROBLEMS["published fit on one node"]
    both = solved(**{**base, "slo": [chat, batch]})
    strict = solved(**{**base, "slo": slo("250ms", "100ms")})
    # everybody shares the queues, so the loose half neither slows the strict one down nor helps it
    assert both.aggregated is not None and strict.aggregated is not None
    assert both.aggregated.rate.goodput_rps == pytest.approx(strict.aggregated.rate.goodput_rps, rel=0.25)
    report = both.chosen.report
    assert report.attainment[0] < report.attainment[1]  # the strict class is the one at its target
    assert report.attainment[0] == pytest.approx(0.9, abs=0.06)
    names = deployment_of(both).prediction.attainment
    assert list(names) == ["chat", "batch"]


@everyone()
def test_attainment_is_joint_and_by_each_classs_own_tpot(name):
    found = solved(**PROBLEMS[name])
    trial = found.trials.ranking
    run = trial.run(found.chosen.placed.system, found.chosen.rate.goodput_rps)
    met = attained(run, found.problem.slos)
    for at in range(0, len(run.requests), 7):
        assert met[at] == by_hand(run, at, found.problem.slos[run.requests.slo_class[at]])


def by_hand(run, at: int, bounds: Slo) -> bool:
    """Return whether one request meets both bounds, from its own times."""
    arrival, tokens = run.requests.arrival_s[at], int(run.requests.output_tokens[at])
    first, last = run.first_token_s[at], run.finish_s[at]
    pace = 0.0
    if tokens > 1:
        pace = (last - arrival) / tokens if bounds.tpot_definition == "inclusive" else (last - first) / (tokens - 1)
    return bool(first - arrival <= bounds.ttft_s * (1 + 1e-9) and pace <= bounds.tpot_s * (1 + 1e-9))


def test_an_inclusive_tpot_counts_the_time_to_the_first_token():
    # 16,000 tokens take two H100 some 0.25 s: (TTFT + 3 steps) / 4 is beyond 50 ms, while each step takes 8 ms
    parts = {"model": "llama3.1-8b", "cluster": PAIR, "workload": fixed(16000, 4)}
    assert solved(**parts, slo=slo("2s", "30ms")).chosen.rate.goodput_rps > 1.0
    with pytest.raises(InfeasibleError) as raised:
        solved(**parts, slo=slo("2s", "30ms", tpot_definition="inclusive"))
    assert raised.value.binding == "TPOT" and raised.value.best_s > 0.03


def test_fewest_gpus_means_that_one_gpu_fewer_fails():
    asked = problem(**PROBLEMS["a load to serve"])
    found = solved(**PROBLEMS["a load to serve"])
    best = found.aggregated
    assert best is not None and best.rate.goodput_rps >= asked.rate_rps
    kinds = find_kinds(asked)
    trials = trials_for(asked, kinds)
    build = rough_network(asked).system
    smaller = [one for one in aggregated(kinds.aggregated, kinds.saturation, space_of(asked)) if one.gpus < best.gpus]
    assert smaller
    for one in smaller:
        margins = [trials.ranking.with_seed(seed).margin(build(one), asked.rate_rps) for seed in range(3)]
        assert np.mean(margins) < 0, f"{one} serves the load on {one.gpus} GPUs, the plan takes {best.gpus}"


def test_fewest_gpus_is_the_best_of_all_layouts_when_tried_one_by_one():
    """Brute force over every pair of counts on four GPUs, each placed and replayed over all seeds."""
    node = {"name": "n", "gpu": "h100-80gb", "gpus": 4, "links": {"kind": "nvswitch"}}
    parts = {
        "model": "llama3.1-8b", "cluster": {"name": "four", "nodes": [node]}, "workload": fixed(6000, 60),
        "slo": slo("1s", "15ms"), "search": {**QUICK, "max_tp": 2, "max_pp": 1},
    }  # fmt: skip
    sizes = [(tp, count) for tp in (1, 2) for count in (1, 2, 3, 4) if tp * count <= 3]
    pairs = [(p, d) for p, d in itertools.product(sizes, sizes) if p[0] * p[1] + d[0] * d[1] <= 4]
    tried = [
        {"name": f"{p} {d}", "prefill": {"tp": p[0], "count": p[1]}, "decode": {"tp": d[0], "count": d[1]}}
        for p, d in pairs
    ]
    asked = problem(**parts, rate_rps="6rps", compare=tried)
    found = plan(asked)
    serving = [o for o in found.compared.values() if o and attains_at(asked, found.trials.quoting, o.placed, 6.0)]
    assert found.disaggregated is not None
    assert found.disaggregated.gpus == min(option.gpus for option in serving)


def test_compare_shows_the_users_layouts_beside_the_plan():
    wanted = [
        {"name": "mine", "prefill": {"tp": 2}, "decode": {"tp": 1, "count": 2}},
        {"name": "whole", "aggregated": {"tp": 4, "max_tokens": 1024}},
    ]
    found = solved(**PROBLEMS["published fit on one node"], compare=wanted)
    assert list(found.compared) == ["mine", "whole"]
    mine, whole = found.compared["mine"], found.compared["whole"]
    assert mine is not None and mine.placed.layout == "1 x prefill TP2 + 2 x decode TP1"
    assert whole is not None and whole.placed.layout == "1 x aggregated TP4 (1024 tokens)"
    # what was searched for is at least as good as what was brought along, within the noise
    for own, best in ((mine, found.disaggregated), (whole, found.aggregated)):
        assert best is not None and own.rate.low_rps <= best.rate.high_rps
    shown = to_json(found)["options"]
    assert shown["mine"]["layout"] == mine.placed.layout and shown["whole"]["gpus"] == 4


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"prefill": {"tp": 3}, "decode": {"tp": 1}}, "no prefill TP3"),
        ({"prefill": {"tp": 4}, "decode": {"tp": 4}}, "takes 8 GPUs, and a100-4gpu has 4"),
        ({"aggregated": {"tp": 1, "count": 5}}, "takes 5 GPUs, and a100-4gpu has 4"),
        ({"aggregated": {"tp": 64}}, "no aggregated TP64"),
    ],
)
def test_compare_of_what_cannot_be_says_why(wanted, why):
    with pytest.raises(InputError, match=why):
        solved(**PROBLEMS["published fit on one node"], compare=[{"name": "mine", **wanted}])


@pytest.mark.parametrize("mode", ["disaggregated", "aggregated"])
def test_a_mode_can_be_forced(mode, tmp_path, capsys):
    file = tmp_path / "problem.yaml"
    file.write_text(text(**SMALL))
    assert _run(["plan", str(file), "-q", "--mode", mode, "-o", str(tmp_path / "out.yaml")]) == 0
    capsys.readouterr()
    written = yaml.safe_load((tmp_path / "out.yaml").read_text())
    phases = {one["phase"] for one in written["instances"]}
    assert written["mode"] == mode and phases == ({"prefill", "decode"} if mode == "disaggregated" else {"aggregated"})


def test_a_mode_that_cannot_serve_is_refused(tmp_path, capsys):
    file = tmp_path / "problem.yaml"
    file.write_text(text(model="llama3.1-8b", cluster=PAIR, workload=fixed(4000, 1), slo=slo("1s", "15ms")))
    assert _run(["plan", str(file), "-q", "--mode", "disaggregated"]) == 1
    assert "no disaggregated plan" in capsys.readouterr().err


def test_a_model_that_no_decode_instance_can_hold_is_bad_input_and_no_traceback():
    # 70B in 16 bits are 141 GB; four RTX 4090 have 94 GB in all
    node = {"name": "n", "gpu": "rtx4090", "gpus": 4, "links": {"kind": "pcie"}}
    with pytest.raises(InputError, match="fits on no layout"):
        solved(
            model="llama3.1-70b",
            cluster={"name": "four", "nodes": [node]},
            workload=fixed(100, 10),
            slo=slo("1s", "1s"),
        )


def test_the_plan_explains_every_layout_that_it_did_not_consider():
    found = solved(**PROBLEMS["PCIe only"])
    assert found.kinds.rejected
    assert all(one.reason and one.gpu for one in found.kinds.rejected)


def test_an_unknown_key_of_a_problem_gets_a_line():
    with pytest.raises(InputError, match=r"problem.yaml:2:1: workloads: unknown key"):
        planned(
            "model: opt-13b\nworkloads: sharegpt\ncluster: a100-4gpu\nworkload: sharegpt\nslo: {ttft_s: 1s, tpot_s: 1s}"
        )


def test_parse_and_plan_are_enough_for_a_library_user():
    found = plan(problem(**SMALL))
    assert found.verdict.headline and parse("a: 1", "x.yaml").data == {"a": 1}
