"""The compiled simulator against queueing theory, closed forms, and a slow plain simulator, request by request."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.base import CostModel
from planner.cost.kernel import SIZE
from planner.simulator import cluster
from planner.simulator.cluster import Instance, KvPath, Limits, Run, System, simulate
from planner.simulator.metrics import attained, attainment, binding_term, latencies, load_of, margin
from planner.specs.layout import Layout, Phase
from planner.specs.slo import Slo
from planner.specs.workload import Requests, make_requests
from tests.reference_decode_loop import DecodeLoop, random_loop
from tests.reference_simulator import Reference, random_requests, random_system

ANY = (Slo(ttft_s=1.0, tpot_s=1.0),)
ROOMY = 1 << 30
TIMES = ("prefill_start_s", "prefill_end_s", "pull_start_s", "pull_end_s", "first_step_s", "finish_s")
seeds = st.integers(0, 10**9)
often = settings(max_examples=400, deadline=None, derandomize=True, database=None)
sometimes = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def law(prefill: Sequence[float] = (0, 0, 0), decode: Sequence[float] = (0, 0, 0)) -> np.ndarray:
    """a + b n + c n^2 for prefill and a + b B + c K for decode, in seconds."""
    p = np.zeros(SIZE)
    p[1:4], p[4:7], p[7:10] = prefill, decode, decode
    return p


def instance(
    phase: Phase, p: np.ndarray, *, shares: tuple[float, ...] = (1.0,), max_batch: int = 1000,
    max_tokens: int = 1 << 20, blocks: int = ROOMY, block_tokens: int = 16, handoff_s: float = 0.0,
    swap_bytes_per_s: float = 25e9, plans_ahead: bool = True,
) -> Instance:  # fmt: skip
    cost = CostModel(Layout(1, len(shares)), p, shares, handoff_s)
    return Instance(phase, cost, Limits(max_batch, max_tokens, blocks, block_tokens, swap_bytes_per_s, plans_ahead))


def load(arrival_s: Sequence[float], prompt: Sequence[int] | int = 10, output: Sequence[int] | int = 1) -> Requests:
    count = len(arrival_s)
    lengths = [np.full(count, n) if isinstance(n, int) else np.asarray(n, np.int64) for n in (prompt, output)]
    return make_requests(np.asarray(arrival_s, float), *lengths)


def poisson(rate_rps: float, count: int, seed: int = 0) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate_rps, count))


# ---- queueing theory


def lindley_wait_s(arrival_s: np.ndarray, service_s: float) -> np.ndarray:
    """W[k+1] = max(0, W[k] + D - gap), unrolled: W[k] = X[k] - min X[..k] with X[k] = k D - t[k]."""
    ahead_s = np.arange(len(arrival_s)) * service_s - arrival_s
    return ahead_s - np.minimum.accumulate(ahead_s)


# M/D/1: mean wait = rho D / (2 (1 - rho)). The mean of n waits scatters by 0.3, 0.8, 1.5 % at one million requests and
# loads of 0.5, 0.8, 0.9; antithetic pairs (u and 1 - u) cut the last two to 0.6 and 0.95 %: hence the numbers of pairs.
@pytest.mark.parametrize(("rho", "pairs"), [(0.5, 2), (0.8, 5), (0.9, 30)])
def test_mean_wait_is_that_of_m_d_1(rho, pairs):
    service_s, count, settled = 0.05, 100_000, 4_000
    system = System((instance("prefill", law((service_s, 0, 0)), max_batch=1),), 1.0)
    means = []
    for seed in range(pairs):
        u = np.random.default_rng([seed, 1]).random(count)
        for gaps in (-np.log1p(-u), -np.log(1e-300 + u)):
            arrival_s = np.cumsum(gaps) * service_s / rho
            run = simulate(system, load(arrival_s), ANY)
            wait_s = run.prefill_start_s - arrival_s
            assert np.abs(wait_s - lindley_wait_s(arrival_s, service_s)).max() < 1e-7
            means.append(wait_s[settled:].mean())
    assert np.mean(means) == pytest.approx(rho * service_s / (2 * (1 - rho)), rel=0.01)


@pytest.mark.parametrize("servers", [2, 3, 8])
def test_least_work_dispatch_serves_first_come_first_served_like_one_queue_of_many_servers(servers):
    """Sending each request to the least work left is the same as one queue that the next free server takes from
    (Kiefer & Wolfowitz, 1955), whatever the service times."""
    rng = np.random.default_rng(3)
    prompts = rng.integers(1, 200, 20_000)
    arrival_s = poisson(0.9 * servers / 0.11, 20_000)
    one = instance("prefill", law((0.01, 0.001, 0)), max_batch=1)
    run = simulate(System((one,) * servers, 1.0), load(arrival_s, prompts), ANY)
    free_s = [0.0] * servers
    starts_s = []
    for now_s, n in zip(arrival_s.tolist(), prompts.tolist(), strict=True):
        starts_s.append(max(now_s, heapq.heappop(free_s)))
        heapq.heappush(free_s, starts_s[-1] + 0.01 + 0.001 * n)
    assert np.abs(run.prefill_start_s - starts_s).max() < 1e-7


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.3, 0.7), (0.6, 0.1, 0.3)])
def test_pipelined_prefill_is_a_tandem_queue(shares):
    """C[s] = max(C[s - 1], free[s]) + t[s], with the hand-off in all stages but the last."""
    rng = np.random.default_rng(5)
    prompts = rng.integers(1, 300, 5_000)
    arrival_s = poisson(0.9 / (max(shares) * 0.16), 5_000)
    one = instance("prefill", law((0.01, 0.001, 0)), shares=shares, handoff_s=0.002, max_batch=1)
    run = simulate(System((one,), 1.0), load(arrival_s, prompts), ANY)
    free_s, ends_s = [0.0] * len(shares), []
    for now_s, n in zip(arrival_s.tolist(), prompts.tolist(), strict=True):
        at_s = now_s
        for s, share in enumerate(shares):
            at_s = max(at_s, free_s[s]) + share * (0.01 + 0.001 * n) + 0.002 * (s + 1 < len(shares))
            free_s[s] = at_s
        ends_s.append(at_s)
    assert np.abs(run.prefill_end_s - ends_s).max() < 1e-7


def test_mean_ttft_of_two_stages_is_that_of_distserve():
    """DistServe, OSDI '24, eq. 2: R D^2 / (4 (2 - R D)) + D for two stages of D / 2 each."""
    whole_s, rate_rps = 0.2, 7.0
    one = instance("prefill", law((whole_s, 0, 0)), shares=(0.5, 0.5), max_batch=1)
    ttft_s = [simulate(System((one,), 1.0), load(poisson(rate_rps, 100_000, k)), ANY).ttft_s.mean() for k in range(4)]
    expected_s = rate_rps * whole_s**2 / (4 * (2 - rate_rps * whole_s)) + whole_s  # 0.3167
    assert np.mean(ttft_s) == pytest.approx(expected_s, rel=0.01)


