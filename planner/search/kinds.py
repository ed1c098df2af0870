"""From a problem to the kinds of instances worth considering: cost models, legality, engine limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import numpy as np

from planner.cost.base import CostModel
from planner.cost.fit import fit_all, fit_elsewhere, no_transfer, sampled_degrees, unprofiled, with_stages
from planner.cost.transferred import Place
from planner.errors import InputError
from planner.lint.check import lines_of, sound_samples
from planner.search.layouts import Kind, Rejected, efficient_budget, pipelines, rejected_or_blocks
from planner.search.saturation import saturation_rps
from planner.simulator.cluster import Limits
from planner.sources.problem import Problem
from planner.specs.cluster import EFFICIENCY
from planner.specs.gpu import Gpu
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec
from planner.specs.profile import Profile, Samples
from planner.specs.topology import GpuId, Unit
from planner.specs.units import show_seconds

_DOMINATED = 0.4
"""A layout that saturates below this share of the best one's rate per GPU is not worth a simulation."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """What can be built, what it saturates at [requests/s per instance], and what was left out, with the reason."""

    prefill: tuple[Kind, ...]
    decode: tuple[Kind, ...]
    aggregated: tuple[Kind, ...]
    saturation: dict[Kind, float]
    rejected: tuple[Rejected, ...]
    costs: tuple[CostModel, ...]
    """One per GPU type and tensor-parallel degree, for the fit report."""
    all_legal: tuple[Kind, ...] = ()
    """Before the dominated ones were dropped."""


def find_kinds(problem: Problem) -> Kinds:
    """Return every kind of instance worth considering. Raises InputError when the model fits nowhere."""
    rejected: list[Rejected] = []
    kinds: list[Kind] = []
    costs: list[CostModel] = []
    for gpu in problem.gpus.values():
        degrees = {tp: replace(cost, gpu=gpu.name) for tp, cost in _degrees(problem, gpu, rejected)}
        found = list(_kinds(problem, gpu, degrees, problem.search.max_pp, rejected))
        if not _complete(found):  # too large for that few stages: try more before giving up
            found += list(_kinds(problem, gpu, degrees, 16, rejected, above=problem.search.max_pp))
        kinds += found
        costs += _shown(problem, gpu, degrees, found)
    if not _complete(kinds):
        raise InputError(problem.fault(_fits_nowhere(problem, rejected), "cluster"))
    saturation = {kind: saturation_rps(kind, problem.workload, problem.slos) for kind in kinds}
    kept = _worthwhile(problem, kinds, saturation, rejected)
    by_phase = {
        phase: tuple(kind for kind in kept if kind.phase == phase) for phase in ("prefill", "decode", "aggregated")
    }
    return Kinds(
        **by_phase, saturation=saturation, rejected=tuple(rejected), costs=tuple(costs), all_legal=tuple(kinds)
    )


def _complete(kinds: list[Kind]) -> bool:
    """Return True when requests can be served from end to end, in one way or the other."""
    return {"prefill", "decode"} <= (phases := {kind.phase for kind in kinds}) or "aggregated" in phases


def _shown(problem: Problem, gpu: Gpu, degrees: dict[int, CostModel], kinds: list[Kind]) -> list[CostModel]:
    """Return the cost models worth reporting: not those of degrees that nobody measured and where nothing fits."""
    profile, used = problem.profile_of(gpu), {kind.layout.tp for kind in kinds}
    return [cost for tp, cost in degrees.items() if profile is None or tp in profile.tps or tp in used]


class _Source(NamedTuple):
    """Where the latencies on a GPU type come from: its profile, one carried over from elsewhere, or (None) data sheets.

    Of a profile only the sound rows; `left_out` has a line for the others.
    """

    profile: Profile | None = None
    here: Place | None = None
    """Where it was measured, if elsewhere."""
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, problem: Problem, gpu: Gpu) -> _Source:
        """Return what the problem has for a GPU type."""
        if (profile := problem.profile_of(gpu)) is not None:
            profile, left_out = _sound(profile, problem.model, gpu)
            return cls(profile, None, left_out)
        if (carried := problem.carried_to(gpu)) is not None:
            profile, left_out = _sound(carried.profile, carried.model, carried.gpu)
            return cls(profile, Place.usual(carried.model, carried.gpu), left_out)
        return cls()

    @property
    def measured(self) -> Profile | None:
        """The profile, where it was measured on this GPU type."""
        return self.profile if self.here is None else None


