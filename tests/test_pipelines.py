"""Prefill over pipeline stages against tensor parallelism: latency alone, capacity, and where they cross (case 58)."""

from __future__ import annotations

from math import inf
from pathlib import Path
from random import Random

import numpy as np
import pytest
import yaml
from hypothesis import given

from planner.cost.base import BatchShape, CostModel
from planner.cost.kernel import PREFIX, SIZE
from planner.report import _notes, to_json
from planner.search.crossover import crossover_rps, md1_wait_s
from planner.search.kinds import find_kinds
from planner.simulator.cluster import Instance, Limits, System, simulate, simulate_clients
from planner.simulator.metrics import throughput
from planner.specs.layout import Layout
from planner.specs.slo import Slo
from planner.specs.workload import Clients, make_requests
from tests.planning import BOX, fixed, problem, slo, solved
from tests.reference_simulator import Reference, in_chunks, random_requests, random_system
from tests.test_simulator import differences, often, seeds

CASE = yaml.safe_load((Path(__file__).parent / "cases" / "58-pp-vs-tp-prefill" / "request.yaml").read_text())
TENSOR, PIPELINE = CASE["prefill_options"]
PROMPT, CHUNKS = CASE["isl"], PIPELINE["chunks"]
ANY = (Slo(ttft_s=1.0, tpot_s=1.0),)


def linear(seconds_per_token: float) -> np.ndarray:
    p = np.zeros(SIZE)
    p[2] = seconds_per_token
    return p


def cost(option: dict) -> CostModel:
    """A law in proportion to tokens: 470 ms a prompt at TP4; four stages of 100 ms per 2048 tokens each at PP4."""
    if option["pp"] == 1:
        return CostModel(Layout(option["tp"]), linear(option["full_prompt_ms"] / 1e3 / PROMPT))
    chunk_s = option["pp"] * option["stage_ms_per_2k_chunk"] / 1e3
    return CostModel(Layout(1, option["pp"]), linear(chunk_s * CHUNKS / PROMPT), (0.25,) * 4)


