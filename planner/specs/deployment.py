"""The answer: what to start where, with which settings, and what was predicted of it.

Self-contained: it carries the cost models and the links' speeds, so `planner simulate` needs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from planner.specs.base import Path_, Spec, suggest
from planner.specs.engine import Engine
from planner.specs.layout import Phase
from planner.specs.slo import Slo
from planner.specs.units import Count, CountOrZero

VERSION = 1
PARAMETERS, MOST_PARAMETERS = 20, 100_000
"""Numbers in the vector of a latency law: at least these, and grids behind them."""

MOST = 1e18
Amount = Annotated[float, Field(ge=0, le=MOST)]
Signed = Annotated[float, Field(ge=-MOST, le=MOST)]
Text = Annotated[str, Field(min_length=1)]


class Devices(Spec):
    """GPUs of one node, by device index."""

    node: Text
    gpus: Annotated[tuple[CountOrZero, ...], Field(min_length=1)]


class LimitsSpec(Spec):
    """The engine's settings for one instance: exactly what was simulated."""

    max_batch: Count
    max_tokens: Count
    kv_blocks: Count
    block_tokens: Count
    swap_bytes_per_s: Annotated[float, Field(gt=0, le=1e18)]
    plans_ahead: bool = True
    """An aggregated instance plans a step while another one runs (asynchronous scheduling)."""
    pipeline_tokens: CountOrZero = 0


class CostSpec(Spec):
    """The latency law of one kind of instance (`planner/cost/kernel.py` says what the parameters mean)."""

    family: str
    parameters: Annotated[tuple[Signed, ...], Field(min_length=PARAMETERS, max_length=MOST_PARAMETERS)]
    stage_share: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1)]
    handoff_s: Annotated[float, Field(ge=0, le=3600)]
    handoff_s_per_token: Annotated[float, Field(ge=0, le=3600)]
    unprofiled: bool
    held_out_error: dict[str, dict[str, float]]
    """Per phase: median, p95 and worst relative error on settings that were left out of the fit, and how many."""
    from_physics: tuple[str, ...] = ()


class InstanceSpec(Spec):
    """One instance and where it stands: `stages` lists the devices of each pipeline stage."""

    name: Text
    phase: Phase
    tp: Count
    pp: Count
    gpu: Text
    stages: tuple[tuple[Devices, ...], ...]
    nics: tuple[str, ...] = ()
    limits: LimitsSpec
    cost: str
    """Key into `costs`."""


class Hop(Spec):
    """A link on a route and the share of the KV bytes that crosses it."""

    link: str
    share: Annotated[float, Field(gt=0, le=1)]


class RouteSpec(Spec):
    """Where a prefill instance's KV goes. Routes that are not listed are not used."""

    source: str
    target: str
    weight: Annotated[float, Field(ge=0, le=1)]
    """Share of the prefill instance's requests, as replayed."""
    fixed_s: Annotated[float, Field(ge=0, le=3600)]
    hops: tuple[Hop, ...]


class LinkSpec(Spec):
    """One direction of a link."""

    name: Text
    bytes_per_s: Annotated[float, Field(gt=0, ge=1e5, le=1e18)]
    """Effective: what was planned with."""
    nominal_bytes_per_s: Annotated[float, Field(gt=0, le=1e18)]
    assumed: bool
    """True when its efficiency is a default and nobody measured it here."""


class SpreadSpec(Spec):
    """A time over requests [s]."""

    mean_s: float | None
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None


class Claim(Spec):
    """A replayed goodput with its 95 % intervals: over the seeds, and with what the latencies may be off by as well."""

    goodput_rps: float
    low_rps: float
    high_rps: float
    wide_low_rps: float | None = None
    wide_high_rps: float | None = None
    gpus: int
    goodput_rps_per_gpu: float
    layout: str
    binding: str
    """Which bound is missed first beyond the claim."""


class Prediction(Spec):
    """What was predicted, at the claimed rate."""

    claim: Claim
    alternative: Claim | None
    """The other way to serve, on as many GPUs."""
    rate_rps: float
    attainment: dict[str, float]
    ttft: SpreadSpec
    ttft_terms: dict[str, SpreadSpec]
    tpot: SpreadSpec
    utilisation: dict[str, float]
    program_rps: float | None
    program_bound_rps: float | None
    program_gap: float | None
    capacity_bound_rps: float


class Provenance(Spec):
    """Where the plan comes from."""

    planner_version: str
    seeds: tuple[int, ...]
    simulated_s: float
    digests: dict[str, str]
    notes: tuple[str, ...]


