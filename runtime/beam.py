"""Beam search over one prompt: which beams go on, which have ended, when no better one can come. Knows no tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.errors import InvariantError
from runtime.sampling import Sampling


def candidates(width: int, eos_count: int) -> int:
    """Return how many of its likeliest next tokens each beam has to know.

    Of one beam at most `width` tokens go on, and those that rank before them in the same beam and do not go on are ends
    of text. So a token behind its beam's first width + eos_count is never needed. (transformers keeps the first
    max(2, 1 + eos_count) * width of all beams together, which always holds as many that go on: the same outcome.)
    """
    return width + eos_count


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """One answer. `token_ids` includes the end of text, if that is what ended it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float
    """Sum of the log-probabilities, divided by length ** length_penalty."""
    finish_reason: Literal["stop", "length"]
    """"stop" or "length"."""


@dataclass(frozen=True, slots=True)
class _Beam:
    """A token and the beam that it continues, so that beams share what they have in common."""

    parent: _Beam | None = None
    token_id: int = -1
    logprob: float = 0.0
    total: np.float32 | float = 0.0
    """Sum of the log-probabilities, added up in float32 as transformers does, so that near-ties fall alike."""

    def tokens(self) -> list[_Beam]:
        beam, chain = self, []
        while beam.parent is not None:
            chain.append(beam)
            beam = beam.parent
        return chain[::-1]


class Beams:
    """The beams of one prompt. It starts as one beam, the prompt alone; `advance` takes what the model says of each.

    It chooses what `generate(num_beams=width, do_sample=False, early_stopping=False)` of transformers 5 chooses:

    - All continuations of all beams are ranked by the sum of their log-probabilities.
    - The first `width` of those that do not end the text go on.
    - An end of text among the first `width` is an answer. So is, once max_tokens are out, each of the first `width`.
      The `width` answers with the best scores are kept.
    - It is over with max_tokens, or when `width` answers are kept and the best running beam, scored as if it ended now,
      does not beat the worst of them. With a positive length_penalty a longer one still might; this is their heuristic.

    A continuation with -inf is none: the sampler's way to ban an end of text before min_tokens.
    """

    def __init__(self, sampling: Sampling, eos_ids: Sequence[int]):
        self._width, self._sampling = sampling.beam_width, sampling
        self._eos_ids = frozenset(eos_ids)
        self._running = [_Beam()]
        self._finished: list[FinishedBeam] = []
        self._length = 0

    @property
    def candidates(self) -> int:
        """Return how many likeliest tokens of each running beam `advance` wants."""
        return candidates(self._width, len(self._eos_ids))

    @property
    def running(self) -> int:
        """Return how many beams go on: one at first, then `width`, none when all is done."""
        return len(self._running)

    @property
    def done(self) -> bool:
        """Return True when the answers are final."""
        return not self._running

    def token_ids(self, index: int) -> list[int]:
        """Return the tokens so far of a running beam."""
        return [beam.token_id for beam in self._running[index].tokens()]

    def best(self, n: int) -> list[FinishedBeam]:
        """Return the `n` answers with the highest scores, the best first. They are final once `done`."""
        return self._finished[:n]

    def advance(self, top_ids: NDArray[np.int64], top_logprobs: NDArray[np.float32]) -> list[tuple[int, int]]:
        """Return (parent, token) for each beam that runs next; parents are indices of the beams that ran before.

        Both arrays are [running, k], k >= `candidates`, likeliest first. The result is empty when all is done.
        """
        if top_ids.shape != top_logprobs.shape or len(top_ids) != self.running or top_ids.shape[1] < self.candidates:
            raise InvariantError(f"expected [{self.running}, {self.candidates} or more], got {top_ids.shape}")
        self._length += 1
        last = self._length == self._sampling.max_tokens
        running: list[tuple[int, _Beam]] = []
        finished: list[FinishedBeam] = []
        for rank, (parent, beam) in enumerate(self._ranked(top_ids, top_logprobs)):
            ends = beam.token_id in self._eos_ids
            if rank < self._width and (ends or last):
                finished.append(self._finish(beam, "stop" if ends else "length"))
            elif not (ends or last) and len(running) < self._width:
                running.append((parent, beam))
        self._keep(finished)
        if last or self._cannot_improve([beam for _, beam in running]):
            running = []
        self._running = [beam for _, beam in running]
        return [(parent, beam.token_id) for parent, beam in running]

    def _ranked(self, top_ids: NDArray[np.int64], top_logprobs: NDArray[np.float32]) -> Iterator[tuple[int, _Beam]]:
        """Yield (parent, continuation), the likeliest first; ties by parent, then in the order given."""
        totals = np.array([beam.total for beam in self._running], np.float32)[:, None] + top_logprobs
        for place in np.argsort(-totals, axis=None, kind="stable").tolist():
            parent, at = divmod(place, top_ids.shape[1])
            if totals[parent, at] == -np.inf:
                return
            logprob = float(top_logprobs[parent, at])
            yield parent, _Beam(self._running[parent], int(top_ids[parent, at]), logprob, totals[parent, at])

    def _finish(self, beam: _Beam, reason: Literal["stop", "length"]) -> FinishedBeam:
        tokens = beam.tokens()
        ids, logprobs = tuple(b.token_id for b in tokens), tuple(b.logprob for b in tokens)
        return FinishedBeam(ids, logprobs, self._score(beam), reason)

    def _score(self, beam: _Beam) -> float:
        """Return the score of a beam of the current length, in float32."""
        limits = np.finfo(np.float32)
        with np.errstate(over="ignore"):
            divisor = np.clip(np.float64(self._length) ** self._sampling.length_penalty, limits.tiny, limits.max)
            return float(beam.total / np.float32(divisor))

    def _keep(self, finished: list[FinishedBeam]) -> None:
        self._finished = sorted(self._finished + finished, key=lambda beam: -beam.score)[: self._width]

    def _cannot_improve(self, running: list[_Beam]) -> bool:
        if not running:
            return True
        return len(self._finished) == self._width and self._score(running[0]) <= self._finished[-1].score
