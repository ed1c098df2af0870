"""Cost models -> how far to trust them: held-out errors, what each fitted term amounts to, and where they are wrong.

Figures only; `fit_view` lays them out and `fit_plot` draws them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from planner.cost import kernel, physics, roofline
from planner.cost.base import Checks, CostModel, TermError
from planner.cost.fit import PHASES
from planner.cost.residual import predict
from planner.cost.settings import Settings, identifiable
from planner.errors import InputError
from planner.search.kinds import find_kinds, fit_sound
from planner.sources.hf_config import read_model
from planner.sources.problem import Problem, problem_of
from planner.sources.profiles import read_profile
from planner.specs.base import Document, load, load_preset, preset_names, resolve, suggest, validate
from planner.specs.gpu import Gpu
from planner.specs.model import ModelSpec
from planner.specs.profile import Profile

NEAR_NOISE = 1.5
"""A median error within this factor of the spread of repeats is as good as the measurements allow."""

WEAKLY = 0.5
"""A term whose standard error is more than this share of it is told weakly: other terms can stand in for it."""

_LIKELY = 1.0
"""How far, as a logarithm, a term may lie from its typical value before any row is seen: a factor of e."""
_STEP = 1e-3
_LEAST_ERROR = 1e-3
_AT_LIMIT = 1.005
_WORST = 5


class Row(NamedTuple):
    """One measured shape (the median of its repeats) beside its prediction by a fit that had not seen its setting."""

    phase: str
    layout: str
    batch: int
    new_tokens: int | None
    """New tokens of each request, in prefill."""
    cached_tokens: int | None
    context_tokens: int | None
    """KV tokens of each request, in decode."""
    measured_s: float
    predicted_s: float | None
    """None where nothing was left to predict it from."""
    setting: int
    """Rows of one setting are held out together."""

    @property
    def error(self) -> float | None:
        """Predicted over measured time, minus 1."""
        return None if self.predicted_s is None else self.predicted_s / self.measured_s - 1.0

    @property
    def tokens(self) -> int:
        """New tokens of the whole batch (prefill)."""
        return self.batch * (self.new_tokens or 0)


class Term(NamedTuple):
    """What one term of a latency law amounts to."""

    name: str
    phase: str
    layout: str
    value: float | None
    """In `unit`; None where the law has the work for nothing."""
    unit: str
    of_peak: float | None
    """Share of the data sheet's rate."""
    of_time: float | None
    """Share of the time that it makes, on average over the measured settings of its phase."""
    standard_error: float | None
    """As a share of the term, from the rows of this degree alone; None where they were not asked."""
    told: str
    """`here`, `weakly`, `limit`, `borrowed`, `physics`, `published`, `data sheet`, `transferred` or `measured`."""
    why: str = ""
    """Why the rows do not tell it, and what was taken instead."""
    when: str = ""
    """The batch sizes that it holds for, where a law has two regimes."""


@dataclass(frozen=True, slots=True, eq=False)
class Degree:
    """One cost model, with all that is known of it."""

    cost: CostModel
    terms: tuple[Term, ...]
    rows: tuple[Row, ...]

    @property
    def layout(self) -> str:
        """`TP4`."""
        return str(self.cost.layout)

    def error(self, phase: str) -> TermError | None:
        """Return the held-out error of one phase."""
        return self.cost.error(phase)

    def of(self, phase: str) -> list[Row]:
        """Return the measured rows of one phase."""
        return [row for row in self.rows if row.phase == phase]