def test_batches_pile_up_before_a_slow_last_stage():
    """Stage 0 is done with all 3000 batches while the last one works on its 30th: each of them is still known."""
    one = instance("prefill", law((1e-3, 0, 0)), shares=(0.01, 0.99), max_batch=1)
    run = simulate(System((one,), 1.0), load(np.zeros(3000)), ANY)
    assert run.finish_s[-1] == pytest.approx(1e-5 + 3000 * 0.99e-3)


def test_equal_idle_instances_take_turns():
    """Rounding in the work that waits must not favour anybody for good: 0.1 + 0.2 - 0.2 - 0.1 is not 0."""
    one = instance("prefill", law((0.013, 0.00017, 1.1e-8)), max_batch=1)
    burst = np.repeat(np.arange(400) * 60.0, 7)
    prompts = np.random.default_rng(0).integers(1, 900, len(burst))
    lone = np.arange(100) * 60.0 + 30_000.0
    run = simulate(System((one,) * 4, 1.0), load(np.r_[burst, lone], np.r_[prompts, np.full(100, 9)]), ANY)
    assert np.bincount(run.prefill_at[-100:], minlength=4).tolist() == [25, 25, 25, 25]


# ---- closed forms


# OPT-13B on A100, tensor parallel 1: DistServe's published fit (simdistserve, Apache-2.0), in seconds.
OPT_13B = law(
    (0.01810254647486372, 0.00010191225726987379, 7.122264314252113e-09),
    (0.019934702624895457, 3.850697740828398e-05, 6.269356524350583e-07),
)


