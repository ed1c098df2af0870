"""What an engine has done since it was started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Running totals."""

    steps: int = 0
    run_tokens: int = 0
    """Tokens that steps have run, those of requests that started over included."""
    output_tokens: int = 0
    cached_tokens: int = 0
    """Tokens that were found in the cache and did not run."""
    preemptions: int = 0
