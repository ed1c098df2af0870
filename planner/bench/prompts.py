"""Prompts as token ids: exactly as long as asked, and equal where the load says that prefixes are equal."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.bench.load import BLOCK_TOKENS
from planner.errors import InputError
from planner.specs.workload import Requests

TOKEN_IDS = (1_000, 31_000)
"""Ids that all but the smallest vocabularies have, and where special tokens stand in none that we know: these are the
first few hundred ids or the last ones."""
_BLOCKS, _OWN = 1, 0


class Prompts:
    """The prompt of each request, made when it is asked for.

    Ids are random, so no two prompts share a prefix by accident. `seed` should be new for each run: a server that keeps
    prefixes would otherwise find the prompts of the last run in its cache, and answer faster than it could.
    """

    def __init__(self, requests: Requests, seed: int, token_ids: tuple[int, int] = TOKEN_IDS):
        self._requests, self._seed, self._token_ids = requests, seed, token_ids

    def __getitem__(self, row: int) -> list[int]:
        """Return the token ids of one request."""
        length = int(self._requests.prompt_tokens[row])
        blocks = self._requests.prefix_blocks
        pieces = [self._draw(_BLOCKS, block, BLOCK_TOKENS) for block in (blocks[row] if blocks else ())]
        pieces.append(self._draw(_OWN, row, max(length - BLOCK_TOKENS * len(pieces), 0)))
        return [int(token) for token in np.concatenate(pieces)[:length].tolist()]

    def _draw(self, kind: int, key: int, count: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed, kind, key]).integers(*self._token_ids, size=count)


def parse_token_ids(text: str) -> tuple[int, int]:
    """Return the first id and the one behind the last for `1000-30999`. Raises InputError."""
    low, dash, high = text.partition("-")
    if not (dash and low.strip().isdecimal() and high.strip().isdecimal() and int(low) < int(high) < 2**31):
        raise InputError(f"--token-ids: expected the first and the last id, such as 1000-30999, got {text!r}")
    return int(low), int(high) + 1