@dataclass(frozen=True, slots=True, eq=False)
class FitReport:
    """All cost models of one model on one GPU type, by degree."""

    model: ModelSpec
    gpu: Gpu
    profile: Profile | None
    """None where nobody measured this GPU type."""
    degrees: tuple[Degree, ...]

    @property
    def title(self) -> str:
        """`llama2-70b on h100-80gb (profile splitwise-llama2-70b-h100)`."""
        bare = "data sheet, no profile" if all(d.cost.unprofiled for d in self.degrees) else "no profile of its own"
        source = f"profile {self.profile.name}" if self.profile else bare
        return f"{self.model.name} on {self.gpu.name} ({source})"

    def worst(self, phase: str, most: int = _WORST) -> list[Row]:
        """Return the row of each setting that is predicted worst, of the `most` worst settings."""
        rows = [row for degree in self.degrees for row in degree.of(phase) if row.error is not None]
        rows.sort(key=lambda row: -abs(row.error or 0.0))
        firsts = {(row.layout, row.setting): row for row in reversed(rows)}
        return [row for row in rows if firsts[row.layout, row.setting] is row][:most]


def near_noise(error: TermError) -> bool:
    """Return True when no model could do much better: the repeats of a setting lie as far from their median."""
    return error.noise is not None and error.median <= NEAR_NOISE * error.noise


# ---- from what is named on the command line to cost models


def fit_reports(name: str, model: str | None = None, gpu: str | None = None) -> list[FitReport]:
    """Return a report per GPU type of a problem file, or the one of a profile (a file, or a preset's name).

    `model` and `gpu` (a name or a file) are for a profile that names neither as the presets do. Raises InputError.
    """
    document = _document(name)
    if _is_profile(document):
        return [_of_profile(document, model, gpu)]
    if model or gpu:
        flag = "--model" if model else "--gpu"
        raise InputError(document.fault(f"{flag} goes with a profile; a problem names its own model and cluster"))
    return reports_of(problem_of(document))


def reports_of(problem: Problem) -> list[FitReport]:
    """Return a report per GPU type of a problem, in the order of its cluster. Raises InputError."""
    costs = find_kinds(problem).costs
    return [
        fit_report(problem.model, gpu, problem.profile_of(gpu), [cost for cost in costs if cost.gpu == gpu.name])
        for gpu in problem.gpus.values()
    ]


def _document(name: str) -> Document:
    if (preset := load_preset("profiles", name)) is not None:
        return preset
    if "/" in name or name.endswith((".yaml", ".yml", ".json")) or os.path.exists(name):
        return load(name)
    shipped = preset_names("profiles")
    hint = suggest(name, shipped) or f"; shipped profiles: {', '.join(shipped)}"
    raise InputError(f"no problem file and no profile preset named {name!r}{hint}")


def _is_profile(document: Document) -> bool:
    keys = set(document.data) if isinstance(document.data, dict) else set()
    return bool(keys & {"provenance", "samples", "coefficients", "gpu"}) and not keys & {"cluster", "workload", "slo"}


def _of_profile(document: Document, model: str | None, gpu: str | None) -> FitReport:
    profile = read_profile(document)
    found_model = (None if model else profile.measured_model) or _meant("model", profile.model, model, document)
    found_gpu = (None if gpu else profile.measured_gpu) or _meant("gpu", profile.gpu, gpu, document)
    return _fitted(profile, found_model, found_gpu, document)


def report_of_profile(profile: Profile) -> FitReport:
    """Return the report of a profile in memory, which brings its model and device or names presets."""
    return _of_profile(Document(profile.model_dump(mode="json", exclude_defaults=True), profile.name), None, None)


def _fitted(profile: Profile, model: ModelSpec, gpu: Gpu, document: Document) -> FitReport:
    try:
        costs = fit_sound(profile, model, gpu)
    except InputError as error:
        raise InputError([document.fault(fault.message) for fault in error.faults]) from None
    return fit_report(model, gpu, profile, costs.values())


def _meant(kind: str, name: str, given: str | None, document: Document) -> Any:
    """Return the model or GPU that a profile is of: the preset it names, or what was given instead."""
    family, read = f"{kind}s", read_model if kind == "model" else (lambda d: validate(Gpu, d))
    presets = [read(d) for each in preset_names(family) if (d := load_preset(family, each)) is not None]
    named = next((preset for preset in presets if preset.is_called(name)), None)
    if given is None:
        if named is not None:
            return named
        close = suggest(name, [preset.name for preset in presets])
        way_out = f"give its file or the preset that is meant with --{kind}"
        raise InputError(document.fault(f"no {kind} preset is called {name!r}{close}; {way_out}", kind))
    found = next((preset for preset in presets if preset.is_called(given)), None)
    found = found or read(resolve(family, Document(given, f"--{kind}")))
    if named is not None and named.name != found.name:
        raise InputError(document.fault(f"measured {named.name}, but --{kind} says {found.name}", kind))
    return found