def opt_13b(**more: object) -> System:
    return System((instance("prefill", OPT_13B), instance("decode", OPT_13B)), 819_200.0, **more)  # type: ignore[arg-type]


def test_one_request_alone_takes_the_sum_of_its_steps():
    """(512, 64): TTFT = a + b 512 + c 512^2 = 18.1025 + 52.1791 + 1.8671 = 72.1487 ms; then 63 steps at contexts
    513 .. 575 (the first token came with the prefill), 19.9347 + 0.0385 + 0.000627 k each, k = 544: 20.3143 ms.
    """
    run = simulate(opt_13b(), load([3.0], 512, 64), ANY)
    assert run.ttft_s[0] == pytest.approx(0.0721487, abs=1e-7)
    assert run.tpot_s[0] == pytest.approx(0.0203143, abs=1e-7)
    assert run.finish_s[0] == pytest.approx(3.0 + 0.0721487 + 63 * 0.0203143, abs=1e-5)
    assert run.steps.tolist() == [1, 63]


def test_ttft_is_what_distserves_own_simulator_says():
    """Ten requests on prefill TP2 and decode TP1, and what simdistserve answers. It adds 3 ms and 0.1 us per token to
    each batch, so the law here is the published fit plus that. Its batches hold 4096 tokens.
    """
    p = law((0.014742973695171262 + 0.003, 6.857720739764e-05 + 1e-7, 2.4495727400243585e-09))
    arrivals_s = [0, 0.010, 0.020, 0.050, 0.120, 0.121, 0.300, 0.301, 0.302, 0.900]
    prompts = [512, 128, 1024, 256, 2000, 64, 768, 768, 16, 1500]
    system = System(
        (instance("prefill", p, max_tokens=4096), instance("decode", OPT_13B)), 819_200.0, first_token_at="prefill"
    )
    run = simulate(system, load(arrivals_s, prompts, [4, 8, 3, 16, 2, 32, 5, 5, 1, 12]), ANY)
    told_ms = [53.548, 160.758, 150.758, 120.758, 220.059, 219.059, 167.279, 166.279, 165.278, 126.270]
    assert (run.ttft_s * 1e3).tolist() == pytest.approx(told_ms, abs=1e-3)


def test_one_request_alone_over_a_link_waits_for_its_kv():
    """512 x 819,200 B at half of them over a 2 GB/s link: 419.4 MB / 4 GB/s = 104.8576 ms, after 5 ms to set up."""
    paths = (KvPath(0, 1, 0.005, ((0, 0.5),)),)
    for sender, first_s in (("decode", 0.0721487 + 0.1098576), ("prefill", 0.0721487)):
        system = opt_13b(paths=paths, link_bytes_per_s=(2e9,), first_token_at=sender)
        run = simulate(system, load([0.0], 512, 64), ANY)
        assert run.ttft_s[0] == pytest.approx(first_s, abs=1e-7)
        assert run.pull_end_s[0] - run.prefill_end_s[0] == pytest.approx(0.1098576, abs=1e-8)
        assert run.link_bytes[0] == pytest.approx(512 * 819_200 / 2)


