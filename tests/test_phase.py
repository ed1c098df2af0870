"""The fast path for pools without contention against the cluster simulator, request by request and bit by bit."""

from __future__ import annotations

import dataclasses
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import kernel
from planner.simulator import cluster, phase
from planner.simulator.cluster import Instance, KvPath, Limits, LoopPulls, Run, System
from planner.simulator.metrics import margin
from planner.specs.slo import Slo
from planner.specs.workload import Requests
from tests.reference_simulator import Reference, random_requests, random_system
from tests.test_simulator import ANY, OPT_13B, TIMES, instance, law, load, opt_13b, poisson

seeds = st.integers(0, 10**9)
often = settings(max_examples=400, deadline=None, derandomize=True, database=None)
TOLD = (*TIMES, "first_token_s", "prefill_at", "decode_at", "busy_s", "batch_s", "steps", "preemptions",
        "least_free_blocks", "link_bytes", "stopped_early")  # fmt: skip


def pools(r: Random) -> System:
    """Return a random system of prefill and decode instances, with links or transfers of a fixed time, often none."""
    system = random_system(r)
    while any(one.phase == "aggregated" for one in system.instances):
        system = random_system(r)
    if r.random() < 0.4:
        return system
    fixed_s = r.choice([0.0, r.uniform(0, 0.02)])
    paths = tuple(dataclasses.replace(path, shares=(), fixed_s=fixed_s) for path in system.paths or ())
    return dataclasses.replace(system, paths=r.choice([None, paths]), link_bytes_per_s=())


def roomy(system: System) -> System:
    """Return the system with KV blocks for everybody, and places as few as before."""
    many = tuple(
        dataclasses.replace(i, limits=dataclasses.replace(i.limits, kv_blocks=1 << 20)) for i in system.instances
    )
    return dataclasses.replace(system, instances=many)


def differences(run: Run, other: Run) -> list[str]:
    """Name the figures in which two runs differ, be it by the last bit."""
    return [
        name for name in TOLD if np.asarray(getattr(run, name)).tobytes() != np.asarray(getattr(other, name)).tobytes()
    ]


@given(seeds)
@often
def test_gives_what_the_cluster_simulator_gives_to_the_last_bit_or_says_that_it_cannot(seed):
    r = Random(seed)
    system, requests = pools(r), random_requests(r)
    fast, whole = phase.simulate_phases(system, requests, ANY), cluster.simulate(system, requests, ANY)
    if whole.preemptions.any():
        assert fast is None
    else:
        assert fast is not None and differences(fast, whole) == []


@given(seeds)
@often
def test_agrees_with_the_plain_simulator_within_a_microsecond(seed):
    r = Random(seed)
    system, requests = roomy(pools(r)), random_requests(r)
    fast, plain = phase.simulate_phases(system, requests, ANY), Reference(system, requests).run()
    assert fast is not None
    for name in TIMES:
        told = np.array([getattr(job, name) for job in plain.jobs])
        assert np.allclose(getattr(fast, name), told, rtol=0.0, atol=1e-6, equal_nan=True), name


@given(seeds)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_gives_the_same_on_longer_loads(seed):
    r = Random(seed)
    system, requests = pools(r), random_requests(r, most=2000)
    fast, whole = phase.simulate_phases(system, requests, ANY), cluster.simulate(system, requests, ANY)
    assert (fast is None) == bool(whole.preemptions.any())
    assert fast is None or differences(fast, whole) == []


def test_the_random_pools_do_meet_what_they_are_for():
    """Preemption, refusals, pipelines on both sides, waiting for blocks on the decode side and, for that, before it."""
    left = refused = deep = waited = starved = shared = 0
    for seed in range(400):
        r = Random(seed)
        system, requests = pools(r), random_requests(r)
        run = phase.simulate_phases(system, requests, ANY)
        if run is None:
            left += 1
            continue
        decodes = np.array([i.phase == "decode" for i in system.instances])
        refused += int((run.prefill_at < 0).any())
        deep += any(len(i.cost.stage_share) > 1 and i.phase == "decode" for i in system.instances)
        waited += int((run.pull_start_s > run.prefill_end_s).any())
        starved += int((run.least_free_blocks[~decodes] == 0).any())
        shared += int((run.link_bytes > 0).any())
    assert min(left, refused, deep, waited, starved, shared) > 25, (left, refused, deep, waited, starved, shared)


