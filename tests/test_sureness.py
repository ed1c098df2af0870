"""How sure a claim is: errors of latencies carried to goodput and to the verdict."""

from __future__ import annotations

from dataclasses import replace
from math import exp, hypot, inf, log

import numpy as np
import pytest

from planner.cost import kernel
from planner.cost.base import BatchShape, CostModel, TermError
from planner.search.goodput import Rate
from planner.specs.layout import Layout
from planner.sureness import UNCHECKED, Latency, Response, spread, typical_error, weakest, widened
from tests.planning import solved
from tests.test_plan import PROBLEMS

RATE = Rate(10.0, 9.5, 10.5)
PREFILL, DECODE = Latency("h100", "TP2", "prefill"), Latency("h100", "TP4", "decode")


def test_without_errors_the_interval_is_that_of_luck():
    wide = widened(RATE, {})
    assert wide.wide_low_rps == pytest.approx(9.5) and wide.wide_high_rps == pytest.approx(10.5)


def test_luck_and_errors_add_in_quadrature():
    """ln(10 / 9.5) = 0.0513 by luck; 1.96 x 0.10 and 1.96 x 0.05 by latencies: 10 x e^-0.225 = 7.98."""
    answers = {PREFILL: Response(0.1, -0.10, 0.12), DECODE: Response(0.03, -0.05, 0.0)}
    wide = widened(RATE, answers)
    assert wide.wide_low_rps == pytest.approx(10 * exp(-hypot(log(10 / 9.5), 0.196, 0.098)))
    assert wide.wide_high_rps == pytest.approx(10 * exp(hypot(log(10.5 / 10), 0.2352)))
    assert weakest(answers) == PREFILL


def test_a_latency_that_could_cost_all_goodput_leaves_nothing_certain():
    assert widened(RATE, {PREFILL: Response(0.1, -inf, 0.1)}).wide_low_rps == 0.0


def test_an_error_that_both_ways_share_cancels_in_their_ratio():
    answers = {DECODE: Response(0.3, -0.5, 0.4)}
    luck = (log(10 / 9.5), log(10.5 / 10))
    assert spread(RATE, answers, answers) == pytest.approx(luck)
    assert spread(RATE, answers, {})[0] > luck[0]
    ruined = {DECODE: Response(0.3, -inf, 0.4)}
    assert spread(RATE, ruined, ruined) == pytest.approx(luck)


@pytest.mark.parametrize("family", [kernel.LINEAR, kernel.ROOFLINE, kernel.HYBRID])
def test_a_slower_phase_is_slower_by_that_share_and_the_other_stays(family):
    p = np.zeros(kernel.SIZE + 2 * kernel.GRID)
    p[:11] = (family, 0.01, 1e-4, 1.0, 1e-4, 1e-9, 1e-5, 0.02, 0.0, 0.0, 1e-8)
    cost = CostModel(Layout(2), p)
    prefill, mixed, decode = (
        BatchShape.prefill(1000),
        BatchShape(1, 500, 250_000.0, 8, 8000),
        BatchShape.decode(8, 8000),
    )
    slow = cost.slower("prefill", 0.25)
    assert slow.iteration_s(prefill) == pytest.approx(1.25 * cost.iteration_s(prefill))
    assert slow.iteration_s(mixed) == pytest.approx(1.25 * cost.iteration_s(mixed))
    assert slow.iteration_s(decode) == cost.iteration_s(decode)
    assert cost.slower("decode", -0.2).iteration_s(decode) == pytest.approx(0.8 * cost.iteration_s(decode))


def test_latencies_without_a_check_are_not_taken_as_certain():
    cost = CostModel(Layout(1), np.zeros(kernel.SIZE))
    assert typical_error(cost, "prefill") == UNCHECKED["prefill"] > 0
    known = replace(cost, prefill_error=TermError(0.02, 0.08, 0.1, 20, rms=0.04))
    assert typical_error(known, "prefill") == pytest.approx(0.02 / 0.6745)  # a few settings rule the root mean square
    even = replace(cost, prefill_error=TermError(0.05, 0.08, 0.1, 20, rms=0.055))
    assert typical_error(even, "prefill") == 0.055 and typical_error(even, "decode") == UNCHECKED["decode"]


@pytest.mark.parametrize("name", ["published fit on one node", "NVLink pairs, unprofiled"])
def test_slower_latencies_never_raise_goodput_and_the_wide_interval_holds_the_narrow_one(name):
    found = solved(**PROBLEMS[name])
    for option in (found.disaggregated, found.aggregated):
        assert option is not None and option.responses
        for latency, answer in option.responses.items():
            assert answer.error > 0 and answer.slower <= 0 <= answer.faster, latency
        rate = option.rate
        assert rate.wide_low_rps <= rate.low_rps * 1.0001 and rate.high_rps <= rate.wide_high_rps * 1.0001


def test_estimates_from_the_data_sheet_err_together_over_layouts():
    """Most of what an unprofiled estimate misses is the engine, which all layouts have in common."""
    found = solved(**PROBLEMS["NVLink pairs, unprofiled"])
    assert found.disaggregated is not None
    shared = [a for latency, a in found.disaggregated.responses.items() if latency.layout == "every layout"]
    own = [a for latency, a in found.disaggregated.responses.items() if latency.layout != "every layout"]
    assert {round(a.error / b.error, 2) for a in shared for b in own} == {1.53}  # sqrt(0.7 / 0.3)
