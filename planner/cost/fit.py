"""Profile -> cost model. Families compete on held-out error; physics fills what data cannot tell.

All tensor-parallel degrees of a profile are fitted together: what they share first, then what each has of its own. So a
degree with few settings leans on the others, and one without any is transferred from them (`cost.transferred`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf
from typing import NamedTuple

import numpy as np

from planner.cost import kernel, linear, physics, roofline, transferred
from planner.cost.base import Checks, CostModel, TermError
from planner.cost.residual import Residuals, hybrid, predict
from planner.cost.settings import Settings, gather, identifiable, tells_prefix
from planner.cost.transferred import Place
from planner.errors import InputError
from planner.specs.gpu import Gpu
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec
from planner.specs.profile import Coefficients, Profile, Sample

UNPROFILED_ERROR = TermError(median=0.25, p95=0.65, worst=0.75, settings=0, rms=0.37)
"""How far that roofline is off where it can be checked: 173 settings of Llama-2-70B on A100 and H100
at TP 2, 4 and 8 (Splitwise) and of Llama-3.1-8B on H200 (Dynamo). An engine of 2023 at TP8 is off the most.
`settings` is 0: none of them is of the GPU and model at hand."""

_SIMPLER = 1.05
"""A family with more parameters must beat a simpler one by this factor."""

_WORTH = 0.0005
"""Residuals that gain less than this share of a step are left out, whatever the factor: no timer is as good."""

PHASES = ("prefill", "decode")


def fit(profile: Profile, model: ModelSpec, gpu: Gpu, tp: int) -> CostModel:
    """Return the cost model of one instance at `tp` ranks and one stage, as `profile` has it.

    Of a degree that was not measured, what the measured ones say of it, marked. Raises InputError when they say
    nothing (published coefficients are those of their degree alone), or only impossible things.
    """
    return fit_all(profile, model, gpu, (tp,))[tp]


def fit_all(profile: Profile, model: ModelSpec, gpu: Gpu, tps: Iterable[int] | None = None) -> dict[int, CostModel]:
    """Return the cost model of each degree in `tps` (by default, all that the profile has), fitted together.

    Raises InputError when the profile says nothing of a degree, or only impossible things.
    """
    sampled = sampled_degrees(profile)
    found = {}
    for tp in profile.tps if tps is None else tps:
        if tp not in sampled and (coefficients := profile.coefficients_at(tp)):
            found[tp] = _from_coefficients(profile, coefficients)
        elif sampled:
            fitter = _fitter(profile, model, gpu)
            found[tp] = fitter.cost(tp) if tp in sampled else fitter.transferred(tp)
        else:
            raise InputError(no_transfer(profile, tp))
    return found


@lru_cache(maxsize=16)  # a second or two of work, and a sweep over loads or clusters asks again and again
def _fitter(profile: Profile, model: ModelSpec, gpu: Gpu) -> _Fitter:
    return _Fitter(profile, _Physics(model, gpu), sampled_degrees(profile))


def fit_elsewhere(profile: Profile, here: Place, there: Mapping[int, Place]) -> dict[int, CostModel]:
    """Return cost models by degree for another GPU or model than the profile's, marked (see `cost.transferred`).

    `there` is given by degree: its links may depend on how many GPUs have to be joined. Raises InputError when the
    profile has no samples, or only impossible ones.
    """
    if not sampled_degrees(profile):
        raise InputError(f"profile {profile.name} has no samples, and published coefficients hold where they were made")
    fitter = _fitter(profile, here.model, here.gpu)
    return {tp: fitter.elsewhere(tp, here, place) for tp, place in there.items()}


def sampled_degrees(profile: Profile) -> dict[int, list[Sample]]:
    """Return the one-stage samples of a profile by degree, without degrees that have none."""
    rows = {tp: [*profile.rows("prefill", tp), *profile.rows("decode", tp)] for tp in profile.tps}
    return {tp: each for tp, each in rows.items() if each}


def no_transfer(profile: Profile, tp: int) -> str:
    """Return why there is no cost model at a degree that was not measured, and the way out."""
    known = ", ".join(f"TP{degree}" for degree in profile.tps) or "no degree without pipeline stages"
    return (
        f"profile {profile.name} says nothing of TP{tp} (it has {known}), and published coefficients hold at their "
        f"own tensor-parallel degree alone; measure TP{tp} or leave it out"
    )


@dataclass(frozen=True, slots=True)
class _Physics:
    """The model on the GPU."""

    model: ModelSpec
    gpu: Gpu

    def typical(self, tp: int) -> np.ndarray:
        return physics.typical(self.model, self.gpu, tp)

    def possible(self, sample: Sample) -> bool:
        """False for a row that beats the data sheet."""
        if sample.phase == "prefill":
            shape = (sample.batch, sample.prompt_tokens, sample.cached_tokens)
            floor_s = physics.prefill_floor_s(self.model, self.gpu, sample.tp, shape)
        else:
            args = (self.model, self.gpu, sample.tp, sample.batch, sample.context_tokens)
            floor_s = physics.decode_floor_s(*args)
        return sample.time_s >= physics.IMPOSSIBLE * floor_s

    def linear_terms(self, tp: int) -> dict[str, tuple[int, float, str]]:
        """Return place in the LINEAR vector, value and derivation of each term that physics can give."""
        p, gpu = self.typical(tp), self.gpu
        compute = f"{physics.COMPUTE_EFFICIENCY:g} of the peak FLOP rate, plus norms and gates"
        return {
            "prefill tokens": (2, p[4], f"matrix FLOP at {compute}"),
            "prefill attention": (3, p[5], f"attention FLOP at {physics.ATTENTION_EFFICIENCY:g} of the peak"),
            "decode batch": (5, p[4] + p[6], f"matrix FLOP at {compute}, plus sampling"),
            "decode KV read": (
                6,
                p[10],
                f"{p[10] * gpu.memory_bytes_per_s * physics.kv_efficiency(self.model):,.0f} B per token and rank at "
                f"{physics.kv_efficiency(self.model):g} of {gpu.memory_bytes_per_s / 1e9:,.0f} GB/s",
            ),
        }


@dataclass(frozen=True, slots=True)
class _Degree:
    """The rows of one tensor-parallel degree, and which terms they cannot tell (with the reason)."""

    tp: int
    rows: Settings
    faults: dict[str, str]
    dropped: int
    prompts: tuple[int, int]
    prefix: bool
    """Whether they tell what reading a cached prefix takes."""

    @property
    def there(self) -> dict[str, bool]:
        return {"prefill": bool((~self.rows.decode).any()), "decode": bool(self.rows.decode.any())}

    def parts(self, knee: bool) -> roofline.Parts:
        """Return the multipliers that these rows can tell."""
        blocked = set(self.faults)
        if not self.there["prefill"]:
            blocked |= {"prefill overhead", "launch floor", "knee"}
        if not self.there["decode"]:
            blocked |= {"decode overhead", "decode batch", "decode KV read", "weight streaming"}
        if not knee:
            blocked.add("knee")
        if not self.prefix:
            blocked.add("prefix read")
        return tuple(name for name in roofline.PARTS if name not in blocked)


def _degree(profile: Profile, at: _Physics, tp: int, samples: list[Sample]) -> _Degree:
    kept = [sample for sample in samples if at.possible(sample)]
    if not kept:
        raise InputError(
            f"profile {profile.name}: every row at TP{tp} is faster than {tp} x {at.gpu.name} can be "
            f"with {at.model.name}; check its model, its GPU and its unit of time"
        )
    rows = gather(kept)
    prompts = [sample.prompt_tokens for sample in kept if sample.phase == "prefill"]
    faults = {term: why for term, why in identifiable(rows).items() if why}
    told = (min(prompts), max(prompts)) if prompts else (0, 0)
    return _Degree(tp, rows, faults, len(samples) - len(kept), told, tells_prefix(rows))


@dataclass(frozen=True, slots=True, eq=False)
class _Roofline:
    """Rooflines of all degrees with one knee (0: none): the multipliers they share, and each one's own vector."""

    knee: int
    parts: roofline.Parts
    center: np.ndarray
    own: dict[int, np.ndarray]
    vectors: dict[int, np.ndarray]

    def residuals(self, rows: dict[int, Settings], phase: str) -> Residuals | None:
        """Return what is left of `rows` in one phase, over all degrees; None without any."""
        of_phase = {tp: part.where(part.decode == (phase == "decode")) for tp, part in rows.items()}
        of_phase = {tp: part for tp, part in of_phase.items() if len(part)}
        predicted_s = {tp: predict(self.vectors[tp], part.shapes) for tp, part in of_phase.items()}
        told = phase == "prefill" or "decode KV read" in self.parts
        return Residuals.of(of_phase, predicted_s, told) if of_phase else None


