"""Who is inside: the requests that are being answered, and whether more may come."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.api.errors import busy, unavailable


class Gate:
    """Counts the completions being answered. Closed for good by `close`, which begins the draining, and `end`."""

    def __init__(self, places: int, retry_after_s: float = 1.0):
        self.places, self.retry_after_s = places, retry_after_s
        self.inside = 0
        self.draining = False
        self.ended = False
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Hold a place. Raises ApiError: 503 while draining, 429 when all places are taken."""
        if self.draining:
            raise unavailable("the server is shutting down", self.retry_after_s)
        if self.inside >= self.places:
            raise busy(f"all {self.places} requests that may run at once are running", self.retry_after_s)
        self.inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.inside -= 1
            if not self.inside:
                self._empty.set()

    def close(self) -> None:
        """Let nobody in any more; /health says so."""
        self.draining = True

    def end(self) -> None:
        """Give up those who are still inside: each is told so when its task is cancelled."""
        self.draining = self.ended = True

    async def emptied(self, timeout_s: float) -> bool:
        """Wait until nobody is inside; return False when somebody still is after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
