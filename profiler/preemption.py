"""Whether the kernel took a processor away from us: what a step then takes says more of others than of the model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_FIELD = "nonvoluntary_ctxt_switches:"


def preemptions(process_ids: Iterable[int]) -> int:
    """Return how often threads of these processes had to make room for others; 0 where the kernel does not say."""
    return sum(_of_thread(status) for pid in process_ids for status in Path(f"/proc/{pid}/task").glob("*/status"))


def _of_thread(status: Path) -> int:
    try:
        text = status.read_text(encoding="utf-8")
    except OSError:  # a thread that has just ended
        return 0
    line = next((line for line in text.splitlines() if line.startswith(_FIELD)), "0")
    return int(line.split()[-1])
