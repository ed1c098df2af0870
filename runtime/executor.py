"""Who runs the steps that the scheduler plans: this process, or one process per rank."""

from __future__ import annotations

from typing import Protocol

from runtime.step import Step, StepOutput


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
