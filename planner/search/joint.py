"""The joint search: how many instances of which prefill and decode layout together give the most goodput.

What a combination is worth is what the joint simulation of its instances says, nothing else. The search goes
best-first by the saturation bound and asks each candidate the cheapest question that can reject it:

    saturation no better than the incumbent          skipped without a simulation
    one simulation at the incumbent's rate fails     rejected (it stops as soon as too many requests have missed)
    otherwise                                        bisected; it becomes the incumbent if it is better

Where instances will stand is not known here, so the network is the best case that their counts allow
(`search/network.py`). `options.py` places the best candidates and lets the replay on the real links judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from planner.search.goodput import Trial, bisect
from planner.search.layouts import Kind, show_mix
from planner.simulator.cluster import System

SLACK = 1.005
"""A challenger must beat the incumbent by half a per cent: closer than that, the cheaper one stays."""


@dataclass(frozen=True, slots=True)
class Combination:
    """So many instances of each kind (aggregated ones of each GPU type, or a prefill and a decode kind)."""

    kinds: tuple[tuple[Kind, int], ...]
    bound_rps: float
    """No load beyond this can be served: the weaker phase's saturation."""

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return sum(kind.gpus * count for kind, count in self.kinds)

    def __str__(self) -> str:
        return show_mix(self.kinds)


Build = Callable[[Combination], System]
"""How a combination becomes a system to simulate."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A combination and its goodput on the best network it could have [requests/s]."""

    combination: Combination
    goodput_rps: float

    @property
    def per_gpu_rps(self) -> float:
        """Goodput per GPU [requests/s]."""
        return self.goodput_rps / self.combination.gpus