class _Candidate(NamedTuple):
    """A family fitted to all rows of a degree, and every row beside its prediction without its setting."""

    name: str
    parameters: np.ndarray
    checks: Checks
    note: str = ""

    @property
    def score(self) -> float:
        """Mean relative error over the settings, of both phases alike; infinite when none was held out."""
        means = [_size(errors) for phase in PHASES if len(errors := self.checks.errors(phase))]
        return sum(means) / len(means) if means else inf


def _size(errors: np.ndarray) -> float:
    return float(np.abs(errors).mean()) if len(errors) else inf


@dataclass(slots=True)
class _Fitter:
    """All degrees of one profile; the shared work is done once, when the first cost model is asked for."""

    profile: Profile
    at: _Physics
    samples: dict[int, list[Sample]]
    degrees: dict[int, _Degree] = field(init=False)
    rooflines: list[tuple[_Roofline, dict[tuple[int, bool], Checks]]] = field(default_factory=list)
    """With each knee: the fit, and by degree and with grids or without, what it predicts of settings held out."""

    def __post_init__(self) -> None:
        self.degrees = {tp: _degree(self.profile, self.at, tp, rows) for tp, rows in self.samples.items()}

    @property
    def rows(self) -> dict[int, Settings]:
        """The rows of each degree that was measured."""
        return {tp: degree.rows for tp, degree in self.degrees.items()}

    def cost(self, tp: int) -> CostModel:
        """Return the cost model of a degree that was measured."""
        degree = self.degrees[tp]
        self.rooflines = self.rooflines or self._rooflines()
        best = self._compete(degree)
        notes = [best.note, *_notes(self.profile, degree.dropped)]
        errors = {phase: _term_error(best.checks.errors(phase), degree.rows, phase) for phase in PHASES}
        return CostModel(
            layout=Layout(tp),
            parameters=best.parameters,
            family=best.name,
            from_physics=tuple(self._marks(degree)),
            prefill_error=errors["prefill"],
            decode_error=errors["decode"],
            measured_tokens=degree.prompts,
            notes=tuple(note for note in notes if note),
            checks=best.checks,
        )

    def transferred(self, tp: int) -> CostModel:
        """Return the cost model of a degree that was not measured."""
        degree, way = self._nearest(tp), transferred.Way.to(tp, sorted(self.degrees))
        checked = [self._left_out(each) for each in way.checked]
        errors = {}
        for phase in PHASES:
            off = np.concatenate([np.zeros(0), *(checks.errors(phase) for checks in checked)])
            errors[phase] = way.error(_term_error(off, degree.rows, phase), phase) if self._told(phase) else None
        return CostModel(
            layout=Layout(tp),
            parameters=self._carried(self.rows, tp),
            family="hybrid",
            from_physics=tuple(self._marks(degree)),
            prefill_error=errors["prefill"],
            decode_error=errors["decode"],
            measured_tokens=degree.prompts,
            notes=(way.note, *filter(None, _notes(self.profile, degree.dropped))),
        )

    def _nearest(self, tp: int) -> _Degree:
        """Return the measured degree nearest to `tp`, said of `tp`: what it cannot tell is not known there either."""
        near = min(self.degrees, key=lambda degree: (transferred.octaves([degree], tp), degree))
        return replace(self.degrees[near], tp=tp)

    def _told(self, phase: str) -> bool:
        return any(degree.there[phase] for degree in self.degrees.values())

    def _base(self, tp: int) -> np.ndarray:
        """Return the roofline of a typical engine, from which fits set out; prefixes are read where rows tell of it."""
        p = self.at.typical(tp)
        if any(degree.prefix for degree in self.degrees.values()):
            p[kernel.PREFIX] = physics.prefix_queries(p)
        return p

    def _lines(self, rows: dict[int, Settings]) -> roofline.Lines:
        """Return the multipliers of `rows` as lines over the ranks."""
        told = {name for tp in rows for name in self.degrees[tp].parts(knee=False)}
        parts = tuple(name for name in roofline.PARTS if name in told)
        degrees = {tp: (part, self._base(tp)) for tp, part in rows.items()}
        return transferred.lines(degrees, parts, Place.usual(self.at.model, self.at.gpu))

    def _carried(self, rows: dict[int, Settings], tp: int) -> np.ndarray:
        """Return the vector that `rows` of other degrees give at `tp`: the roofline carried over, and residuals."""
        lines = self._lines(rows)
        vectors = {each: roofline.vector(self._base(each), lines.parts, lines.at(each)) for each in (*rows, tp)}
        whole = _Roofline(0, lines.parts, lines.level, {}, vectors)
        return hybrid(vectors[tp], tp, *[whole.residuals(rows, phase) for phase in PHASES])

    def _left_out(self, tp: int) -> Checks:
        """Return the rows of a measured degree beside what the other degrees alone say of them."""
        rows = self.rows
        mine = rows.pop(tp)
        return _checks(mine, predict(self._carried(rows, tp), mine.shapes))

    def elsewhere(self, tp: int, here: Place, there: Place) -> CostModel:
        """Return the cost model at `tp` of another GPU or model. Without residuals: they are no better there."""
        degree, at = self._nearest(tp), _Physics(there.model, there.gpu)
        lines = self._lines(self.rows)
        theta = transferred.elsewhere(lines, tp, here, there)
        move = transferred.Move(here, there, transferred.Way.to(tp, sorted(self.degrees)))
        errors = {phase: move.error(phase) if self._told(phase) else None for phase in PHASES}
        return CostModel(
            layout=Layout(tp),
            parameters=roofline.vector(at.typical(tp), lines.parts, theta),
            family="roofline",
            from_physics=tuple(self._marks(degree, at)),
            prefill_error=errors["prefill"],
            decode_error=errors["decode"],
            notes=(*move.notes, *filter(None, _notes(self.profile, degree.dropped))),
        )

    def _compete(self, degree: _Degree) -> _Candidate:
        """Return the family with the least held-out error; the simpler one where they are close.

        A phase without rows is only known to the roofline. Of the knees the one that fits best enters.
        """
        candidates = [self._linear(degree)] if all(degree.there.values()) else []
        candidates += [self._hybrid(degree, *found) for found in self.rooflines]
        bar = _SIMPLER * min(candidate.score for candidate in candidates)
        return next((candidate for candidate in candidates if candidate.score <= bar), candidates[-1])

    def _linear(self, degree: _Degree) -> _Candidate:
        fixed = np.full(kernel.SIZE, np.nan)
        for term in degree.faults:
            place, value, _ = self.at.linear_terms(degree.tp)[term]
            fixed[place] = value
        predicted_s = np.full(len(degree.rows), np.nan)
        for held in _folds(degree.rows):
            p = linear.fit(degree.rows.where(~held), fixed, degree.prefix)
            predicted_s[held] = predict(p, degree.rows.shapes[held])
        return _Candidate("linear", linear.fit(degree.rows, fixed, degree.prefix), _checks(degree.rows, predicted_s))

    def _hybrid(self, degree: _Degree, whole: _Roofline, held_out: dict[tuple[int, bool], Checks]) -> _Candidate:
        """Return the roofline, with residuals in each phase where they predict better."""
        rows = self.rows
        plain, corrected = held_out[degree.tp, False], held_out[degree.tp, True]
        better = {
            phase: _SIMPLER * _size(corrected.errors(phase)) + _WORTH < _size(plain.errors(phase)) for phase in PHASES
        }
        p = whole.vectors[degree.tp]
        note = f"+{p[15]:.0%} per token beyond {2 * p[14]:.0f} tokens" if p[15] else ""
        if not any(better.values()):
            return _Candidate("roofline", p, plain, note)
        grids = [whole.residuals(rows, phase) if better[phase] else None for phase in PHASES]
        kept = np.where(degree.rows.decode, better["decode"], better["prefill"])
        checks = _checks(degree.rows, np.where(kept, corrected.predicted_s, plain.predicted_s))
        return _Candidate("hybrid", hybrid(p, degree.tp, *grids), checks, note)

    def _rooflines(self) -> list[tuple[_Roofline, dict[tuple[int, bool], Checks]]]:
        rows = self.rows
        wholes = [self._together(rows, knee) for knee in self._knees(rows)]
        return [(whole, self._held_out(rows, whole)) for whole in wholes]

    def _knees(self, rows: dict[int, Settings]) -> list[int]:
        """Return no knee, and the one that fits best of those with two settings on either side."""
        tokens = np.concatenate([part.shapes[~part.decode, 1] for part in rows.values()])
        knees = [k for k in roofline.KNEES if (tokens <= k).sum() >= 2 and (tokens >= 2 * k).sum() >= 2]

        def misfit(knee: int) -> float:
            vectors = self._together(rows, knee).vectors
            logs = {tp: np.log(predict(vectors[tp], part.shapes) / part.time_s) for tp, part in rows.items()}
            return float(sum(part.weight @ logs[tp] ** 2 for tp, part in rows.items()))

        best = min(knees, key=misfit, default=None)
        return [0] if best is None else [0, best]

    def _together(self, rows: dict[int, Settings], knee: int, start: _Roofline | None = None) -> _Roofline:
        """Return the rooflines of `rows`: first what all degrees share, then each its own."""
        bases = {tp: self._base(tp) for tp in rows}
        if knee:
            bases = {tp: roofline.with_knee(base, knee) for tp, base in bases.items()}
        told = {tp: self.degrees[tp].parts(knee > 0) for tp in rows}
        parts = tuple(name for name in roofline.PARTS if any(name in each for each in told.values()))
        center = roofline.shared(
            [(part, bases[tp]) for tp, part in rows.items()], parts, None if start is None else start.center
        )
        if len(rows) == 1:
            own = dict.fromkeys(rows, center)
        else:
            before = start.own if start is not None else dict.fromkeys(rows, center)
            own = {tp: self._own((rows[tp], bases[tp]), parts, told[tp], center, before[tp]) for tp in rows}
        vectors = {tp: roofline.vector(bases[tp], parts, theta) for tp, theta in own.items()}
        return _Roofline(knee, parts, center, own, vectors)

    def _own(
        self,
        degree: roofline.Degree,
        parts: roofline.Parts,
        told: roofline.Parts,
        center: np.ndarray,
        start: np.ndarray,
    ) -> np.ndarray:
        """Return a degree's own multipliers; those that its rows cannot tell stay at what all share."""
        rows, base = degree
        mine = np.array([name in told for name in parts])
        base = roofline.vector(base, tuple(name for name in parts if name not in told), center[~mine])
        theta = center.copy()
        theta[mine] = roofline.own((rows, base), told, center[mine], start[mine])
        return theta

    def _held_out(self, rows: dict[int, Settings], whole: _Roofline) -> dict[tuple[int, bool], Checks]:
        """Return what each setting is predicted to be from all others, by degree, with grids and without."""
        found = {}
        for tp, mine in rows.items():
            plain_s, corrected_s = np.full(len(mine), np.nan), np.full(len(mine), np.nan)
            for held in _folds(mine):
                others = rows | {tp: mine.where(~held)}
                fitted = self._together(others, whole.knee, whole)
                phase = PHASES[int(mine.decode[held][0])]
                grids = [fitted.residuals(others, phase) if phase == each else None for each in PHASES]
                plain_s[held] = predict(fitted.vectors[tp], mine.shapes[held])
                corrected_s[held] = predict(hybrid(fitted.vectors[tp], tp, *grids), mine.shapes[held])
            found[tp, False], found[tp, True] = _checks(mine, plain_s), _checks(mine, corrected_s)
        return found

    def _marks(self, degree: _Degree, at: _Physics | None = None) -> Iterator[str]:
        """Yield one line per term that physics or the other degrees supplied, with the reason."""
        terms = (at or self.at).linear_terms(degree.tp)
        others = [other for other in self.degrees.values() if other.tp != degree.tp]
        missing = [phase for phase, there in degree.there.items() if not there]
        for phase in missing:
            told = any(other.there[phase] for other in others)
            source = "what the other degrees show" if told else "a data-sheet roofline"
            yield f"{phase}: not measured; all of it is {source}"
        for term, why in degree.faults.items():
            if term.split()[0] not in missing:
                yield f"{term}: {why}; taken as {terms[term][2]}"


