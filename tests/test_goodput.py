"""Goodput by bisection, the saturation bound, pools, and the joint search against looking at everything."""

from __future__ import annotations

import dataclasses
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.base import CostModel
from planner.cost.kernel import FAMILY, ROOFLINE, SIZE
from planner.search.goodput import Trial, bisect, classify, goodput_rps, pool, replicated
from planner.search.joint import Combination, Space, aggregated, disaggregated, fewest_gpus, largest, most_goodput
from planner.search.layouts import Kind
from planner.search.pools import first_token_only, pool_rps
from planner.search.saturation import saturation_rps
from planner.simulator.cluster import Instance, Limits, System, simulate
from planner.specs.layout import Layout, Phase
from planner.specs.slo import Slo
from planner.specs.workload import ArrivalProcess, Workload, WorkloadSpec, make_requests, make_workload

ROOMY = 1 << 30


def lengths(prompts: object, outputs: object, arrivals: ArrivalProcess = "poisson") -> Workload:
    table = make_requests(np.zeros(np.size(prompts)), np.atleast_1d(prompts), np.atleast_1d(outputs))  # type: ignore[arg-type]
    return make_workload("made", WorkloadSpec(source="lengths", arrivals=arrivals), table, (), "")


def chat(seed: int = 0, rows: int = 300) -> Workload:
    """Prompts around 250 and outputs around 60, both with a tail."""
    rng = np.random.default_rng(seed)
    prompts = np.minimum(np.exp(rng.normal(5.5, 0.8, rows)), 2000).astype(np.int64) + 1
    return lengths(prompts, np.minimum(np.exp(rng.normal(4.0, 0.7, rows)), 300).astype(np.int64) + 1)


def law(prefill: tuple[float, float, float], decode: tuple[float, float, float] = (0, 0, 0)) -> np.ndarray:
    p = np.zeros(SIZE)
    p[1:4], p[4:7], p[7:10] = prefill, decode, decode
    return p


def kind(
    phase: Phase, p: np.ndarray, tp: int = 1, pp: int = 1, *, max_batch: int = 256, max_tokens: int = 2048,
    blocks: int = 20_000,
) -> Kind:  # fmt: skip
    cost = CostModel(Layout(tp, pp), p, (1 / pp,) * pp)
    return Kind(phase, Layout(tp, pp), "gpu", cost, Limits(max_batch, max_tokens, blocks))


def constant_service(service_s: float) -> System:
    cost = CostModel(Layout(1), law((service_s, 0, 0)))
    return System((Instance("prefill", cost, Limits(1, ROOMY, ROOMY)),), 1.0)


# ---- bisection


@given(st.floats(-2.5, 6), st.floats(-4, 6), st.floats(0.001, 2), st.sampled_from([0.001, 0.01, 0.1]))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_bisection_finds_the_threshold_from_any_guess(where, guess, width, precision):
    threshold, low = 10.0**where, 10.0**guess
    found = bisect(lambda rate: rate <= threshold, low, low * 10.0**width, precision)
    assert threshold / (1 + precision) * (1 - 1e-12) <= found <= threshold


def test_bisection_ends_when_nothing_or_everything_passes():
    assert bisect(lambda _: False, 1.0, 2.0, 0.01) == 0.0
    assert 1e8 < bisect(lambda _: True, 1.0, 2.0, 0.01) < inf


# ---- goodput


def test_goodput_of_a_queue_is_where_its_exact_waits_say():
    """One server of 50 ms, TTFT within 150 ms for 90 %: the waits follow from the arrivals alone (Lindley)."""
    workload = lengths(100, 1)
    trial = Trial(workload, (Slo(ttft_s=0.15, tpot_s=1.0),), 600.0)
    found = goodput_rps(trial, constant_service(0.05), 5.0, precision=0.005)

    def attained(rate_rps: float) -> float:
        arrival_s = workload.generate(rate_rps, 600.0, 0).arrival_s
        ahead_s = np.arange(len(arrival_s)) * 0.05 - arrival_s
        ttft_s = ahead_s - np.minimum.accumulate(ahead_s) + 0.05
        return float((ttft_s[arrival_s >= 90.0] <= 0.15).mean())  # the first 15 % of the time are not counted

    assert attained(found) >= 0.9 > attained(found * 1.0051)


