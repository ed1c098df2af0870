"""Clients in a closed loop: against the plain simulator, Little's law, and closed forms; the command line with them."""

from __future__ import annotations

import json
from math import inf
from random import Random

import numpy as np
import pytest
from hypothesis import given

from planner import parse, plan, problem_of
from planner.cli import _run
from planner.deploy import deployment_of, to_yaml
from planner.errors import InputError
from planner.search.concurrency import ClosedLoop, attains, most_clients
from planner.search.goodput import Trial
from planner.simulator.cluster import Run, System, simulate, simulate_clients
from planner.simulator.metrics import throughput
from planner.sources.workloads import read_workload
from planner.specs.slo import Slo
from planner.specs.workload import Clients, Requests, Workload
from tests.planning import PROBLEMS, solved
from tests.reference_simulator import Reference, random_clients, random_requests, random_system
from tests.test_simulator import ANY, differences, instance, law, load, often, seeds


def alike(count: int, prompt: int = 10, output: int = 1) -> Requests:
    return load([inf] * count, prompt, output)


def fixed(prompt: int = 10, output: int = 1, **more: object) -> Workload:
    lines = "".join(f"{key}: {value}\n" for key, value in more.items())
    text = f"source: fixed\nprompt_tokens: {prompt}\noutput_tokens: {output}\n{lines}"
    return read_workload(parse(text, "load.yaml"))


def in_system(run: Run, at_s: np.ndarray) -> np.ndarray:
    """How many requests have been sent and not yet answered (refused ones end at once) right after each time."""
    end_s = np.where(np.isfinite(run.finish_s), run.finish_s, run.requests.arrival_s)
    return np.searchsorted(run.requests.arrival_s, at_s, "right") - np.searchsorted(np.sort(end_s), at_s, "right")


# ---- against the plain simulator


@given(seeds)
@often
def test_equals_the_plain_simulator_request_by_request(seed):
    r = Random(seed)
    system, requests, clients = random_system(r), random_requests(r), random_clients(r)
    run = simulate_clients(system, requests, ANY, clients)
    reference = Reference(system, requests, clients).run()
    reference.jobs = [job for job in reference.jobs if job.arrival_s < inf]
    assert run.requests.arrival_s == pytest.approx([job.arrival_s for job in reference.jobs], abs=1e-9)
    assert differences(run, reference) == []


@given(seeds)
@often
def test_no_client_is_lost_and_none_sends_two_requests_at_a_time(seed):
    """Without pauses all clients are in the system from the last start until nothing is left to send."""
    r = Random(seed)
    system, requests = random_system(r), random_requests(r)
    clients = Clients(r.randint(1, 12), ramp_s=r.choice([0.0, r.uniform(0, 1)]))
    run = simulate_clients(system, requests, ANY, clients)
    sent_s = run.requests.arrival_s
    assert len(sent_s) == len(requests) and (np.diff(sent_s) >= 0).all()
    assert in_system(run, sent_s).max() <= clients.count
    served = run.prefill_at >= 0
    last_start_s = clients.ramp_s * (clients.count - 1) / clients.count
    steady = (sent_s >= last_start_s) & (
        sent_s < sent_s[-1]
    )  # at the last instant there may be fewer left than clients
    if served.all() and len(requests) > clients.count:
        assert (in_system(run, sent_s[steady]) == clients.count).all()


def test_the_random_loops_do_meet_what_they_are_for():
    """Refusals that free a client, clients that start after others were answered, and runs that stop early."""
    refused = interleaved = stopped = 0
    for seed in range(500):
        r = Random(seed)
        system, requests, clients = random_system(r), random_requests(r), random_clients(r)
        run = simulate_clients(system, requests, ANY, clients)
        refused += int((run.prefill_at < 0).sum())
        last_start_s = clients.ramp_s * (clients.count - 1) / clients.count
        interleaved += int((run.finish_s < last_start_s).sum())
        stopped += len(run.requests) < len(requests)
    assert min(refused, interleaved, stopped) > 40


