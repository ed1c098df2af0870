"""A request and the sequences that answer it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.answer import Begun
from runtime.beam import Beams
from runtime.output_text import OutputText
from runtime.sampling import Sampling


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer in the making. `tokens` is the prompt and what has been chosen since."""

    id: int
    """Its name in the KV cache."""
    request: Request
    index: int
    """Which of the n answers."""
    tokens: list[int]
    started: bool = False
    """True while the KV cache has a table for it."""
    flights: int = 0
    """Steps under way that run some of its tokens."""
    logprobs: list[float] = field(default_factory=list)
    """Of each chosen token, where asked for."""
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    """The likeliest tokens at each place, where asked for."""
    row: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None
    """Beam search: candidates for its next token, until its siblings have theirs."""
    text: OutputText | None = None
    """What has become of its tokens, from the first one on that was chosen."""
    told: int = 0
    """Chosen tokens that the engine has told, or another one before it."""

    def go_on(self, begun: Begun) -> None:
        """Take over an answer that another engine has begun."""
        count = len(begun.token_ids)
        self.index, self.told = begun.index, count
        self.tokens = [*self.request.prompt, *begun.token_ids]
        self.logprobs, self.top = [math.nan] * count, [()] * count

    @property
    def chosen(self) -> int:
        """Return how many tokens have been chosen."""
        return len(self.tokens) - len(self.request.prompt)


@dataclass(slots=True, eq=False)
class Request:
    """A prompt with its settings. It is admitted, swapped and preempted as a whole: its sequences share KV blocks."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    chain: tuple[bytes, ...] = ()
    """Hashes of the blocks that its first sequence may find in the cache."""
    live: list[Sequence] = field(default_factory=list)
    """Sequences that go on, the first of which runs the prompt."""
    beams: Beams | None = None
    aborted: bool = False
    prompt_only: bool = False
    """Only its KV is wanted: the first token is chosen by whoever takes it over."""
    ticket: int = 0
    """Under which its KV is handed over once its prompt has run; 0: not at all."""

    @property
    def leader(self) -> Sequence:
        """Return the sequence that runs the prompt for all."""
        return self.live[0]

    @property
    def forked(self) -> bool:
        """Return True when the sequences that are to share a prompt all do."""
        return all(sequence.started for sequence in self.live)

    @property
    def in_flight(self) -> bool:
        """Return True while a step under way runs some of its tokens."""
        return any(sequence.flights for sequence in self.live)

    @property
    def seats(self) -> int:
        """Return the places in a batch that it takes, now or once its prompt has run."""
        if len(self.live) == 1 and not self.leader.chosen:
            return self.sampling.width
        return len(self.live)

    @property
    def logprobs_wanted(self) -> int:
        """Return how many of the likeliest tokens a row of logits has to name; 0: not even the chosen one's."""
        if self.beams is not None:
            return self.beams.candidates
        return 0 if self.sampling.logprobs is None else max(1, self.sampling.logprobs)

    def goal(self, sequence: Sequence) -> int:
        """Return how many tokens of `sequence` can run now. The prompt comes first where others wait to share it."""
        shares = len(self.live) > 1 and not self.forked
        return len(self.prompt) if shares else len(sequence.tokens)