class Deployment(Spec):
    """deployment.yaml."""

    version: Annotated[int, Field(strict=True, ge=1, le=VERSION)]
    name: str
    mode: Literal["disaggregated", "aggregated"]
    verdict: str
    model: str
    dtype: str
    kv_dtype: str
    kv_bytes_per_token: Annotated[float, Field(ge=0, le=1e9)]
    cluster: str
    engine: Engine
    slo: Annotated[tuple[Slo, ...], Field(min_length=1)]
    workload: dict[str, float | str | None]
    instances: Annotated[tuple[InstanceSpec, ...], Field(min_length=1)]
    routes: tuple[RouteSpec, ...]
    links: tuple[LinkSpec, ...]
    costs: dict[str, CostSpec]
    prediction: Prediction
    provenance: Provenance


def mistakes(deployment: Deployment) -> Iterator[tuple[str, Path_]]:
    """Yield what does not fit together in a deployment, each with its path in the file."""
    names = {instance.name: instance for instance in deployment.instances}
    links = {link.name for link in deployment.links}
    yield from _twice([instance.name for instance in deployment.instances], "instances")
    yield from _twice([link.name for link in deployment.links], "links")
    for i, instance in enumerate(deployment.instances):
        yield from _instance_mistakes(deployment, instance, ("instances", i))
    yield from _device_mistakes(deployment)
    for r, route in enumerate(deployment.routes):
        for key, name, phase in (("source", route.source, "prefill"), ("target", route.target, "decode")):
            if name not in names:
                yield f"no instance called {name!r}{suggest(name, list(names))}", ("routes", r, key)
            elif names[name].phase != phase:
                yield f"expected a {phase} instance, got {name!r} ({names[name].phase})", ("routes", r, key)
        for h, hop in enumerate(route.hops):
            if hop.link not in links:
                yield f"no link called {hop.link!r}{suggest(hop.link, list(links))}", ("routes", r, "hops", h, "link")
    yield from _reach_mistakes(deployment)


def _twice(names: list[str], key: str) -> Iterator[tuple[str, Path_]]:
    for at, name in enumerate(names):
        if name in names[:at]:
            yield f"a second one called {name!r}", (key, at, "name")


def _instance_mistakes(deployment: Deployment, instance: InstanceSpec, at: Path_) -> Iterator[tuple[str, Path_]]:
    costs = deployment.costs
    if (instance.phase == "aggregated") != (deployment.mode == "aggregated"):
        yield f"expected phases of mode {deployment.mode}, got {instance.phase}", (*at, "phase")
    if instance.cost not in costs:
        way_out = suggest(instance.cost, list(costs)) or f"; there are {', '.join(costs) or 'none'}"
        yield f"no costs called {instance.cost!r}{way_out}", (*at, "cost")
    elif len(costs[instance.cost].stage_share) != instance.pp:
        given = len(costs[instance.cost].stage_share)
        yield f"expected costs of {instance.pp} stages (pp), got {given} in {instance.cost!r}", (*at, "cost")
    if len(instance.stages) != instance.pp:
        yield f"expected {instance.pp} stages (pp), got {len(instance.stages)}", (*at, "stages")
    for s, stage in enumerate(instance.stages):
        ranks = sum(len(devices.gpus) for devices in stage)
        if ranks != instance.tp:
            yield f"expected {instance.tp} GPUs (tp), got {ranks}", (*at, "stages", s)


def _device_mistakes(deployment: Deployment) -> Iterator[tuple[str, Path_]]:
    """GPUs that are given away twice."""
    owner: dict[tuple[str, int], str] = {}
    for i, instance in enumerate(deployment.instances):
        for s, stage in enumerate(instance.stages):
            for d, devices in enumerate(stage):
                for gpu in devices.gpus:
                    first = owner.setdefault((devices.node, gpu), f"{instance.name} stage {s}")
                    if first != f"{instance.name} stage {s}" or devices.gpus.count(gpu) > 1:
                        message = f"GPU {devices.node}:{gpu} is already taken by {first}"
                        yield message, ("instances", i, "stages", s, d, "gpus")


def _reach_mistakes(deployment: Deployment) -> Iterator[tuple[str, Path_]]:
    """Instances that no request would pass."""
    if deployment.mode == "aggregated":
        return
    for phase in ("prefill", "decode"):
        if not any(instance.phase == phase for instance in deployment.instances):
            yield f"expected at least one {phase} instance in mode disaggregated", ("instances",)
    sources = {route.source for route in deployment.routes}
    for i, instance in enumerate(deployment.instances):
        if instance.phase == "prefill" and instance.name not in sources:
            yield f"no route leads from {instance.name!r} to a decode instance", ("instances", i, "name")
