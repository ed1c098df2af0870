"""The question: which model on which cluster, under which load, within which bounds, for which objective."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from planner.specs.base import Spec
from planner.specs.engine import Engine, Tokens
from planner.specs.units import Count, Name, RequestsPerSecond

Reference = str | dict[str, Any]
"""A preset's name, a file (relative to the problem's), or the thing itself."""

Objective = Literal["max_goodput", "min_gpus"]


class Search(Spec):
    """How wide and how hard to look. The defaults plan a cluster of 32 GPUs in seconds."""

    max_tp: Annotated[int, Field(strict=True, ge=1, le=1024)] = 8
    max_pp: Annotated[int, Field(strict=True, ge=1, le=64)] = 2
    """Pipeline stages of one instance at most; a model too large for that many is tried with more."""
    extrapolate: Annotated[bool, Field(strict=True)] = False
    """Also consider tensor-parallel degrees below or above all that a profile measured. Those in between always are."""
    requests: Annotated[int, Field(strict=True, ge=200, le=1_000_000)] = 6000
    """Requests of a simulation that ranks candidates, at the rate that the cluster could serve at best."""
    replay_requests: Annotated[int, Field(strict=True, ge=200, le=5_000_000)] = 50_000
    """Requests of a simulation whose result is quoted."""
    seeds: Annotated[int, Field(strict=True, ge=3, le=100)] = 6
    """Replicates of every quoted number, each with its own luck."""
    finalists: Annotated[int, Field(strict=True, ge=1, le=50)] = 4
    """Candidates that are placed and replayed on the real network."""


class Side(Spec):
    """So many instances of one layout."""

    count: Count = 1
    tp: Count = 1
    pp: Count = 1
    max_tokens: Tokens | None = None
    """Token budget of an iteration; by default what the planner would choose."""


class Compared(Spec):
    """A layout of yours, to see beside the plan: a prefill and a decode side, or an aggregated one."""

    name: Annotated[str, Field(min_length=1, max_length=60)]
    prefill: Side | None = None
    decode: Side | None = None
    aggregated: Side | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Compared:
        split = self.prefill is not None and self.decode is not None and self.aggregated is None
        whole = self.prefill is None and self.decode is None and self.aggregated is not None
        if not (split or whole):
            raise ValueError("expected prefill and decode, or aggregated alone")
        return self


class CarryOver(Spec):
    """A profile of another GPU or another model, served by the same engine, to estimate latencies from."""

    carry_over: Reference
    """For GPU types without a profile of their own; of several, one of the same GPU is taken first."""
    model: Reference | None = None
    """The model that was measured, where it is no preset."""


class ProblemSpec(Spec):
    """The problem file."""

    name: Name | None = None
    model: Reference
    cluster: Reference
    profiles: Reference | CarryOver | list[Reference | CarryOver] = "auto"
    """Measured profiles; `auto`: every shipped one of this model and these GPUs; `none`: data sheets only.

    `{carry_over: PROFILE}` estimates from a profile of another GPU or model, where there is none of this one."""
    workload: Reference
    slo: dict[str, Any] | list[dict[str, Any]]
    objective: Objective | None = None
    """`max_goodput` on the whole cluster; `min_gpus` for `rate_rps` (the default when a rate is given)."""
    rate_rps: RequestsPerSecond | None = None
    """The load to serve; by default the workload's own `rate_rps`, if it has one."""
    compare: tuple[Compared, ...] = ()
    """Layouts to replay beside the plan, such as the one you run today."""
    engine: Engine = Engine()
    search: Search = Search()
    seed: Annotated[int, Field(strict=True, ge=0, le=2**31)] = 0