@pytest.mark.parametrize("servers", [1, 4])
def test_under_common_random_numbers_every_wait_grows_with_the_rate(servers):
    """Request i has the same lengths at every rate, and arrives earlier after the same others: it waits longer."""
    one = kind("prefill", law((0.01, 1e-4, 0)), max_batch=1)
    system, workload = pool([(one, servers)], 1.0), chat()
    waits = []
    for rate_rps in (3.0, 6.0, 12.0, 24.0):
        requests = first_token_only(workload).generate(rate_rps * servers, 3000 / rate_rps / servers, 5)
        run = simulate(system, requests, (Slo(ttft_s=1.0, tpot_s=1.0),))
        waits.append((run.prefill_start_s - requests.arrival_s)[:2900])
    assert (np.diff(waits, axis=0) >= -1e-9).all()


@pytest.mark.parametrize("duration_s", [60.0, 300.0])
@pytest.mark.parametrize("seed", range(3))
def test_an_slo_that_nobody_can_meet_has_no_goodput(duration_s, seed):
    """Not even at a rate where, by luck, nobody arrives in the time that is counted."""
    trial = Trial(lengths(100, 1), (Slo(ttft_s=0.1, tpot_s=1.0),), duration_s, seed)
    assert goodput_rps(trial, constant_service(0.5), 1.0) == 0.0


def test_an_slo_that_too_few_can_meet_has_no_goodput():
    """15 % of the prompts take 2 s, beyond the bound at any load; five lucky short ones in a row prove nothing."""
    system = pool([(kind("prefill", law((0, 0.001, 0))), 1)], 1.0)
    trial = Trial(lengths([100] * 17 + [2000] * 3, [1] * 20), (Slo(ttft_s=1.0, tpot_s=1.0),), 100.0)
    assert goodput_rps(trial, system, 1.0) == 0.0


def test_a_run_cut_short_does_not_pass_because_nobody_is_counted():
    """2000 requests at most; at a high rate they all arrive within what was the warm-up. Service 0.5 s bounds it."""
    trial = Trial(lengths(100, 1), (Slo(ttft_s=1.0, tpot_s=1.0),), 3e5, most_requests=2000)
    assert 0.5 < goodput_rps(trial, constant_service(0.5), 1.0) < 2.0


def test_the_claim_over_seeds_meets_the_target_on_average():
    trial = Trial(lengths(100, 1), (Slo(ttft_s=0.15, tpot_s=1.0),), 200.0)
    system = constant_service(0.05)
    rate = replicated(trial, system, 10.0, range(4))
    assert rate.low_rps < rate.goodput_rps < rate.high_rps
    margins = [trial.with_seed(seed).margin(system, rate.goodput_rps) for seed in range(4)]
    assert rate.margin >= 0.0 and max(margins) >= 0.0
    assert rate == replicated(trial, system, 10.0, range(4))
    longer = replicated(dataclasses.replace(trial, duration_s=4000.0), system, 10.0, range(4))
    assert rate.low_rps * 0.97 < longer.goodput_rps < rate.high_rps * 1.03
    assert longer.width < rate.width


def test_classes_are_dealt_by_their_shares_and_each_must_attain():
    slos = tuple(Slo(ttft_s=t, tpot_s=1.0, share=share) for t, share in ((1.0, 0.25), (0.2, None), (0.4, None)))
    requests = classify(make_requests(np.arange(40_000.0), *np.ones((2, 40_000), np.int64)), slos, 3)
    assert np.bincount(requests.slo_class) / 40_000 == pytest.approx([0.25, 0.375, 0.375], abs=0.01)
    system = constant_service(0.05)
    loose, tight = (Slo(ttft_s=t, tpot_s=1.0, share=0.5) for t in (1.0, 0.12))
    alone = goodput_rps(Trial(lengths(100, 1), (tight,), 400.0), system, 10.0)
    both = goodput_rps(Trial(lengths(100, 1), (loose, tight), 400.0), system, 10.0)
    assert both == pytest.approx(alone, rel=0.05)  # one queue: the tighter class binds, on half of the sample


