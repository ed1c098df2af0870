"""Which requests an instance can ever serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import InputError
from planner.policies.decode import blocks_for
from runtime.model_config import ModelConfig
from runtime.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Room:
    """What one instance has to offer."""

    kv_blocks: int
    block_tokens: int
    max_batch: int
    prompts_only: bool = False
    """A prefill instance: answers take no room."""


def check_request(prompt: Sequence[int], sampling: Sampling, config: ModelConfig, has_text: bool) -> None:
    """Raise InputError for a request that no instance of a model could serve. `has_text`: there is a tokenizer."""
    if not prompt:
        raise InputError("prompt: expected at least one token")
    if not all(0 <= token < config.vocab_size for token in prompt):
        raise InputError(f"prompt: expected token ids from 0 to {config.vocab_size - 1}")
    if len(prompt) + sampling.max_tokens > config.max_positions:
        raise InputError(
            f"prompt of {len(prompt)} tokens and max_tokens {sampling.max_tokens} are more than the "
            f"{config.max_positions} positions of the model; shorten the prompt or lower max_tokens"
        )
    if sampling.stop and not has_text:
        raise InputError("stop: this model has no tokenizer, so no text to stop at; use stop_token_ids")


def no_room_for(prompt_tokens: int, sampling: Sampling, room: Room) -> str | None:
    """Return why an instance can never hold a request, with the way out; None when it can."""
    if sampling.width > room.max_batch:
        return f"n or beam_width: expected up to max_batch {room.max_batch}"
    longest, width = prompt_tokens + sampling.max_tokens, sampling.width
    if room.prompts_only:
        longest, width = prompt_tokens, 1
    shared = prompt_tokens // room.block_tokens
    blocks = shared + width * (blocks_for(longest, room.block_tokens) - shared)
    if blocks <= room.kv_blocks:
        return None
    return (
        f"prompt of {prompt_tokens} tokens, max_tokens {sampling.max_tokens} and {width} answers can take {blocks} KV "
        f"blocks, the instance has {room.kv_blocks}; lower one of them, or raise kv_blocks or memory_fraction"
    )
