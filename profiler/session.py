"""The measuring of one layout: a pilot, a plan that the time allows, passes over it, then where the fit is least sure.

Every measurement is in the journal before the next begins, and every decision is taken from the journal: a run that was
killed goes on where it stopped.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from planner.cost.base import CostModel
from planner.errors import InputError
from planner.specs.gpu import Gpu
from planner.specs.layout import Layout
from planner.specs.measured import Accuracy
from planner.specs.model import ModelSpec
from profiler import accuracy, grid
from profiler.accuracy import PHASES, Target
from profiler.expect import Expected
from profiler.setting import Setting, setting_of
from profiler.store import Journal
from profiler.subject import Subject
from profiler.timer import Timer, measure

TARGET = Target()
ROLES = ("fit", "held out", "mixed")
TIME_UP = "the time was up"
PASSES = 3
"""Visits to every planned setting, spread over the run so that drift shows and one bad moment spoils no setting."""
MOST_VISITS = 8
HELD_OUT = 12
"""Settings per phase that are kept from the fit."""
_PILOT, _GRID, _MIXED = 0.05, 0.6, 0.05
"""Shares of a layout's time: to learn what steps cost, for the passes over the grid, and for mixed steps."""
_FEWEST = 3
"""Settings of each phase that the pilot measures, however little time there is."""
_LONGEST = 0.02
"""A single step of the pilot may take this share of the layout's time."""
_VISIT_S = 0.15
"""Short steps are repeated within a visit, three times at most, while that takes no longer."""
_SPARE = 2
"""More repeats of a short step, where another process took the processor away."""
_NOISY = 0.02
_AT_ONCE = 3
"""New settings per phase between two fits."""


class Watch(Protocol):
    """Whoever shows progress."""

    def at(self, what: str, spent_s: float, budget_s: float) -> None:
        """Show what is measured now, and how much of the time is gone."""


class Time(Protocol):
    """How much of the time is gone."""

    @property
    def budget_s(self) -> float:
        """What the layouts may take in all."""

    @property
    def spent_s(self) -> float:
        """Seconds gone, over all starts of the run."""


