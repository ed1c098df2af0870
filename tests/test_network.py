"""Shared links: max-min fairness against a linear program, bytes conserved, and the cases one can work out by hand."""

from __future__ import annotations

from math import inf
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from planner.cost.base import CostModel
from planner.cost.kernel import SIZE
from planner.simulator.cluster import Instance, KvPath, Limits, Run, System, simulate
from planner.specs.layout import Layout, Phase
from planner.specs.slo import Slo
from planner.specs.workload import Requests, make_requests
from tests import reference_simulator
from tests.reference_simulator import Reference, fair_rates

ANY = (Slo(ttft_s=1.0, tpot_s=1.0),)
ROOMY = 1 << 30
Shares = list[dict[int, float]]
seeds = st.integers(0, 10**9)
often = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def transfers(
    arrival_s: list[float], prompts: list[int], shares: dict[tuple[int, int], tuple[tuple[int, float], ...]],
    links: list[float], *, fixed_s: float = 0.0, max_pulls: int = 64, prefills: int = 1, decodes: int = 1,
) -> tuple[System, Requests]:  # fmt: skip
    """A cluster whose prefill takes no time, so request r is a transfer of prompts[r] bytes from arrival_s[r] on."""

    def instance(phase: Phase) -> Instance:
        law = np.zeros(SIZE)
        law[4] = law[7] = 1e-3
        return Instance(phase, CostModel(Layout(1), law), Limits(ROOMY, ROOMY, ROOMY, 1))

    paths = tuple(KvPath(p, prefills + d, fixed_s, crossed) for (p, d), crossed in shares.items())
    instances = (instance("prefill"),) * prefills + (instance("decode"),) * decodes
    system = System(instances, 1.0, paths, tuple(links), max_pulls=max_pulls)
    return system, make_requests(np.array(arrival_s), np.array(prompts), np.full(len(prompts), 2))


def ends_s(run: Run) -> list[float]:
    return [float(end_s) for end_s in run.pull_end_s]


# ---- by hand


def test_one_transfer_alone_runs_at_its_tightest_link():
    """1000 bytes, half of them over a link of 100 B/s and all over one of 400 B/s: min(100 / 0.5, 400) = 200 B/s."""
    run = simulate(*transfers([2.0], [1000], {(0, 0): ((0, 0.5), (1, 1.0))}, [100, 400], fixed_s=0.25), ANY)
    assert ends_s(run) == pytest.approx([2.0 + 0.25 + 5.0])
    assert run.link_bytes.tolist() == pytest.approx([500, 1000])


def test_two_transfers_halve_a_link_and_the_longer_one_then_has_it_all():
    """300 and 500 bytes from 0 on at 100 B/s: 50 B/s each until 6 s; the other 200 bytes then take 2 s."""
    run = simulate(*transfers([0, 0], [300, 500], {(0, 0): ((0, 1.0),)}, [100]), ANY)
    assert ends_s(run) == pytest.approx([6.0, 8.0])


def test_a_late_comer_slows_down_who_was_there():
    """100 B/s: 100 bytes by 1 s, then 50 B/s each; the other 200 of the first take 4 s, the second ends at 6 s."""
    run = simulate(*transfers([0, 1], [300, 300], {(0, 0): ((0, 1.0),)}, [100]), ANY)
    assert ends_s(run) == pytest.approx([5.0, 6.0])


def test_what_one_cannot_use_goes_to_the_others():
    """Link 0 (60 B/s) is shared by A and B, link 1 (200 B/s) by B and C: A and B get 30, C what is left, 170 B/s.

    Requests go round among equally loaded decode instances, so A, B and C are in order. A's 300 bytes take 10 s, as
    do 300 of B's 600 and C's 1700; B is alone then, and its other 300 bytes take 5 s at 60 B/s.
    """
    shares = {(0, 0): ((0, 1.0),), (0, 1): ((0, 1.0), (1, 1.0)), (0, 2): ((1, 1.0),)}
    assert fair_rates([dict(hops) for hops in shares.values()], [60, 200]) == pytest.approx([30, 30, 170])
    run = simulate(*transfers([0, 0, 0], [300, 600, 1700], shares, [60, 200], decodes=3), ANY)
    assert run.decode_at.tolist() == [1, 2, 3]
    assert ends_s(run) == pytest.approx([10, 15, 10])


