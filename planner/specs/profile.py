"""What was measured of one model on one kind of GPU: samples or published fits, with provenance."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from planner.specs.base import Spec, short
from planner.specs.gpu import Gpu
from planner.specs.measured import Accuracy, Environment, MixedSamples, Overhead, Transfer
from planner.specs.model import ModelSpec
from planner.specs.units import Count, Name

FORMAT = 1
COLUMNS = ("phase", "tp", "pp", "batch", "prompt_tokens", "cached_tokens", "context_tokens", "time_s", "output_tokens")
_REQUIRED = ("phase", "tp", "batch", "time_s")
_DEFAULTS: dict[str, int] = {"pp": 1, "prompt_tokens": 0, "cached_tokens": 0, "context_tokens": 0, "output_tokens": 0}
_LIMIT = 10**9
_LONGEST_S = 86400.0
_LATER = (
    "held_out",
    "accuracy",
    "mixed",
    "transfers",
    "overheads",
    "environment",
    "measured_model",
    "measured_gpu",
)


class Sample(NamedTuple):
    """One measurement: `time_s` is the whole batch's prefill, or one decode step of the whole batch."""

    phase: str
    tp: int
    pp: int
    batch: int
    prompt_tokens: int
    """New tokens of each request (prefill); the prompt behind its context (decode)."""
    cached_tokens: int
    context_tokens: int
    """KV tokens of each request during the step (decode)."""
    time_s: float
    output_tokens: int = 0
    """Tokens asked of each request (decode). With the prompt it names the setting: contexts vary within one when
    generation stops early."""


def row_fault(columns: tuple[str, ...], row: Any) -> str | None:
    """Return what is wrong with one row of a samples table, or None."""
    if not isinstance(row, list | tuple) or len(row) != len(columns):
        return f"expected a list of {len(columns)} values ({', '.join(columns)}), got {short(row)}"
    values = dict(zip(columns, row, strict=True))
    if values["phase"] not in ("prefill", "decode"):
        return f"phase: expected prefill or decode, got {short(values['phase'])}"
    for name in (name for name in columns if name not in ("phase", "time_s")):
        if fault := _count_fault(name, values[name]):
            return fault
    time_s = values["time_s"]
    if isinstance(time_s, bool) or not isinstance(time_s, int | float) or not 0 < time_s <= _LONGEST_S:
        return f"time_s: expected seconds above 0 and up to {_LONGEST_S:g}, got {short(time_s)}"
    needed = "prompt_tokens" if values["phase"] == "prefill" else "context_tokens"
    return None if values.get(needed, 0) > 0 else f"{needed}: a {values['phase']} row needs at least 1"


def _count_fault(name: str, value: Any) -> str | None:
    low = 1 if name in ("tp", "pp", "batch") else 0
    if isinstance(value, bool) or not isinstance(value, int):
        return f"{name}: expected a whole number, got {short(value)}"
    return None if low <= value <= _LIMIT else f"{name}: expected {low} to {_LIMIT}, got {value}"


