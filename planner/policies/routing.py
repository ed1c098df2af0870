"""Which instance a request goes to. Ties go round, so that nothing depends on an instance's number.

Work left in seconds, not requests waiting: "fewest queued" ignores what is in service and sends every tie to
instance 0 (docs/decisions/0008 has what that costs).
"""

from __future__ import annotations

from planner.compiled import compiled


@compiled
def pick_least(score, allowed, last):
    """Return the index with the smallest `score` among those with `allowed` > 0, or -1 when there is none.

    Equal scores go to the first one after `last`, the previous pick.
    """
    best, at = -1, last
    for _ in range(len(score)):
        at = at + 1 if at + 1 < len(score) else 0  # a remainder would take longer than all the rest
        if allowed[at] > 0.0 and (best < 0 or score[at] < score[best]):
            best = at
    return best


@compiled
def work_left_s(now_s, busy_until_s, queued_s):
    """Return the seconds until an instance could start a new prompt: what is in service plus what waits."""
    return max(busy_until_s - now_s, 0.0) + queued_s


@compiled
def decode_load(held_blocks, waiting_blocks, total_blocks):
    """Return the share of a decode instance's KV blocks that is spoken for, those still waiting for it included."""
    return (held_blocks + waiting_blocks) / total_blocks
