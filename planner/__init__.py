"""goodput-planner: lay a large language model out on the GPUs you have, for the most goodput.

    from planner import plan, read_problem
    print(plan(read_problem("problem.yaml")).verdict.headline)

Names are imported when they are first used, so that `planner --help` does not wait for numba.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "InfeasibleError": "planner.errors",
    "InputError": "planner.errors",
    "PlannerError": "planner.errors",
    "Plan": "planner.pipeline",
    "plan": "planner.pipeline",
    "Problem": "planner.sources.problem",
    "problem_of": "planner.sources.problem",
    "read_problem": "planner.sources.problem",
    "Deployment": "planner.specs.deployment",
    "deployment_of": "planner.deploy",
    "parse": "planner.specs.base",
    "simulate": "planner.simulator.cluster",
}

__all__ = [  # noqa: PLE0604
    "__version__",
    *sorted(_WHERE),
]

if TYPE_CHECKING:
    from planner.deploy import deployment_of as deployment_of
    from planner.errors import InfeasibleError as InfeasibleError
    from planner.errors import InputError as InputError
    from planner.errors import PlannerError as PlannerError
    from planner.pipeline import Plan as Plan
    from planner.pipeline import plan as plan
    from planner.simulator.cluster import simulate as simulate
    from planner.sources.problem import Problem as Problem
    from planner.sources.problem import problem_of as problem_of
    from planner.sources.problem import read_problem as read_problem
    from planner.specs.base import parse as parse
    from planner.specs.deployment import Deployment as Deployment


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _WHERE:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