def test_without_links_a_transfer_takes_its_fixed_time_only_however_large():
    for prompt in (1, 10**9):
        run = simulate(*transfers([1.0], [prompt], {(0, 0): ()}, [], fixed_s=0.125), ANY)
        assert ends_s(run) == [1.125]


def test_a_decode_instance_pulls_at_most_so_many_at_a_time():
    """Four transfers of 100 bytes at 100 B/s: by twos at 50 B/s each they end at 2, 2, 4, 4, singly at 1, 2, 3, 4."""
    for max_pulls, expected in ((2, [2, 2, 4, 4]), (1, [1, 2, 3, 4])):
        run = simulate(*transfers([0] * 4, [100] * 4, {(0, 0): ((0, 1.0),)}, [100], max_pulls=max_pulls), ANY)
        assert ends_s(run) == pytest.approx(expected)


def test_a_transfer_late_in_a_long_run_still_ends():
    """Ten days in, a double resolves 0.1 ns: a transfer of 3 bytes at 1 GB/s must not spin for ever."""
    run = simulate(*transfers([1e6] * 3, [3] * 3, {(0, 0): ((0, 1 / 3),)}, [1e9]), ANY)
    assert ends_s(run) == pytest.approx([1e6] * 3, abs=1e-8)


# ---- fairness


def random_flows(r: Random) -> tuple[Shares, list[float]]:
    capacity = [10 ** r.uniform(0, 2) for _ in range(r.randint(1, 6))]
    flows = []
    for _ in range(r.randint(1, 6)):
        crossed = r.sample(range(len(capacity)), r.randint(0, min(3, len(capacity))))
        flows.append({link: r.choice([1.0, 0.5, r.uniform(0.05, 2)]) for link in crossed})
    return flows, capacity


def by_linear_programs(shares: Shares, capacity: list[float]) -> list[float]:
    """Max-min fair rates by definition: raise the least rate, fix whoever cannot get more, go on with the rest."""
    count = len(shares)
    rates = [inf if not crossed else 0.0 for crossed in shares]
    rows = np.array([[crossed.get(link, 0.0) for crossed in shares] for link in range(len(capacity))])
    todo = [f for f, crossed in enumerate(shares) if crossed]
    least = [0.0] * count

    def most(aim: np.ndarray, upper: list[float | None]) -> float:
        bounds = [(least[f], upper[f]) if shares[f] else (0.0, 0.0) for f in range(count)]
        found = linprog(-aim, A_ub=rows, b_ub=np.array(capacity) * (1 + 1e-12), bounds=bounds, method="highs")
        return float(-found.fun)

    while todo:
        # all of them at one rate t: maximise t, a column that loads each link with their sum
        together = rows[:, todo].sum(axis=1)
        taken = rows[:, [f for f in range(count) if shares[f] and f not in todo]] @ np.array(
            [rates[f] for f in range(count) if shares[f] and f not in todo]
        )
        room = np.array(capacity) - taken
        found = linprog([-1.0], A_ub=together[:, None], b_ub=np.maximum(room, 0.0), method="highs")
        level = float(found.x[0])
        for f in todo:
            least[f] = level * (1 - 1e-9)
        upper: list[float | None] = [None if f in todo else rates[f] for f in range(count)]
        stuck = [f for f in todo if most(np.eye(count)[f], upper) <= level * (1 + 1e-6)]
        for f in stuck:
            rates[f] = least[f] = level
        todo = [f for f in todo if f not in stuck]
    return rates


@given(seeds)
@settings(often, max_examples=40)
def test_the_plain_fair_rates_are_those_of_linear_programs(seed):
    shares, capacity = random_flows(Random(seed))
    assert fair_rates(shares, capacity) == pytest.approx(by_linear_programs(shares, capacity), rel=1e-5)


