"""An executor without a model, to hold the engine's bookkeeping to: its KV blocks keep the tokens themselves.

The next token is a function of all tokens that the block table leads to, so a block that was shared, copied, swapped or
freed wrongly changes the answer, or is caught at once where a slot holds what nobody has written.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence

import numpy as np

from runtime.copies import Direction, batches
from runtime.step import Step, StepOutput

UNWRITTEN = -1


def next_token(context: Sequence[int], vocabulary: int, seed: int = 0) -> int:
    """Return the token that follows `context`."""
    return candidates(context, vocabulary, 1, seed)[0][0]


def candidates(context: Sequence[int], vocabulary: int, count: int, seed: int = 0) -> tuple[list[int], list[float]]:
    """Return the `count` likeliest tokens after `context` and their log-probabilities."""
    data = np.asarray([seed, *context], "<i8").tobytes()
    rng = np.random.default_rng(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little"))
    logprobs = np.log(rng.dirichlet(np.ones(vocabulary)))
    best = np.argsort(-logprobs, kind="stable")[:count]
    return best.tolist(), logprobs[best].tolist()


class TokenExecutor:
    """`depth` steps under way at a time, like that many pipeline stages."""

    def __init__(self, kv_blocks: int, host_blocks: int, block_tokens: int, vocabulary: int, depth: int = 1):
        self.depth, self.kv_blocks = depth, kv_blocks
        self._vocabulary = vocabulary
        self._kv = np.full((kv_blocks, block_tokens), UNWRITTEN)
        self._host = np.full((host_blocks, block_tokens), UNWRITTEN)
        self._under_way: deque[StepOutput] = deque()
        self.moved = 0

    def submit(self, step: Step) -> None:
        for run in batches(step.copies):
            out, back = (self._kv, self._host), (self._host, self._kv)
            within = (self._kv, self._kv)
            source, target = {Direction.WITHIN: within, Direction.OUT: out, Direction.IN: back}[run[0].direction]
            target[[copy.target for copy in run]] = source[[copy.source for copy in run]]
            self.moved += len(run)
        assert len(set(step.slots.tolist())) == step.tokens, "two tokens are written to one slot"
        self._kv.flat[step.slots] = step.token_ids
        self._under_way.append(self._output(step))

    def _output(self, step: Step) -> StepOutput:
        owner = np.searchsorted(step.query_starts, step.sampled, side="right") - 1
        contexts = [self._context(step, int(sequence)) for sequence in owner]
        rows = range(len(contexts))
        seeds = [int(step.choices.seed[row]) if step.choices.temperature[row] > 0 else 0 for row in rows]
        best = [candidates(contexts[row], self._vocabulary, max(step.choices.logprobs, 1), seeds[row]) for row in rows]
        shape = (len(best), step.choices.logprobs)
        return StepOutput(
            step.number,
            np.array([ids[0] for ids, _ in best], np.int64),
            np.array([values[0] for _, values in best], np.float32),
            np.array([ids[: step.choices.logprobs] for ids, _ in best], np.int64).reshape(shape),
            np.array([values[: step.choices.logprobs] for _, values in best], np.float32).reshape(shape),
        )

    def _context(self, step: Step, sequence: int) -> list[int]:
        """Return the tokens that the block table leads to, each of which must have been written."""
        length = int(step.contexts[sequence])
        held = self._kv[step.block_tables[sequence]].ravel()[:length].tolist()
        assert UNWRITTEN not in held, "a sequence attends to KV that was never written"
        first, end = step.query_starts[sequence : sequence + 2]
        assert step.positions[first:end].tolist() == list(range(length - int(end - first), length))
        return held

    def collect(self) -> StepOutput:
        return self._under_way.popleft()

    def close(self) -> None:
        pass
