"""Profile -> cost model. Families compete on held-out error; physics fills what data cannot tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from planner.cost import kernel, linear, physics, roofline
from planner.cost.base import CostModel, TermError
from planner.cost.settings import Settings, gather, identifiable
from planner.errors import InputError
from planner.specs.gpu import Gpu
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec
from planner.specs.profile import Coefficients, Profile, Sample

UNPROFILED_ERROR = TermError(median=0.32, p95=0.64, worst=0.74, settings=0)
"""How far that roofline is off where it can be checked: 173 settings of Llama-2-70B on A100 and H100
at TP 2, 4 and 8 (Splitwise) and of Llama-3.1-8B on H200 (Dynamo). An engine of 2023 at TP8 is off the most.
`settings` is 0: none of them is of the GPU and model at hand."""

_IMPOSSIBLE = 0.98
"""Rows faster than this share of the data-sheet floor are no measurements (timers and peaks are rounded)."""

_SIMPLER = 1.05
"""A family with more parameters must beat a simpler one by this factor."""

Refit = Callable[[Settings, np.ndarray | None], np.ndarray]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A family fitted to all rows, with the error of predicting each setting without it."""

    name: str
    parameters: np.ndarray
    errors: dict[str, np.ndarray]
    note: str = ""

    @property
    def score(self) -> float:
        """Mean relative error over the settings, of both phases alike; infinite when none was held out."""
        means = [float(errors.mean()) for errors in self.errors.values() if len(errors)]
        return sum(means) / len(means) if means else float("inf")


def fit(profile: Profile, model: ModelSpec, gpu: Gpu, tp: int) -> CostModel:
    """Return the cost model of one instance at `tp` ranks and one stage, as `profile` has it.

    Raises InputError when the profile says nothing of that degree, or only impossible things.
    """
    samples = [*profile.rows("prefill", tp), *profile.rows("decode", tp)]
    if samples:
        return _from_samples(profile, samples, _Physics(model, gpu, tp))
    if coefficients := profile.coefficients_at(tp):
        return _from_coefficients(profile, coefficients)
    raise InputError(transfer(profile, tp))


def transfer(profile: Profile, tp: int) -> str:
    """Return why there is no cost model at a degree that was not measured, and the way out."""
    known = ", ".join(f"TP{degree}" for degree in profile.tps) or "no degree without pipeline stages"
    return (
        f"profile {profile.name} has no measurements at TP{tp} (it has {known}), and latencies do not carry "
        f"over from one tensor-parallel degree to another; measure TP{tp} or leave it out"
    )


@dataclass(frozen=True, slots=True)
class _Physics:
    """The model on the GPU at one degree."""

    model: ModelSpec
    gpu: Gpu
    tp: int

    @property
    def typical(self) -> np.ndarray:
        return physics.typical(self.model, self.gpu, self.tp)

    def possible(self, sample: Sample) -> bool:
        """False for a row that beats the data sheet."""
        if sample.phase == "prefill":
            shape = (sample.batch, sample.prompt_tokens, sample.cached_tokens)
            floor_s = physics.prefill_floor_s(self.model, self.gpu, self.tp, shape)
        else:
            args = (self.model, self.gpu, self.tp, sample.batch, sample.context_tokens)
            floor_s = physics.decode_floor_s(*args)
        return sample.time_s >= _IMPOSSIBLE * floor_s

    def linear_terms(self) -> dict[str, tuple[int, float, str]]:
        """Return place in the LINEAR vector, value and derivation of each term that physics can give."""
        p, gpu = self.typical, self.gpu
        compute = f"{physics.COMPUTE_EFFICIENCY:g} of the peak FLOP rate"
        return {
            "prefill tokens": (2, p[4], f"matrix FLOP at {compute}"),
            "prefill attention": (3, p[5], f"attention FLOP at {physics.ATTENTION_EFFICIENCY:g} of the peak"),
            "decode batch": (5, p[4] + p[6], f"matrix FLOP at {compute}, plus sampling"),
            "decode KV read": (
                6,
                p[10],
                f"{p[10] * gpu.memory_bytes_per_s * physics.KV_EFFICIENCY:,.0f} B per token and rank at "
                f"{physics.KV_EFFICIENCY:g} of {gpu.memory_bytes_per_s / 1e9:,.0f} GB/s",
            ),
        }


def _from_samples(profile: Profile, samples: list[Sample], at: _Physics) -> CostModel:
    kept = [sample for sample in samples if at.possible(sample)]
    if not kept:
        raise InputError(
            f"profile {profile.name}: every row at TP{at.tp} is faster than {at.tp} x {at.gpu.name} can be "
            f"with {at.model.name}; check its model, its GPU and its unit of time"
        )
    rows = gather(kept)
    faults = {term: why for term, why in identifiable(rows).items() if why}
    best = _compete(rows, faults, at)
    prompts = [sample.prompt_tokens for sample in kept if sample.phase == "prefill"]
    notes = [best.note, *_notes(profile, len(samples) - len(kept))]
    return CostModel(
        layout=Layout(at.tp),
        parameters=best.parameters,
        family=best.name,
        from_physics=tuple(_marks(faults, rows, at)),
        prefill_error=_term_error(best.errors["prefill"]),
        decode_error=_term_error(best.errors["decode"]),
        measured_tokens=(min(prompts), max(prompts)) if prompts else (0, 0),
        notes=tuple(note for note in notes if note),
    )


def _notes(profile: Profile, dropped: int) -> list[str]:
    assembled = profile.provenance.method == "assembled"
    return [
        "assembled from layer tables, not measured end to end" if assembled else "",
        f"left out {dropped} rows faster than the data sheet allows" if dropped else "",
    ]