def test_an_open_load_does_not_care_about_clients():
    """As many clients as requests, all of them there from the start, are an open load at time 0."""
    r = Random(3)
    system, requests = random_system(r), random_requests(r)
    run = simulate_clients(system, requests, ANY, Clients(len(requests)))
    same = simulate(system, load([0.0] * len(requests), requests.prompt_tokens, requests.output_tokens), ANY)
    assert np.array_equal(run.finish_s, same.finish_s, equal_nan=True)


# ---- closed forms


def test_one_client_sends_one_request_after_the_other():
    """A prompt takes 0.1 s, 4 steps of 10 ms bring the other 4 tokens, then half a second of thought: 0.64 s each."""
    system = System((instance("prefill", law((0.1, 0, 0))), instance("decode", law(decode=(0.01, 0, 0)))), 1.0)
    run = simulate_clients(system, alike(20, output=5), ANY, Clients(1, think_s=0.5))
    assert run.requests.arrival_s == pytest.approx(0.64 * np.arange(20))
    assert run.finish_s - run.requests.arrival_s == pytest.approx(np.full(20, 0.14))


def test_more_clients_than_one_server_can_keep_busy_wait_in_turn():
    """One prompt at a time, 0.1 s each: 7 clients without a pause all wait for the 6 others, 10 requests/s in all."""
    system = System((instance("prefill", law((0.1, 0, 0)), max_batch=1),), 1.0)
    run = simulate_clients(system, alike(100), ANY, Clients(7))
    assert run.ttft_s[:7] == pytest.approx(0.1 * np.arange(1, 8))
    assert run.ttft_s[7:] == pytest.approx(0.7)
    assert throughput(run, ANY, 1.0, 9.0).requests_per_s == pytest.approx(10.0, abs=0.2)


def test_clients_start_evenly_over_the_ramp():
    system = System((instance("prefill", law((0.01, 0, 0))),), 1.0)
    run = simulate_clients(system, alike(4), ANY, Clients(4, think_s=100.0, ramp_s=8.0))
    assert run.requests.arrival_s == pytest.approx([0.0, 2.0, 4.0, 6.0])


def test_who_is_answered_during_the_ramp_sends_before_those_who_start_later():
    """Clients start at 0 and 2 s, a request takes 0.9 s: the first sends at 0, 0.9 and 1.8 s, the second then at 2."""
    system = System((instance("prefill", law((0.9, 0, 0))), instance("prefill", law((0.9, 0, 0)))), 1.0)
    run = simulate_clients(system, alike(6), ANY, Clients(2, ramp_s=4.0))
    assert run.requests.arrival_s == pytest.approx([0.0, 0.9, 1.8, 2.0, 2.7, 2.9])


def test_a_refused_request_frees_its_client():
    """Blocks for 100 tokens: the second prompt of 200 never fits. Its client goes on with the third at once."""
    system = System((instance("prefill", law((0.1, 0, 0)), blocks=7),), 1.0)
    run = simulate_clients(system, load([inf] * 3, [10, 200, 10]), ANY, Clients(1))
    assert run.requests.arrival_s == pytest.approx([0.0, 0.1, 0.1])
    assert run.finish_s == pytest.approx([0.1, np.nan, 0.2], nan_ok=True)


def test_pauses_have_the_mean_and_the_variation_that_were_asked_for():
    """Gamma pauses of mean 0.5 s and cv 1.5; the first thousand of many are those of a thousand."""
    clients = Clients(1, think_s=0.5, cv=1.5)
    pauses_s = clients.pauses_s(100_000)
    assert pauses_s.mean() == pytest.approx(0.5, rel=0.02) and pauses_s.std() == pytest.approx(0.75, rel=0.02)
    assert np.array_equal(pauses_s[:1000], clients.pauses_s(1000))
    system = System((instance("prefill", law((0.1, 0, 0))),), 1.0)
    run = simulate_clients(system, alike(50), ANY, clients)
    assert np.diff(run.requests.arrival_s) == pytest.approx(0.1 + clients.pauses_s(50)[:49])