def _degrees(problem: Problem, gpu: Gpu, rejected: list[Rejected]) -> Iterator[tuple[int, CostModel]]:
    """Yield the tensor-parallel degrees that are legal and of known cost, with their one-stage cost models."""
    source, unit = _Source.of(problem, gpu), _largest_unit(problem, gpu)
    legal = []
    for tp in range(1, min(problem.search.max_tp, len(unit.gpus)) + 1):
        if (fault := _fault(problem, source.measured, unit, tp)) is None:
            legal.append(tp)
        elif tp & (tp - 1) == 0:  # nobody asks why TP7 is missing
            rejected.append(Rejected("any", Layout(tp), gpu.name, fault))
    yield from _costs(problem, gpu, source, legal).items()


def fit_sound(profile: Profile, model: ModelSpec, gpu: Gpu) -> dict[int, CostModel]:
    """Return the cost models that a profile's sound rows give, by degree, with what was left out. Raises InputError."""
    profile, left_out = _sound(profile, model, gpu)
    return {tp: replace(cost, notes=(*cost.notes, *left_out)) for tp, cost in fit_all(profile, model, gpu).items()}


def _sound(profile: Profile, model: ModelSpec, gpu: Gpu) -> tuple[Profile, tuple[str, ...]]:
    """Return the profile's sound rows, and a line for what was left out."""
    samples, findings = sound_samples(profile, model, gpu)
    if profile.samples and samples:  # with none left, the fit says what is wrong with all of them
        profile = profile.model_copy(update={"samples": Samples.of(samples)})
    return profile, tuple(lines_of(findings))


def _fault(problem: Problem, profile: Profile | None, unit: Unit, tp: int) -> str | None:
    """Return why there is no instance of this degree, or None."""
    if (fault := problem.model.tp_fault(tp)) is not None:
        return fault
    if profile is None:
        return None
    if (reason := _unmeasured(problem, profile, tp)) is not None:
        return reason
    if not _joined(problem, _tp_group(problem, unit, tp)):
        return f"profile {profile.name} measured NVLink, but here {tp} GPUs are not all joined by it"
    return None


def _unmeasured(problem: Problem, profile: Profile, tp: int) -> str | None:
    """Return why a profile without this degree is of no use for it, or None.

    A search picks what looks best, so an estimate beyond the measurements wins by its error too: only on request.
    """
    if tp in profile.tps:
        return None
    if not (sampled := sampled_degrees(profile)):
        return no_transfer(profile, tp)
    if problem.search.extrapolate or min(sampled) < tp < max(sampled):
        return None
    known = f"TP{min(sampled)} to TP{max(sampled)}" if len(sampled) > 1 else f"TP{min(sampled)}"
    return f"outside of what profile {profile.name} measured ({known}); search: {{extrapolate: true}} estimates it"


def _costs(problem: Problem, gpu: Gpu, source: _Source, tps: list[int]) -> dict[int, CostModel]:
    """Return the cost model of each degree. Raises InputError at the profile's line."""
    model, unit, profile = problem.model, _largest_unit(problem, gpu), source.profile
    rings = {tp: _ring(problem, _tp_group(problem, unit, tp)) for tp in tps}
    try:
        if profile is None:
            return {tp: unprofiled(model, gpu, tp, *rings[tp]) for tp in tps}
        if source.here is None:
            costs = fit_all(profile, model, gpu, tps)
        else:
            costs = fit_elsewhere(profile, source.here, {tp: Place(model, gpu, rings[tp][0]) for tp in tps})
        return {tp: replace(cost, notes=(*cost.notes, *source.left_out)) for tp, cost in costs.items()}
    except InputError as error:
        raise InputError([problem.fault(fault.message, "profiles") for fault in error.faults]) from None