def test_a_request_of_one_token_ends_with_its_prefill():
    run = simulate(opt_13b(), load([1.0], 512, 1), ANY)
    assert run.finish_s[0] == run.first_token_s[0] == pytest.approx(1.0721487)
    assert np.isnan(run.tpot_s[0]) and run.decode_at[0] == -1 and run.steps.tolist() == [1, 0]


def test_one_request_alone_on_an_aggregated_instance_is_cut_into_chunks():
    """1000 tokens in chunks of 400, 400, 200; attended is each chunk's n^2 + 2 n k, 10^6 in all:
    3 x 10 ms + 1000 x 0.1 ms + 10^6 x 10 ns = 140 ms. Then 3 steps of 20 ms + 0.01 ms x context 1001, 1002, 1003."""
    one = instance("aggregated", law((0.01, 1e-4, 1e-8), (0.02, 0, 1e-5)), max_tokens=400)
    run = simulate(System((one,), 1.0), load([0.0], 1000, 4), ANY)
    assert run.ttft_s[0] == pytest.approx(0.140)
    assert run.finish_s[0] == pytest.approx(0.140 + 3 * 0.02 + 3006e-5)
    assert run.steps.tolist() == [6]


def test_decoding_requests_ride_along_with_a_chunk():
    """The second prompt's chunk shares its step with the first request's token: 10 ms + (99 + 1) x 0.1 ms, plus the KV
    reads of context 11, in a step that began when the first one's chunk (10 ms + 10 x 0.1 ms) ended."""
    one = instance("aggregated", law((0.01, 1e-4, 0), (0.005, 0, 1e-5)), max_tokens=100, plans_ahead=False)
    run = simulate(System((one,), 1.0), load([0.0, 0.001], [10, 99], [2, 1]), ANY)
    assert run.first_token_s[0] == pytest.approx(0.011)
    assert run.finish_s.tolist() == pytest.approx([0.011 + 0.02 + 11e-5] * 2)


def test_who_arrives_while_a_step_runs_is_in_the_step_after_the_next():
    """An engine that plans ahead has planned the first request's second token (5 ms + 11 x 0.01 ms) when the second
    request arrives: that one's prompt, 10 ms + 99 x 0.1 ms, runs in the step behind it."""
    one = instance("aggregated", law((0.01, 1e-4, 0), (0.005, 0, 1e-5)), max_tokens=100)
    run = simulate(System((one,), 1.0), load([0.0, 0.001], [10, 99], [2, 1]), ANY)
    assert run.finish_s.tolist() == pytest.approx([0.01611, 0.01611 + 0.0199])


def test_a_preempted_request_computes_anew_only_what_others_have_taken():
    """Blocks of one token, 12 of them; steps of 10 ms + 1 ms per token in those with a prompt; prompts of 4.

    0 .. 14     the older one's prompt (4 blocks)
    14 .. 29    the newer one's prompt (4) beside the older one's second token (5)
    29 .. 39    both (6 + 5 blocks)
    39 .. 49    they need 7 + 6 = 13: the newer one leaves, the older one has the last block that was free
    49 .. 59    the older one's fifth and last token: its block is the one given up first of the newer one's 5
    59 .. 71    4 of the newer one's 6 tokens are still there: the other 2 bring its third token
    71 .. 81    its fourth and last
    """
    one = instance("aggregated", law((0.01, 1e-3, 0), (0.01, 0, 0)), blocks=12, block_tokens=1, plans_ahead=False)
    run = simulate(System((one,), 1.0), load([0.0, 0.0], 4, [5, 4]), ANY)
    assert run.preemptions.tolist() == [1]
    assert run.finish_s.tolist() == pytest.approx([0.059, 0.081])