@given(seeds)
@often
def test_everybody_has_a_full_link_on_which_nobody_is_faster(seed):
    """What characterises max-min fairness (Bertsekas & Gallager, Data Networks, section 6.5.2)."""
    shares, capacity = random_flows(Random(seed))
    rates = fair_rates(shares, capacity)
    for f, crossed in enumerate(shares):
        full = []
        for link in crossed:
            there = [g for g, other in enumerate(shares) if link in other]
            used = sum(shares[g][link] * rates[g] for g in there)
            assert used <= capacity[link] * (1 + 1e-9)
            full.append(used > capacity[link] * (1 - 1e-9) and rates[f] >= max(rates[g] for g in there) * (1 - 1e-9))
        assert any(full) or not crossed


def random_transfers(r: Random, count: int) -> tuple[System, Requests]:
    links = [10 ** r.uniform(2, 4) for _ in range(r.randint(1, 6))]
    prefills, decodes = r.randint(1, 4), r.randint(1, 4)
    shares = {}
    for p in range(prefills):
        for d in range(decodes):
            crossed = sorted(r.sample(range(len(links)), r.randint(0, min(3, len(links)))))
            shares[p, d] = tuple((link, r.choice([1.0, 0.5, r.uniform(0.05, 2)])) for link in crossed)
    arrival_s = sorted(r.uniform(0, 3) for _ in range(count))
    prompts = [r.randint(1, 3000) for _ in range(count)]
    return transfers(
        arrival_s, prompts, shares, links, fixed_s=r.choice([0.0, 0.01]), max_pulls=r.randint(1, 8),
        prefills=prefills, decodes=decodes,
    )  # fmt: skip


@given(seeds)
@often
def test_transfers_end_when_fair_sharing_says(seed):
    system, requests = random_transfers(Random(seed), 40)
    run, reference = simulate(system, requests, ANY), Reference(system, requests).run()
    assert ends_s(run) == pytest.approx([job.pull_end_s for job in reference.jobs], abs=1e-8)
    assert run.decode_at.tolist() == [job.decode_at for job in reference.jobs]
    assert run.link_bytes == pytest.approx(np.array(reference.link_bytes), rel=1e-9, abs=1e-3)


@given(seeds)
@settings(often, max_examples=6)
def test_transfers_end_when_linear_programs_say(seed):
    system, requests = random_transfers(Random(seed), 6)
    run = simulate(system, requests, ANY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_simulator, "fair_rates", by_linear_programs)
        reference = Reference(system, requests).run()
    assert ends_s(run) == pytest.approx([job.pull_end_s for job in reference.jobs], rel=1e-5)


@given(seeds)
@often
def test_bytes_are_conserved(seed):
    """Each link carries its share of each transfer that crosses it, and never more than its rate allows."""
    system, requests = random_transfers(Random(seed), 40)
    run = simulate(system, requests, ANY)
    assert system.paths is not None
    crossed = {(path.source, path.target): path.shares for path in system.paths}
    expected = np.zeros(len(system.link_bytes_per_s))
    for p, d, size in zip(run.prefill_at, run.decode_at, requests.prompt_tokens, strict=True):
        for link, share in crossed[int(p), int(d)]:
            expected[link] += share * size
    assert run.link_bytes == pytest.approx(expected, rel=1e-6, abs=1e-3)
    busy_s = np.nanmax(run.pull_end_s) - np.nanmin(run.pull_start_s)
    assert (run.link_bytes <= np.array(system.link_bytes_per_s) * busy_s * (1 + 1e-6) + 1e-3).all()


def test_transfers_end_however_late_the_clock_is():
    """At 1e8 s a double resolves 1.5e-8 s, coarser than the nanosecond that ends a transfer early in a run."""
    law = np.zeros(SIZE)
    law[[1, 4]] = 0.1
    instances = tuple(
        Instance(phase, CostModel(Layout(1), law), Limits(8, 512, 1000)) for phase in ("prefill", "decode")
    )
    path = KvPath(0, 1, 0.0, ((0, 1.0),))
    system = System(instances, 1000.0, (path,), (3e4,))
    requests = make_requests(1e8 + np.arange(50) * 5.0, np.full(50, 97, np.int64), np.full(50, 3, np.int64))
    run = simulate(system, requests, (Slo(ttft_s=1.0, tpot_s=1.0),))
    assert np.isfinite(run.finish_s).all()
    assert np.allclose(run.pull_end_s - run.pull_start_s, 97_000 / 3e4, atol=1e-6)
