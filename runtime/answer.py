"""What an engine says of a request: piece by piece as it comes, and whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]
TopLogprobs = tuple[tuple[int, float], ...]
"""(token id, log-probability), likeliest first."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step has added to one of a request's answers."""

    request_id: str
    index: int
    """Which of the n answers; of beams, their rank."""
    token_ids: tuple[int, ...]
    text: str = ""
    """Whole characters that no stop string can begin in; empty for an engine without a tokenizer."""
    logprobs: tuple[float, ...] = ()
    """Of each token, where asked for."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    """stop: an end-of-text or stop token, the last of its token ids, or a stop string; length: max_tokens; None: it
    goes on."""
    last: bool = False
    """True when nothing more comes for the request."""


@dataclass(frozen=True, slots=True)
class Begun:
    """An answer that goes on: its tokens so far were chosen, and told, by another instance."""

    index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole answer; the fields are those of Delta."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()


def whole(deltas: Sequence[Delta]) -> Answer:
    """Return the answer that the deltas of one index make up."""
    reason = deltas[-1].finish_reason
    assert reason is not None
    return Answer(
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join(delta.text for delta in deltas),
        reason,
        tuple(value for delta in deltas for value in delta.logprobs),
        tuple(row for delta in deltas for row in delta.top_logprobs),
    )
