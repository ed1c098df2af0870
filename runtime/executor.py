"""Who runs the steps that the scheduler plans: this process, or one process per rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from runtime.step import Step, StepOutput

if TYPE_CHECKING:
    from runtime.transfer.base import Source
    from runtime.transfer.pull import Pull, Pulled


class Executor(Protocol):
    """Steps in, results out, in the same order."""

    depth: int
    """Steps that may be under way at a time: one per pipeline stage."""
    kv_blocks: int
    """KV blocks of the instance: what its fullest rank has room for."""

    def submit(self, step: Step) -> None:
        """Start a step."""
        ...

    def collect(self) -> StepOutput:
        """Return the result of the oldest step under way, once it is there."""
        ...

    def close(self) -> None:
        """End all processes and free all memory."""
        ...


class ServingExecutor(Executor, Protocol):
    """An executor of an instance that hands KV over, or takes it in."""

    sources: tuple[Source, ...]
    """Where the KV of each rank can be read; empty unless it is a prefill instance."""

    def pull(self, pull: Pull) -> None:
        """Start to pull KV, on all ranks."""
        ...

    def cancel_pull(self, key: str) -> None:
        """Let a pull end early; `pulled` tells when it has."""
        ...

    def pulled(self) -> list[Pulled]:
        """Return the pulls that every rank is through with, without waiting."""
        ...

    def wakers(self) -> Sequence[int]:
        """Return the descriptors that become readable when there may be something for `pulled`."""
        ...