def system(option: dict) -> System:
    limits = Limits(1, PROMPT, 1 << 20, pipeline_tokens=PROMPT // CHUNKS)
    return System((Instance("prefill", cost(option), limits),), 1.0)


def prompts(count: int, arrival_s: np.ndarray | None = None):
    times = np.full(count, inf) if arrival_s is None else arrival_s
    return make_requests(times, np.full(count, PROMPT), np.ones(count, np.int64))


def test_one_prompt_alone_takes_chunks_and_bubbles_on_a_pipeline_and_less_on_tensor_parallel_gpus():
    """Case 58.1: (4 chunks + 3 bubbles) x 100 ms = 700 ms, against 470 ms; and 58.4: not 1600 ms / 4."""
    chunk = PROMPT // CHUNKS
    assert cost(TENSOR).prompt_s(PROMPT, chunk) == pytest.approx((0.47, 0.47))
    assert cost(PIPELINE).prompt_s(PROMPT, chunk) == pytest.approx((0.7, 0.4))
    for option, expected_s in ((TENSOR, 0.47), (PIPELINE, 0.7)):
        run = simulate(system(option), prompts(1, np.zeros(1)), ANY)
        assert run.ttft_s[0] == pytest.approx(expected_s)


def test_a_prompt_that_passes_whole_waits_for_every_stage_in_turn():
    """Without chunks each stage holds all 400 ms of it: 1600 ms, four times what dividing by the stages would say."""
    assert cost(PIPELINE).prompt_s(PROMPT) == pytest.approx((1.6, 0.4))


@pytest.mark.parametrize("clients", CASE["concurrency"])
def test_a_full_pipeline_passes_a_prompt_every_400_ms(clients):
    """Case 58.2: one client gets 1/0.7 = 1.43 prompts/s of the pipeline, four and more 2.5; of TP4 2.13 any number."""
    rates = {}
    for name, option in (("pp", PIPELINE), ("tp", TENSOR)):
        run = simulate_clients(system(option), prompts(50 * clients), ANY, Clients(clients))
        rates[name] = throughput(run, ANY, 5.0, float(run.finish_s.max()) - 5.0).requests_per_s
    assert rates["tp"] == pytest.approx(1 / 0.47, rel=0.02)
    assert rates["pp"] == pytest.approx(1 / 0.7 if clients == 1 else 2.5, rel=0.03)


def test_the_crossover_is_where_the_queues_of_both_say():
    """0.47 + W(r, 0.47) = 0.7 + W(r, 0.4), the M/D/1 waits: at 1.455 requests/s."""
    rate = crossover_rps((0.47, 0.47), (0.7, 0.4))
    assert rate == pytest.approx(1.4552, abs=0.0005)
    assert 0.47 + md1_wait_s(rate, 0.47) == pytest.approx(0.7 + md1_wait_s(rate, 0.4))


@pytest.mark.parametrize("rate_rps, sooner", [(1.2, "tp"), (1.75, "pp")])
def test_the_simulator_agrees_on_either_side_of_the_crossover(rate_rps, sooner):
    arrival_s = np.cumsum(np.random.default_rng(3).exponential(1 / rate_rps, 40_000))
    ttft_s = {
        name: simulate(system(option), prompts(len(arrival_s), arrival_s), ANY).ttft_s.mean()
        for name, option in (("pp", PIPELINE), ("tp", TENSOR))
    }
    assert min(ttft_s, key=lambda name: ttft_s[name]) == sooner
    expected_s = {"tp": 0.47 + md1_wait_s(rate_rps, 0.47), "pp": 0.7 + md1_wait_s(rate_rps, 0.4)}
    assert ttft_s == pytest.approx(expected_s, rel=0.05)


@pytest.mark.parametrize("pipeline_s", [(0.4, 0.4), (0.7, 0.47), (0.7, 0.5), (0.47, 0.3)])
def test_there_is_no_crossover_where_one_is_better_at_every_rate(pipeline_s):
    assert crossover_rps((0.47, 0.47), pipeline_s) is None


def test_chunks_attend_to_what_came_before_them():
    """Two chunks of 4 tokens: 4^2 and 4^2 + 2 x 4 x 4, together 8^2; on one stage chunks change nothing."""
    p = np.zeros(SIZE)
    p[3] = 1e-3
    two = CostModel(Layout(1, 2), p, (0.5, 0.5))
    assert two.prompt_s(8, 4) == pytest.approx((0.008 + 0.024 + 0.024, 0.008 + 0.024))
    assert two.prompt_s(8) == pytest.approx((0.064, 0.032))
    p[PREFIX] = 3.0  # 2 x 3 x 4 more, to read the first chunk back
    assert two.prompt_s(8, 4) == pytest.approx((0.008 + 0.036 + 0.036, 0.008 + 0.036))
    one = CostModel(Layout(1), p)
    assert one.prompt_s(8, 4) == one.prompt_s(8) == pytest.approx((0.064, 0.064))


QUESTION = {"model": "llama3.1-8b", "cluster": BOX, "workload": fixed(8192, 20), "slo": slo("3s", "40ms")}
ENGINE = {"pipeline_tokens": 2048}


def test_the_plan_shows_the_crossover():
    """Case 58.2, on the kinds of a real problem: chunked pipelines save collectives and pay with bubbles."""
    found = solved(**QUESTION, engine=ENGINE)
    notes = [str(note) for note in _notes(found) if "answers sooner from" in str(note)]
    assert notes and "prefill TP1 PP2 instead of TP2: a prompt of 8192 tokens alone takes" in notes[0]
    told = to_json(found)["prefill_crossovers"]
    assert len(told) == len(notes)
    for one in told:
        assert one["pipeline_alone_s"] > one["tensor_alone_s"] and one["pipeline_next_s"] < one["tensor_next_s"]
        assert 0 < one["rate_rps"] < 1 / one["tensor_next_s"]


def test_a_chunked_pipeline_saturates_no_later_than_its_law_says():
    """The bound of the search stays one: no simulated load passes more prompts than saturation."""
    kinds = find_kinds(problem(**QUESTION, engine=ENGINE))
    piped = [kind for kind in kinds.all_legal if kind.phase == "prefill" and kind.layout.pp == 2]
    assert piped and all(kind.limits.pipeline_tokens == 2048 for kind in piped)
    for kind in piped:
        count = 300
        requests = make_requests(np.zeros(count), np.full(count, 8192), np.ones(count, np.int64))
        run = simulate(System((kind.instance(),), 1.0), requests, ANY)
        reached = count / run.finish_s.max()
        assert 0.9 * kinds.saturation[kind] < reached <= kinds.saturation[kind] * (1 + 1e-9)


def test_an_engine_without_pipelines_on_the_decode_side_is_offered_none():
    """Case 58.3."""
    kinds = find_kinds(problem(**QUESTION, engine={"decode_pp": False}))
    assert {kind.layout.pp for kind in kinds.all_legal if kind.phase == "decode"} == {1}
    assert {kind.layout.pp for kind in kinds.all_legal if kind.phase == "prefill"} == {1, 2}
    assert any(r.phase == "decode" and "decodes without pipeline stages" in r.reason for r in kinds.rejected)
    with_them = find_kinds(problem(**QUESTION))
    assert 2 in {kind.layout.pp for kind in with_them.all_legal if kind.phase == "decode"}


@given(seeds)
@often
def test_chunks_equal_the_plain_simulator_request_by_request(seed):
    r = Random(seed)
    system, requests = in_chunks(random_system(r), r), random_requests(r)
    assert differences(simulate(system, requests, ANY), Reference(system, requests).run()) == []


def test_dividing_the_time_of_a_prompt_by_the_stages_is_not_what_the_law_says():
    """Case 58.4: the stages' times add up to the whole, hand-offs on top."""
    staged = CostModel(Layout(1, 4), linear(1e-4), (0.25,) * 4, handoff_s=1e-3)
    assert staged.iteration_s(BatchShape.prefill(1000)) == pytest.approx(0.1 + 3e-3)
    assert staged.prompt_s(1000)[0] == pytest.approx(0.1 + 3e-3)