# ---- saturation


def random_law(rng: np.random.Generator) -> np.ndarray:
    p = np.zeros(SIZE)
    if rng.random() < 0.5:
        p[1:4] = rng.uniform((1e-3, 1e-5, 0), (0.02, 2e-4, 2e-8))
        p[4:7] = p[7:10] = rng.uniform((5e-3, 0, 0), (0.03, 3e-4, 1e-6))
        if rng.random() < 0.5:  # a second regime, from some batch size on
            p[7:9], p[10] = p[4:6] * rng.uniform((0.3, 1), (1, 3)), rng.integers(2, 200)
        return p
    p[FAMILY], p[3] = ROOFLINE, rng.uniform(2, 8)
    p[1:3] = rng.uniform(0, (0.01, 0.005))
    p[4:8] = rng.uniform((1e-5, 0, 0, 2e-3), (2e-4, 2e-8, 1e-5, 0.03))
    p[8:11] = rng.uniform((0, 0.02, 0), (0.05, 0.3, 1e-6))
    return p


def random_kind(rng: np.random.Generator, phase: Phase, longest: int) -> Kind:
    weights = rng.uniform(0.8, 1.2, rng.integers(1, 4))
    cost = CostModel(Layout(1, len(weights)), random_law(rng), tuple((weights / weights.sum()).tolist()))
    blocks = longest // 16 + 1 + int(rng.integers(0, 100) if rng.random() < 0.4 else rng.integers(100, 5000))
    limits = Limits(int(rng.choice([4, 32, 256])), int(rng.choice([256, 512, 2048])), blocks)
    return Kind(phase, cost.layout, "gpu", cost, limits)


def alone(one: Kind, count: int) -> System:
    """A pool of one phase, the other one for free."""
    instances = [one.instance()] * count
    if one.phase == "decode":
        instances.append(Instance("prefill", CostModel(Layout(1), np.zeros(SIZE)), Limits(ROOMY, ROOMY, ROOMY)))
    return System(tuple(instances), 1.0)


@pytest.mark.parametrize("phase", ["prefill", "decode", "aggregated"])
def test_nothing_attains_its_slo_beyond_saturation(phase):
    """At 1.08 times saturation, whatever the law, lengths, KV blocks, pipeline and SLO; 8 % are the luck of a run."""
    tried = 0
    for seed in range(40):
        rng = np.random.default_rng([seed, len(phase)])
        workload = chat(seed) if seed % 3 else lengths(int(rng.integers(20, 1500)), int(rng.integers(2, 200)))
        if phase == "prefill":
            workload = first_token_only(workload)
        longest = int((workload.table.prompt_tokens + workload.table.output_tokens).max())
        one, count = random_kind(rng, phase, longest), int(rng.choice([1, 4]))
        ttft_s, tpot_s = 10 ** rng.uniform(-0.7, 0.3), 10 ** rng.uniform(-1.5, -0.3)
        slo = Slo(ttft_s=ttft_s, tpot_s=tpot_s, attainment=float(rng.choice([0.5, 0.9, 0.99])))
        bound_rps = saturation_rps(one, workload, (slo,)) * count
        life_s = float(workload.table.output_tokens.max()) * tpot_s
        duration_s = max(10 * life_s, 3000 / bound_rps, 60 * ttft_s) if bound_rps > 0 else inf
        if duration_s * bound_rps < 20_000:
            tried += 1
            assert Trial(workload, (slo,), duration_s, seed).margin(alone(one, count), 1.08 * bound_rps) < 0, seed
    assert tried >= 20


