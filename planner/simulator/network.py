"""Transfers that share links: every transfer gets its max-min fair rate, recomputed when one starts or ends.

A transfer may spread over several links at once (the ranks of an instance use different NICs): it then takes `share`
of its own rate from each. Progressive filling, Bertsekas & Gallager, Data Networks, section 6.5.2.
"""

from __future__ import annotations

import numpy as np

from planner.compiled import inlined

LINK = np.dtype([("bytes_per_s", "f8"), ("carried_bytes", "f8"), ("room", "f8"), ("load", "f8")])
PATH = np.dtype([("allowed", "f8"), ("fixed_s", "f8"), ("first_hop", "i8"), ("end_hop", "i8")])
HOP = np.dtype([("link", "i8"), ("share", "f8")])
FLOW = np.dtype([("request", "i8"), ("source", "i8"), ("target", "i8"), ("left_bytes", "f8"), ("rate", "f8")])


@inlined
def _tick_s(w):
    """Return the time [s] below which a transfer has ended: a nanosecond, or what a clock this late can resolve."""
    return max(1e-9, 1e-15 * w.scalar[0].settled_s)


@inlined
def settle(w, now_s):
    """Let every transfer move on at its rate until `now_s`."""
    elapsed_s = now_s - w.scalar[0].settled_s
    w.scalar[0].settled_s = now_s
    if elapsed_s <= 0.0:
        return
    for f in range(w.scalar[0].flows):
        flow = w.flow[f]
        moved = min(flow.rate * elapsed_s, flow.left_bytes)
        flow.left_bytes -= moved
        path = w.path[flow.source, flow.target]
        for h in range(path.first_hop, path.end_hop):
            w.link[w.hop[h].link].carried_bytes += moved * w.hop[h].share


@inlined
def begin_flow(w, r, source, target, size_bytes):
    """Add a transfer (settle first)."""
    flow = w.flow[w.scalar[0].flows]
    flow.request, flow.source, flow.target, flow.left_bytes = r, source, target, size_bytes
    w.scalar[0].flows += 1
    _share_out(w)


@inlined
def take_finished(w):
    """Remove one finished transfer and return its request, or -1 (settle first)."""
    for f in range(w.scalar[0].flows):
        if w.flow[f].left_bytes <= w.flow[f].rate * _tick_s(w):
            r = w.flow[f].request
            w.scalar[0].flows -= 1
            for g in range(f, w.scalar[0].flows):  # keep their order, so that ties stay first come, first served
                w.flow[g] = w.flow[g + 1]
            _share_out(w)
            return r
    return -1


@inlined
def next_end_s(w):
    """Return when the first transfer ends at the present rates [s], or infinity."""
    best_s = np.inf
    for f in range(w.scalar[0].flows):
        if w.flow[f].rate > 0.0:
            left_s = w.flow[f].left_bytes / w.flow[f].rate
            best_s = min(best_s, w.scalar[0].settled_s + (left_s if left_s > _tick_s(w) else 0.0))
    return best_s


@inlined
def _share_out(w):
    """Set the max-min fair rates: raise all alike, freeze those that cross a full link, go on with the rest."""
    count = w.scalar[0].flows
    for f in range(count):
        w.flow[f].rate = -1.0  # not yet fixed
    for at in range(len(w.link)):
        w.link[at].room = w.link[at].bytes_per_s
    frozen = 0
    while frozen < count:
        fair = _fair_rate(w, count)
        frozen += _freeze(w, count, fair)


@inlined
def _fair_rate(w, count):
    """Return the rate at which the tightest link fills up when all unfixed transfers get the same."""
    for at in range(len(w.link)):
        w.link[at].load = 0.0
    for f in range(count):
        if w.flow[f].rate < 0.0:
            path = w.path[w.flow[f].source, w.flow[f].target]
            for h in range(path.first_hop, path.end_hop):
                w.link[w.hop[h].link].load += w.hop[h].share
    fair = np.inf
    for at in range(len(w.link)):
        if w.link[at].load > 0.0:
            fair = min(fair, w.link[at].room / w.link[at].load)
    return fair


@inlined
def _freeze(w, count, fair):
    """Fix at `fair` the transfers that cross a full link, take what they use off the links; return how many."""
    fixed = 0
    for f in range(count):
        flow = w.flow[f]
        if flow.rate >= 0.0:
            continue
        path = w.path[flow.source, flow.target]
        full = path.first_hop == path.end_hop
        for h in range(path.first_hop, path.end_hop):
            link = w.link[w.hop[h].link]
            full = full or link.room <= fair * link.load * (1.0 + 1e-9)
        if full:
            flow.rate = -2.0  # marked; charged below, once all have been tested against the same room
    for f in range(count):
        flow = w.flow[f]
        if flow.rate != -2.0:
            continue
        path = w.path[flow.source, flow.target]
        flow.rate = fair if path.first_hop < path.end_hop else np.inf
        fixed += 1
        for h in range(path.first_hop, path.end_hop):
            link = w.link[w.hop[h].link]
            link.room = max(link.room - fair * w.hop[h].share, 0.0)
    return fixed