# ---- figures


def fit_report(model: ModelSpec, gpu: Gpu, profile: Profile | None, costs: Iterable[CostModel]) -> FitReport:
    """Return the report of the cost models of `model` on `gpu` that come from one profile."""
    ordered = sorted(costs, key=lambda cost: cost.layout)
    faults = {cost.layout.tp: _faults(cost.checks) for cost in ordered if cost.checks is not None}
    degrees = []
    for cost in ordered:
        rows = tuple(_rows(cost)) if cost.checks is not None else ()
        terms = _Terms(model, gpu, profile, cost, faults)
        degrees.append(Degree(cost, tuple(terms.each()), rows))
    return FitReport(model, gpu, profile, tuple(degrees))


def _rows(cost: CostModel) -> Iterator[Row]:
    checks = cost.checks
    assert checks is not None
    each = zip(checks.shapes.tolist(), checks.setting, checks.measured_s, checks.predicted_s, strict=True)
    for (prefills, tokens, _, decodes, context, prefix), setting, measured_s, predicted_s in each:
        times = float(measured_s), float(predicted_s) if isfinite(predicted_s) else None
        if decodes:
            shape = ("decode", str(cost.layout), int(decodes), None, None, round(context / decodes))
        else:
            each_has = round(tokens / prefills), round(prefix / prefills)
            shape = ("prefill", str(cost.layout), int(prefills), *each_has, None)
        yield Row(*shape, *times, int(setting))


_OF_PHASE = {
    "prefill": ("prefill tokens", "prefill attention", "prefix read", "prefill overhead", "launch floor", "knee"),
    "decode": ("weight streaming", "decode KV read", "decode batch", "decode overhead"),
}


def _faults(checks: Checks) -> dict[str, str]:
    """Return the terms that these rows cannot tell, each with the reason."""
    count = np.bincount(checks.setting)[checks.setting]
    nothing = np.full(len(count), np.nan)
    rows = Settings(checks.shapes, checks.measured_s, checks.setting, checks.decode, 1.0 / count, nothing)
    faults = {term: why for term, why in identifiable(rows).items() if why}
    for phase, terms in _OF_PHASE.items():
        if not (checks.decode == (phase == "decode")).any():
            faults |= dict.fromkeys(terms, f"no {phase} was measured")
    return faults


class _Law(NamedTuple):
    """One term of a family: where it stands in the vector, and what it is worth."""

    name: str
    phase: str
    places: tuple[int, ...]
    value: float | None
    unit: str
    of_peak: float | None = None
    why: str = ""
    when: str = ""


