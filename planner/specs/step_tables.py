"""What the parts of an engine's step take, as measured: the input of a table law."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class StepTables:
    """Times [s] of a whole model's step, by part. Each curve is (where, time)."""

    by_tokens: tuple[np.ndarray, np.ndarray]
    """Everything that works token by token, over the tokens of the step."""
    by_sequences: tuple[np.ndarray, np.ndarray]
    """What is done once per request: projection to the vocabulary and sampling."""
    attention: np.ndarray
    """Rows of (tokens of a chunk, cached tokens before it, decoding requests, KV tokens of each, time [s])."""
    notes: tuple[str, ...] = ()