def _largest_unit(problem: Problem, gpu: Gpu) -> Unit:
    return max((u for u in problem.topology.units() if u.gpu.name == gpu.name), key=lambda u: len(u.gpus))


def _tp_group(problem: Problem, unit: Unit, tp: int) -> tuple[GpuId, ...]:
    """Return the best-joined `tp` GPUs of a unit: within one fast group if one is large enough."""
    groups = [
        tuple(GpuId(node, index) for index in group)
        for node in unit.nodes
        for group in problem.topology.node(node).tp_groups
    ]
    fast = next((group for group in groups if len(group) >= tp), unit.gpus)
    return fast[:tp]


def _ring(problem: Problem, group: tuple[GpuId, ...]) -> tuple[float, float]:
    """Return line rate [bytes/s] and latency [s] of the slowest step of a ring (the law applies its own efficiency)."""
    links = problem.topology.links
    steps = list(zip(group, group[1:] + group[:1], strict=True)) if len(group) > 1 else []
    rates = [min(links[i].nominal_bytes_per_s for i in problem.topology.path(a, b)) for a, b in steps]
    return min(rates, default=inf), problem.topology.rank_link(group)[1]


def _joined(problem: Problem, group: tuple[GpuId, ...]) -> bool:
    """Return True when every pair of the group's ring talks over NVLink alone (cores: over their memory)."""
    topology = problem.topology
    steps = zip(group, group[1:] + group[:1], strict=True) if len(group) > 1 else ()
    return all(topology.links[i].kind in ("nvlink", "memory") for a, b in steps for i in topology.path(a, b))


def _kinds(
    problem: Problem, gpu: Gpu, degrees: dict[int, CostModel], max_pp: int, rejected: list[Rejected], above: int = 0
) -> Iterator[Kind]:
    """Yield the legal kinds of one GPU type, aggregated ones with each of their token budgets."""
    longest = int((problem.workload.table.prompt_tokens + problem.workload.table.output_tokens).max())
    total = sum(len(u.gpus) for u in problem.topology.units() if u.gpu.name == gpu.name)
    for tp, cost in degrees.items():
        for pp in pipelines(problem.model, max_pp):
            layout = Layout(tp, pp)
            if pp <= above or layout.gpus > total:
                continue
            staged = with_stages(cost, problem.model, pp, *_between_stages(problem, gpu, layout))
            budget = problem.engine.prefill_tokens or efficient_budget(staged, longest)
            yield from _if_legal(problem, gpu, staged, "prefill", budget, longest, rejected)
            yield from _if_legal(problem, gpu, staged, "decode", problem.engine.max_batch, longest, rejected)
            for chunk in problem.engine.chunk_tokens:
                yield from _if_legal(problem, gpu, staged, "aggregated", chunk, longest, rejected)


def _between_stages(problem: Problem, gpu: Gpu, layout: Layout) -> tuple[float, float]:
    """Return bandwidth [bytes/s] and latency [s] from one pipeline stage to the next, where they are likely to lie."""
    units = [unit for unit in problem.topology.units() if unit.gpu.name == gpu.name]
    unit = _largest_unit(problem, gpu)
    if layout.pp == 1:
        return inf, 0.0
    other = unit.gpus[layout.tp] if layout.gpus <= len(unit.gpus) else units[-1].gpus[0]
    topology = problem.topology
    return topology.path_bytes_per_s(unit.gpus[0], other), topology.path_latency_s(unit.gpus[0], other)


