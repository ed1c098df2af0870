"""One thing to measure: a step of the engine, by what runs in it."""

from __future__ import annotations

from typing import Any, NamedTuple

from planner.cost.base import BatchShape
from planner.specs.profile import Sample


class Setting(NamedTuple):
    """One step: `prefills` prompts of `new_tokens` behind `cached_tokens` each, beside `decodes` running requests.

    `context_tokens` are the KV tokens of each decoding request during the step, the one that it writes included.
    """

    prefills: int = 0
    new_tokens: int = 0
    cached_tokens: int = 0
    decodes: int = 0
    context_tokens: int = 0

    @classmethod
    def prefill(cls, batch: int, new_tokens: int, cached_tokens: int = 0) -> Setting:
        """Return a step that prefills alone."""
        return cls(batch, new_tokens, cached_tokens)

    @classmethod
    def decode(cls, batch: int, context_tokens: int) -> Setting:
        """Return a step that decodes alone."""
        return cls(decodes=batch, context_tokens=context_tokens)

    @property
    def phase(self) -> str:
        """`prefill`, `decode` or `mixed`."""
        if self.prefills and self.decodes:
            return "mixed"
        return "prefill" if self.prefills else "decode"

    @property
    def step_tokens(self) -> int:
        """Tokens that run through the model in the step."""
        return self.prefills * self.new_tokens + self.decodes

    @property
    def requests(self) -> int:
        """Requests in the step."""
        return self.prefills + self.decodes

    @property
    def longest(self) -> int:
        """Tokens of the longest request at the end of the step."""
        return max(self.new_tokens + self.cached_tokens, self.context_tokens)

    def blocks(self, block_tokens: int) -> int:
        """Return the KV blocks that the requests hold at the end of the step."""
        each = -(-(self.new_tokens + self.cached_tokens) // block_tokens), -(-self.context_tokens // block_tokens)
        return self.prefills * each[0] + self.decodes * each[1]

    @property
    def shape(self) -> BatchShape:
        """The sums that a cost law takes."""
        prompts = BatchShape.prefill(self.new_tokens, self.prefills, self.cached_tokens)
        return prompts._replace(decodes=self.decodes, context=self.decodes * self.context_tokens)

    def sample(self, tp: int, pp: int, time_s: float) -> Sample:
        """Return the row of a profile (not of mixed steps, which have a table of their own)."""
        assert self.phase != "mixed"
        if self.decodes:
            return Sample("decode", tp, pp, self.decodes, 0, 0, self.context_tokens, time_s)
        return Sample("prefill", tp, pp, self.prefills, self.new_tokens, self.cached_tokens, 0, time_s)

    def __str__(self) -> str:
        parts = []
        if self.prefills:
            behind = f" behind {self.cached_tokens}" if self.cached_tokens else ""
            parts.append(f"prefill {self.prefills} x {self.new_tokens}{behind}")
        if self.decodes:
            parts.append(f"decode {self.decodes} x {self.context_tokens}")
        return " + ".join(parts)


def setting_of(values: Any) -> Setting:
    """Return the setting that a journal's list of five whole numbers names. Raises ValueError."""
    if not isinstance(values, list) or len(values) != len(Setting._fields):
        raise ValueError(f"expected {len(Setting._fields)} numbers, got {values!r}")
    if not all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values):
        raise ValueError(f"expected whole numbers from 0, got {values!r}")
    return Setting(*values)