def _marks(faults: dict[str, str], rows: Settings, at: _Physics) -> list[str]:
    """Return one line per term that physics supplied, with the reason."""
    missing = [phase for phase, there in _phases(rows).items() if not there]
    terms = at.linear_terms()
    lines = [f"{phase}: not measured; all of it is a data-sheet roofline" for phase in missing]
    for term, why in faults.items():
        if term.split()[0] not in missing:
            lines.append(f"{term}: {why}; taken as {terms[term][2]}")
    return lines


def _phases(rows: Settings) -> dict[str, bool]:
    return {"prefill": bool((~rows.decode).any()), "decode": bool(rows.decode.any())}


def _compete(rows: Settings, faults: dict[str, str], at: _Physics) -> _Candidate:
    """Return the family with the least held-out error; the simpler one where they are close.

    A phase without rows is only known to the roofline. Of the knees the one that fits best enters.
    """
    there = _phases(rows)
    candidates = [_linear(rows, faults, at)] if all(there.values()) else []
    candidates.append(_roofline(rows, faults, at.typical))
    if there["prefill"] and (knee := _best_knee(rows, faults, at.typical)):
        candidates.append(_roofline(rows, faults, roofline.with_knee(at.typical, knee)))
    bar = _SIMPLER * min(candidate.score for candidate in candidates)
    return next(candidate for candidate in candidates if candidate.score <= bar)


def _linear(rows: Settings, faults: dict[str, str], at: _Physics) -> _Candidate:
    fixed = np.full(kernel.SIZE, np.nan)
    for term in faults:
        place, value, _ = at.linear_terms()[term]
        fixed[place] = value
    parameters = linear.fit(rows, fixed)
    return _Candidate("linear", parameters, _held_out(rows, parameters, lambda part, _: linear.fit(part, fixed)))


def _roofline(rows: Settings, faults: dict[str, str], base: np.ndarray) -> _Candidate:
    parts = _parts(rows, faults, base)
    parameters = roofline.fit(rows, base, parts)
    errors = _held_out(rows, parameters, lambda part, start: roofline.fit(part, base, parts, start))
    note = f"+{parameters[15]:.0%} per token beyond {2 * base[14]:.0f} tokens" if base[15] else ""
    return _Candidate("roofline", parameters, errors, note)


def _parts(rows: Settings, faults: dict[str, str], base: np.ndarray) -> tuple[str, ...]:
    """Return the multipliers that these rows can tell."""
    there = _phases(rows)
    blocked = set(faults)
    if not there["prefill"]:
        blocked |= {"prefill overhead", "launch floor"}
    if not there["decode"]:
        blocked |= {"decode overhead", "decode batch", "decode KV read", "weight streaming"}
    if not base[15]:
        blocked.add("knee")
    return tuple(name for name in roofline.PARTS if name not in blocked)


def _best_knee(rows: Settings, faults: dict[str, str], base: np.ndarray) -> int | None:
    """Return where a knee fits best, of those with two settings on either side; None when there is none."""
    tokens = rows.shapes[~rows.decode, 1]
    knees = [k for k in roofline.KNEES if (tokens <= k).sum() >= 2 and (tokens >= 2 * k).sum() >= 2]

    def misfit(knee: int) -> float:
        start = roofline.with_knee(base, knee)
        p = roofline.fit(rows, start, _parts(rows, faults, start))
        return float(rows.weight @ np.log(_predict(p, rows.shapes) / rows.time_s) ** 2)

    return min(knees, key=misfit, default=None)


def _held_out(rows: Settings, parameters: np.ndarray, refit: Refit) -> dict[str, np.ndarray]:
    """Return the relative error of each setting when predicted from the others, per phase."""
    errors: dict[str, list[float]] = {"prefill": [], "decode": []}
    for held in rows.folds():
        left = rows.where(~held)
        if not (left.decode == rows.decode[held][0]).any():
            continue  # the only setting of its phase: nothing to predict it from
        p = refit(left, parameters)
        test = rows.where(held)
        relative = np.abs(_predict(p, test.shapes) / test.time_s - 1.0)
        phase = "decode" if test.decode[0] else "prefill"
        errors[phase] += [float(relative[test.group == group].mean()) for group in np.unique(test.group)]
    return {phase: np.array(values) for phase, values in errors.items()}


def _predict(parameters: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    out = np.empty(len(shapes))
    kernel.iterations_s(parameters, shapes, out)
    return out


def _term_error(errors: np.ndarray) -> TermError | None:
    if not len(errors):
        return None
    p95 = float(np.percentile(errors, 95))
    return TermError(float(np.median(errors)), p95, float(errors.max()), len(errors))


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


def fit_report(costs: Iterable[CostModel]) -> list[FitRow]:
    """Return two lines per cost model, prefill and decode, in the order of the layouts."""
    return [
        _fit_row(cost, phase, error)
        for cost in sorted(costs, key=lambda cost: cost.layout)
        for phase, error in (("prefill", cost.prefill_error), ("decode", cost.decode_error))
    ]


def _fit_row(cost: CostModel, phase: str, error: TermError | None) -> FitRow:
    other = "decode" if phase == "prefill" else "prefill"
    notes = tuple(note for note in (*cost.notes, *cost.from_physics) if not note.startswith(other))
    if error is None:
        return FitRow(phase, str(cost.layout), cost.family, 0, None, None, None, notes)
    numbers = error.settings, error.median, error.p95, error.worst
    return FitRow(phase, str(cost.layout), cost.family, *numbers, notes)