def _notes(profile: Profile, dropped: int) -> list[str]:
    assembled = profile.provenance.method == "assembled"
    return [
        "assembled from layer tables, not measured end to end" if assembled else "",
        f"left out {dropped} rows faster than the data sheet allows" if dropped else "",
    ]


def _folds(rows: Settings) -> Iterator[np.ndarray]:
    """Yield masks of the rows to hold out; never the only setting of a phase."""
    for held in rows.folds():
        if (rows.decode[~held] == rows.decode[held][0]).any():
            yield held


def _checks(rows: Settings, predicted_s: np.ndarray) -> Checks:
    return Checks(rows.shapes, rows.decode, rows.group, rows.time_s, predicted_s)


def _term_error(errors: np.ndarray, rows: Settings, phase: str) -> TermError | None:
    if not len(errors):
        return None
    size = np.abs(errors)
    return TermError(
        median=float(np.median(size)),
        p95=float(np.percentile(size, 95)),
        worst=float(size.max()),
        settings=len(size),
        rms=float(np.sqrt(np.mean(size**2))),
        noise=rows.noise(phase == "decode"),
    )


def _from_coefficients(profile: Profile, coefficients: Coefficients) -> CostModel:
    parameters, notes = linear.published(coefficients)
    return CostModel(Layout(coefficients.tp), parameters, family="linear", notes=notes)