def test_a_prompt_waits_until_all_of_it_fits():
    """Ten blocks of one token, steps of 10 ms for 4 tokens at most. The first prompt (4) and its tokens hold 4, 5 and 6
    blocks. The second one (6) is not let in with a first chunk beside it, though that would fit: it starts at 30 ms."""
    one = instance(
        "aggregated", law((0.01, 0, 0), (0.01, 0, 0)), blocks=10, block_tokens=1, max_tokens=4, plans_ahead=False
    )
    run = simulate(System((one,), 1.0), load([0.0, 0.0], [4, 7], [3, 1]), ANY)
    assert run.prefill_start_s.tolist() == pytest.approx([0.0, 0.03])
    assert run.finish_s.tolist() == pytest.approx([0.03, 0.05])


def test_a_swap_costs_the_time_of_its_blocks_both_ways():
    """Blocks of 1 token, 12 of them, 1 ms each to swap; steps of 10 ms; two requests of prompt 4 and output 5.

    0 .. 10     the older one alone (5 blocks, then 6); the newer one has its 5 and joins at the next step
    10 .. 20    both; then they need 7 + 6 = 13: the newer one, which holds 5, goes out
    20 .. 35    the older one, behind 5 ms of copying
    35 .. 45    its fourth and last step
    45 .. 61    the newer one, behind 6 ms of copying: it needs 6 for the token that found no room
    61 .. 81    its last two steps
    """
    decode = instance(
        "decode", law(decode=(0.01, 0, 0)), blocks=12, block_tokens=1, max_batch=2, swap_bytes_per_s=1000.0
    )
    system = System((instance("prefill", law(), block_tokens=1), decode), 1.0)
    run = simulate(system, load([0.0, 0.0], 4, 5), ANY)
    assert run.preemptions.tolist() == [0, 1]
    assert run.finish_s.tolist() == pytest.approx([0.045, 0.081])


# ---- against the plain simulator


def differences(run: Run, reference: Reference, within_s: float = 1e-9) -> list[str]:
    """Say where the two simulators differ, by more than `within_s` in time or at all in a decision."""
    found = []
    for name in TIMES:
        told = np.array([getattr(job, name) for job in reference.jobs])
        if not np.allclose(getattr(run, name), told, rtol=0.0, atol=within_s, equal_nan=True):
            found.append(f"{name}: {getattr(run, name)} {told}")
    for name, rows in (("prefill_at", reference.jobs), ("decode_at", reference.jobs), ("steps", reference.boxes),
                       ("preemptions", reference.boxes), ("least_free_blocks", reference.boxes)):  # fmt: skip
        told = np.array([getattr(row, name) for row in rows])
        if not np.array_equal(getattr(run, name), told):
            found.append(f"{name}: {getattr(run, name)} {told}")
    for name in ("busy_s", "batch_s"):
        if not np.allclose(getattr(run, name), [getattr(box, name) for box in reference.boxes]):
            found.append(name)
    if not np.allclose(run.link_bytes, reference.link_bytes, rtol=1e-6, atol=1e-3):
        found.append(f"link_bytes: {run.link_bytes} {reference.link_bytes}")
    return found


@given(seeds)
@often
def test_equals_the_plain_simulator_request_by_request(seed):
    r = Random(seed)
    system, requests = random_system(r), random_requests(r)
    assert differences(simulate(system, requests, ANY), Reference(system, requests).run()) == []


@given(seeds)
@settings(sometimes, max_examples=25)
def test_equals_the_plain_simulator_on_longer_loads(seed):
    r = Random(seed)
    system, requests = random_system(r), random_requests(r, most=400)
    assert differences(simulate(system, requests, ANY), Reference(system, requests).run()) == []


def test_the_random_clusters_do_meet_what_they_are_for():
    """Preemption by swap and by recompute, waiting for blocks on both sides, pipelines, refusals, shared links."""
    swapped = recomputed = refused = short_of_blocks = shared = waited = 0
    for seed in range(1000):
        r = Random(seed)
        system, requests = random_system(r), random_requests(r)
        run = simulate(system, requests, ANY)
        phases = np.array([i.phase for i in system.instances])
        swapped += int(run.preemptions[phases == "decode"].sum())
        recomputed += int(run.preemptions[phases == "aggregated"].sum())
        refused += int((run.prefill_at < 0).sum())
        short_of_blocks += int((run.least_free_blocks == 0).sum())
        shared += int((run.link_bytes > 0).sum())
        waited += int((run.pull_start_s > run.prefill_end_s + 1e-6).sum())
    assert min(swapped, recomputed, refused, short_of_blocks, shared, waited) > 50


