"""What the profiler measures: anything that puts requests in place and runs one whole step over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from profiler.setting import Setting


@dataclass(frozen=True, slots=True)
class Limits:
    """What an instance is asked at most."""

    kv_blocks: int
    block_tokens: int
    max_positions: int
    """Longest request, in tokens."""
    max_requests: int
    """In one step."""
    max_step_tokens: int

    @property
    def kv_tokens(self) -> int:
        """Tokens in those blocks."""
        return self.kv_blocks * self.block_tokens

    def fault(self, setting: Setting) -> str | None:
        """Return why a setting cannot run, or None."""
        for what, value, most in (
            ("requests", setting.requests, self.max_requests),
            ("tokens in a step", setting.step_tokens, self.max_step_tokens),
            ("tokens of a request", setting.longest, self.max_positions),
            ("KV blocks", setting.blocks(self.block_tokens), self.kv_blocks),
        ):
            if value > most:
                return f"{value} {what}, the instance takes {most}"
        return None


class Subject(Protocol):
    """One instance at one layout. `place`, then `step` once; `place` again for the next repeat."""

    @property
    def limits(self) -> Limits:
        """What the profiler may ask of it."""

    @property
    def kv_tokens(self) -> int:
        """KV tokens that the engine found room for; `limits` has fewer where it would be unwise to touch them all."""

    @property
    def process_ids(self) -> Sequence[int]:
        """The processes that run its steps."""

    def place(self, setting: Setting) -> None:
        """Put requests in place as if their first tokens were cached. Not timed; whatever was there before goes."""

    def step(self) -> float | None:
        """Run one whole step (schedule, run, postprocess) until its tokens are back on the host.

        Returns the seconds spent outside of the model, where the engine tells them.
        """

    def close(self) -> None:
        """End the instance and every process of it."""


Opener = Callable[[int, int], Subject]
"""(tp, pp) -> an instance at that layout."""
