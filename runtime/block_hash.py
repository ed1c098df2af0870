"""Names of KV blocks by what they hold: a chain of hashes over the token ids from the first one on.

The KV of a token depends on all tokens before it, so a block may be reused only where everything before it agrees as
well: its hash takes in its parent's (PagedAttention, SOSP '23, section 4.4; Mooncake, FAST '25, section 4).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

_DIGEST_BYTES = 16
"""128 bits: among 10^12 different blocks, two share a name with odds below 10^-14, so tokens need no second look."""


def root_hash(block_tokens: int, salt: bytes = b"") -> bytes:
    """Return the parent of first blocks. Caches with other block sizes or another `salt` never share a name.

    `salt` says what else the bytes of a block depend on: model, revision, KV type.
    """
    return _digest(block_tokens.to_bytes(8, "little") + salt)


def hash_chain(token_ids: Sequence[int], block_tokens: int, parent: bytes) -> tuple[bytes, ...]:
    """Return one hash per full block of `token_ids`; the last, partial block has none, for it will change.

    Python's own hash() differs from process to process; these are the same on every machine.
    """
    step = 8 * block_tokens
    data = np.asarray(token_ids, "<i8").tobytes()
    chain = []
    for end in range(step, len(data) + 1, step):
        parent = _digest(parent + data[end - step : end])
        chain.append(parent)
    return tuple(chain)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