def with_stages(
    cost: CostModel, model: ModelSpec, pp: int, handoff_bytes_per_s: float, handoff_latency_s: float
) -> CostModel:
    """Return `cost` cut into `pp` pipeline stages: each its share of the work, plus the hand-off between two.

    Never time / pp: stages are uneven, a request still passes through all of them, and every boundary moves
    the hidden states of the step's tokens. Raises InputError when the layers cannot fill the stages.
    """
    assert cost.layout.pp == 1, "stages are cut once"
    if fault := model.pp_fault(pp):
        raise InputError(fault)
    if pp == 1:
        return cost
    return replace(
        cost,
        layout=Layout(cost.layout.tp, pp),
        stage_share=model.stage_share(pp),
        handoff_s=handoff_latency_s,
        handoff_s_per_token=model.activation_bytes_per_token / handoff_bytes_per_s,
        notes=(*cost.notes, f"PP{pp} derived from PP1 by stage, not measured"),
    )


def unprofiled(model: ModelSpec, gpu: Gpu, tp: int, link_bytes_per_s: float, link_latency_s: float) -> CostModel:
    """Return the data-sheet roofline with typical efficiencies and ring collectives, marked as unprofiled.

    `link_bytes_per_s`: line rate between the ranks, per GPU and one way; without meaning at TP1.
    """
    p = physics.typical(model, gpu, tp)
    p[11], p[12] = physics.collectives_s(model, tp, link_bytes_per_s, link_latency_s)
    return CostModel(
        Layout(tp),
        p,
        family="roofline",
        unprofiled=True,
        from_physics=("all of it: a data-sheet roofline with typical efficiencies",),
        prefill_error=UNPROFILED_ERROR,
        decode_error=UNPROFILED_ERROR,
        notes=("unprofiled: the error is that seen elsewhere; profile this GPU before you rely on the plan",),
    )


class FitRow(NamedTuple):
    """One line of the fit report. Errors are relative and held out; None where nothing could be held out."""

    phase: str
    layout: str
    family: str
    settings: int
    median: float | None
    p95: float | None
    worst: float | None
    notes: tuple[str, ...]
    gpu: str = ""


def fit_report(costs: Iterable[CostModel]) -> list[FitRow]:
    """Return two lines per cost model, prefill and decode, in the order of GPU types and layouts."""
    return [
        _fit_row(cost, phase, error)
        for cost in sorted(costs, key=lambda cost: (cost.gpu, cost.layout))
        for phase, error in (("prefill", cost.prefill_error), ("decode", cost.decode_error))
    ]


def _fit_row(cost: CostModel, phase: str, error: TermError | None) -> FitRow:
    other = "decode" if phase == "prefill" else "prefill"
    notes = tuple(note for note in (*cost.notes, *cost.from_physics) if not note.startswith(other))
    if error is None:
        return FitRow(phase, str(cost.layout), cost.family, 0, None, None, None, notes, cost.gpu)
    numbers = error.settings, error.median, error.p95, error.worst
    return FitRow(phase, str(cost.layout), cost.family, *numbers, notes, cost.gpu)
