"""Whom a decode instance takes in, and whom it puts out when its KV blocks run short."""

from __future__ import annotations

from planner.compiled import compiled


@compiled
def admits(free_blocks, needed_blocks, total_blocks, members, max_members):
    """Return True when an instance may take in a request that needs `needed_blocks` now and will grow.

    One block in a hundred stays free, so that those who run already can grow for a while before somebody has to be
    preempted. An empty instance admits whatever fits.
    """
    if members >= max_members:
        return False
    reserve = total_blocks // 100 if members > 0 else 0
    return needed_blocks + reserve <= free_blocks


@compiled
def blocks_for(tokens, block_tokens):
    """Return the KV blocks that hold `tokens`: ceil(tokens / block_tokens)."""
    return (tokens + block_tokens - 1) // block_tokens
