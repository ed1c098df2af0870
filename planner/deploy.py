"""Plan -> deployment.yaml, and back into a system that can be simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from math import isfinite, isnan, nan, prod

import numpy as np

from planner import __version__
from planner.cost.base import BatchShape, CostModel, TermError
from planner.cost.kernel import FAMILIES, MEASURED, SIZE
from planner.errors import InputError
from planner.options import Option
from planner.pipeline import Plan
from planner.search.layouts import Kind
from planner.simulator.cluster import Instance, KvPath, Limits, System
from planner.simulator.metrics import Spread
from planner.specs.base import Document, dump_yaml, validate
from planner.specs.deployment import (
    MOST,
    MOST_PARAMETERS,
    VERSION,
    Claim,
    CostSpec,
    Deployment,
    Devices,
    Hop,
    InstanceSpec,
    LimitsSpec,
    LinkSpec,
    Prediction,
    Provenance,
    RouteSpec,
    SpreadSpec,
    mistakes,
)
from planner.specs.layout import Layout
from planner.specs.topology import GpuId

_LONGEST_S = 600.0
"""Of one iteration, even of 256 requests with a million tokens of context in all."""


def deployment_of(plan: Plan) -> Deployment:
    """Return the deployment of the plan's chosen way. Equal plans give equal bytes."""
    problem, chosen = plan.problem, plan.chosen
    workload = problem.workload
    return Deployment(
        version=VERSION,
        name=problem.name,
        mode=plan.mode,
        verdict=f"{plan.verdict.headline}; {plan.verdict.reason}",
        model=problem.model.name,
        dtype=problem.model.dtype,
        kv_dtype=problem.model.kv_dtype or problem.model.dtype,
        kv_bytes_per_token=chosen.placed.system.kv_bytes_per_token,
        cluster=problem.topology.name,
        engine=problem.engine,
        slo=problem.slos,
        workload={
            "name": workload.name,
            "arrivals": workload.spec.process,
            "rate_rps": problem.rate_rps,
            "mean_prompt_tokens": _rounded(workload.mean_prompt_tokens),
            "mean_output_tokens": _rounded(workload.mean_output_tokens),
        },
        instances=_instances(plan, chosen),
        routes=_routes(plan, chosen),
        links=_links(plan, chosen),
        costs={_cost_key(kind): _cost(kind.cost) for kind in _distinct(chosen)},
        prediction=_prediction(plan, chosen),
        provenance=Provenance(
            planner_version=__version__,
            seeds=tuple(problem.seed + k for k in range(problem.search.seeds)),
            simulated_s=_rounded(plan.trials.quoting.duration_s),
            digests=problem.digests,
            notes=problem.notes,
        ),
    )


def to_yaml(deployment: Deployment) -> str:
    """Return the file's text."""
    return dump_yaml(deployment.model_dump(mode="json"))


def read_deployment(document: Document) -> Deployment:
    """Return the deployment in a document. Raises InputError with lines."""
    version = document.data.get("version") if isinstance(document.data, dict) else None
    if isinstance(version, int) and version > VERSION:
        message = f"expected {VERSION}, got {version}: a newer planner wrote it; update this one (it is {__version__})"
        raise InputError(document.fault(message, "version"))
    deployment = validate(Deployment, document)
    faults = [document.fault(message, *path) for message, path in mistakes(deployment)]
    faults += [document.fault(why, "costs", key, "parameters") for key, why in _lawless(deployment)]
    if faults:
        raise InputError(faults)
    return deployment


def _lawless(deployment: Deployment) -> Iterator[tuple[str, str]]:
    """Yield the costs that give no time at all to a prompt or a step: a simulation of them would never end."""
    shapes = (BatchShape.prefill(1), BatchShape.prefill(4096), BatchShape.decode(1, 1), BatchShape.decode(256, 10**6))
    for key, cost in deployment.costs.items():
        if why := _law_fault(cost.parameters):
            yield key, why
            continue
        times_s = [_time_s(cost.parameters, shape) for shape in shapes]
        if not all(0 < time_s < _LONGEST_S for time_s in times_s):
            yield key, f"expected times above 0 and under {_LONGEST_S:g} s, got {', '.join(f'{t:g}' for t in times_s)}"