class Samples(Spec):
    """A table: one line per measurement. Rows of one setting are repeats. A missing column is 0 (pp: 1)."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float, ...], ...]

    @field_validator("columns")
    @classmethod
    def _known_columns(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in columns if name not in COLUMNS]
        if unknown or len(set(columns)) != len(columns):
            raise ValueError(f"expected columns out of {', '.join(COLUMNS)}, each once, got {', '.join(columns)}")
        if missing := [name for name in _REQUIRED if name not in columns]:
            raise ValueError(f"the columns {', '.join(missing)} are required")
        return columns

    @field_validator("rows", mode="before")
    @classmethod
    def _no_silent_coercion(cls, rows: Any) -> Any:
        if not isinstance(rows, list | tuple):
            raise ValueError(f"expected a list of rows, got {short(rows)}")
        return tuple(tuple(row) if isinstance(row, list) else row for row in rows)

    @model_validator(mode="after")
    def _sound_rows(self) -> Samples:
        for index, row in enumerate(self.rows):
            if fault := row_fault(self.columns, row):
                raise ValueError(f"row {index + 1}: {fault}")
        return self

    @property
    def each(self) -> Iterator[Sample]:
        """The rows, one by one."""
        for row in self.rows:
            yield Sample(**(_DEFAULTS | dict(zip(self.columns, row, strict=True))))  # type: ignore[arg-type]

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Samples:
        """Return the table of `samples`, without the columns that hold only their default."""
        found = list(samples)
        columns = tuple(
            name
            for name in COLUMNS
            if name in _REQUIRED or any(getattr(sample, name) != _DEFAULTS[name] for sample in found)
        )
        return cls(columns=columns, rows=tuple(tuple(getattr(s, name) for name in columns) for s in found))


Term = Annotated[float, Field(ge=-_LONGEST_S, le=_LONGEST_S)]


class PrefillFit(Spec):
    """constant + per_token * sum(n) + per_attended * sum(n^2)  [s]."""

    constant_s: Term
    per_token_s: Term
    per_attended_s: Term

    @model_validator(mode="after")
    def _takes_time(self) -> PrefillFit:
        if max(self.constant_s, self.per_token_s, self.per_attended_s) <= 0:
            raise ValueError("expected at least one term above 0")
        return self


class DecodeFit(Spec):
    """constant + per_request * batch + per_context_token * sum(context)  [s]."""

    constant_s: Term
    per_request_s: Term
    per_context_token_s: Term

    @model_validator(mode="after")
    def _takes_time(self) -> DecodeFit:
        if max(self.constant_s, self.per_request_s, self.per_context_token_s) <= 0:
            raise ValueError("expected at least one term above 0")
        return self


class Coefficients(Spec):
    """A published fit at one degree. `decode_large` holds from `large_from_batch` requests on."""

    tp: Count
    prefill: PrefillFit
    decode: DecodeFit
    decode_large: DecodeFit | None = None
    large_from_batch: Count | None = None

    @model_validator(mode="after")
    def _both_or_neither(self) -> Coefficients:
        if (self.decode_large is None) != (self.large_from_batch is None):
            raise ValueError("expected decode_large and large_from_batch together, or neither")
        return self


class KvTokens(Spec):
    """KV tokens that fit one instance, as measured or published."""

    tp: Count
    pp: Count = 1
    tokens: Count


class Provenance(Spec):
    """Where the numbers come from, so that a plan can say so."""

    method: Literal["measured", "assembled", "published fit"]
    """`assembled`: put together from per-layer tables, never timed end to end."""
    source: str = Field(min_length=1)
    url: str = ""
    revision: str = ""
    licence: str = ""
    citation: str = ""
    notes: tuple[str, ...] = ()


class Profile(Spec):
    """Measurements of one model on one GPU type with one engine. The times are seconds."""

    format: Literal[1] = 1
    name: Name
    version: str = "1"
    model: str = Field(min_length=1)
    gpu: str = Field(min_length=1)
    engine: str = "unstated"
    dtype: str = "unstated"
    interconnect: str = "unstated"
    provenance: Provenance
    samples: Samples | None = None
    coefficients: tuple[Coefficients, ...] = ()
    kv_tokens: tuple[KvTokens, ...] = ()
    held_out: Samples | None = None
    """Measured like `samples`, at settings drawn at random; never fitted, only compared with what a fit says."""
    accuracy: tuple[Accuracy, ...] = ()
    mixed: MixedSamples | None = None
    transfers: tuple[Transfer, ...] = ()
    overheads: tuple[Overhead, ...] = ()
    environment: Environment | None = None
    measured_model: ModelSpec | None = None
    """The model as it was measured, where no preset says it (another type of weights, a configuration of one's own)."""
    measured_gpu: Gpu | None = None
    """The device, where no preset describes it; peaks are the best that was seen on it, not a data sheet's."""

    @model_validator(mode="after")
    def _says_something(self) -> Profile:
        if not self.coefficients and not (self.samples and self.samples.rows):
            raise ValueError("expected samples or coefficients, got neither")
        named: tuple[tuple[str, list[tuple[int, ...]]], ...] = (
            ("coefficients for TP", [(fit.tp,) for fit in self.coefficients]),
            ("kv_tokens for TP, PP", [(kv.tp, kv.pp) for kv in self.kv_tokens]),
        )
        for what, keys in named:
            if twice := sorted({key for key in keys if keys.count(key) > 1}):
                raise ValueError(f"{what} {', '.join(map(str, twice[0]))} stand twice")
        return self

    def is_of(self, gpu: Gpu) -> bool:
        """True when it was measured on this type of GPU."""
        return gpu.is_called(self.gpu)

    @property
    def _each(self) -> Iterator[Sample]:
        return self.samples.each if self.samples else iter(())

    def rows(self, phase: str, tp: int, pp: int = 1) -> list[Sample]:
        """Return the samples of one phase at one layout, in file order."""
        wanted = (phase, tp, pp)
        return [sample for sample in self._each if (sample.phase, sample.tp, sample.pp) == wanted]

    @property
    def tps(self) -> tuple[int, ...]:
        """The tensor-parallel degrees that were measured without pipeline stages, or have published fits."""
        measured = {sample.tp for sample in self._each if sample.pp == 1}
        return tuple(sorted(measured | {fit.tp for fit in self.coefficients}))

    def coefficients_at(self, tp: int) -> Coefficients | None:
        """Return the published fit at `tp`, or None."""
        return next((fit for fit in self.coefficients if fit.tp == tp), None)

    def kv_tokens_at(self, tp: int, pp: int = 1) -> int | None:
        """Return the KV tokens that fit an instance of this layout, where the source says so."""
        return next((kv.tokens for kv in self.kv_tokens if (kv.tp, kv.pp) == (tp, pp)), None)

    @property
    def digest(self) -> str:
        """SHA-256 of the content, independent of how the file was laid out.

        Fields that came later count only where they are set, so that a profile without them keeps its digest.
        """
        later = {name for name in _LATER if getattr(self, name) in (None, ())}
        text = json.dumps(self.model_dump(mode="json", exclude=later), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
