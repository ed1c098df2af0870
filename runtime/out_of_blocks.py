"""The error for KV memory that runs short: what was asked, what could be had, which setting to change."""

from __future__ import annotations

from planner.errors import PlannerError
from runtime.block_pool import BlockPool


class OutOfBlocksError(PlannerError):
    """More KV blocks are needed than can be had. Nothing was taken."""

    exit_code = 1

    def __init__(self, message: str, *, asked: int, available: int):
        self.asked, self.available = asked, available
        super().__init__(message)


def short_on_device(pool: BlockPool, block_tokens: int, asked: int, why: str) -> OutOfBlocksError:
    """Return the error for `asked` blocks that the device does not have."""
    way_out = "lower max_batch, n or the beam width, or raise memory_fraction"
    if asked > pool.total:
        way_out = "this can never fit: lower the longest prompt and max_tokens, or raise memory_fraction"
    return OutOfBlocksError(
        f"KV cache: {why}, which takes {asked} blocks of {block_tokens} tokens; {pool.free} of {pool.total} are "
        f"free and {pool.idle} more can be evicted; {way_out}",
        asked=asked,
        available=pool.available,
    )


def short_on_host(pool: BlockPool, block_tokens: int, asked: int, why: str) -> OutOfBlocksError:
    """Return the error for `asked` blocks that the swap space does not have."""
    return OutOfBlocksError(
        f"swap space: {why}, which takes {asked} blocks of {block_tokens} tokens; {pool.free} of {pool.total} are "
        "free; lower max_batch, raise host_blocks, or recompute instead",
        asked=asked,
        available=pool.available,
    )
