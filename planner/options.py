"""A way to serve the load: searched, placed on named GPUs, and proven by replay on the real links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isfinite

from planner.errors import InputError
from planner.placement.assign import place
from planner.placement.base import Candidate, Placement, Program, Unplaceable
from planner.placement.solve import capacity_bound
from planner.replay import Placed, Report, attains_at, claim, place_on, report, system_settings
from planner.search.goodput import Rate, Trial, goodput_rps
from planner.search.joint import (
    SLACK,
    Combination,
    Scored,
    Space,
    aggregated,
    disaggregated,
    fewest_gpus,
    largest,
    most_goodput,
    promising,
)
from planner.search.kinds import Kinds
from planner.search.layouts import Kind, with_budget
from planner.search.network import RoughNetwork
from planner.search.pools import pool_rps
from planner.sources.problem import Problem
from planner.specs.layout import Layout
from planner.specs.problem import Compared, Side
from planner.sureness import Responses, responses, widened

Progress = Callable[[str], None]

_CLEARLY = 1.03
_PILOT_REQUESTS = 1000
_SCREEN = 0.95
"""Share of the load asked for at which a short run decides whether a longer look is worth it."""
_MOST_TIMES = 10
"""A run is cut short where the rate tried is so many times the one that its length was made for."""
_LONGEST_S = 2e6
"""Three weeks of an idle load; a clock in double precision resolves the end of a transfer for about as long again."""
_FLOOR_TIMES = 30
"""A TPOT bound of a minute, which no answer comes near, would ask for hours of simulated time; it gets no more than so
many times the requests that were wanted."""


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """One way to serve, its replayed goodput, and what else came close."""

    placed: Placed
    rate: Rate
    report: Report
    program: Placement | None
    """The program's own optimum over all kinds, with its bound and gap (None for the aggregated way)."""
    ranked: tuple[Scored, ...]
    replayed: tuple[tuple[Scored, float], ...]
    """The candidates that were placed, with their goodput on the real network."""
    responses: Responses = field(default_factory=dict)
    """What the goodput does when a latency is off by its typical error."""

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.placed.gpus

    @property
    def per_gpu_rps(self) -> float:
        """Claimed goodput per GPU [requests/s]."""
        return self.rate.goodput_rps / self.gpus


@dataclass(frozen=True, slots=True)
class Trials:
    """Short simulations to rank candidates, long ones to quote from."""

    ranking: Trial
    quoting: Trial


def space_of(problem: Problem) -> Space:
    """Return the room that the cluster offers, per GPU type."""
    units = problem.topology.units()
    sizes = {name: tuple(len(u.gpus) for u in units if u.gpu.name == name) for name in problem.gpus}
    return Space({name: sum(size) for name, size in sizes.items()}, sizes)


def trials_for(problem: Problem, kinds: Kinds) -> Trials:
    """Return the conditions of comparison: one simulated time for all, long enough to fill the decode side.

    It is such that the load asked for, or else roughly the best goodput, makes the requests that the problem wants
    to see. Twice the time of a long answer (p90) is the least that makes sense, and where it takes no more than four
    times the requests, so is twenty times the TTFT bound: overload by a twentieth shows only when it has grown a queue.
    """
    output = problem.workload.percentiles["output_tokens"]["p90"]
    floor_s = 2.0 * output * max(slo.tpot_s for slo in problem.slos)
    settle_s = 20.0 * max(slo.ttft_s for slo in problem.slos)
    rate_rps = problem.demand_rps or _rough_goodput_rps(problem, kinds, floor_s)

    def trial(requests: int) -> Trial:
        wanted_s = requests / rate_rps
        duration_s = max(_at_least(floor_s, wanted_s), min(settle_s, 4 * wanted_s))
        duration_s = min(duration_s, _LONGEST_S)
        most = int(_MOST_TIMES * duration_s * rate_rps)  # an idle load's long hours at full speed prove no more
        return Trial(problem.workload, problem.slos, duration_s, problem.seed, most)

    return Trials(trial(problem.search.requests), trial(problem.search.replay_requests))


