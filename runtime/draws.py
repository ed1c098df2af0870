"""The random bits behind sampled tokens: draw i of a seed is fixed, whatever else the engine does."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_PAGE = 64


def keys(seed: NDArray[np.int64], draw: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 64 random bits per row: number `draw` of the Philox stream that `seed` is the key of.

    Philox (Salmon et al., SC '11) is a function of key and counter, so there is no state that preemption, another batch
    or another rank could change. numpy promises that the bits of a stream stay the same between releases.
    """
    return np.array([_page(s, d // _PAGE)[d % _PAGE] for s, d in zip(seed.tolist(), draw.tolist(), strict=True)])


def sequence_seed(seed: int, index: int) -> int:
    """Return the seed of answer `index` of a request (parallel sampling); answer 0 has the request's own."""
    if index == 0:
        return seed
    return int(np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0] >> np.uint64(1))


@lru_cache(maxsize=4096)
def _page(seed: int, page: int) -> tuple[int, ...]:
    """Return draws page * 64 to page * 64 + 63. One call of numpy costs as much as all of them."""
    blocks = page * _PAGE // 4  # each count of the counter gives four numbers
    return tuple(np.random.Philox(key=seed, counter=blocks).random_raw(_PAGE).view(np.int64).tolist())