def test_saturation_of_constant_lengths_by_hand():
    """Prefill: 2048 tokens hold 4 prompts of 512: (10 + 204.8) ms per 4. Decode: 99 steps of 20 ms + 0.1 ms x B, with B
    = 256: 45.6 ms; or B = 100 at most within a TPOT of 30 ms, which 90 % have to attain. Aggregated: 512 tokens per
    prompt at (10 + 51.2) ms, which allows less than decode does.
    """
    workload, p = lengths(512, 100), law((0.01, 1e-4, 0), (0.02, 1e-4, 0))
    loose, tight = (Slo(ttft_s=1.0, tpot_s=t) for t in (0.1, 0.03))
    assert saturation_rps(kind("prefill", p), workload, (loose,)) == pytest.approx(4 / 0.2148)
    decode = kind("decode", p)
    assert saturation_rps(decode, workload, (loose,)) == pytest.approx(256 / 0.0456 / 99)
    assert saturation_rps(decode, workload, (tight,)) == pytest.approx(100 / 0.03 / 0.9 / 99, rel=0.03)
    assert saturation_rps(decode, workload, (Slo(ttft_s=1.0, tpot_s=0.02),)) == 0.0
    assert saturation_rps(decode, lengths(512, 1), (loose,)) == inf
    one = kind("aggregated", p, max_tokens=512)
    assert saturation_rps(one, workload, (loose,)) == pytest.approx(1 / 0.0612)


def test_a_law_that_gets_worse_from_some_batch_on_is_bounded_by_its_best_batch():
    """20 ms for up to 31 requests, and 20 ms + 2 ms x B from 32 on: the bound is that of 31, not that of 256."""
    p = law((0, 0, 0), (0.02, 0, 0))
    p[8], p[10] = 0.002, 32
    slo = Slo(ttft_s=1.0, tpot_s=0.9)
    bound_rps = saturation_rps(kind("decode", p), lengths(100, 20), (slo,))
    assert 31 / 0.02 / 19 <= bound_rps < 32.1 / 0.02 / 19
    trial = Trial(lengths(100, 20), (slo,), 200.0)
    assert trial.margin(alone(kind("decode", p), 1), 0.5 * bound_rps) >= 0


# ---- pools


def test_a_pool_serves_at_least_as_much_per_instance_as_one_alone():
    slos = (Slo(ttft_s=0.3, tpot_s=0.05),)
    trial = Trial(chat(), slos, 300.0)
    p = law((0.01, 1.5e-4, 2e-9), (0.015, 2e-4, 5e-7))
    for phase in ("prefill", "decode", "aggregated"):
        one = kind(phase, p, max_tokens=512)  # type: ignore[arg-type]
        bound_rps = saturation_rps(one, trial.workload, slos)
        rates = [pool_rps(trial, one, count, bound_rps, {"kv_bytes_per_token": 1.0}) for count in (1, 2, 4)]
        assert 0 < rates[0] <= rates[1] * 1.03 <= rates[2] * 1.06, phase
        assert max(rates) <= bound_rps * 1.05


# ---- the joint search


PREFILL = (kind("prefill", law((0.012, 1.6e-4, 3e-9)), 1), kind("prefill", law((0.010, 0.9e-4, 2e-9)), 2))
DECODE = (
    kind("decode", law((0, 0, 0), (0.016, 2e-4, 6e-7)), 1),
    kind("decode", law((0, 0, 0), (0.011, 1.2e-4, 3.4e-7)), 2, blocks=60_000),
)
AGGREGATED = (kind("aggregated", law((0.012, 1.6e-4, 3e-9), (0.016, 2e-4, 6e-7)), 1, max_tokens=512),)
SLOS = (Slo(ttft_s=0.25, tpot_s=0.06),)


def saturations(workload: Workload) -> dict[Kind, float]:
    return {one: saturation_rps(one, workload, SLOS) for one in (*PREFILL, *DECODE, *AGGREGATED)}