def _at_least(floor_s: float, wanted_s: float) -> float:
    """Return the time that gives the requests wanted, or the floor where that is not out of proportion [s]."""
    return max(wanted_s, min(floor_s, _FLOOR_TIMES * wanted_s))


def _rough_goodput_rps(problem: Problem, kinds: Kinds, floor_s: float) -> float:
    """Return about the best goodput [requests/s], from a few promising candidates.

    Saturation can be ten times more than bursts let through, and a time that suits it would be too short to see them;
    so the time is lengthened until the goodput found in it no longer falls.
    """
    space = space_of(problem)
    pilots = [*promising(largest(disaggregated(kinds.prefill, kinds.decode, kinds.saturation, space))),
              *promising(largest(aggregated(kinds.aggregated, kinds.saturation, space)))]  # fmt: skip
    build = rough_network(problem).system
    rate_rps = max((pilot.bound_rps for pilot in pilots), default=1.0)
    for _ in range(6):
        duration_s = _at_least(floor_s, _PILOT_REQUESTS / rate_rps)
        trial = Trial(problem.workload, problem.slos, duration_s, problem.seed)
        found = [goodput_rps(trial, build(p), p.bound_rps, 0.3) for p in pilots if p.bound_rps > 0]
        before, best = rate_rps, max(found, default=0.0)
        if best <= 0:
            break
        rate_rps = max(best, 1e-3)
        if rate_rps > 0.5 * before:
            break
    return rate_rps


def rough_network(problem: Problem) -> RoughNetwork:
    """Return what builds systems for ranking, with the network in its best case."""
    strictest_s = min(slo.ttft_s for slo in problem.slos)
    prompt = problem.workload.mean_prompt_tokens
    return RoughNetwork(problem.topology, system_settings(problem), prompt, strictest_s)


def best_disaggregated(problem: Problem, kinds: Kinds, trials: Trials, progress: Progress) -> Option | None:
    """Return the best disaggregated plan, or None when none meets the SLO at any rate or nothing is to be decoded."""
    if problem.workload.table.output_tokens.max() < 2:
        return None
    space = space_of(problem)
    combos = disaggregated(kinds.prefill, kinds.decode, kinds.saturation, space)
    progress(f"ranking {len(combos)} disaggregated combinations")
    best, ranked, replayed = _search(problem, trials, combos, progress)
    if best is None:
        return None
    progress("solving the placement program")
    best, program = _improve_by_program(problem, kinds, trials, best)
    return _quoted(problem, kinds, trials, best, program, ranked, replayed, progress)


def best_aggregated(problem: Problem, kinds: Kinds, trials: Trials, progress: Progress) -> Option | None:
    """Return the best aggregated plan, or None when none meets the SLO at any rate."""
    combos = aggregated(kinds.aggregated, kinds.saturation, space_of(problem))
    progress(f"ranking {len(combos)} aggregated combinations")
    best, ranked, replayed = _search(problem, trials, combos, progress)
    return None if best is None else _quoted(problem, kinds, trials, best, None, ranked, replayed, progress)


def compared(problem: Problem, kinds: Kinds, trials: Trials, wanted: Compared, progress: Progress) -> Option | None:
    """Return a layout of the user's own choice, placed and replayed; None when it meets the SLO at no rate.

    Raises InputError when there can be no such instances, with the reason, or when they do not fit on the cluster.
    """
    chosen = [(_kind_of(kinds, phase, side), side.count) for phase, side in _sides(wanted)]
    bound = min(kinds.saturation[kind] * count for kind, count in chosen)
    one = Scored(Combination(tuple(chosen), bound), 0.7 * bound)
    finalist = _replayed(problem, trials, one)
    if finalist is None:
        message = f"{wanted.name}: {one.combination} does not fit on {problem.topology.name}"
        raise InputError(problem.fault(message, "compare", problem.compare.index(wanted)))
    return _quoted(problem, kinds, trials, finalist, None, (), (), progress)


