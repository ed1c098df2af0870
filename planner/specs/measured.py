"""What a profiling run says beside its samples: where it ran, how fast bytes moved, how far its fits were off."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from planner.specs.base import Spec
from planner.specs.units import Count, CountOrZero

_LONGEST_S = 86400.0
Time = Annotated[float, Field(gt=0, le=_LONGEST_S)]
TimeOrZero = Annotated[float, Field(ge=0, le=_LONGEST_S)]
Error = Annotated[float, Field(ge=0, le=1e6)]

What = Literal[
    "send",
    "all-reduce",
    "device to device",
    "pull",
    "device to host",
    "host to device",
    "host to disk",
    "disk to host",
]


class Environment(Spec):
    """Where and how a profile was measured: enough to tell whether two of them may be compared."""

    date: str = ""
    """ISO 8601, in UTC."""
    device: str = ""
    """As the driver or the kernel calls it."""
    devices: Count = 1
    driver: str = ""
    """Of the GPU; empty on a CPU."""
    host: str = ""
    """Processor and operating system."""
    cores: CountOrZero = 0
    threads_per_rank: CountOrZero = 0
    python: str = ""
    torch: str = ""
    engine: str = ""
    git_commit: str = ""
    model_digest: str = ""
    """Of the model's configuration, as `runtime.model_config` makes it."""
    busy_beside: CountOrZero = 0
    """Copies of the engine that were kept busy on further devices meanwhile."""
    weights: str = ""
    """`dummy` or where they came from."""
    seed: int = 0
    measured_s: TimeOrZero = 0.0
    """How long the measuring took in all, over every start of the run."""
    load_before: TimeOrZero = 0.0
    load_after: TimeOrZero = 0.0
    """Load average over one minute: above the cores that the run used itself, others were at work."""
    notes: tuple[str, ...] = ()
    """Clocks, throttling, drift and whatever else was noticed."""


class Transfer(Spec):
    """Seconds that messages or copies of several sizes took: one row per size, the median with its quantiles."""

    what: What
    """`send` is one way, between two ranks; `all-reduce` is over all `ranks`; `pull` is KV blocks that one process
    takes, layer by layer, out of another's memory."""
    over: str = Field(min_length=1)
    """What carried the bytes: gloo, nccl, memory, or the kind of disk."""
    ranks: Count = 1
    rows: tuple[tuple[Count, Time, Time, Time], ...] = Field(min_length=1)
    """(bytes, median, 10 % quantile, 90 % quantile)"""
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _rising(self) -> Transfer:
        sizes = [row[0] for row in self.rows]
        if sizes != sorted(set(sizes)):
            raise ValueError("expected rows in rising order of their bytes, each size once")
        return self


MIXED_COLUMNS = (
    "tp",
    "pp",
    "prefills",
    "prompt_tokens",
    "cached_tokens",
    "decodes",
    "context_tokens",
    "time_s",
)


class MixedSamples(Spec):
    """Steps that prefill and decode at once: one line per measurement, rows of one setting are repeats."""

    columns: tuple[str, ...] = MIXED_COLUMNS
    rows: tuple[tuple[Count, Count, Count, Count, CountOrZero, Count, Count, Time], ...]

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if isinstance(data, dict) and tuple(data.get("columns", MIXED_COLUMNS)) != MIXED_COLUMNS:
            raise ValueError(f"expected the columns {', '.join(MIXED_COLUMNS)}")
        return data


class Overhead(Spec):
    """What a step of one layout takes outside of the model: scheduling before it, bookkeeping after it."""

    tp: Count
    pp: Count = 1
    phase: Literal["prefill", "decode"]
    requests: Count
    median_s: TimeOrZero
    p90_s: TimeOrZero


class Accuracy(Spec):
    """How far the fit was off on settings that it never saw, drawn at random before anything was fitted."""

    tp: Count
    pp: Count = 1
    phase: Literal["prefill", "decode"]
    settings: Count
    median: Error
    p95: Error
    worst: Error
    repeats: Error | None = None
    """How far the repeats of a held-out setting lie from their median, typically."""