@given(seeds)
@often
def test_a_decode_loop_equals_the_plain_one_request_by_request(seed):
    r = Random(seed)
    system, requests = random_loop(r), random_requests(r)
    assert differences(simulate(system, requests, ANY), DecodeLoop(system, requests).run()) == []


def test_the_random_decode_loops_do_meet_what_they_are_for():
    """Swapping, back-pressure, and with several stages both one batch that holds everyone and several that share."""
    swapped = waited = pipelined = 0
    for seed in range(300):
        r = Random(seed)
        system, requests = random_loop(r), random_requests(r)
        run = simulate(system, requests, ANY)
        swapped += int(run.preemptions.sum())
        waited += int((run.pull_start_s > run.prefill_end_s + 0.05).sum())
        pipelined += len(system.instances[1].cost.stage_share) > 1
    assert min(swapped, waited, pipelined) > 100


# ---- invariants


@given(seeds)
@often
def test_everything_is_given_back_and_everybody_is_served_once(seed):
    r = Random(seed)
    system, requests = random_system(r), random_requests(r)
    world = cluster._world(system, requests, ANY, 0.0, False)
    events = cluster._run(world)
    run = cluster._result(system, world, requests, events)
    served = run.prefill_at >= 0
    assert np.array_equal(np.isfinite(run.finish_s), served)
    assert np.array_equal(world.instance["free_blocks"], world.instance["blocks"])
    assert (world.instance["least_free_blocks"] >= 0).all()
    for name in ("pulls", "waiting_blocks", "queued_s"):
        assert (world.instance[name] == 0).all(), name
    decodes = world.instance["phase"] != cluster.PREFILL
    assert (world.instance["members"][decodes] == 0).all()
    for name in ("running", "context", "in_flight"):
        assert (world.lane[name] == 0).all(), name
    assert (world.residue == 0).all() and (world.due == -1).all() and (world.queue["size"] == 0).all()
    assert world.scalar["flows"][0] == world.scalar["events"][0] == world.scalar["waiting_pulls"][0] == 0
    assert (requests.output_tokens[run.decode_at >= 0] > 1).all()


@given(seeds)
@often
def test_causes_come_before_effects_and_the_terms_add_up(seed):
    r = Random(seed)
    system, requests = random_system(r), random_requests(r)
    run = simulate(system, requests, ANY)
    chain = [requests.arrival_s, run.prefill_start_s, run.prefill_end_s]
    pulled = run.decode_at >= 0
    for earlier, later in pairwise(chain):
        assert (later >= earlier)[run.prefill_at >= 0].all()
    chain = [run.prefill_end_s, run.pull_start_s, run.pull_end_s, run.first_step_s, run.finish_s]
    for earlier, later in pairwise(chain):
        assert (later >= earlier)[pulled].all()
    sent = np.zeros(len(run.link_bytes))
    paths = {(path.source, path.target): path for path in system.paths or ()}
    for r_, (p, d) in enumerate(zip(run.prefill_at.tolist(), run.decode_at.tolist(), strict=True)):
        for link, share in paths[p, d].shares if (p, d) in paths else ():
            sent[link] += share * system.kv_bytes_per_token * requests.prompt_tokens[r_]
    assert np.allclose(run.link_bytes, sent, rtol=1e-6, atol=1e-3)
    if np.isfinite(run.ttft_s).any():
        told = latencies([run])
        terms_s = (told.queue, told.prefill, told.handoff, told.first_decode_wait)
        assert sum(term.mean_s for term in terms_s) == pytest.approx(told.ttft.mean_s)


