"""One request on its way through the instances, as the conductor sees it and the API reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from runtime.answer import Begun, Delta
from runtime.messages import Started
from runtime.sampling import Sampling
from runtime.service import Times


@dataclass(slots=True, eq=False)
class Tracked:
    """A request; its `Stream`, too."""

    request_id: str
    prompt: list[int]
    sampling: Sampling
    times: Times
    _cancel: Callable[[Tracked], None]
    entry: str = ""
    """The instance that runs its prompt; empty while none is ready."""
    target: str = ""
    """The decode instance; empty before it is chosen, and in aggregated serving."""
    queued_s: float = 0.0
    """What its prompt adds to its entry's queue."""
    started: Started | None = None
    handed_over: tuple[Begun, ...] | None = None
    """Its answers when its prompt had run."""
    pulled: bool = False
    told: dict[int, list[int]] = field(default_factory=dict)
    """Tokens of each answer that went to the client."""
    ended: set[int] = field(default_factory=set)
    """Answers that are complete."""
    kept_back: list[Delta] = field(default_factory=list)
    """First tokens that the decode instance is to send (`first_token_at: decode`)."""
    done: bool = False
    _news: asyncio.Queue[Delta | Exception] = field(default_factory=asyncio.Queue)

    @property
    def key(self) -> str:
        """Return the name of this try."""
        return f"{self.request_id}/{self.times.retries}"

    @property
    def tokens(self) -> int:
        """Return the tokens whose KV it holds where it decodes."""
        return len(self.prompt) + sum(map(len, self.told.values()))

    @property
    def pulls(self) -> int:
        """Return how many of its prompt's tokens are pulled; beams choose their first tokens where they decode."""
        return len(self.prompt) - (self.sampling.beam_width > 0)

    @property
    def goes_on(self) -> bool:
        """Return True when it is not done with its first token."""
        return self.sampling.max_tokens > 1 or self.sampling.beam_width > 0

    @property
    def begun(self) -> tuple[Begun, ...]:
        """Return the answers that have to go on where the client has them; none before the first token."""
        return tuple(Begun(index, tuple(ids)) for index, ids in sorted(self.told.items()) if index not in self.ended)

    def start_over(self) -> None:
        """Forget where it was."""
        self.times.retries += 1
        self.entry = self.target = ""
        self.started = self.handed_over = None
        self.pulled = False
        self.kept_back.clear()

    def tell(self, delta: Delta) -> None:
        """Pass on to the client."""
        self.told.setdefault(delta.index, []).extend(delta.token_ids)
        if delta.finish_reason:
            self.ended.add(delta.index)
        self._news.put_nowait(delta)

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        self._news.put_nowait(error)

    # ---- Stream

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            news = await self._news.get()
            if isinstance(news, Exception):
                raise news
            yield news
            if news.last:
                return

    async def aclose(self) -> None:
        """Cancel what is left."""
        self._cancel(self)
