"""A decode loop that pulls by itself, between two steps, one request after the other (DistServe's engine).

The loop of the released code (LLMServe/DistServe, branch feat-add-simulator): accept finished prefills, each migration
awaited, while those accepted and not yet running hold less than `pull_share` of all blocks and the prompt fits the free
ones; swap out the newest running requests until the rest can grow; let those swapped out, then those accepted, join;
run the step. Beside our own engine, where transfers run while steps go on, everybody waits for each migration.
"""

from __future__ import annotations

from planner.compiled import inlined
from planner.simulator.instance import (
    PULL_DONE,
    blocks_of,
    grow,
    joining,
    schedule,
    start_step,
    take_blocks,
)
from planner.simulator.queues import pop, push


@inlined
def take_turn(w, lane, now_s):
    """Accept finished prefills into a lane between its steps, and start the next one after their migrations."""
    if w.lane[lane].in_flight == 0:
        i = w.lane[lane].instance
        now_s = _accept(w, i, lane, now_s)
        grow(w, i, lane)  # with nobody running there is nobody to grow
        start_step(w, lane, now_s)


@inlined
def wake_idle(w, i, now_s):
    """Let the idle lanes of instance `i` look for finished prefills: their loop polls every few milliseconds."""
    me = w.instance[i]
    for lane in range(me.first_lane, me.first_lane + me.stages):
        if w.queue[i].size > 0 and w.lane[lane].running == 0:
            take_turn(w, lane, now_s)


@inlined
def _accept(w, i, lane, now_s):
    """Move finished prefills into the queue of those who join the lane; return when the last migration has ended."""
    me, line = w.instance[i], w.queue[i]
    held, r = 0, w.queue[joining(w, lane)].head
    for _ in range(w.queue[joining(w, lane)].size):
        held += blocks_of(w, w.request[r].prompt)
        r = w.request[r].after
    while line.size > 0 and held < w.scalar[0].pull_share * me.blocks:
        blocks = blocks_of(w, w.request[line.head].prompt + 1)
        if blocks > me.free_blocks or me.members >= me.max_batch:
            return now_s
        r = pop(w, i)
        held += blocks
        me.waiting_blocks -= blocks
        w.scalar[0].waiting_pulls -= 1
        take_blocks(w, i, blocks)
        me.members += 1
        w.request[r].pull_start_s = now_s
        now_s += w.scalar[0].pull_s
        schedule(w, now_s, PULL_DONE, r)
        push(w, joining(w, lane), r)
    return now_s