@dataclass(frozen=True, slots=True)
class _Terms:
    """The terms of one cost model, beside those of the other degrees of its profile."""

    model: ModelSpec
    gpu: Gpu
    profile: Profile | None
    cost: CostModel
    faults: dict[int, dict[str, str]]
    """By measured degree, what its rows cannot tell."""

    @property
    def tp(self) -> int:
        return self.cost.layout.tp

    def each(self) -> Iterator[Term]:
        """Yield the terms in the order of the phases, then what the best measured rows reach."""
        laws = list(self._linear() if self.cost.family == "linear" else self._roofline())
        told = [self._told(law.name) for law in laws]
        of_time, error = self._weigh(laws, [source == "here" for source, _ in told])
        for law, (source, why), share, own in zip(laws, told, of_time, error, strict=True):
            beyond = "above the data sheet's peak, so it stands in for something else"
            above = beyond if law.of_peak is not None and law.of_peak > _AT_LIMIT else ""
            reason = "; ".join(text for text in (why, law.why, above) if text)
            worth = law.value, law.unit, law.of_peak, share, own
            how = self._how_well(law, own) if source == "here" else source
            yield Term(law.name, law.phase, str(self.cost.layout), *worth, how, reason, law.when)
        yield from self._best()

    def _how_well(self, law: _Law, error: float | None) -> str:
        if self._at_limit(law):
            return "limit"
        return "weakly" if error is not None and error > WEAKLY else "here"

    def _flops(self, name: str, phase: str, place: int, flops: float) -> _Law:
        """`flops` of work per unit of the term, on all ranks, in p[place] seconds."""
        seconds = self.cost.parameters[place] * self.tp
        rate = flops / seconds if seconds > 0 else None
        peak = physics.peak_flop_per_s(self.model, self.gpu)
        return _Law(name, phase, (place,), rate, "FLOP/s per GPU", rate and rate / peak)

    def _bytes(self, name: str, places: tuple[int, ...], read: float, seconds: float) -> _Law:
        rate = read / (seconds * self.tp) if seconds > 0 else None
        return _Law(name, "decode", places, rate, "bytes/s per GPU", rate and rate / self.gpu.memory_bytes_per_s)

    def _time(self, name: str, phase: str, place: int, unit: str = "s", why: str = "") -> _Law:
        return _Law(name, phase, (place,), float(self.cost.parameters[place]), unit, why=why)

    @property
    def _matrix_flops(self) -> float:
        return self.model.matrix_flops_per_token - self.model.head_flops_per_token

    @property
    def _attention_flops(self) -> float:
        return self.model.attention_flops(physics.REFERENCE_TOKENS) / physics.REFERENCE_TOKENS**2

    @property
    def _kv_bytes(self) -> float:
        """Bytes of one KV token on all ranks; where heads do not divide, ranks hold copies."""
        return physics.kv_read_s(self.model, self.gpu, self.tp, 1.0) * self.gpu.memory_bytes_per_s * self.tp

    def _roofline(self) -> Iterator[_Law]:
        p = self.cost.parameters
        yield self._flops("prefill tokens", "prefill", 4, self._matrix_flops)
        yield self._flops("prefill attention", "prefill", 5, self._attention_flops)
        yield from self._prefix()
        yield self._time("prefill overhead", "prefill", 1)
        yield self._time("launch floor", "prefill", 13)
        yield _Law("sharpness", "both", (3,), float(p[3]), "exponent")
        if p[15] > 0:
            yield _Law("knee", "prefill", (15,), float(p[15]), f"more time per token from {2 * p[14]:.0f} tokens on")
        weights = self.model.shared_weight_bytes + self.model.expert_weight_bytes
        yield self._bytes("weight streaming", (7, 8), weights, p[7] + p[8])
        yield self._bytes("decode KV read", (10,), self._kv_bytes, p[10])
        yield self._time("decode batch", "decode", 6, "s per request")
        yield self._time("decode overhead", "decode", 2)
        if p[11] > 0 or p[12] > 0:
            yield self._time("collectives", "decode", 11)
            yield self._time("collectives/token", "prefill", 12, "s per token")
        if self.cost.family == "hybrid":
            yield from self._residuals()

    def _prefix(self) -> Iterator[_Law]:
        """Yield what reading a cached token back takes, where prompts behind a cached prefix were measured."""
        queries = float(self.cost.parameters[kernel.PREFIX])
        if queries > 0:
            yield _Law("prefix read", "prefill", (kernel.PREFIX,), queries, "queries")

    def _residuals(self) -> Iterator[_Law]:
        """What the grids make of the roofline at the measured shapes: the largest correction up or down."""
        checks, p = self.cost.checks, self.cost.parameters
        if checks is None:
            return
        base = p[: kernel.SIZE].copy()
        base[kernel.FAMILY] = kernel.ROOFLINE
        off = predict(p, checks.shapes) / predict(base, checks.shapes) - 1.0
        for phase in PHASES:
            mine = off[checks.decode == (phase == "decode")]
            if len(mine) and np.abs(mine).max() > 0:
                most = float(mine[np.abs(mine).argmax()])
                yield _Law(f"{phase} residual", phase, (), most, "of the roofline, at most")

    def _linear(self) -> Iterator[_Law]:
        p = self.cost.parameters
        yield self._flops("prefill tokens", "prefill", 2, self._matrix_flops)
        yield self._flops("prefill attention", "prefill", 3, self._attention_flops)
        yield from self._prefix()
        yield self._time("prefill overhead", "prefill", 1)
        regimes = ((4, f"<{p[10]:.0f}"), (7, f">={p[10]:.0f}")) if isfinite(p[10]) else ((4, ""),)
        for start, when in regimes:
            for law in (
                self._bytes("decode KV read", (start + 2,), self._kv_bytes, float(p[start + 2])),
                self._time("decode batch", "decode", start + 1, "s per request"),
                self._time("decode overhead", "decode", start, why="weight streaming is inside"),
            ):
                yield law._replace(when=when)

    def _told(self, name: str) -> tuple[str, str]:
        """Return what a term was told by, and why not by the rows of this degree."""
        if self.cost.unprofiled:
            return "data sheet", ""
        if self.tp not in self.faults:
            published = self.profile is not None and self.profile.coefficients_at(self.tp) is not None
            return ("published" if published else "transferred"), ""
        if name.endswith("residual"):
            return "here", ""
        if (fault := self.faults[self.tp].get(name)) is None:
            return "here", ""
        others = [f"TP{tp}" for tp, faults in self.faults.items() if tp != self.tp and name not in faults]
        if others and self.cost.family != "linear":
            return "borrowed", f"{fault}; taken from {', '.join(others)}"
        return "physics", f"{fault}; taken from the data sheet at a typical efficiency"

    def _at_limit(self, law: _Law) -> bool:
        """True where the fit stopped at the bounds of a multiplier: the rows ask for more than can be."""
        if self.cost.family == "linear" or law.name not in roofline.PARTS:
            return False
        part, place = roofline.PARTS[law.name], law.places[0]
        typical = roofline.KNEE_SHARE if law.name == "knee" else physics.typical(self.model, self.gpu, self.tp)[place]
        factor = self.cost.parameters[place] / typical if typical > 0 else 1.0
        return bool(factor < part.low * _AT_LIMIT or factor > part.high / _AT_LIMIT)

    def _weigh(self, laws: Sequence[_Law], here: Sequence[bool]) -> tuple[list[float | None], list[float | None]]:
        """Return for each term its share of the time, and its standard error where the rows of this degree tell it.

        Both from how the log time of each row moves with the log of the term (linearised at the fit): the mean, and
        the inverse of the information in the rows, whose scatter is the held-out error. A term that they leave open
        is as likely as not within a factor of e of what is typical.
        """
        nothing: list[float | None] = [None] * len(laws)
        checks = self.cost.checks
        if checks is None:
            return nothing, nothing
        slopes = np.column_stack([self._slope(law.places, checks.shapes) for law in laws])
        weight = 1.0 / np.bincount(checks.setting)[checks.setting]
        shares: list[float | None] = []
        for law, slope in zip(laws, slopes.T, strict=True):
            mine = checks.decode == (law.phase == "decode")
            known = law.places and law.phase != "both" and mine.any()
            shares.append(float(np.average(slope[mine], weights=weight[mine])) if known else None)
        told = [at for at, law in enumerate(laws) if here[at] and law.places]
        scaled = slopes[:, told] * (np.sqrt(weight) / self._scatter(checks))[:, None]
        spread = np.sqrt(np.diag(np.linalg.inv(scaled.T @ scaled + np.eye(len(told)) / _LIKELY**2)))
        moves = np.abs(slopes[:, told]).max(axis=0, initial=0.0) > 0
        errors = nothing.copy()
        for at, size, moved in zip(told, spread, moves, strict=True):
            errors[at] = float(size) if moved else None
        return shares, errors

    def _slope(self, places: tuple[int, ...], shapes: np.ndarray) -> np.ndarray:
        """Return d log(time) / d log(term) of each row."""
        up, down = self.cost.parameters.copy(), self.cost.parameters.copy()
        up[list(places)] *= np.exp(_STEP)
        down[list(places)] *= np.exp(-_STEP)
        return np.asarray(np.log(predict(up, shapes) / predict(down, shapes)) / (2 * _STEP))

    def _scatter(self, checks: Checks) -> np.ndarray:
        """Return how far each row scatters about the law, by phase: as on held-out settings, and without the grids."""
        law = self.cost.parameters[: kernel.SIZE].copy()
        law[kernel.FAMILY] = min(law[kernel.FAMILY], kernel.ROOFLINE)
        misfit = np.log(predict(law, checks.shapes) / checks.measured_s)
        scatter = np.full(len(misfit), _LEAST_ERROR)
        for phase, error in zip(PHASES, (self.cost.prefill_error, self.cost.decode_error), strict=True):
            mine = checks.decode == (phase == "decode")
            if mine.any():
                held_out = error.rms if error is not None else 0.0
                scatter[mine] = max(_LEAST_ERROR, held_out, float(np.sqrt(np.mean(misfit[mine] ** 2))))
        return scatter

    def _best(self) -> Iterator[Term]:
        """Yield the rate of the fastest measured row of each phase: no law is in these."""
        rows = list(_rows(self.cost)) if self.cost.checks is not None else []
        peak = physics.peak_flop_per_s(self.model, self.gpu)
        flop_rates = [
            row.batch
            * (self._matrix_flops * row.new_tokens + self.model.attention_flops(row.new_tokens, row.cached_tokens or 0))
            / row.measured_s
            for row in rows
            if row.new_tokens is not None
        ]
        byte_rates = [
            (self.model.streamed_weight_bytes(1) + row.batch * self.model.kv_bytes(row.context_tokens)) / row.measured_s
            for row in rows
            if row.context_tokens is not None
        ]
        for phase, rates, unit, most in (
            ("prefill", flop_rates, "FLOP/s per GPU", peak),
            ("decode", byte_rates, "bytes/s per GPU", self.gpu.memory_bytes_per_s),
        ):
            if rates:
                rate = max(rates) / self.tp
                name, layout = f"{phase} at best", str(self.cost.layout)
                yield Term(name, phase, layout, rate, unit, rate / most, None, None, "measured")