def _law_fault(parameters: tuple[float, ...]) -> str | None:
    """Return what is wrong with the form of a law's vector, or None: compiled code indexes it without a check."""
    family, least = parameters[0], min(parameters[:SIZE])
    if family not in FAMILIES:
        known = ", ".join(f"{number} ({name})" for number, (name, _) in FAMILIES.items())
        return f"expected the number of a family first, {known}, got {family:g}"
    name, length = FAMILIES[int(family)]
    if len(parameters) < length:
        return f"expected {length} numbers for the {name} family, got {len(parameters)}"
    if family == MEASURED and (why := _table_fault(parameters)):
        return why
    return f"expected nothing below 0 among the first {SIZE} numbers, got {least:g}" if least < 0 else None


def _table_fault(parameters: tuple[float, ...]) -> str | None:
    """Return what is wrong with a table law's lengths and axes, or None."""
    lengths = parameters[3:9]
    if any(n != int(n) or not 2 <= n <= MOST_PARAMETERS for n in lengths):
        return f"expected whole numbers from 2 on as the lengths of tables and axes, got {lengths}"
    curves, axes = sum(map(int, lengths[:2])), [int(n) for n in lengths[2:]]
    if len(parameters) < (whole := SIZE + curves + sum(axes) + prod(axes)):
        return f"expected {whole} numbers for tables of these lengths, got {len(parameters)}"
    at = SIZE + curves
    for length in axes:
        axis = parameters[at : at + length]
        if axis[0] != 0 or any(b <= a for a, b in pairwise(axis)):
            return f"expected each axis to rise from 0, got {axis}"
        at += length
    return None


def _time_s(parameters: tuple[float, ...], shape: BatchShape) -> float:
    try:
        return shape.time_s(np.array(parameters))
    except (ZeroDivisionError, OverflowError, ValueError):
        return nan


def _rounded(value: float) -> float:
    """Return the value to nine digits: enough for anybody, and free of the last bits' noise."""
    return float(f"{value:.9g}")


def _distinct(option: Option) -> tuple[Kind, ...]:
    return tuple(dict.fromkeys(option.placed.kinds))


def _cost_key(kind: Kind) -> str:
    return f"{kind.gpu}-tp{kind.layout.tp}-pp{kind.layout.pp}"


def _cost(cost: CostModel) -> CostSpec:
    errors = {"prefill": cost.prefill_error, "decode": cost.decode_error}
    return CostSpec(
        family=cost.family,
        parameters=tuple(min(float(p), MOST) for p in cost.parameters),  # a law without a second regime has inf there
        stage_share=cost.stage_share,
        handoff_s=cost.handoff_s,
        handoff_s_per_token=cost.handoff_s_per_token,
        unprofiled=cost.unprofiled,
        held_out_error={phase: _error(error) for phase, error in errors.items() if error is not None},
        from_physics=cost.from_physics,
    )


def _error(error: TermError) -> dict[str, float]:
    return {name: _rounded(value) for name, value in asdict(error).items() if value is not None}


def _instances(plan: Plan, option: Option) -> tuple[InstanceSpec, ...]:
    topology = plan.problem.topology
    specs = []
    for placed, kind in zip(option.placed.placement.instances, option.placed.kinds, strict=True):
        nics = sorted({name for stage in placed.stages for gpu in stage for name in topology.nic_names(gpu)})
        specs.append(
            InstanceSpec(
                name=placed.name,
                phase=placed.phase,
                tp=placed.layout.tp,
                pp=placed.layout.pp,
                gpu=placed.gpu,
                stages=tuple(_devices(stage) for stage in placed.stages),
                nics=tuple(nics),
                limits=LimitsSpec(**asdict(kind.limits)),
                cost=_cost_key(kind),
            )
        )
    return tuple(specs)


def _devices(stage: tuple[GpuId, ...]) -> tuple[Devices, ...]:
    """Return a stage's GPUs grouped by node, ranks in order."""
    nodes: dict[str, list[int]] = {}
    for gpu in stage:
        nodes.setdefault(gpu.node, []).append(gpu.index)
    return tuple(Devices(node=node, gpus=tuple(indexes)) for node, indexes in nodes.items())