def check_compared(problem: Problem, kinds: Kinds) -> None:
    """Raise InputError for layouts of the user's own that cannot be, before anything is searched."""
    faults = []
    for index, wanted in enumerate(problem.compare):
        for phase, side in _sides(wanted):
            if not _legal(kinds, phase, side):
                message = f"{wanted.name}: {_why_not(problem, kinds, phase, Layout(side.tp, side.pp))}"
                faults.append(problem.fault(message, "compare", index, phase))
        asked, have = sum(side.count * side.tp * side.pp for _, side in _sides(wanted)), len(problem.topology.gpus)
        if asked > have:
            message = f"{wanted.name}: takes {asked} GPUs, and {problem.topology.name} has {have}"
            faults.append(problem.fault(message, "compare", index))
    if faults:
        raise InputError(faults)


def _sides(wanted: Compared) -> list[tuple[str, Side]]:
    sides = (("prefill", wanted.prefill), ("decode", wanted.decode), ("aggregated", wanted.aggregated))
    return [(phase, side) for phase, side in sides if side is not None]


def _legal(kinds: Kinds, phase: str, side: Side) -> list[Kind]:
    return [kind for kind in kinds.all_legal if (kind.phase, kind.layout) == (phase, Layout(side.tp, side.pp))]


def _why_not(problem: Problem, kinds: Kinds, phase: str, layout: Layout) -> str:
    """Return why there is no such instance."""
    reasons = [
        r.reason for r in kinds.rejected if r.layout in (layout, Layout(layout.tp)) and r.phase in (phase, "any")
    ]
    fault = problem.model.tp_fault(layout.tp) or problem.model.pp_fault(layout.pp) or next(iter(reasons), "")
    return f"no {phase} {layout} here: {fault or 'search.max_tp and search.max_pp limit what is considered'}"


def _kind_of(kinds: Kinds, phase: str, side: Side) -> Kind:
    """Return the legal kind that a side asks for, with its token budget if it has one."""
    found = _legal(kinds, phase, side)
    if side.max_tokens is None:
        return found[-1]
    resized = with_budget(found[-1], side.max_tokens)
    kinds.saturation[resized] = kinds.saturation[found[-1]]
    return resized


@dataclass(frozen=True, slots=True, eq=False)
class _Finalist:
    scored: Scored
    placed: Placed
    goodput_rps: float


_Found = tuple["_Finalist | None", list[Scored], list[tuple[Scored, float]]]
"""The best one, placed; promising ones, best first, on a rough network; those that were placed, with their goodput."""


def _search(problem: Problem, trials: Trials, combos: list[Combination], progress: Progress) -> _Found:
    """Return the best combination for the objective, placed and measured on the real links.

    Where none serves the load asked for, it is the one that gets closest.
    """
    if problem.demand_rps is not None:
        found = _least(problem, trials, combos, progress)
        if found[0] is not None:
            return found
    ranked = most_goodput(trials.ranking, largest(combos), rough_network(problem).system, keep=problem.search.finalists)
    return _replay_finalists(problem, trials, ranked, progress)


def _least(problem: Problem, trials: Trials, combos: list[Combination], progress: Progress) -> _Found:
    """Return the combination with the fewest GPUs that serves the load on the real links, over all seeds."""
    rate_rps = problem.demand_rps or 0.0
    screened = fewest_gpus(trials.ranking, combos, rate_rps, _SCREEN * rate_rps, rough_network(problem).system)
    ranked: list[Scored] = []
    replayed: list[tuple[Scored, float]] = []
    tried: dict[int, int] = {}
    for one in screened:
        ranked.append(one)
        gpus = one.combination.gpus
        tried[gpus] = tried.get(gpus, 0) + 1
        if tried[gpus] > problem.search.finalists:
            continue
        progress(f"placing {one.combination}")
        finalist = _replayed(problem, trials, one)
        if finalist is None:
            continue
        replayed.append((one, finalist.goodput_rps))
        if attains_at(problem, trials.quoting, finalist.placed, rate_rps):
            ranked += islice(screened, problem.search.finalists)
            return finalist, ranked, replayed
    return None, ranked, replayed