@given(seeds)
@sometimes
def test_the_same_input_gives_the_same_bytes(seed):
    runs = [simulate(random_system(Random(seed)), random_requests(Random(seed + 1)), ANY) for _ in range(2)]
    for field in dataclasses.fields(Run):
        first, second = (getattr(run, field.name) for run in runs)
        if isinstance(first, np.ndarray):
            assert first.tobytes() == second.tobytes(), field.name


@given(seeds, st.sampled_from([0.3, 0.9]))
@often
def test_stopping_early_changes_only_what_fails(seed, target):
    r = Random(seed)
    system, requests = random_system(r), random_requests(r)
    slos = (
        Slo(ttft_s=10 ** r.uniform(-2, 0), tpot_s=10 ** r.uniform(-2, -1), attainment=target),
        Slo(ttft_s=1.0, tpot_s=0.1, attainment=0.5, tpot_definition="inclusive"),
    )
    classes = np.array([int(r.random() < 0.4) for _ in range(len(requests))])
    requests = dataclasses.replace(requests, slo_class=classes)
    warmup_s = float(r.choice([0.0, requests.arrival_s[-1] / 4]))
    whole = simulate(system, requests, slos, warmup_s)
    short = simulate(system, requests, slos, warmup_s, stop_when_missed=True)
    passes = margin([whole], slos, warmup_s) >= -1e-12
    assert short.stopped_early == (not passes)
    assert not whole.stopped_early
    if passes:
        assert all(np.array_equal(getattr(whole, name), getattr(short, name), equal_nan=True) for name in TIMES)


def test_work_is_conserved():
    """One decode instance that is never idle makes (output - 1) tokens per request, whatever the batches."""
    outputs = np.random.default_rng(1).integers(1, 80, 400)
    outputs[0] = 1  # it has the first prefill batch to itself
    run = simulate(opt_13b(), load(np.zeros(400), 100, outputs), ANY)
    batch_step_s = 0.019934702624895457
    assert run.busy_s[1] >= batch_step_s * run.steps[1]
    assert run.busy_s[1] == pytest.approx(run.finish_s.max() - run.first_step_s[outputs > 1].min())
    tokens = (outputs - 1).sum()
    contexts = sum(sum(range(101, 101 + n - 1)) for n in outputs.tolist())
    assert run.busy_s[1] == pytest.approx(
        batch_step_s * run.steps[1] + 3.850697740828398e-05 * tokens + 6.269356524350583e-07 * contexts
    )


# ---- edges


def test_a_request_that_nobody_can_ever_hold_is_refused_and_misses():
    """Decode has 8 blocks of 16: prompt + output of 128 fits, 129 does not. Prefill needs room for the prompt alone."""
    system = System((instance("prefill", OPT_13B, blocks=5), instance("decode", OPT_13B, blocks=8)), 1.0)
    run = simulate(system, load([0.0, 0.1, 0.2, 0.3, 0.4], [64, 64, 81, 80, 80], [64, 65, 2, 48, 1]), ANY)
    assert np.isfinite(run.finish_s).tolist() == [True, False, False, True, True]
    assert attained(run, ANY).tolist() == [True, False, False, True, True]


def test_a_small_instance_does_not_keep_others_from_a_long_request():
    """Two decode and two aggregated instances, only one of each roomy enough for 200 tokens."""
    small, large = (instance("decode", OPT_13B, blocks=n) for n in (10, 40))
    run = simulate(System((instance("prefill", OPT_13B), small, large), 1.0), load(np.zeros(6), [20, 150] * 3, 50), ANY)
    assert np.isfinite(run.finish_s).all() and (run.decode_at[1::2] == 2).all()
    small, large = (instance("aggregated", OPT_13B, blocks=n) for n in (10, 40))
    run = simulate(System((small, large), 1.0), load(np.zeros(6), [20, 150] * 3, 50), ANY)
    assert np.isfinite(run.finish_s).all() and (run.prefill_at[1::2] == 1).all()


