"""The text of one answer while its tokens come: what may be sent already, and what ends it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from planner.errors import InvariantError
from runtime.answer import FinishReason
from runtime.sampling import Sampling


class Decoder(Protocol):
    """Turns tokens that come one by one into text, whole characters only."""

    def add(self, token_id: int) -> str:
        """Return the text that this token completes, often nothing."""
        ...

    def finish(self) -> str:
        """Return what is left when no token follows."""
        ...


class NoText:
    """The decoder of a model without a tokenizer."""

    def add(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class OutputText:
    """One answer. It ends with, looked for in this order:

    - "stop": an end of text (unless ignore_eos) or one of stop_token_ids, which adds no text;
    - "stop": a stop string, which is cut off with all that follows. Of several the one that is complete first counts,
      and of those complete at once the longest, so the text does not depend on where tokens begin and end;
    - "length": max_tokens.

    Tokens that end it are all counted. None ends it before min_tokens: ends of text are `banned` so long, and a stop
    string has to be completed by the min_tokens-th token or a later one. What may be the beginning of a stop string is
    held back until a token decides.
    """

    def __init__(self, sampling: Sampling, eos_ids: Collection[int], decoder: Decoder):
        self._sampling, self._decoder = sampling, decoder
        self._ends = sampling.ends(eos_ids)
        self._longest = max((len(stop) for stop in sampling.stop), default=0)
        self._sent: list[str] = []
        self._held = ""
        self.tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stopped_by: str | int | None = None
        """The stop string or the token that ended the answer."""

    @property
    def text(self) -> str:
        """Return what `add` has given out so far; the whole answer once finish_reason is set."""
        return "".join(self._sent)

    @property
    def banned(self) -> tuple[int, ...]:
        """Return the tokens that the next one must not be: all ends before min_tokens are out (Choices.banned)."""
        return tuple(sorted(self._ends)) if self.tokens < self._sampling.min_tokens else ()

    def add(self, token_id: int) -> str:
        """Return the text that may be sent now that `token_id` is out."""
        if self.finish_reason is not None:
            raise InvariantError(f"token {token_id} came after an answer's end ({self.finish_reason})")
        self.tokens += 1
        if token_id in self._ends and self.tokens > self._sampling.min_tokens:
            self.finish_reason, self.stopped_by = "stop", token_id
            return self._send(self._decoder.finish())
        text = self._decoder.add(token_id)
        if self.tokens == self._sampling.max_tokens:
            self.finish_reason = "length"
            text += self._decoder.finish()
        return self._send(text)

    def _send(self, new: str) -> str:
        """Return the part of what is held and `new` that no stop string can begin in, or all of it at the end."""
        text, cut = self._held + new, self._find_stop(new)
        if cut is None:
            cut = len(text) if self.finish_reason else len(text) - self._undecided(text)
        sent, self._held = text[:cut], text[cut:]
        self._sent.append(sent)
        return sent

    def _find_stop(self, new: str) -> int | None:
        """Return where the stop string that `new` completes begins in held + new, and take the answer as stopped."""
        if self.tokens < self._sampling.min_tokens:
            return None
        text, matches = self._held + new, []
        for stop in self._sampling.stop:
            start = text.find(stop, max(0, len(self._held) + 1 - len(stop)))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return None
        _, start, stop = min(matches)
        self.finish_reason, self.stopped_by = "stop", stop
        return start

    def _undecided(self, text: str) -> int:
        """Return the length of the longest end of `text` that some stop string begins with."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(len(stop) > size and stop.startswith(text[-size:]) for stop in self._sampling.stop):
                return size
        return 0