def test_nobody_sends_after_the_end_and_what_is_under_way_ends():
    """Requests of 0.3 s from 0 on, until 1 s: the one sent at 0.9 s ends at 1.2 s, and none follows."""
    system = System((instance("prefill", law((0.3, 0, 0))),), 1.0)
    run = simulate_clients(system, alike(50), ANY, Clients(1, until_s=1.0))
    assert run.requests.arrival_s == pytest.approx([0.0, 0.3, 0.6, 0.9])
    assert run.finish_s[-1] == pytest.approx(1.2)


# ---- Little's law


@pytest.mark.parametrize("think_s, cv", [(0.0, 0.0), (0.7, 0.0), (0.7, 2.0)])
@pytest.mark.parametrize("phases", ["split", "whole"])
def test_clients_are_throughput_times_latency_and_thought(think_s, cv, phases):
    """Little's law over the clients: N = X (R + Z), whatever the lengths, the queues and the batches are."""
    prefill, decode = law((0.02, 1e-4, 0)), law((0.02, 1e-4, 0), (0.01, 1e-3, 1e-6))
    split = (instance("prefill", prefill, max_batch=4), instance("decode", decode, blocks=400))
    whole = (instance("aggregated", decode, max_tokens=256, blocks=400),)
    r = np.random.default_rng(5)
    requests = load([inf] * 4000, r.integers(10, 500, 4000), r.integers(1, 60, 4000))
    run = simulate_clients(
        System(split if phases == "split" else whole, 1e3), requests, ANY, Clients(24, think_s, cv=cv)
    )
    start_s, end_s = np.quantile(run.requests.arrival_s, [0.1, 0.9])
    counted = (run.requests.arrival_s >= start_s) & (run.requests.arrival_s < end_s)
    rate_rps = counted.sum() / (end_s - start_s)
    latency_s = (run.finish_s - run.requests.arrival_s)[counted].mean()
    assert rate_rps * (latency_s + think_s) == pytest.approx(24, rel=0.01 + 0.01 * cv)


# ---- a time instead of a number, and the most clients


def trial(workload: Workload, slo: Slo, duration_s: float = 100.0) -> Trial:
    return Trial(workload, (slo,), duration_s, most_requests=100_000)


def test_a_run_lasts_its_time_whatever_number_of_requests_that_takes():
    """0.1 s a prompt, one at a time: 1000 requests in 100 s, of which the last are sent just before the end."""
    system = System((instance("prefill", law((0.1, 0, 0)), max_batch=1),), 1.0)
    run = ClosedLoop(trial(fixed(), ANY[0]), Clients(3)).run(system)
    assert len(run.requests) == pytest.approx(1002, abs=1)
    assert 99.8 < run.requests.arrival_s[-1] < 100.0


def test_the_most_clients_are_as_many_as_the_bound_lets_wait():
    """n clients of a server with 0.1 s a prompt see a TTFT of n/10 s each: 1.25 s allow twelve."""
    system = System((instance("prefill", law((0.1, 0, 0)), max_batch=1),), 1.0)
    loop = ClosedLoop(trial(fixed(), Slo(ttft_s=1.25, tpot_s=1.0)), Clients(1))
    assert most_clients(loop, system, 1000, lambda step: None) == 12
    assert most_clients(loop, system, 8, lambda step: None) == 8
    assert attains(loop.with_count(12), system) and not attains(loop.with_count(13), system)


def test_who_is_always_refused_ends_the_run_with_nothing_answered():
    system = System((instance("prefill", law((0.1, 0, 0)), blocks=1),), 1.0)
    loop = ClosedLoop(trial(fixed(prompt=100), ANY[0]), Clients(2))
    assert not np.isfinite(loop.run(system).finish_s).any()
    assert most_clients(loop, system, 8, lambda step: None) == 0


