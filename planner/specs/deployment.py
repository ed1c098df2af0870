"""The answer: what to start where, with which settings, and what was predicted of it.

Self-contained: it carries the cost models and the links' speeds, so `planner simulate` needs nothing else.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from planner.specs.base import Spec
from planner.specs.engine import Engine
from planner.specs.layout import Phase
from planner.specs.slo import Slo

VERSION = 1


class Devices(Spec):
    """GPUs of one node, by device index."""

    node: str
    gpus: tuple[int, ...]


class LimitsSpec(Spec):
    """The engine's settings for one instance: exactly what was simulated."""

    max_batch: int
    max_tokens: int
    kv_blocks: int
    block_tokens: int
    swap_bytes_per_s: float


class CostSpec(Spec):
    """The latency law of one kind of instance (`planner/cost/kernel.py` says what the parameters mean)."""

    family: str
    parameters: tuple[float, ...]
    stage_share: tuple[float, ...]
    handoff_s: float
    handoff_s_per_token: float
    unprofiled: bool
    held_out_error: dict[str, dict[str, float]]
    """Per phase: median, p95 and worst relative error on settings that were left out of the fit, and how many."""
    from_physics: tuple[str, ...] = ()


class InstanceSpec(Spec):
    """One instance and where it stands: `stages` lists the devices of each pipeline stage."""

    name: str
    phase: Phase
    tp: int
    pp: int
    gpu: str
    stages: tuple[tuple[Devices, ...], ...]
    nics: tuple[str, ...] = ()
    limits: LimitsSpec
    cost: str
    """Key into `costs`."""


class Hop(Spec):
    """A link on a route and the share of the KV bytes that crosses it."""

    link: str
    share: float


class RouteSpec(Spec):
    """Where a prefill instance's KV goes. Routes that are not listed are not used."""

    source: str
    target: str
    weight: float
    """Share of the prefill instance's requests, as replayed."""
    fixed_s: float
    hops: tuple[Hop, ...]


class LinkSpec(Spec):
    """One direction of a link."""

    name: str
    bytes_per_s: float
    """Effective: what was planned with."""
    nominal_bytes_per_s: float
    assumed: bool
    """True when its efficiency is a default and nobody measured it here."""


class SpreadSpec(Spec):
    """A time over requests [s]."""

    mean_s: float | None
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None


class Claim(Spec):
    """A replayed goodput with the 95 % interval over its seeds."""

    goodput_rps: float
    low_rps: float
    high_rps: float
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
    kv_bytes_per_token: float
    cluster: str
    engine: Engine
    slo: tuple[Slo, ...]
    workload: dict[str, float | str | None]
    instances: tuple[InstanceSpec, ...]
    routes: tuple[RouteSpec, ...]
    links: tuple[LinkSpec, ...]
    costs: dict[str, CostSpec]
    prediction: Prediction
    provenance: Provenance
