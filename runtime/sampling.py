"""How the next token of a request is chosen: what a client may ask for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from planner.errors import InputError

MAX_LOGPROBS = 20
MAX_SEQUENCES = 128


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of one request. Temperature 0 is greedy: the likeliest token, the lowest id on a tie."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """Choose among so many of the likeliest tokens; 0: among all."""
    seed: int | None = None
    """Same seed, same tokens, whatever runs beside them; None: the engine draws one."""
    n: int = 1
    """Answers to one prompt, which share its KV blocks (parallel sampling)."""
    beam_width: int = 0
    """Beam search with so many beams instead of sampling; 0: none. `n` of them are returned, the best first."""
    length_penalty: float = 1.0
    """Beams: the sum of log-probabilities is divided by length ** length_penalty."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    """Log-probabilities of the chosen token and of so many likeliest ones; None: none."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_tokens", 1, 2**31),
            ("temperature", 0.0, 100.0),
            ("top_k", 0, 2**31),
            ("n", 1, MAX_SEQUENCES),
            ("beam_width", 0, MAX_SEQUENCES),
            ("min_tokens", 0, self.max_tokens),
            ("length_penalty", -100.0, 100.0),
        ):
            _within(name, getattr(self, name), low, high)
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"top_p: expected more than 0 and up to 1, got {self.top_p}")
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _within("seed", self.seed, 0, 2**63 - 1)
        if "" in self.stop:
            raise InputError("stop: expected strings that are not empty")
        if self.beam_width and self.stop:
            raise InputError("stop: strings do not end beams; use stop_token_ids, or sample without beam_width")
        if self.beam_width and self.n > self.beam_width:
            raise InputError(f"n: expected up to the {self.beam_width} beams, got {self.n}")

    def ends(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """Return the tokens that end an answer, for a model whose texts end with `eos_ids`."""
        return frozenset(self.stop_token_ids) | frozenset(() if self.ignore_eos else eos_ids)

    @property
    def greedy(self) -> bool:
        """Return True when chance plays no part."""
        return self.temperature == 0.0

    @property
    def width(self) -> int:
        """Return the sequences that decode side by side."""
        return self.beam_width or self.n


def _within(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InputError(f"{name}: expected {low} to {high}, got {value}")
