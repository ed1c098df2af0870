"""What a cost model is: the latency of one iteration of one instance, in a form the simulators can compile."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from planner.cost.kernel import PREFIX, SLOWER, iteration_s
from planner.specs.layout import Layout


class BatchShape(NamedTuple):
    """One iteration, as the sums that its cost depends on (defined in `cost.kernel`), but for what r adds to them."""

    prefills: int = 0
    tokens: int = 0
    attended: float = 0.0
    decodes: float = 0
    context: float = 0
    prefix: float = 0
    """KV tokens that the prompts of the step find cached, sum of k; r times twice this is yet to be attended."""

    @classmethod
    def prefill(cls, new_tokens: int, batch: int = 1, cached_tokens: int = 0) -> BatchShape:
        """Return the shape of `batch` equal prompts of `new_tokens` each over a cached prefix."""
        attended = float(new_tokens) ** 2 + 2.0 * new_tokens * cached_tokens
        return cls(batch, batch * new_tokens, batch * attended, prefix=batch * cached_tokens)

    @classmethod
    def decode(cls, batch: int, context_tokens: int) -> BatchShape:
        """Return the shape of a decode step over `context_tokens` KV tokens in all."""
        return cls(decodes=batch, context=context_tokens)

    def time_s(self, parameters: np.ndarray) -> float:
        """Return the time [s] of the iteration under a law's vector."""
        attended = self.attended + 2.0 * parameters[PREFIX] * self.prefix
        return float(iteration_s(parameters, self.prefills, self.tokens, attended, self.decodes, self.context))


@dataclass(frozen=True, slots=True)
class TermError:
    """Held-out relative error of one phase: settings left out one at a time, never repeats."""

    median: float
    p95: float
    worst: float
    settings: int
    rms: float = 0.0
    """Root mean square: how wide an interval has to be."""
    noise: float | None = None
    """How far repeats of a setting lie from their median, typically; None without repeats. No model gets below."""


@dataclass(frozen=True, slots=True, eq=False)
class Checks:
    """Every measured row beside its prediction by a fit that had not seen the row's setting. Arrays of (rows,)."""

    shapes: np.ndarray
    """(rows, 6), the sums of `BatchShape`."""
    decode: np.ndarray
    setting: np.ndarray
    """Which setting a row belongs to: a setting is held out as a whole."""
    measured_s: np.ndarray
    predicted_s: np.ndarray
    """nan where nothing was left to predict it from."""

    def errors(self, phase: str) -> np.ndarray:
        """Return predicted over measured time minus 1 of each setting in one phase: mean size over its rows, signed."""
        mine = (self.decode == (phase == "decode")) & ~np.isnan(self.predicted_s)
        off = self.predicted_s / self.measured_s - 1.0
        each = [off[mine & (self.setting == setting)] for setting in np.unique(self.setting[mine])]
        return np.array([np.copysign(np.abs(rows).mean(), rows.sum()) for rows in each])


@dataclass(frozen=True, slots=True, eq=False)
class CostModel:
    """Latency of one instance at one layout.

    `parameters` is the vector that `cost.kernel.iteration_s` takes (whole model). A pipeline stage s takes
    `stage_share[s]` of it, plus the hand-off of its activations to the next stage.
    """

    layout: Layout
    parameters: np.ndarray
    stage_share: tuple[float, ...] = (1.0,)
    handoff_s: float = 0.0
    handoff_s_per_token: float = 0.0
    family: str = "linear"
    unprofiled: bool = False
    """True when no measurement stands behind it (a roofline out of data-sheet figures)."""
    from_physics: tuple[str, ...] = ()
    """Terms that the data could not identify and physics supplied, with the reason."""
    prefill_error: TermError | None = None
    decode_error: TermError | None = None
    measured_tokens: tuple[int, int] = (0, 0)
    """Smallest and largest prompt that was measured; outside, the prediction is an extrapolation."""
    notes: tuple[str, ...] = field(default=())
    checks: Checks | None = None
    gpu: str = ""
    """The GPU type it is of, where there may be several."""

    def error(self, phase: str) -> TermError | None:
        """Return the error of one phase, None where nothing is known of it."""
        return self.prefill_error if phase == "prefill" else self.decode_error

    def slower(self, phase: str, share: float) -> CostModel:
        """Return the same with the steps of one phase longer by `share` (0.1: a tenth; below 0: shorter)."""
        parameters = self.parameters.copy()
        parameters[SLOWER[0] if phase == "prefill" else SLOWER[1]] = share
        return replace(self, parameters=parameters)

    def iteration_s(self, shape: BatchShape) -> float:
        """Return the time [s] of one iteration through all stages, hand-offs included."""
        tokens = shape.tokens + shape.decodes
        return float(sum(self.stages_s(shape))) if tokens else 0.0

    def prompt_s(self, tokens: int, chunk_tokens: int = 0) -> tuple[float, float]:
        """Return how long a prompt alone takes, and for how long it keeps the busiest stage [s].

        In chunks of `chunk_tokens` (0: whole) its stages work on it at the same time: with equal ones it takes
        (chunks + stages - 1) times what a stage needs for one, not its time over the stages, and the next prompt may
        follow after `chunks` of them.
        """
        size = chunk_tokens if chunk_tokens and len(self.stage_share) > 1 else tokens
        free_s = [0.0] * len(self.stage_share)
        busy_s = [0.0] * len(self.stage_share)
        for done in range(0, tokens, size):
            new = min(size, tokens - done)
            at_s = 0.0
            for stage, stage_s in enumerate(self.stages_s(BatchShape.prefill(new, cached_tokens=done))):
                at_s = free_s[stage] = max(at_s, free_s[stage]) + stage_s
                busy_s[stage] += stage_s
        return free_s[-1], max(busy_s)

    def stages_s(self, shape: BatchShape) -> list[float]:
        """Return the time [s] that each pipeline stage is busy with the iteration."""
        whole = shape.time_s(self.parameters)
        handoff = self.handoff_s + self.handoff_s_per_token * (shape.tokens + shape.decodes)
        last = len(self.stage_share) - 1
        return [share * whole + (handoff if s < last else 0.0) for s, share in enumerate(self.stage_share)]