@dataclass(slots=True)
class Clock:
    """Seconds that a run has measured for, over all its starts."""

    budget_s: float
    before_s: float = 0.0
    begun: float = field(default_factory=time.monotonic)

    @property
    def spent_s(self) -> float:
        """Seconds gone."""
        return self.before_s + time.monotonic() - self.begun


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured, and the best that is known of the device."""

    model: ModelSpec
    gpu: Callable[[], Gpu]
    layout: Layout
    seed: int
    target: Target = TARGET


@dataclass(slots=True, eq=False)
class Session:
    """One layout of one run."""

    case: Case
    subject: Subject
    timer: Timer
    journal: Journal
    clock: Time
    layouts_left: int
    """Layouts still to be measured, this one included: they share what is left of the time."""
    watch: Watch
    _seen: set[Setting] = field(default_factory=set)
    _times: dict[str, dict[Setting, list[float]]] = field(init=False)
    _visits: dict[Setting, int] = field(init=False)
    _expected: Expected | None = None

    def __post_init__(self) -> None:
        records = self._of("sample")
        self._times = {role: times_of(records, role) for role in ROLES}
        each: dict[Setting, set[object]] = defaultdict(set)
        for record in records:
            each[setting_of(record["setting"])].add(record["visit"])
        self._visits = defaultdict(int, {setting: len(visits) for setting, visits in each.items()})

    def run(self) -> str:
        """Measure until the held-out error is small enough or the time is up; return which it was."""
        if not self._of("layout"):
            self._keep("layout", kv_tokens=self.subject.kv_tokens, at_s=self.clock.spent_s)
        plans = self._of("plan")
        if not plans or float(plans[-1]["budget_s"]) < self.clock.budget_s:  # type: ignore[arg-type]
            self._pilot()
            self._plan()
        why = self._passes() and self._mixed() and self._refine()
        self._keep("layout done", why=why or TIME_UP, at_s=self.clock.spent_s, budget_s=self.clock.budget_s)
        return why or TIME_UP

    # ---- what the journal holds

    def _of(self, kind: str) -> list[dict[str, object]]:
        return self.journal.of(kind, tp=self.case.layout.tp, pp=self.case.layout.pp)

    def _keep(self, kind: str, **values: object) -> None:
        self.journal.append([{"kind": kind, "tp": self.case.layout.tp, "pp": self.case.layout.pp, **values}])

    def times(self, role: str) -> dict[Setting, list[float]]:
        """Return the repeats of each setting that was measured for `role`: fit, held out or mixed."""
        return self._times[role]

    @property
    def _planned(self) -> tuple[list[Setting], list[Setting]]:
        record = self._of("plan")[-1]
        fit, held_out = record["fit"], record["held_out"]
        return [setting_of(each) for each in fit], [setting_of(each) for each in held_out]  # type: ignore[attr-defined]

    @property
    def expected(self) -> Expected:
        """What a step takes, from the measurements so far; worked out anew when there is a setting more."""
        each = self.times("fit") | self.times("held out")
        if self._expected is None or self._expected.settings != len(each):
            self._expected = Expected({setting: float(np.median(repeats)) for setting, repeats in each.items()})
        return self._expected

    @property
    def _share_s(self) -> float:
        """The time that this layout may take in all [s]."""
        begun_s = float(self._of("layout")[0]["at_s"])  # type: ignore[arg-type]
        return max(0.0, self.clock.budget_s - begun_s) / self.layouts_left

    @property
    def _left_s(self) -> float:
        begun_s = float(self._of("layout")[0]["at_s"])  # type: ignore[arg-type]
        return begun_s + self._share_s - self.clock.spent_s

    # ---- measuring

    def _visit(self, setting: Setting, role: str, visit: int) -> None:
        """Measure a setting once more, a few times in a row where it is short, and keep that."""
        self.watch.at(f"{self.case.layout} {setting}", self.clock.spent_s, self.clock.budget_s)
        expected_s = self.expected(setting)
        repeats = int(np.clip(_VISIT_S / max(expected_s, 1e-4), 1, 3)) if expected_s else 1
        warm_ups = 0 if setting in self._seen and expected_s > _VISIT_S else 1
        self._seen.add(setting)
        alone = len(self.subject.process_ids) <= 1  # ranks take the processor from each other, repeat or not
        spare = _SPARE if alone and expected_s < _VISIT_S else 0
        found = measure(self.subject, setting, self.timer, warm_ups, repeats, spare)
        at_s = round(self.clock.spent_s, 3)
        where = {"tp": self.case.layout.tp, "pp": self.case.layout.pp, "setting": list(setting)}
        self.journal.append(
            {"kind": "sample", **where, "role": role, "visit": visit, **repeat._asdict(), "at_s": at_s}
            for repeat in found
        )
        self._times[role].setdefault(setting, []).extend(repeat.time_s for repeat in found)
        self._visits[setting] += 1

    def _pilot(self) -> None:
        """Climb the grid from its cheapest settings until steps get long: enough to tell what the others will take."""
        end_s = self._left_s - _PILOT * self._share_s
        for setting in grid.base(self.subject.limits):
            seen = sum(each.phase == setting.phase for each in self.times("fit"))
            long = self.expected(setting) > _LONGEST * self._share_s or self._left_s < end_s
            if not self._visits[setting] and (seen < _FEWEST or not long):
                self._visit(setting, "fit", 1)

    def _plan(self) -> None:
        """Settle what is measured for the fit and what is kept from it, as the time allows."""
        limits, expected = self.subject.limits, self.expected
        everything = grid.base(limits)
        each = PASSES + 1.0  # warm-ups
        budget_s = _GRID * self._share_s
        apart = grid.held_out(limits, grid.spans(everything), HELD_OUT, self._seed)
        room_s = budget_s * len(everything) / max(len(everything) + len(apart), 1)
        fit = grid.affordable_of_both(everything, expected, each, room_s)
        before = self._planned[1] if self._of("plan") else []  # once apart, for ever apart
        measured = self.times("fit")
        fit = [s for s in everything if (s in set(fit) or s in measured) and s not in before]
        drawn = grid.held_out(limits, grid.spans(fit), HELD_OUT, self._seed)
        apart = [*before, *(s for s in drawn if s not in fit and s not in measured and s not in before)]
        left_out = [str(s) for s in everything if s not in fit and s not in before]
        lists = {"fit": [list(s) for s in fit], "held_out": [list(s) for s in apart], "left_out": left_out}
        self._keep("plan", **lists, budget_s=self.clock.budget_s)

    @property
    def _seed(self) -> int:
        return self.case.seed * 1009 + self.case.layout.tp * 31 + self.case.layout.pp

    def _passes(self) -> bool:
        """Visit every planned setting PASSES times; return False when the time was up before."""
        fit, apart = self._planned
        roles = dict.fromkeys(fit, "fit") | dict.fromkeys(apart, "held out")
        order = sorted(roles, key=grid.work)
        for visit in range(1, PASSES + 1):
            for setting in order:
                if self._visits[setting] >= visit:
                    continue
                if visit > 1 and self._left_s < self.expected(setting):
                    return False
                if self._left_s < -0.1 * self._share_s:
                    return False
                self._visit(setting, roles[setting], visit)
        return True

    def _mixed(self) -> bool:
        """Measure a few steps that prefill and decode at once; return False when the time was up before."""
        settings = grid.affordable(grid.mixed(self.subject.limits), self.expected, PASSES + 1.0, _MIXED * self._share_s)
        for visit in range(1, PASSES + 1):
            for setting in settings:
                if self._visits[setting] < visit:
                    self._visit(setting, "mixed", visit)
        return self._left_s > 0

    def _refine(self) -> str | None:
        """Measure where the fit is least sure, and again what scattered, until the target is met or the time is up."""
        while self._left_s > 0:
            cost = self.fit()
            if cost is None:
                raise InputError(f"{self.case.layout}: the measurements allow no fit; see the profile's lint")
            errors = self.errors(cost)
            if all(self.case.target.met(errors[phase]) for phase in PHASES):
                return "the held-out errors are on target"
            chosen = [*self._scattered(), *self._next(cost, errors)]
            if not chosen:
                return "every setting was measured as often as it helps"
            for setting, role in chosen:
                if self._left_s <= 0:
                    break
                self._visit(setting, role, self._visits[setting] + 1)
        return None

    def fit(self) -> CostModel | None:
        """Return the cost model of what was measured for the fit."""
        return accuracy.try_fit(self.times("fit"), self.case.model, self.case.gpu(), self.case.layout)

    def errors(self, cost: CostModel) -> dict[str, Accuracy | None]:
        """Return the held-out errors by phase."""
        apart = self.times("held out")
        return {phase: accuracy.held_out_accuracy(cost, apart, phase) for phase in PHASES}

    def _scattered(self) -> Iterator[tuple[Setting, str]]:
        """Yield settings whose repeats lie far apart: their medians may still move."""
        for role in ("fit", "held out"):
            for setting, repeats in self.times(role).items():
                if accuracy.spread(repeats) > _NOISY and self._visits[setting] < MOST_VISITS:
                    yield setting, role

    def _next(self, cost: CostModel, errors: dict[str, Accuracy | None]) -> Iterator[tuple[Setting, str]]:
        """Yield new settings, each as often as one visit of every pass would have been."""
        fit, apart = self._planned
        times, expected = self.times("fit"), self.expected
        for phase in PHASES:
            if self.case.target.met(errors[phase]) or phase not in (spans := grid.spans(fit)):
                continue
            known = accuracy.known(cost, times, phase)
            among = [s for s in grid.candidates(self.subject.limits, spans[phase], phase) if s not in set(apart)]
            among = [s for s in among if PASSES * expected(s) <= 0.25 * self._left_s]
            yield from _interleaved(grid.least_sure(known, among, expected, _AT_ONCE))


def _interleaved(settings: Sequence[Setting]) -> Iterator[tuple[Setting, str]]:
    for _ in range(PASSES):
        yield from ((setting, "fit") for setting in settings)


def times_of(records: Sequence[dict[str, object]], role: str) -> dict[Setting, list[float]]:
    """Return the repeats [s] of each setting among sample records of one role, in the order of the records."""
    found: dict[Setting, list[float]] = defaultdict(list)
    for record in records:
        if record["role"] == role:
            found[setting_of(record["setting"])].append(float(record["time_s"]))  # type: ignore[arg-type]
    return dict(found)