def _routes(plan: Plan, option: Option) -> tuple[RouteSpec, ...]:
    names = [one.name for one in option.placed.placement.instances]
    links, shares = plan.problem.topology.links, option.report.shares
    routes = []
    for path in option.placed.system.paths or ():
        hops = option.placed.routes[path.source, path.target].shares
        routes.append(
            RouteSpec(
                source=names[path.source],
                target=names[path.target],
                weight=_rounded(shares.get((path.source, path.target), 0.0)),
                fixed_s=_rounded(path.fixed_s),
                hops=tuple(Hop(link=links[link].name, share=_rounded(share)) for link, share in hops),
            )
        )
    return tuple(routes)


def _links(plan: Plan, option: Option) -> tuple[LinkSpec, ...]:
    links = [plan.problem.topology.links[id_] for id_ in option.placed.links]
    return tuple(
        LinkSpec(
            name=link.name,
            bytes_per_s=link.bytes_per_s,
            nominal_bytes_per_s=link.nominal_bytes_per_s,
            assumed=link.assumed,
        )
        for link in links
    )


def _spread(spread: Spread) -> SpreadSpec:
    return SpreadSpec(**{name: _rounded(v) if isfinite(v) else None for name, v in asdict(spread).items()})


def claim_of(option: Option | None) -> Claim | None:
    """Return the option's replayed goodput, as it goes into files."""
    if option is None:
        return None
    rate = option.rate
    return Claim(
        goodput_rps=_rounded(rate.goodput_rps),
        low_rps=_rounded(rate.low_rps),
        high_rps=_rounded(rate.high_rps),
        wide_low_rps=None if isnan(rate.wide_low_rps) else _rounded(rate.wide_low_rps),
        wide_high_rps=None if isnan(rate.wide_high_rps) else _rounded(rate.wide_high_rps),
        gpus=option.gpus,
        goodput_rps_per_gpu=_rounded(option.per_gpu_rps),
        layout=option.placed.layout,
        binding=rate.binding,
    )


def _prediction(plan: Plan, chosen: Option) -> Prediction:
    other = plan.aggregated if chosen is plan.disaggregated else plan.disaggregated
    report, program = chosen.report, chosen.program
    terms = asdict(report.latencies)
    names = [slo.name or "all" for slo in plan.problem.slos]
    claim = claim_of(chosen)
    assert claim is not None
    return Prediction(
        claim=claim,
        alternative=claim_of(other),
        rate_rps=_rounded(report.rate_rps),
        attainment={name: _rounded(share) for name, share in zip(names, report.attainment, strict=True)},
        ttft=_spread(report.latencies.ttft),
        ttft_terms={name: _spread(getattr(report.latencies, name)) for name in terms if name not in ("ttft", "tpot")},
        tpot=_spread(report.latencies.tpot),
        utilisation={phase: _rounded(load.busy) for phase, load in report.load.items()},
        program_rps=_rounded(program.value_rps) if program else None,
        program_bound_rps=_rounded(program.bound_rps) if program else None,
        program_gap=_rounded(program.gap) if program else None,
        capacity_bound_rps=_rounded(plan.capacity_bound_rps),
    )


def system_of(deployment: Deployment) -> System:
    """Return the system that simulates a deployment, from the file alone."""
    position = {instance.name: at for at, instance in enumerate(deployment.instances)}
    link_at = {link.name: at for at, link in enumerate(deployment.links)}
    return System(
        instances=tuple(_instance(deployment, spec) for spec in deployment.instances),
        kv_bytes_per_token=deployment.kv_bytes_per_token,
        paths=tuple(
            KvPath(
                position[route.source],
                position[route.target],
                route.fixed_s,
                tuple((link_at[hop.link], hop.share) for hop in route.hops),
            )
            for route in deployment.routes
        ),
        link_bytes_per_s=tuple(link.bytes_per_s for link in deployment.links),
        first_token_at=deployment.engine.first_token_at,
        max_pulls=deployment.engine.max_pulls,
    )


def _instance(deployment: Deployment, spec: InstanceSpec) -> Instance:
    cost = deployment.costs[spec.cost]
    model = CostModel(
        Layout(spec.tp, spec.pp),
        np.array(cost.parameters),
        cost.stage_share,
        cost.handoff_s,
        cost.handoff_s_per_token,
        cost.family,
        cost.unprofiled,
    )
    return Instance(spec.phase, model, Limits(**spec.limits.model_dump()))