def test_lengths_begin_alike_whatever_number_is_drawn_and_follow_the_seed():
    workload = problem_of(parse(PROBLEM, "problem.yaml")).workload
    few, more, others = workload.draw(10, 4), workload.draw(100, 4), workload.draw(10, 5)
    assert np.array_equal(few.prompt_tokens, more.prompt_tokens[:10])
    assert not np.array_equal(few.prompt_tokens, others.prompt_tokens)


# ---- what a user writes

PROBLEM = """model: llama2-70b
cluster: a100-4gpu
workload: sharegpt
slo: {ttft_s: 1s, tpot_s: 100ms}
"""


@pytest.fixture
def deployment(tmp_path):
    path = tmp_path / "deployment.yaml"
    path.write_text(to_yaml(deployment_of(solved(**PROBLEMS["published fit on one node"]))))
    return path


def simulated(capsys, *arguments: str) -> dict:
    capsys.readouterr()
    assert _run(["simulate", *map(str, arguments), "--json", "-q"]) == 0
    return json.loads(capsys.readouterr().out)


def test_simulate_with_clients_obeys_littles_law(deployment, capsys):
    told = simulated(capsys, deployment, "-w", "sharegpt", "--concurrency", "16", "--duration", "300")
    assert told["clients"] == {"count": 16, "think_s": 0.0, "cv": 0.0, "ramp_s": 0.0}
    rate = told["throughput"]["requests_per_s"]
    assert told["rate_rps"] == rate
    # 187 output tokens on average: TTFT and 186 gaps (weighted by length, so TPOT's plain mean is only near)
    latency_s = told["times"]["ttft"]["mean_s"] + 186 * told["times"]["tpot"]["mean_s"]
    assert rate * latency_s == pytest.approx(16, rel=0.1)
    assert told["throughput"]["output_tokens_per_s"] == pytest.approx(187 * rate, rel=0.1)


def test_a_workload_file_may_be_a_closed_loop(deployment, capsys, tmp_path):
    file = tmp_path / "users.yaml"
    file.write_text(
        "{source: fixed, prompt_tokens: 100, output_tokens: 10, "
        "arrivals: closed, concurrency: 5, think_s: 2s, cv: 1, ramp_s: 10s}"
    )
    told = simulated(capsys, deployment, "-w", file, "--duration", "3000", "--seed", "1")
    assert told["clients"] == {"count": 5, "think_s": 2.0, "cv": 1.0, "ramp_s": 10.0}
    latency_s = told["times"]["ttft"]["mean_s"] + 9 * told["times"]["tpot"]["mean_s"]
    assert told["rate_rps"] * (latency_s + 2.0) == pytest.approx(5, rel=0.03)  # random pauses
    more = simulated(capsys, deployment, "-w", file, "--duration", "100", "--concurrency", "10")
    assert more["clients"] == {"count": 10, "think_s": 2.0, "cv": 1.0, "ramp_s": 10.0}


def test_max_finds_the_most_clients_that_keep_the_slo(deployment, capsys):
    at = (deployment, "-w", "sharegpt", "--duration", "60", "--concurrency")
    best = simulated(capsys, *at, "max")
    count = best["clients"]["count"]
    assert best["attainment"]["all"] >= 0.9 and count > 1
    assert simulated(capsys, *at, str(round(1.1 * count)))["attainment"]["all"] < 0.9
    assert simulated(capsys, *at, str(count)) == best