@given(seeds, st.sampled_from([0.3, 0.9]))
@often
def test_stopping_early_gives_the_same_verdict(seed, target):
    r = Random(seed)
    system, requests = pools(r), random_requests(r)
    slos = (
        Slo(ttft_s=10 ** r.uniform(-2, 0), tpot_s=10 ** r.uniform(-2, -1), attainment=target),
        Slo(ttft_s=1.0, tpot_s=0.1, attainment=0.5, tpot_definition="inclusive"),
    )
    requests = dataclasses.replace(requests, slo_class=np.array([int(r.random() < 0.4) for _ in range(len(requests))]))
    warmup_s = float(r.choice([0.0, requests.arrival_s[-1] / 4]))
    whole = cluster.simulate(system, requests, slos, warmup_s)
    short = phase.simulate(system, requests, slos, warmup_s, stop_when_missed=True)
    passes = margin([whole], slos, warmup_s) >= -1e-12
    assert short.stopped_early == (not passes)
    assert not passes or differences(short, whole) == []


def test_bursts_of_equal_requests_tie_alike():
    """Everything at once and of one size: steps, batches and arrivals that coincide keep their order."""
    constant = law((0.25, 0, 0), (0.125, 0, 0))
    system = System(
        (instance("prefill", constant, max_batch=3), instance("decode", constant, max_batch=2)) * 3, 1.0, max_pulls=1
    )
    requests = load(np.repeat(np.arange(40) * 0.5, 7), 16, 9)
    fast, whole = phase.simulate_phases(system, requests, ANY), cluster.simulate(system, requests, ANY)
    assert fast is not None and differences(fast, whole) == []


def test_prompts_that_take_no_time_are_handed_on_after_the_steps_of_that_instant():
    """As in a pool of decode instances alone, where prompts appear ready; arrivals fall onto the ends of steps."""
    decode = instance("decode", law(decode=(0.25, 0, 0)), max_batch=2)
    system = System((instance("prefill", law()), decode, decode), 1.0)
    requests = load(np.arange(60) * 0.125, 16, [2, 5, 3] * 20)
    fast, whole = phase.simulate_phases(system, requests, ANY), cluster.simulate(system, requests, ANY)
    assert fast is not None and differences(fast, whole) == []


# ---- where it does not apply


def test_says_that_it_does_not_apply_to_aggregated_instances_and_to_other_loops():
    mixed = System((*opt_13b().instances, instance("aggregated", OPT_13B)), 819_200.0)
    looping = opt_13b(loop_pulls=LoopPulls(0.01))
    requests = load(poisson(5.0, 50), 300, 20)
    for system in (mixed, looping):
        assert phase.simulate_phases(system, requests, ANY) is None
        assert differences(phase.simulate(system, requests, ANY), cluster.simulate(system, requests, ANY)) == []


def test_says_so_when_a_decode_instance_has_to_preempt():
    decode = instance("decode", law(decode=(0.01, 0, 0)), blocks=12, block_tokens=1, max_batch=2)
    system = System((instance("prefill", law(), block_tokens=1), decode), 1.0)
    requests = load([0.0, 0.0], 4, 5)
    assert phase.simulate_phases(system, requests, ANY) is None
    assert phase.simulate(system, requests, ANY).preemptions.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        (System, "instances kv_bytes_per_token paths link_bytes_per_s first_token_at max_pulls loop_pulls"),
        (Instance, "phase cost limits max_padding"),
        (Limits, "max_batch max_tokens kv_blocks block_tokens swap_bytes_per_s plans_ahead pipeline_tokens"),
        (KvPath, "source target fixed_s shares weight"),
        (Requests, "arrival_s prompt_tokens output_tokens slo_class prefix_blocks"),
    ],
)
def test_knows_every_setting_there_is(kind, known):
    """Whoever adds one must say in `phase.applies` whether this path heeds it, and then here."""
    assert [field.name for field in dataclasses.fields(kind)] == known.split()


def test_an_empty_load_is_an_empty_run():
    run = phase.simulate_phases(opt_13b(), load([]), ANY)
    assert run is not None and len(run.finish_s) == 0 and run.events == 0 and not run.stopped_early


# ---- the soft maximum off a table


@given(st.floats(2.0, 8.0), st.floats(-8.0, 8.0), st.integers(1, 300), st.integers(1, 10**6))
@often
def test_the_table_of_the_soft_maximum_is_as_good_as_the_formula(sharpness, log_ratio, decodes, context):
    """Off by less than 1e-10 of the step, which is a microsecond in ten thousand seconds."""
    p = np.zeros(kernel.SIZE)
    p[kernel.FAMILY], p[kernel.SHARPNESS] = kernel.ROOFLINE, sharpness
    p[4], p[7], p[10] = 1e-4, 1e-2 * 10**log_ratio, 1e-8
    (row,) = kernel.with_tables([p])
    exact_s, told_s = (kernel.iteration_s(q, 0, 0, 0.0, decodes, context) for q in (p, row))
    assert told_s == pytest.approx(exact_s, rel=1e-10, abs=0.0)


def test_a_law_without_a_soft_maximum_is_not_changed_by_its_table():
    (row,) = kernel.with_tables([OPT_13B])
    assert kernel.iteration_s(row, 0, 0, 0.0, 7, 900) == kernel.iteration_s(OPT_13B, 0, 0, 0.0, 7, 900)
