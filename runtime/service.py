"""What the HTTP API asks of whatever serves behind it: token ids in, deltas out, and what it was doing meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from planner.errors import PlannerError
from runtime.answer import Delta
from runtime.model_config import ModelConfig
from runtime.sampling import Sampling
from runtime.tokenizer import Tokenizer

NEVER = float("nan")


class RejectedError(PlannerError):
    """A request that is not taken in now: too many wait, or its SLO cannot be met. Come again after `retry_after_s`."""

    exit_code = 1

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(PlannerError):
    """Nothing can be served now: starting, draining, or a request that was lost too often."""

    exit_code = 1


@dataclass(slots=True)
class Times:
    """When a request passed which station, by time.monotonic [s]; NaN for what never happened."""

    arrival_s: float = NEVER
    prefill_start_s: float = NEVER
    """The first step that runs some of its prompt begins."""
    prefill_end_s: float = NEVER
    pull_start_s: float = NEVER
    """The decode instance has reserved blocks and begins to pull KV."""
    pull_end_s: float = NEVER
    first_step_s: float = NEVER
    """The decode instance begins the first step that runs it; in an aggregated instance the end of its prefill."""
    first_token_s: float = NEVER
    finish_s: float = NEVER
    prefill_at: str = ""
    """Name of the instance."""
    decode_at: str = ""
    retries: int = 0
    """Times that it started over because an instance was lost."""
    cached_tokens: int = 0
    """Prompt tokens found in a prefix cache."""


class Stream(Protocol):
    """One request on its way. To close it before its last delta cancels the request and frees what it holds."""

    request_id: str
    times: Times

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield deltas until one is `last`. Raises UnavailableError when the request is lost for good."""
        ...

    async def aclose(self) -> None:
        """Cancel what is left. Closing twice, or after the end, is no error."""
        ...


@dataclass(frozen=True, slots=True)
class InstanceState:
    """One instance as of its last sign of life."""

    name: str
    phase: Literal["prefill", "decode", "aggregated"]
    state: Literal["starting", "ready", "gone"]
    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    used_blocks: int = 0
    """Blocks that requests hold; those kept for their prefix alone are not counted."""
    steps: int = 0
    run_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    starts: int = 0
    """How often it was started: 1 unless it was lost."""
    process_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at one moment."""

    instances: tuple[InstanceState, ...] = ()
    requests: int = 0
    """Accepted and not finished."""
    accepted: int = 0
    finished: int = 0
    cancelled: int = 0
    rejected: int = 0
    lost: int = 0
    """Ended with an error because instances were lost too often."""
    retries: int = 0
    attained: dict[str, float] = field(default_factory=dict)
    """By name of the SLO class: the share of the last requests that met it."""


class Service(Protocol):
    """Whatever serves. All methods are called from one event loop."""

    model: str
    """Name of the model."""
    config: ModelConfig
    tokenizer: Tokenizer | None

    @property
    def ready(self) -> bool:
        """Return True while every instance can take requests."""
        ...

    def submit(self, prompt: Sequence[int], sampling: Sampling, request_id: str = "") -> Stream:
        """Take in a request. Raises InputError (can never be served), RejectedError, UnavailableError, at once."""
        ...

    def snapshot(self) -> Snapshot:
        """Return what is going on."""
        ...