# ---- as plain data


def to_json(reports: Sequence[FitReport]) -> dict[str, Any]:
    """Return everything as plain data: no NaN, times in seconds, errors as shares."""
    return {"fits": [_report_json(report) for report in reports]}


def _report_json(report: FitReport) -> dict[str, Any]:
    return {
        "model": report.model.name,
        "gpu": report.gpu.name,
        "profile": report.profile.name if report.profile else None,
        "degrees": [_degree_json(degree) for degree in report.degrees],
        "worst": {phase: [_row_json(row) for row in report.worst(phase)] for phase in PHASES},
    }


def _degree_json(degree: Degree) -> dict[str, Any]:
    cost = degree.cost
    return {
        "layout": degree.layout,
        "family": cost.family,
        "unprofiled": cost.unprofiled,
        "parameters": [float(p) if isfinite(p) else None for p in cost.parameters],
        "errors": {phase: _error_json(degree.error(phase)) for phase in PHASES},
        "terms": [term._asdict() for term in degree.terms],
        "notes": [*cost.from_physics, *cost.notes],
        "held_out": [_row_json(row) for row in degree.rows],
    }


def _error_json(error: TermError | None) -> dict[str, Any] | None:
    return None if error is None else {**asdict(error), "near_noise": near_noise(error)}


def _row_json(row: Row) -> dict[str, Any]:
    return {**row._asdict(), "error": row.error}