@pytest.mark.parametrize("gpus", [4, 6])
def test_the_joint_search_finds_what_looking_at_everything_finds(gpus):
    workload = chat()
    trial = Trial(workload, SLOS, 120.0)
    combinations = largest(
        disaggregated(PREFILL, DECODE, saturations(workload), Space({"gpu": gpus}, {"gpu": (gpus,)}))
    )
    every = {
        str(one): goodput_rps(trial, pool(one.kinds, 1.0), one.bound_rps / 2, precision=0.01) for one in combinations
    }
    found = most_goodput(trial, combinations, free, precision=0.01, keep=1)
    best = max(every.values())
    assert found[0].goodput_rps == pytest.approx(best, rel=0.02)
    assert every[str(found[0].combination)] >= best * 0.98
    several = most_goodput(trial, combinations, free, precision=0.01, keep=4)
    expected = sorted(every.values(), reverse=True)[:4]
    assert [one.goodput_rps for one in several[:4]] == pytest.approx(expected, rel=0.025)
    assert found[0].goodput_rps <= found[0].combination.bound_rps * 1.02


def free(one: Combination) -> System:
    """Return the combination on a free network."""
    return pool(one.kinds, 1.0)


def test_the_search_may_find_nothing():
    workload = chat()
    hopeless = (Slo(ttft_s=0.005, tpot_s=0.06),)
    combinations = disaggregated(PREFILL, DECODE, saturations(workload), Space({"gpu": 3}, {"gpu": (3,)}))
    assert most_goodput(Trial(workload, hopeless, 60.0), largest(combinations), free) == []


def test_every_pair_of_counts_that_fits_is_there_once():
    """On 4 GPUs, p of a GPUs and d of b GPUs with p a + d b <= 4: 6 pairs for (a, b) = (1, 1), 2 each for (1, 2) and
    (2, 1), and 1 for (2, 2).
    """
    space = Space({"gpu": 4}, {"gpu": (4,)})
    found = disaggregated(PREFILL, DECODE, saturations(chat()), space)
    assert len(found) == len({str(one) for one in found}) == 11
    assert all(2 <= one.gpus <= 4 for one in found)
    assert [one.gpus for one in aggregated(AGGREGATED, saturations(chat()), space)] == [1, 2, 3, 4]


def test_a_tensor_parallel_group_must_fit_into_a_unit():
    """Two nodes of 3 GPUs hold one TP2 group each, and six of TP1."""
    space = Space({"gpu": 6}, {"gpu": (3, 3)})
    assert space.most(PREFILL[1]) == 2 and space.most(PREFILL[0]) == 6
    assert space.most(PREFILL[0], free=2) == 2 and space.most(PREFILL[1], free=3) == 1


def test_the_largest_are_those_that_no_instance_can_be_added_to():
    space = Space({"gpu": 5}, {"gpu": (5,)})
    found = disaggregated(PREFILL, DECODE, saturations(chat()), space)
    kept = {str(one) for one in largest(found)}

    def grows(one: Combination) -> bool:
        """Some other combination has the same kinds, as many of each, and one more of one."""
        counts = dict(one.kinds)
        others = (dict(other.kinds) for other in found if dict(other.kinds).keys() == counts.keys())
        return any(
            all(other[k] >= counts[k] for k in counts) and sum(other.values()) == sum(counts.values()) + 1
            for other in others
        )

    assert kept == {str(one) for one in found if not grows(one)}
    assert [one.gpus for one in largest(aggregated(AGGREGATED, saturations(chat()), space))] == [5]


def test_fewest_gpus_come_first_and_all_of_them_serve_the_load():
    workload = chat()
    trial = Trial(workload, SLOS, 120.0)
    combinations = disaggregated(PREFILL, DECODE, saturations(workload), Space({"gpu": 6}, {"gpu": (6,)}))
    found = list(fewest_gpus(trial, combinations, 9.0, 9.0, free))
    gpus = [one.combination.gpus for one in found]
    assert gpus == sorted(gpus) and gpus
    assert all(trial.margin(pool(one.combination.kinds, 1.0), 9.0) >= 0 for one in found)
    fewer = [one for one in combinations if one.gpus < gpus[0]]
    assert fewer and all(trial.margin(pool(one.kinds, 1.0), 9.0) < 0 for one in fewer)
