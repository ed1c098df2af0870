"""The simulator against runs of real engines: OPT-13B on A100 under DistServe, and Llama-3.1-8B under vLLM."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import recorded_vllm as vllm
from benchmarks.recorded_runs import BOUNDS_S, Overheads, Recorded, attainment, median_error, recorded, replay

RUNS = [run for run in recorded() if run.decode_pp == 1]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.rate)
def test_attainment_is_within_three_points_of_what_was_recorded(run: Recorded):
    simulated = replay(run, Overheads())
    for bounds_s in BOUNDS_S:
        real = attainment(run.ttft_s, run.tpot_s, bounds_s)
        assert attainment(simulated.ttft_s, simulated.tpot_s, bounds_s) == pytest.approx(real, abs=3.0)


def test_attainment_over_the_held_out_runs_is_off_by_less_than_a_point():
    off = []
    for run in RUNS:
        if run.held_out:
            simulated = replay(run, Overheads())
            off += [
                attainment(simulated.ttft_s, simulated.tpot_s, b) - attainment(run.ttft_s, run.tpot_s, b)
                for b in BOUNDS_S
            ]
    assert len(off) == 6
    assert np.sqrt(np.mean(np.square(off))) < 1.0


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.rate)
def test_each_request_is_about_as_fast_as_recorded(run: Recorded):
    simulated = replay(run, Overheads())
    assert median_error(simulated.ttft_s, run.ttft_s) < 0.08
    assert median_error(simulated.tpot_s, run.tpot_s) < 0.05


def test_the_tails_of_overload_come_out_of_the_mechanism():
    """At 10.5 requests/s decode fills up: P90 of TTFT is 43 s and of TPOT 4 s, by back-pressure and swapping."""
    run = next(run for run in RUNS if run.rate == "10.5")
    simulated = replay(run, Overheads())
    for real, mine in ((run.ttft_s, simulated.ttft_s), (run.tpot_s, simulated.tpot_s)):
        assert np.nanpercentile(mine, 90) == pytest.approx(np.nanpercentile(real, 90), rel=0.1)


@pytest.mark.parametrize(("card", "most"), [("RTX4090", 0.1), ("RTXPRO6000", 0.2)])
def test_an_aggregated_instance_is_close_below_vllm_on_latencies_without_host_time(card: str, most: float):
    """The layer tables hold no host work, so the simulated mean latency is too short, but not by much."""
    requests, real = vllm.recorded(card)
    simulated = vllm.replayed(card, requests)
    assert 1 - most < np.mean(simulated.latency_s) / np.mean(real.latency_s) < 1
