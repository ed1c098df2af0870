"""First-in first-out queues of requests, threaded through the requests: each waits in one place at a time."""

from __future__ import annotations

import numpy as np

from planner.compiled import inlined

QUEUE = np.dtype([("head", "i8"), ("tail", "i8"), ("size", "i8")])


@inlined
def push(w, queue, r):
    """Append a request."""
    line = w.queue[queue]
    w.request[r].after = -1
    if line.size == 0:
        line.head = r
    else:
        w.request[line.tail].after = r
    line.tail = r
    line.size += 1


@inlined
def push_front(w, queue, r):
    """Put a request before all others: it was preempted and has waited longest."""
    line = w.queue[queue]
    if line.size == 0:
        w.request[r].after = -1
        line.tail = r
    else:
        w.request[r].after = line.head
    line.head = r
    line.size += 1


@inlined
def pop(w, queue):
    """Remove and return the first request of a queue that is not empty."""
    line = w.queue[queue]
    r = line.head
    line.head = w.request[r].after
    line.size -= 1
    return r
