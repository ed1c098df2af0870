"""The question: which model on which cluster, under which load, within which bounds, for which objective."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from planner.specs.base import Spec
from planner.specs.engine import Engine
from planner.specs.units import Name, RequestsPerSecond

Reference = str | dict[str, Any]
"""A preset's name, a file (relative to the problem's), or the thing itself."""

Objective = Literal["max_goodput", "min_gpus"]


class Search(Spec):
    """How wide and how hard to look. The defaults plan a cluster of 32 GPUs in seconds."""

    max_tp: Annotated[int, Field(strict=True, ge=1, le=1024)] = 8
    max_pp: Annotated[int, Field(strict=True, ge=1, le=64)] = 2
    """Pipeline stages of one instance at most; a model too large for that many is tried with more."""
    requests: Annotated[int, Field(strict=True, ge=200, le=1_000_000)] = 4000
    """Requests of a simulation that ranks candidates, at the rate that the cluster could serve at best."""
    replay_requests: Annotated[int, Field(strict=True, ge=200, le=5_000_000)] = 20_000
    """Requests of a simulation whose result is quoted."""
    seeds: Annotated[int, Field(strict=True, ge=3, le=100)] = 6
    """Replicates of every quoted number, each with its own luck."""
    finalists: Annotated[int, Field(strict=True, ge=1, le=50)] = 4
    """Candidates that are placed and replayed on the real network."""


class ProblemSpec(Spec):
    """The problem file."""

    name: Name | None = None
    model: Reference
    cluster: Reference
    profiles: Reference | list[Reference] = "auto"
    """Measured profiles; `auto`: every shipped one of this model and these GPUs; `none`: data sheets only."""
    workload: Reference
    slo: dict[str, Any] | list[dict[str, Any]]
    objective: Objective | None = None
    """`max_goodput` on the whole cluster; `min_gpus` for `rate_rps` (the default when a rate is given)."""
    rate_rps: RequestsPerSecond | None = None
    """The load to serve; by default the workload's own `rate_rps`, if it has one."""
    engine: Engine = Engine()
    search: Search = Search()
    seed: Annotated[int, Field(strict=True, ge=0, le=2**31)] = 0
