"""Who is put out when KV blocks run short, and whether its KV is kept on the host or computed again."""

from __future__ import annotations

from planner.compiled import compiled


@compiled
def prefill_leaves_first(prefilling):
    """Return True when one of the `prefilling` running requests is put out, False when one that decodes is.

    Of either kind the last admitted leaves: who came first is served first, and a prompt that is half in came after all
    that decode. All sequences of one request leave together, since they share blocks (PagedAttention, SOSP '23, section
    4.5).
    """
    return prefilling > 0


@compiled
def swaps(held_blocks, free_host_blocks, tokens, swap_s_per_block, recompute_s_per_token):
    """Return True when a request's `held_blocks` are swapped to the host rather than forgotten.

    Its blocks must fit there, all or none, and moving them out and in again must take less time than to compute the
    `tokens` that they hold once more. `swap_s_per_block` is one way; infinity or NaN, if it is not known, means never.
    Count a block that several sequences share once, and leave out tokens that the prefix cache is sure to keep.

    PagedAttention, SOSP '23, sections 4.5 and 7.3: which is faster hangs on the host's link, the GPU's compute and the
    block size, as small blocks make small transfers. There it is a setting of the engine; here each case decides.
    """
    if held_blocks > free_host_blocks:
        return False
    return 2.0 * held_blocks * swap_s_per_block < tokens * recompute_s_per_token