def test_without_a_decode_instance_in_reach_longer_requests_are_refused():
    lonely = System((instance("prefill", OPT_13B), instance("decode", OPT_13B)), 1.0, paths=())
    run = simulate(lonely, load([0.0, 1.0], 100, [1, 2]), ANY)
    assert np.isfinite(run.finish_s).tolist() == [True, False]


def test_an_empty_load_is_an_empty_run():
    run = simulate(opt_13b(), load([]), ANY)
    assert len(run.finish_s) == 0 and run.events == 0 and not run.stopped_early
    assert attainment([run], ANY) == (1.0,)
    assert binding_term([run], ANY) == ("TTFT", 0.0, 0.0)
    assert np.isnan(latencies([run]).ttft.mean_s)
    assert load_of([run], [0], [10]).busy == 0.0


def test_overload_ends_with_everybody_served():
    """Ten times what one instance can do, little room, pulls over a thin link: it takes long but it ends."""
    paths = (KvPath(0, 1, 0.001, ((0, 1.0),)),)
    system = System(
        (instance("prefill", OPT_13B, blocks=200), instance("decode", OPT_13B, blocks=200)), 819_200.0, paths, (1e9,)
    )
    run = simulate(system, load(poisson(50.0, 2000), 500, 50), ANY)
    assert np.isfinite(run.finish_s).all() and run.least_free_blocks.min() >= 0
    assert attainment([run], ANY)[0] < 0.05


def test_idle_lanes_take_over_when_another_lane_lets_go_of_blocks():
    """Two lanes of two seats and four blocks of 5 tokens: one long prompt, or four short ones. While the long one runs
    in lane 0, four short ones wait; when it ends both lanes must take of them, two each: all four have their token two
    (overlapping) steps later, not four."""
    one = instance(
        "aggregated", law((0.1, 0, 0), (0.1, 0, 0)), shares=(0.5, 0.5), blocks=4, block_tokens=5, max_batch=4
    )
    run = simulate(System((one,), 1.0), load([0.0] + [0.01] * 4, [18, 5, 5, 5, 5], [2, 1, 1, 1, 1]), ANY)
    first_s = np.sort(run.first_token_s[1:] - run.finish_s[0])
    assert first_s == pytest.approx([0.1, 0.1, 0.15, 0.15])


# ---- what a run says


def test_each_class_is_held_to_its_own_slo():
    """Alone, each request has TTFT 72 ms and TPOT 20.3 ms; class 1 asks for 50 ms, class 2 counts the TTFT in."""
    slos = (
        Slo(ttft_s=0.1, tpot_s=0.03), Slo(ttft_s=0.05, tpot_s=0.03),
        Slo(ttft_s=0.1, tpot_s=0.021, tpot_definition="inclusive"),
    )  # fmt: skip
    requests = dataclasses.replace(load(np.arange(6) * 10.0, 512, 64), slo_class=np.array([0, 1, 2, 0, 1, 0]))
    run = simulate(opt_13b(), requests, slos)
    # inclusive: (72.15 + 63 x 20.31) / 64 = 21.12 ms > 21 ms
    assert attainment([run], slos) == (1.0, 0.0, 0.0)
    assert attainment([run], slos, warmup_s=45.0) == (1.0, 1.0, 1.0)
    assert margin([run], slos) == pytest.approx(-0.9)
    assert binding_term([run], slos) == ("TTFT", pytest.approx(2 / 6), pytest.approx(1 / 6))


def test_a_first_token_sent_by_prefill_leaves_the_hand_off_out_of_ttft():
    run = simulate(opt_13b(first_token_at="prefill"), load(poisson(5.0, 200), 300, 20), ANY)
    told = latencies([run])
    assert told.handoff.mean_s == told.first_decode_wait.mean_s == 0.0
    assert told.queue.mean_s + told.prefill.mean_s == pytest.approx(told.ttft.mean_s)
