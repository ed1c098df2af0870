"""How a prefill instance forms its next batch: first come, first served, up to a token budget."""

from __future__ import annotations

from planner.compiled import compiled


@compiled
def joins_batch(requests, tokens, next_tokens, max_requests, max_tokens):
    """Return True when the next waiting prompt joins a batch that holds `requests` prompts of `tokens` in all.

    The first prompt always joins, however long: one prompt runs whole. Beyond the budget (the L_m of DistServe, OSDI
    '24, section 3.1: where the GPU's compute is saturated) a larger batch only delays everybody in it.
    """
    if requests == 0:
        return True
    return requests < max_requests and tokens + next_tokens <= max_tokens


@compiled
def chunk_tokens(budget, left):
    """Return how many of the `left` prompt tokens run in this step of a chunked-prefill engine (SARATHI)."""
    return min(budget, left)


@compiled
def joins_padded_batch(requests, longest, tokens, next_tokens, max_tokens, max_padding):
    """Return True when the next prompt joins a batch whose prompts are all padded to the longest one (vLLM 0.2).

    The batch holds `requests` prompts of `tokens` in all. Bounded are its size, padding included, and the padding.
    """
    if requests == 0:
        return True
    padded = (requests + 1) * max(longest, next_tokens)
    return padded <= max_tokens and padded - (tokens + next_tokens) <= max_padding
