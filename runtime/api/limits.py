"""How much the API takes in, and from whom."""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import InputError
from runtime.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """Bounds of the HTTP API. They keep one client from taking the memory or the time of all."""

    body_bytes: int = 8 * 2**20
    """Of one request."""
    held_bytes: int = 256 * 2**20
    """Bodies of all requests that are being answered, together."""
    concurrent_requests: int = 1024
    """Completions that are being answered; those above are told to come again."""
    prompts: int = 256
    """Prompts of one request."""
    prompt_tokens: int = 0
    """Of one prompt; 0: as many as the context has."""
    context_tokens: int = 0
    """Of one prompt and its answer together, where the instances have room for less than the model has positions; 0:
    as many as it has positions."""
    answer_tokens: int = 0
    """max_tokens of a chat that names none; 0: what the prompt leaves of the context."""
    stop_strings: int = 32
    stop_chars: int = 1024
    """Of one stop string: what may begin one is held back, and looked at again with each token."""
    body_timeout_s: float = 30.0
    """For a request's body to arrive."""
    send_timeout_s: float = 30.0
    """For a client to take what it is sent; one that does not is cancelled."""
    retry_after_s: float = 1.0
    """Said to those who are turned away by these bounds."""
    api_key: str = ""
    """What `Authorization: Bearer ...` has to say; empty: nothing."""

    def context(self, config: ModelConfig) -> int:
        """Return the tokens that a prompt and its answer may have together."""
        return min(config.max_positions, self.context_tokens or config.max_positions)

    def __post_init__(self) -> None:
        for name in ("body_bytes", "held_bytes", "concurrent_requests", "prompts", "stop_strings", "stop_chars"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("prompt_tokens", "context_tokens", "answer_tokens"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}: expected at least 0, got {getattr(self, name)}")
        for name in ("body_timeout_s", "send_timeout_s", "retry_after_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name}: expected more than 0 s, got {getattr(self, name)}")
        if not self.api_key.isascii() or self.api_key != self.api_key.strip():
            raise InputError("api_key: expected ASCII without blanks around it")
