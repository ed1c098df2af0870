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
def admits_whole(free_blocks, needed_blocks, members, max_members):
    """Return True when an aggregated instance may take in a request whose tokens so far need `needed_blocks`.

    All of them must fit now, though they are only taken chunk by chunk; room to grow is not kept (vLLM 0.19:
    `scheduler_reserve_full_isl`, and no watermark).
    """
    return members < max_members and needed_blocks <= free_blocks


@compiled
def reusable_blocks(edge, taken, kept, tokens, block_tokens):
    """Return how many blocks of a preempted request of `tokens` tokens still hold its KV.

    Freed blocks join the end of one line, last block first, and new ones are taken from its head: after `edge` takes in
    all since the start nothing is left of the `kept` full blocks that were given up. The last token always runs anew.
    """
    return min(max(0, edge - taken), kept, (tokens - 1) // block_tokens)


@compiled
def blocks_for(tokens, block_tokens):
    """Return the KV blocks that hold `tokens`: ceil(tokens / block_tokens)."""
    return (tokens + block_tokens - 1) // block_tokens