def _replay_finalists(problem: Problem, trials: Trials, ranked: list[Scored], progress: Progress) -> _Found:
    """Place the best candidates and measure them on the real links, until the rest cannot win.

    What the rough network gave is its best case, so a candidate below the best replay so far is out.
    """
    best: _Finalist | None = None
    replayed: list[tuple[Scored, float]] = []
    for one in ranked[: 3 * problem.search.finalists]:
        enough = len(replayed) >= problem.search.finalists
        if best is not None and (enough or one.goodput_rps <= best.goodput_rps * SLACK):
            break
        progress(f"placing {one.combination}")
        finalist = _replayed(problem, trials, one)
        if finalist is None:
            continue
        replayed.append((one, finalist.goodput_rps))
        if finalist.goodput_rps > (0.0 if best is None else best.goodput_rps * SLACK):
            best = finalist
    return best, ranked, replayed


def _replayed(problem: Problem, trials: Trials, one: Scored) -> _Finalist | None:
    """Return the candidate on named GPUs, measured; None when it cannot be placed."""
    counts = {kind.key: count for kind, count in one.combination.kinds}
    candidates = tuple(
        Candidate(*kind.key, max(one.goodput_rps / count, 1e-6)) for kind, count in one.combination.kinds
    )
    try:
        placement = place(_program(problem, candidates, counts=counts))
    except Unplaceable:
        return None
    by_key = {kind.key: kind for kind, _ in one.combination.kinds}
    return _measured(problem, trials, one, placement, by_key)


def _measured(problem: Problem, trials: Trials, one: Scored, placement: Placement, by_key: dict) -> _Finalist:
    """Return a placement with its goodput; KV goes to every decode instance, or along the program's flows if better."""
    ways = [place_on(problem, placement, by_key, all_pairs) for all_pairs in (True, False)]
    if ways[0].routes.keys() == ways[1].routes.keys():
        ways.pop()
    rates = [goodput_rps(trials.ranking, placed.system, one.goodput_rps, 0.02) for placed in ways]
    narrow = len(rates) > 1 and rates[1] > rates[0] * SLACK  # the network costs so much that fewer ways cost less
    return _Finalist(one, ways[narrow], rates[narrow])


def _program(problem: Problem, candidates: Iterable[Candidate], **more: object) -> Program:
    return Program(problem.topology, tuple(candidates), problem.kv_bytes_per_request, **more)  # type: ignore[arg-type]


def _improve_by_program(
    problem: Problem, kinds: Kinds, trials: Trials, best: _Finalist
) -> tuple[_Finalist, Placement | None]:
    """Solve the program over all kinds with pool rates, and take its answer where the replay says it is better.

    Its rates are those of pools of the size it uses, measured again until they agree (three rounds at most).
    """
    sizes = dict(best.scored.combination.kinds)
    program: Placement | None = None
    rates: dict[tuple[Kind, int], float] = {}
    for _ in range(3):
        candidates = _rated(problem, kinds, trials, sizes, rates)
        try:
            program = place(_program(problem, candidates, objective=problem.objective, rate_rps=problem.demand_rps))
        except Unplaceable:
            return best, program
        used = _sizes_used(kinds, program)
        if all(sizes.get(kind) == count for kind, count in used.items()):
            break
        sizes = used
    assert program is not None
    by_key = {kind.key: kind for kind in (*kinds.prefill, *kinds.decode)}
    combination = Combination(tuple(used.items()), program.value_rps)
    if _counts(combination) == _counts(best.scored.combination) or len(used) < 2:
        return best, program
    challenger = _measured(problem, trials, Scored(combination, program.value_rps), program, by_key)
    if _clearly_better(problem, trials, challenger, best):
        best = challenger
    return best, program


def _clearly_better(problem: Problem, trials: Trials, challenger: _Finalist, best: _Finalist) -> bool:
    """Return True when a mix of layouts is worth its trouble: fewer GPUs, or more than the noise of a long run."""
    demand = problem.demand_rps
    if demand is not None and best.goodput_rps >= _SCREEN * demand:
        fewer = challenger.placed.gpus < best.placed.gpus
        return fewer and attains_at(problem, trials.quoting, challenger.placed, demand)
    if challenger.goodput_rps <= best.goodput_rps * SLACK:
        return False
    rates = [goodput_rps(trials.quoting, one.placed.system, one.goodput_rps, 0.01) for one in (challenger, best)]
    return rates[0] > _CLEARLY * rates[1]


def _counts(combination: Combination) -> dict:
    return {kind.key: count for kind, count in combination.kinds}


