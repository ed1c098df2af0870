"""JSON Schemas of the files that the planner reads and writes."""

from __future__ import annotations

from typing import Any

from planner.errors import InputError
from planner.specs.base import Spec, suggest
from planner.specs.cluster import Cluster
from planner.specs.deployment import Deployment
from planner.specs.model import ModelSpec
from planner.specs.problem import ProblemSpec
from planner.specs.profile import Profile
from planner.specs.slo import Slo
from planner.specs.workload import WorkloadSpec

KINDS: dict[str, type[Spec]] = {
    "deployment": Deployment,
    "problem": ProblemSpec,
    "cluster": Cluster,
    "model": ModelSpec,
    "profile": Profile,
    "workload": WorkloadSpec,
    "slo": Slo,
}


def schema_of(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a file kind. Raises InputError for an unknown one."""
    if kind not in KINDS:
        raise InputError(f"no schema called {kind!r}{suggest(kind, list(KINDS))}; there are {', '.join(KINDS)}")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **KINDS[kind].model_json_schema()}
