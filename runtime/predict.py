"""What the deployment's cost models say of an instance's steps: for routing, and to refuse what comes too late."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost.kernel import iteration_s
from planner.specs.deployment import CostSpec


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """The latency law of one instance."""

    parameters: np.ndarray
    slowest_share: float
    """Of an iteration, what its slowest stage takes."""

    @classmethod
    def of(cls, cost: CostSpec) -> Law:
        """Return the law of a cost model."""
        return cls(np.array(cost.parameters), max(cost.stage_share))

    def prompts_s(self, tokens: list[int]) -> float:
        """Return how long a batch of whole prompts takes [s]."""
        attended = float(sum(n * n for n in tokens))
        return float(iteration_s(self.parameters, len(tokens), sum(tokens), attended, 0, 0)) if tokens else 0.0

    def alone_s(self, tokens: int) -> float:
        """Return for how long a prompt of its own keeps the slowest stage busy [s], as the simulator counts queues."""
        return self.slowest_share * self.prompts_s([tokens])

    def step_s(self, decodes: int, context: int) -> float:
        """Return how long a decode step takes over `context` KV tokens in all [s]."""
        return float(iteration_s(self.parameters, 0, 0, 0.0, decodes, context)) if decodes else 0.0