def _sizes_used(kinds: Kinds, placement: Placement) -> dict[Kind, int]:
    """Return how many instances of each kind a placement has."""
    used: dict[Kind, int] = {}
    for kind in (*kinds.prefill, *kinds.decode):
        if count := sum(one.kind == kind.key for one in placement.instances):
            used[kind] = count
    return used


def _rated(
    problem: Problem, kinds: Kinds, trials: Trials, sizes: dict[Kind, int], rates: dict[tuple[Kind, int], float]
) -> list[Candidate]:
    """Return every kind with its rate in a pool: of its own size, or of the size that would replace its phase."""
    settings = system_settings(problem)
    candidates = []
    for kind in (*kinds.prefill, *kinds.decode):
        taken = sum(
            other.gpus * count for other, count in sizes.items() if (other.phase, other.gpu) == (kind.phase, kind.gpu)
        )
        count = sizes.get(kind) or max(taken // kind.gpus, 1)
        if (kind, count) not in rates:
            rates[kind, count] = pool_rps(trials.ranking, kind, count, kinds.saturation[kind], settings)
        if rates[kind, count] > 0:
            candidates.append(Candidate(*kind.key, rates[kind, count]))
    return candidates


def _quoted(
    problem: Problem,
    kinds: Kinds,
    trials: Trials,
    best: _Finalist,
    program: Placement | None,
    ranked: Sequence[Scored],
    replayed: Sequence[tuple[Scored, float]],
    progress: Progress,
) -> Option:
    """Return the finalist with its claim over several seeds, which never exceeds what it can sustain for ever."""
    progress(f"replaying {best.placed.layout} with {problem.search.seeds} seeds")
    rate = claim(problem, trials.quoting, best.placed, best.goodput_rps).capped(_saturated_rps(kinds, best.placed))
    at_rps = min(rate.goodput_rps, problem.rate_rps or rate.goodput_rps) or 1e-3
    figures = report(problem, trials.quoting, best.placed, at_rps)
    answers: Responses = {}
    if rate.goodput_rps > 0:
        progress(f"asking what errors of the latencies would do to {best.placed.layout}")
        answers = responses(trials.ranking, best.placed, rate.goodput_rps)
        rate = widened(rate, answers)
    return Option(best.placed, rate, figures, program, tuple(ranked), tuple(replayed), answers)


def _saturated_rps(kinds: Kinds, placed: Placed) -> float:
    """Return the rate [requests/s] at which the weaker phase of a placement saturates."""
    by_phase: dict[str, float] = {}
    for kind in placed.kinds:
        by_phase[kind.phase] = by_phase.get(kind.phase, 0.0) + kinds.saturation[kind]
    return min(by_phase.values())


def capacity_bound_rps(problem: Problem, kinds: Kinds, mode: str) -> float:
    """Return the rate that no placement on this cluster can exceed in this mode: the program at saturation rates."""
    if mode == "aggregated":
        best: dict[tuple, Kind] = {}
        for kind in kinds.aggregated:  # of one layout's token budgets the one that saturates last
            if kind.key not in best or kinds.saturation[kind] > kinds.saturation[best[kind.key]]:
                best[kind.key] = kind
        allowed: Iterable[Kind] = best.values()
    else:
        allowed = (*kinds.prefill, *kinds.decode)
    rates = ((kind, kinds.saturation[kind]) for kind in allowed)
    candidates = [Candidate(*kind.key, rate_rps) for kind, rate_rps in rates if isfinite(rate_rps)]
    return capacity_bound(problem.topology, candidates, problem.kv_bytes_per_request)


def free_network_gain(trials: Trials, option: Option) -> float:
    """Return by how much the option's goodput would rise if moving KV cost nothing (0.1 is 10 %), under equal luck."""
    free = replace(option.placed.system, paths=None, link_bytes_per_s=())
    guess_rps = option.rate.goodput_rps or 1.0
    with_links = goodput_rps(trials.quoting, option.placed.system, guess_rps, 0.01)
    return goodput_rps(trials.quoting, free, max(with_links, guess_rps), 0.01) / max(with_links, 1e-9) - 1