@dataclass(frozen=True, slots=True)
class Space:
    """How many instances of a kind fit: GPUs by type, and slots (tensor-parallel groups that a unit can hold)."""

    gpus: Mapping[str, int]
    unit_gpus: Mapping[str, tuple[int, ...]]

    def most(self, kind: Kind, free: int | None = None) -> int:
        """Return how many instances of `kind` the (remaining `free`) GPUs of its type allow at most."""
        slots = sum(size // kind.layout.tp for size in self.unit_gpus[kind.gpu]) // kind.layout.pp
        available = self.gpus[kind.gpu] if free is None else free
        return min(slots, available // kind.gpus)


def aggregated(kinds: Iterable[Kind], saturation: Mapping[Kind, float], space: Space) -> list[Combination]:
    """Return every number of instances of every aggregated kind, and mixes over GPU types.

    A mix has one kind per type, of one token budget, and takes all GPUs of its types but one.
    """
    by_budget: dict[int, dict[str, list[Kind]]] = {}
    for kind in kinds:
        by_budget.setdefault(kind.limits.max_tokens, {}).setdefault(kind.gpu, []).append(kind)
    found = {}
    for by_type in by_budget.values():
        for mix in product(*([None, *same_type] for same_type in by_type.values())):
            for chosen in _counts([kind for kind in mix if kind is not None], space):
                found[chosen] = Combination(chosen, sum(saturation[kind] * count for kind, count in chosen))
    return list(found.values())


def _counts(mix: Sequence[Kind], space: Space) -> Iterator[tuple[tuple[Kind, int], ...]]:
    """Yield numbers of instances of each kind: one of them any number, the others as many as fit."""
    most = [space.most(kind) for kind in mix]
    for varied, kind in enumerate(mix):
        for count in range(1, most[varied] + 1) if all(most) else ():
            yield tuple((other, count if other is kind else most[at]) for at, other in enumerate(mix))


def disaggregated(
    prefill: Sequence[Kind], decode: Sequence[Kind], saturation: Mapping[Kind, float], space: Space
) -> list[Combination]:
    """Return every pair of counts of every prefill and decode kind that fits."""
    found = []
    for p in prefill:
        for d in decode:
            for at_p in range(1, space.most(p) + 1):
                free = space.gpus[d.gpu] - (p.gpus * at_p if p.gpu == d.gpu else 0)
                for at_d in range(1, space.most(d, free) + 1):
                    bound = min(saturation[p] * at_p, saturation[d] * at_d)
                    found.append(Combination(((p, at_p), (d, at_d)), bound))
    return found


def largest(combinations: Iterable[Combination]) -> list[Combination]:
    """Return those to which no instance can be added: with GPUs to spare, one more never hurts goodput."""
    best: dict[tuple[Kind, ...], dict[tuple[int, ...], Combination]] = {}
    for one in combinations:
        counts = tuple(count for _, count in one.kinds)
        best.setdefault(tuple(kind for kind, _ in one.kinds), {})[counts] = one
    kept = []
    for family in best.values():
        for counts, one in family.items():
            more = (tuple(c + (i == k) for i, c in enumerate(counts)) for k in range(len(counts)))
            if not any(other in family for other in more):
                kept.append(one)
    return kept


def most_goodput(
    trial: Trial,
    combinations: Sequence[Combination],
    build: Build,
    precision: float = 0.02,
    keep: int = 8,
) -> list[Scored]:
    """Return the best of combinations to which nothing can be added (`largest`), best first, ties by fewer GPUs.

    The first `keep` are exact to `precision` relative to each other: an incumbent needs to be beaten, so a candidate
    that is close to the best but not better is bisected too, until `keep` are known.
    """
    ranked: list[Scored] = []
    outward = _Outward(combinations)
    for one in sorted(combinations, key=lambda c: (-_estimate(c), c.gpus, str(c))):
        bar = _bar(ranked, keep)
        if one.bound_rps <= bar * SLACK or outward.is_hopeless(one):
            continue
        system = build(one)
        if bar > 0 and trial.margin(system, bar * SLACK) < 0:
            outward.failed(one)
            continue
        ranked.append(Scored(one, _climb(trial, system, max(bar, 0.5 * _estimate(one)), one.bound_rps, precision)))
    ranked = [one for one in ranked if one.goodput_rps > 0]
    return sorted(ranked, key=lambda s: (-s.goodput_rps, s.combination.gpus, str(s.combination)))


class _Outward:
    """Remembers, per pair of kinds, on which side of the best-balanced counts a combination has already failed.

    Taking instances from the side that failed for want of them and giving them to the other only makes it worse, so
    what lies further out on that side is skipped. Goodput over the counts of one pair is taken to have one peak.
    """

    def __init__(self, combinations: Iterable[Combination]):
        self._peak: dict[tuple[Kind, ...], Combination] = {}
        self._failed: dict[tuple[tuple[Kind, ...], bool], int] = {}
        for one in combinations:
            family = tuple(kind for kind, _ in one.kinds)
            if family not in self._peak or _estimate(one) > _estimate(self._peak[family]):
                self._peak[family] = one

    def _side(self, one: Combination) -> tuple[tuple[Kind, ...], int, int]:
        family = tuple(kind for kind, _ in one.kinds)
        return family, one.kinds[0][1], self._peak[family].kinds[0][1]

    def failed(self, one: Combination) -> None:
        """Note a failure (the peak itself says nothing about either side)."""
        family, count, peak = self._side(one)
        if count != peak and len(family) > 1:
            at = (family, count > peak)
            closer = min if count > peak else max
            self._failed[at] = closer(self._failed.get(at, count), count)

    def is_hopeless(self, one: Combination) -> bool:
        """Return True when something closer to balance failed on the same side."""
        family, count, peak = self._side(one)
        edge = self._failed.get((family, count > peak))
        return edge is not None and (count >= edge if count > peak else count <= edge)


def fewest_gpus(
    trial: Trial,
    combinations: Sequence[Combination],
    rate_rps: float,
    screen_rps: float,
    build: Build,
) -> Iterator[Scored]:
    """Yield combinations that may serve `rate_rps`, fewest GPUs first; that rate is their goodput here.

    They saturate beyond it and meet the SLO at `screen_rps` in one short run: a bit less, as its luck may be bad.
    """
    for one in sorted(combinations, key=lambda c: (c.gpus, -_estimate(c), str(c))):
        if one.bound_rps <= rate_rps:
            continue
        if trial.margin(build(one), screen_rps) >= 0:
            yield Scored(one, rate_rps)


def _bar(ranked: Sequence[Scored], keep: int) -> float:
    """Return the goodput that a newcomer has to beat: the `keep`-th best so far."""
    values = sorted((one.goodput_rps for one in ranked), reverse=True)
    return values[keep - 1] if len(values) >= keep else 0.0


def promising(combinations: Iterable[Combination]) -> list[Combination]:
    """Return the best guess for each entry kind (prefill or aggregated), to try out conditions on."""
    best: dict[Kind, Combination] = {}
    for one in combinations:
        entry = one.kinds[0][0]
        if entry not in best or _estimate(one) > _estimate(best[entry]):
            best[entry] = one
    return list(best.values())


def _estimate(one: Combination) -> float:
    """Return a guess of the goodput, only to choose the order: larger pools come closer to saturation."""
    return min((one.bound_rps * (1 - 0.5 / (1 + count)) for _, count in one.kinds), default=0.0)


def _climb(trial: Trial, system: System, low: float, bound: float, precision: float) -> float:
    """Return the goodput by bisection between what passed (or a guess) and the saturation bound."""
    return bisect(lambda rate: trial.margin(system, rate) >= 0.0, low, min(low * 1.3, bound), precision)
