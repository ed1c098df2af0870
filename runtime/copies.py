"""Copies of whole KV blocks that have to be made before the next step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum


class Direction(Enum):
    """Between which memories a copy goes. Block numbers of device and host are two counts of their own."""

    WITHIN = "device to device"
    OUT = "device to host"
    IN = "host to device"


@dataclass(frozen=True, slots=True)
class Copy:
    """All layers of block `source` go to block `target`."""

    source: int
    target: int
    direction: Direction = Direction.WITHIN


def batches(copies: Iterable[Copy]) -> Iterator[tuple[Copy, ...]]:
    """Yield runs of `copies`, in order; each run may read all its sources first and write all its targets then.

    Order matters between runs: within one scheduling pass a block may be copied away, given back, and become the target
    of another copy. A run ends where the direction changes, or where a copy reads or rewrites what it has written.
    """
    run: list[Copy] = []
    written: set[int] = set()
    for copy in copies:
        reads_written = copy.direction is Direction.WITHIN and copy.source in written
        if run and (copy.direction is not run[0].direction or reads_written or copy.target in written):
            yield tuple(run)
            run, written = [], set()
        run.append(copy)
        written.add(copy.target)
    if run:
        yield tuple(run)