def _if_legal(
    problem: Problem, gpu: Gpu, cost: CostModel, phase: str, max_tokens: int, longest: int, rejected: list[Rejected]
) -> Iterator[Kind]:
    """Yield the kind if it is legal, else note why not."""
    engine, layout = problem.engine, cost.layout
    if phase == "decode" and layout.pp > 1 and not engine.decode_pp:
        rejected.append(Rejected(phase, layout, gpu.name, "this engine decodes without pipeline stages (decode_pp)"))
        return
    held = longest if phase != "prefill" else int(problem.workload.table.prompt_tokens.max())
    unit_gpus = len(_largest_unit(problem, gpu).gpus)
    verdict = rejected_or_blocks(problem.model, gpu, layout, engine, max_tokens, held, unit_gpus)
    profile = problem.profile_of(gpu)
    measured = profile.kv_tokens_at(layout.tp, layout.pp) if profile else None
    if isinstance(verdict, int) and measured is not None:
        found = measured // engine.block_tokens
        given = "memory_fraction" in engine.model_fields_set  # less than the profile's engine may take, on request
        verdict = min(verdict, found) if given else found
    if isinstance(verdict, str):
        rejected.append(Rejected(phase, layout, gpu.name, verdict))
        return
    swap = gpu.host_bytes_per_s * EFFICIENCY["pcie"][0] * layout.gpus
    batch = engine.max_prefill_batch if phase == "prefill" else engine.max_batch
    if phase == "aggregated":
        batch = min(batch, max_tokens)  # each running request needs a token of the step's budget; vLLM insists
    chunk = engine.pipeline_tokens or 0 if phase == "prefill" and layout.pp > 1 else 0
    limits = Limits(batch, max_tokens, verdict, engine.block_tokens, swap, engine.plans_ahead, chunk)
    yield Kind(phase, layout, gpu.name, cost, limits)  # type: ignore[arg-type]


def _worthwhile(
    problem: Problem, kinds: list[Kind], saturation: dict[Kind, float], rejected: list[Rejected]
) -> list[Kind]:
    """Return the kinds without those that cannot meet the SLO, or saturate far below another of their phase and type.

    That is per GPU, and by one that is no larger: a small instance may be all that a load or a remainder needs.
    """
    able = [kind for kind in kinds if not _noted(_hopeless(problem, kind, saturation[kind]), kind, rejected)]
    return [kind for kind in able if not _noted(_dominated(kind, able, saturation), kind, rejected)]


def _noted(reason: str, kind: Kind, rejected: list[Rejected]) -> bool:
    """Note a reason, if there is one, and return whether there is."""
    if reason:
        budget = kind.limits.max_tokens if kind.phase == "aggregated" else None
        rejected.append(Rejected(kind.phase, kind.layout, kind.gpu, reason, budget))
    return bool(reason)


def _hopeless(problem: Problem, kind: Kind, saturation_rps: float) -> str:
    """Return why this kind attains no class's SLO even with one request at a time, or nothing."""
    if saturation_rps <= 0:
        return "not even one request alone meets the TPOT bound"
    loosest_s, share = max(slo.ttft_s for slo in problem.slos), min(slo.attainment for slo in problem.slos)
    prompt = int(np.percentile(problem.workload.table.prompt_tokens, share * 100, method="inverted_cdf"))
    alone_s, _ = kind.cost.prompt_s(prompt, kind.limits.pipeline_tokens)
    if kind.phase == "decode" or alone_s <= loosest_s:
        return ""
    return (
        f"a prompt of {prompt} tokens alone takes {show_seconds(alone_s)}, the TTFT bound is {show_seconds(loosest_s)}"
    )


def _dominated(kind: Kind, others: list[Kind], saturation: dict[Kind, float]) -> str:
    """Return by how much a kind falls behind another that is no larger, or nothing when it keeps up."""
    rivals = [k for k in others if (k.phase, k.gpu) == (kind.phase, kind.gpu) and k.gpus <= kind.gpus]
    best = max(saturation[k] / k.gpus for k in rivals)
    if saturation[kind] / kind.gpus >= _DOMINATED * best:
        return ""
    return f"saturates below {_DOMINATED:.0%} of the {best:.3g} requests/s per GPU that another layout reaches"


def _fits_nowhere(problem: Problem, rejected: Iterable[Rejected]) -> str:
    """Return one line that says that the model fits on no layout, and the reason of the largest one tried."""
    cluster = ", ".join(problem.gpus)
    last = max(rejected, key=lambda r: (r.layout.gpus, r.layout), default=None)
    why = f"; {last.layout} on {last.gpu}: {last.reason}" if last else ""
    return f"{problem.model.name} fits on no layout of {problem.topology.name} ({cluster}){why}"
