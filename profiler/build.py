"""A journal -> the profile: samples, what was kept from the fit, what they are worth, and where they come from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import InputError
from planner.specs.gpu import Gpu
from planner.specs.layout import Layout
from planner.specs.measured import Accuracy, Environment, MixedSamples, Overhead, Transfer
from planner.specs.model import ModelSpec
from planner.specs.profile import KvTokens, Profile, Provenance, Sample, Samples
from profiler import accuracy
from profiler.accuracy import PHASES
from profiler.device import raised
from profiler.session import times_of
from profiler.setting import Setting
from profiler.store import Journal, Record

_DRIFT = 0.03


@dataclass(frozen=True, slots=True)
class Facts:
    """What a profile says of itself beside its numbers."""

    name: str
    model: ModelSpec
    gpu: Gpu
    """A preset, or the device as it was measured."""
    model_is_preset: bool
    gpu_is_preset: bool
    dtype: str
    interconnect: str
    environment: Environment


def layouts_of(journal: Journal) -> list[Layout]:
    """Return the layouts that were measured, in order."""
    return sorted({Layout(record["tp"], record["pp"]) for record in journal.of("sample")})


def samples_of(journal: Journal, role: str, layout: Layout | None = None) -> list[Sample]:
    """Return the rows that were measured for `role`: by layout, phase and size, repeats in the order they were made."""
    found = []
    for at in layouts_of(journal) if layout is None else [layout]:
        times = times_of(journal.of("sample", tp=at.tp, pp=at.pp), role)
        for setting in sorted(times, key=lambda each: (each.phase != "prefill", each)):
            found += [setting.sample(*at, _rounded(time_s)) for time_s in times[setting]]
    return found


def gpu_of(journal: Journal, gpu: Gpu, model: ModelSpec, is_preset: bool) -> Gpu:
    """Return the GPU; one without a data sheet gets peaks that no measured row beats."""
    if is_preset:
        return gpu
    rows = [*samples_of(journal, "fit"), *samples_of(journal, "held out")]
    return raised(gpu, model, rows)


def profile_of(journal: Journal, facts: Facts) -> Profile:
    """Return the profile of everything in a journal. Raises InputError when nothing was measured for a fit."""
    rows = samples_of(journal, "fit")
    if not rows:
        raise InputError(f"{journal.path}: nothing was measured yet; give more time with --time-budget")
    gpu = gpu_of(journal, facts.gpu, facts.model, facts.gpu_is_preset)
    apart = samples_of(journal, "held out")
    layouts = layouts_of(journal)
    return Profile(
        name=facts.name,
        model=facts.model.name,
        gpu=gpu.name,
        engine=facts.environment.engine,
        dtype=facts.dtype,
        interconnect=facts.interconnect,
        provenance=Provenance(
            method="measured", source="planner profile: the runtime's own engine, whole steps", notes=tuple(_notes())
        ),
        samples=Samples.of(rows),
        held_out=Samples.of(apart) if apart else None,
        accuracy=tuple(_accuracy(journal, layouts, facts.model, gpu)),
        mixed=_mixed(journal, layouts),
        transfers=tuple(Transfer.model_validate(record["transfer"]) for record in journal.of("transfer")),
        overheads=tuple(_overheads(journal, layouts)),
        kv_tokens=tuple(_kv_tokens(journal, layouts)),
        environment=facts.environment.model_copy(
            update={"notes": (*facts.environment.notes, *_noticed(journal, layouts))}
        ),
        measured_model=None if facts.model_is_preset else facts.model,
        measured_gpu=None if facts.gpu_is_preset else gpu,
    )


def _rounded(time_s: float) -> float:
    """Return a time without the digits that no clock has: six that count."""
    return float(f"{time_s:.6g}")


def _notes() -> Iterator[str]:
    yield "a row is one engine step: schedule, run, tokens back on the host; rows of one setting are repeats"
    yield "with pipeline stages, the whole batch passes through all of them, one step at a time"


def _accuracy(journal: Journal, layouts: Sequence[Layout], model: ModelSpec, gpu: Gpu) -> Iterator[Accuracy]:
    for at in layouts:
        records = journal.of("sample", tp=at.tp, pp=at.pp)
        cost = accuracy.try_fit(times_of(records, "fit"), model, gpu, at)
        apart = times_of(records, "held out")
        for phase in PHASES if cost is not None else ():
            if (found := accuracy.held_out_accuracy(cost, apart, phase)) is not None:  # type: ignore[arg-type]
                update = {name: _short(getattr(found, name)) for name in ("median", "p95", "worst", "repeats")}
                yield found.model_copy(update=update)


def _short(share: float | None) -> float | None:
    return None if share is None else round(share, 5)


def _mixed(journal: Journal, layouts: Sequence[Layout]) -> MixedSamples | None:
    rows = []
    for at in layouts:
        for setting, repeats in sorted(times_of(journal.of("sample", tp=at.tp, pp=at.pp), "mixed").items()):
            rows += [(*at, *setting, _rounded(time_s)) for time_s in repeats]
    return MixedSamples(rows=tuple(rows)) if rows else None


def _overheads(journal: Journal, layouts: Sequence[Layout]) -> Iterator[Overhead]:
    """Yield what steps take outside of the model by layout, phase and powers of two of the requests."""
    for at in layouts:
        each: dict[tuple[str, int], list[float]] = defaultdict(list)
        for record in journal.of("sample", tp=at.tp, pp=at.pp):
            setting = Setting(*record["setting"])
            if record.get("outside_s") is not None and setting.phase in PHASES:
                each[setting.phase, 1 << (setting.requests - 1).bit_length()].append(record["outside_s"])
        for (phase, requests), times_s in sorted(each.items()):
            middle, high = np.percentile(times_s, (50, 90))
            yield Overhead(
                tp=at.tp,
                pp=at.pp,
                phase=phase,  # type: ignore[arg-type]
                requests=requests,
                median_s=_rounded(float(middle)),
                p90_s=_rounded(float(high)),
            )


def _kv_tokens(journal: Journal, layouts: Sequence[Layout]) -> Iterator[KvTokens]:
    for at in layouts:
        for record in journal.of("layout", tp=at.tp, pp=at.pp)[:1]:
            yield KvTokens(tp=at.tp, pp=at.pp, tokens=int(record["kv_tokens"]))


def _noticed(journal: Journal, layouts: Sequence[Layout]) -> Iterator[str]:
    """Yield what a reader should know of the measurements: outliers, drift, what was left out, why a layout ended."""
    for at in layouts:
        records = journal.of("sample", tp=at.tp, pp=at.pp)
        times: dict[Setting, list[float]] = {}
        for role in ("fit", "held out"):
            times |= times_of(records, role)
        if found := accuracy.outliers(times):
            worst = max(found, key=lambda setting: max(times[setting]) / float(np.median(times[setting])))
            factor = max(times[worst]) / float(np.median(times[worst]))
            repeats = sum(map(len, times.values()))
            many = sum(found.values())
            yield f"{at}: {many} of {repeats} repeats are outliers, at most {factor:.2g} times the median ({worst})"
        if disturbed := sum(record["disturbed"] for record in records):
            yield f"{at}: {disturbed} of {len(records)} repeats were kept although another process interrupted them"
        drift = _drift(records)
        if drift is not None and abs(drift) > _DRIFT:
            yield f"{at}: the same settings took {drift:+.1%} at their last visit compared with the first"
        for record in journal.of("plan", tp=at.tp, pp=at.pp)[-1:]:
            if left_out := record["left_out"]:
                yield f"{at}: left out for time: {left_out[0]} and {len(left_out) - 1} more"
        for record in journal.of("layout done", tp=at.tp, pp=at.pp)[-1:]:
            yield f"{at}: ended because {record['why']}"


def _drift(records: Sequence[Record]) -> float | None:
    """Return by how much the last visits of settings took longer than the first ones, the median of it."""
    visits: dict[Setting, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        visits[Setting(*record["setting"])][record["visit"]].append(record["time_s"])
    ratios = [
        float(np.median(each[max(each)])) / float(np.median(each[min(each)]))
        for each in visits.values()
        if len(each) > 1
    ]
    return float(np.median(ratios)) - 1.0 if ratios else None
