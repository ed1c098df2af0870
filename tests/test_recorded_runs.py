"""The simulator against runs of real engines: OPT-13B on A100 under DistServe and vLLM 0.2.3, Llama-3.1-8B under vLLM.

What is asserted is what is reached, with a small margin; the targets are printed by `make recorded`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import recorded_vllm as vllm
from benchmarks.recorded_engines import DistServe, Front, distserve, play
from benchmarks.recorded_runs import (
    BOUNDS_S,
    Recorded,
    attainment,
    median_error,
    nearest,
    off_by,
    recorded,
    replay,
    rmse,
    system,
)
from planner.simulator.cluster import System

PP1, PP2, COLOCATED = (recorded(group) for group in ("decode PP1", "decode PP2", "colocated"))
ONE_BATCH = distserve(2, DistServe(look_again_s=0.0))
"""The race for a second batch is never won."""


def by_rate(runs: list[Recorded], rate: str) -> Recorded:
    return next(run for run in runs if run.rate == rate)


@pytest.mark.parametrize("run", PP1, ids=lambda run: run.rate)
def test_attainment_with_one_decode_stage_is_within_two_points(run: Recorded):
    assert off_by(run, [replay(run)]) == pytest.approx([0.0, 0.0], abs=2.0)


def test_attainment_over_the_held_out_runs_is_off_by_half_a_point():
    off = [points for run in PP1 if run.held_out for points in off_by(run, [replay(run)])]
    assert len(off) == 6
    assert rmse(off) < 0.6


@pytest.mark.parametrize("run", PP1, ids=lambda run: run.rate)
def test_each_request_is_about_as_fast_as_recorded(run: Recorded):
    mine = replay(run)
    assert median_error(mine.ttft_s, run.real.ttft_s) < 0.065
    assert median_error(mine.tpot_s, run.real.tpot_s) < 0.045


@pytest.mark.parametrize("rate", ["7.5", "10.5"])
def test_the_tails_of_overload_come_out_of_the_mechanism(rate: str):
    """Decode fills up, prefill waits for it: at 10.5 requests/s P90 of TTFT is 43 s and of TPOT 4 s."""
    run = by_rate(PP1, rate)
    mine = replay(run)
    for real, simulated in ((run.real.ttft_s, mine.ttft_s), (run.real.tpot_s, mine.tpot_s)):
        assert np.nanpercentile(simulated, 90) == pytest.approx(np.nanpercentile(real, 90), rel=0.05)


@pytest.mark.parametrize("rate", ["4", "10", "14"])
def test_two_decode_stages_gain_little_when_one_batch_holds_everyone(rate: str):
    """As these three logs show. No constant was chosen on any of them: the race has none here."""
    run = by_rate(PP2, rate)
    mine = replay(run, ONE_BATCH)
    assert off_by(run, [mine]) == pytest.approx([0.0, 0.0], abs=3.0)
    assert median_error(mine.tpot_s, run.real.tpot_s) < 0.10


def test_the_same_load_ends_in_either_regime():
    """At 8 requests/s the log shows a second batch from 29 s on: 77 % attain. Without one it would be 29 %."""
    run = by_rate(PP2, "8")
    plays = [replay(run, seed=seed) for seed in range(1, 41)]
    shares = [attainment(times, BOUNDS_S[0]) for times in plays]
    assert min(shares) < 35 and max(shares) > attainment(run.real, BOUNDS_S[0]) > 75
    assert min(np.mean(np.array(shares) < 35), np.mean(np.array(shares) > 70)) > 0.15
    closest = nearest(run, plays)
    assert off_by(run, [closest]) == pytest.approx([0.0, 0.0], abs=3.0)
    assert median_error(closest.tpot_s, run.real.tpot_s) < 0.12


@pytest.mark.parametrize("rate", ["1", "3", "4"])
def test_a_colocated_engine_that_runs_prompts_first_is_within_four_points(rate: str):
    run = by_rate(COLOCATED, rate)
    mine = replay(run)
    assert off_by(run, [mine]) == pytest.approx([0.0, 0.0], abs=4.0)
    assert median_error(mine.tpot_s, run.real.tpot_s) < 0.03


def test_the_colocated_run_at_two_requests_a_second_was_recorded_on_a_slower_machine():
    """Its first request, alone, has a TPOT of 29.3 ms against 24.4 .. 26.2 in the others; 13 % slower, it fits."""
    alone_s = {run.rate: run.real.tpot_s[0] for run in COLOCATED}
    assert alone_s.pop("2") > 1.1 * max(alone_s.values())
    run = by_rate(COLOCATED, "2")
    assert min(off_by(run, [replay(run)])) > 10
    (only,) = system(run.group).instances
    p = only.cost.parameters.copy()
    p[1:10] *= 1.13
    slower = System((replace(only, cost=replace(only.cost, parameters=p)),), 1.0)
    assert off_by(run, [play(slower, run.requests, Front())]) == pytest.approx([0.0, 0.0], abs=6.0)


def test_vllm_runs_come_out_of_layer_tables_and_one_number_fitted_on_one_of_them():
    """What has been reached: the run that was fitted within a percent, and the one held out within three."""
    unmeasured = vllm.fitted()
    assert unmeasured.prefill_s == pytest.approx(5.25e-3, abs=0.5e-3)
    for card, most in ((vllm.FITTED_ON, 0.012), ("RTX4090", 0.03)):
        for line in vllm.lines(card, unmeasured):
            if (line.time, line.statistic) in vllm.TARGETS:
                assert abs(line.off) < most, line
    held_out = {(line.time, line.statistic): line.off for line in vllm.lines("RTX4090", unmeasured)}
    assert abs(held_out["tpot", "mean"]) < 0.012
