"""What the scheduler hands to every rank for one step, and what comes back. Plain arrays: no tensor, no policy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.copies import Copy

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Choices:
    """How to choose a token in each of L rows of logits. All arrays are [L]."""

    temperature: Floats
    top_p: Floats
    top_k: Ints
    """0: no bound."""
    seed: Ints
    draw: Ints
    """How many tokens this sequence has drawn before: a draw depends on (seed, draw) and on nothing else."""
    logprobs: int = 0
    """So many likeliest tokens are reported for each row, beside the chosen one; 0: not even that."""
    banned: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(row, token ids) that must not be chosen: ends of text before min_tokens."""


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over S sequences with T tokens in all, those that run a single token first.

    Sequence s owns tokens query_starts[s]..query_starts[s+1]-1, the last of its `contexts[s]` tokens so far. Token j of
    it attends to all of the sequence up to its own position, through block_tables[s].
    """

    number: int
    token_ids: Ints
    """[T]"""
    positions: Ints
    """[T] place in its own sequence, from 0."""
    slots: Ints
    """[T] where its KV goes: block * block_tokens + place in the block."""
    query_starts: Ints
    """[S + 1]"""
    contexts: Ints
    """[S] tokens with KV once the step has run."""
    block_tables: NDArray[np.int32]
    """[S, most blocks of any] padded with 0."""
    sampled: Ints
    """[L] places in token_ids whose logits are wanted."""
    choices: Choices
    copies: tuple[Copy, ...] = ()
    """To be made, in order, before the step."""
    tickets: tuple[int, ...] = ()
    """Hand-offs of the prompts that this step completes: their KV may be read, layer by layer, from now on."""

    @property
    def tokens(self) -> int:
        """Return the tokens that run."""
        return len(self.token_ids)

    @property
    def single(self) -> int:
        """Return how many sequences, the first ones, run a single token."""
        lengths = np.diff(self.query_starts)
        return int(np.count_nonzero(lengths == 1))


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step chose, one row for each of `Step.sampled`."""

    number: int
    token_ids: Ints
    """[L]"""
    logprobs: Floats
    """[L] natural log-probability of the chosen token, before temperature and cuts; NaN if Choices.logprobs is 0."""
    top_ids: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """[L, Choices.logprobs] likeliest first, the lowest id on a tie."""
    top_logprobs: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))


def prompt_step(tokens: int, block_tokens: int) -> Step:
    """Return a step that runs one prompt of `tokens` tokens, all of them id 0, in blocks 0, 1, ..."""
    places = np.arange(tokens, dtype=np.int64)
    one = np.zeros(1, np.int64)
    greedy = Choices(np.zeros(1, np.float32), np.ones(1, np.float32), one, one, one)
    return Step(
        number=0,
        token_ids=np.zeros(tokens, np.int64),
        positions=places,
        slots=places,
        query_starts=np.array([0, tokens], np.int64),
        contexts=np.array([tokens], np.int64),
        block_tables=np.arange(-(-tokens // block_tokens), dtype=np.int32)[None],
        sampled=np.array([tokens - 1], np.int64),
        choices=greedy,
    )
