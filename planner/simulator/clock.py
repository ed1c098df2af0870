"""The event queue: a binary heap over (time, serial number), so that equal times keep a total order."""

from __future__ import annotations

import numpy as np

from planner.compiled import inlined

EVENT = np.dtype([("time_s", "f8"), ("serial", "i8"), ("kind", "i8"), ("who", "i8")])


@inlined
def _before(heap, a, b):
    if heap[a].time_s != heap[b].time_s:
        return heap[a].time_s < heap[b].time_s
    return heap[a].serial < heap[b].serial


@inlined
def _swap(heap, a, b):
    x, y = heap[a], heap[b]
    x.time_s, y.time_s = y.time_s, x.time_s
    x.serial, y.serial = y.serial, x.serial
    x.kind, y.kind = y.kind, x.kind
    x.who, y.who = y.who, x.who


@inlined
def add_event(heap, count, serial, time_s, kind, who):
    """Add an event to a heap of `count` events."""
    at = count
    heap[at].time_s, heap[at].serial, heap[at].kind, heap[at].who = time_s, serial, kind, who
    while at > 0 and _before(heap, at, (at - 1) // 2):
        _swap(heap, at, (at - 1) // 2)
        at = (at - 1) // 2


@inlined
def drop_first(heap, count):
    """Remove the earliest of `count` events (read it at index 0 before)."""
    last = count - 1
    _swap(heap, 0, last)
    at = 0
    while True:
        child = 2 * at + 1
        if child >= last:
            return
        if child + 1 < last and _before(heap, child + 1, child):
            child += 1
        if not _before(heap, child, at):
            return
        _swap(heap, at, child)
        at = child
