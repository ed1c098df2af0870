"""A request that is being answered, and what it leaves in the metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from runtime.answer import Delta
from runtime.sampling import Sampling
from runtime.service import Stream

if TYPE_CHECKING:
    from runtime.api.metrics import Metrics


class Counted:
    """A stream whose tokens and end are counted."""

    def __init__(self, stream: Stream, prompt_tokens: int, sampling: Sampling, metrics: Metrics):
        self.stream, self.prompt_tokens, self.sampling = stream, prompt_tokens, sampling
        self.output_tokens = 0
        self.reasons: list[str] = []
        """Of each answer that has ended."""
        self._metrics, self._deltas = metrics, aiter(stream)
        self._told_s: dict[int, float] = {}
        self._end = ""

    def __aiter__(self) -> Counted:
        return self

    async def __anext__(self) -> Delta:
        if self._end:
            raise StopAsyncIteration
        try:
            delta = await anext(self._deltas)
        except Exception:
            self._end = "error"
            raise
        self._count(delta)
        return delta

    def _count(self, delta: Delta) -> None:
        self.output_tokens += len(delta.token_ids)
        now_s = time.monotonic()
        before_s = self._told_s.get(delta.index)
        self._told_s[delta.index] = now_s
        self._metrics.told(len(delta.token_ids), None if before_s is None else now_s - before_s)
        if delta.finish_reason is not None:
            self.reasons.append(delta.finish_reason)
        if delta.last:
            self._end = "last"

    async def close(self) -> None:
        """Cancel what is left, and count how the request ended."""
        self._metrics.ended(self, self._end)
        await self.stream.aclose()
