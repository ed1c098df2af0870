"""Times of other hosts in this host's own: their clocks count from different moments, and not quite equally fast."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from runtime.messages import Beat

_SAMPLES = 240
"""Signs of life, two minutes of them. Older ones are forgotten: clocks run apart, by 6 ms meanwhile at 50 ppm."""


class Clock:
    """One sender's clock. What took least time to arrive tells best how far it is off (as in NTP)."""

    def __init__(self) -> None:
        self._offsets_s: deque[float] = deque(maxlen=_SAMPLES)

    @property
    def offset_s(self) -> float:
        """Return what to add to the sender's times: too much by the fastest way of a message here."""
        return min(self._offsets_s, default=0.0)

    def here(self, message: Any, now_s: float) -> Any:
        """Return a message just received with its `at_s`, if it has one, by our clock."""
        at_s = getattr(message, "at_s", None)
        if at_s is None:
            return message
        if isinstance(message, Beat) or not self._offsets_s or now_s - at_s < self.offset_s:
            self._offsets_s.append(now_s - at_s)
        return msgspec.structs.replace(message, at_s=at_s + self.offset_s)