def test_the_table_names_the_clients_and_what_was_answered(deployment, capsys):
    capsys.readouterr()
    assert _run(["simulate", str(deployment), "-w", "sharegpt", "--concurrency", "1", "--duration", "60", "-q"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "at 1 client, " in shown and "answered: " in shown and "output tokens/s" in shown


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--concurrency", "0"), "--concurrency: expected 1 to 100,000 clients, or max, got '0'"),
        (("--concurrency", "many"), "--concurrency: expected 1 to 100,000 clients, or max, got 'many'"),
        (("--concurrency", "4", "--rate", "2"), "--rate and --concurrency exclude each other"),
        (("--concurrency", "4", "--duration", "0"), "expected a duration above 0"),
        (("--concurrency", "4", "--duration", "inf"), "expected a duration above 0"),
        (("--concurrency", "1", "--duration", "0.001"), "no client sends a request after the warm-up"),
    ],
)
def test_simulate_says_what_is_wrong_with_the_clients(deployment, capsys, arguments, message):
    capsys.readouterr()
    assert _run(["simulate", str(deployment), "-q", "-w", "sharegpt", *arguments]) == 1
    told = capsys.readouterr().err
    assert message in told and len(told.splitlines()) == 1


def test_too_many_requests_for_one_run_are_an_input_error():
    system = System((instance("prefill", law((1e-4, 0, 0))),), 1.0)
    loop = ClosedLoop(Trial(fixed(), ANY, 10.0, most_requests=1000), Clients(1))
    with pytest.raises(InputError, match="1 clients send more than 1,000 requests in 10 s; give a shorter --duration"):
        loop.run(system)


def test_an_slo_that_not_even_one_client_attains_exits_2(deployment, capsys, tmp_path):
    strict = tmp_path / "strict.yaml"
    strict.write_text(deployment.read_text().replace("tpot_s: 0.1", "tpot_s: 0.0001"))
    capsys.readouterr()
    assert _run(["simulate", str(strict), "-w", "sharegpt", "--concurrency", "max", "--duration", "60", "-q"]) == 2
    told = capsys.readouterr().err
    assert "not even one client attains the SLO; 100% of its requests miss TPOT" in told


@pytest.mark.parametrize(
    "lines, message",
    [
        ("arrivals: closed", "concurrency: is required with arrivals: closed (how many clients)"),
        ("arrivals: closed, concurrency: 0", "concurrency: expected at least 1, got 0"),
        ("arrivals: closed, concurrency: 4, rate_rps: 2rps", "rate_rps: is not used with arrivals: closed"),
        ("arrivals: poisson, concurrency: 4", "concurrency: is only used with arrivals: closed, not with poisson"),
        ("arrivals: closed, concurrency: 4, cv: 1", "cv: is the variation of the pauses, and there are none"),
        ("arrivals: poisson, cv: 1", "cv: is only used with arrivals: gamma or closed, not with poisson"),
        ("think_s: 1s", "think_s: is only used with arrivals: closed, not with poisson"),
        ("ramp_s: 1s", "ramp_s: is only used with arrivals: closed, not with poisson"),
    ],
)
def test_a_closed_loop_that_cannot_be_is_an_input_error(lines, message):
    text = f"{{source: fixed, prompt_tokens: 10, output_tokens: 10, {lines}}}"
    with pytest.raises(InputError) as caught:
        read_workload(parse(text, "load.yaml"))
    assert message in str(caught.value) and "load.yaml:1:" in str(caught.value)


def test_plan_refuses_a_closed_loop_in_one_line_with_the_way_out(tmp_path, capsys):
    load_line = "workload: {source: fixed, prompt_tokens: 500, output_tokens: 50, arrivals: closed, concurrency: 8}"
    text = PROBLEM.replace("workload: sharegpt", load_line)
    with pytest.raises(InputError, match="there is no rate to plan for; plan with arrivals: poisson, then"):
        plan(problem_of(parse(text, "problem.yaml")))
    (tmp_path / "problem.yaml").write_text(text)
    capsys.readouterr()
    assert _run(["plan", str(tmp_path / "problem.yaml"), "-q"]) == 1
    told = capsys.readouterr().err
    assert "problem.yaml:3:11: workload: a closed loop" in told and len(told.splitlines()) == 1


def test_a_closed_loop_has_no_requests_at_a_rate():
    with pytest.raises(InputError, match="is a closed loop, which has no rate; simulate it with its clients"):
        fixed(arrivals="closed", concurrency=3).generate(1.0, 10.0, 0)
