"""A decode loop that pulls by itself, between two steps, one request after the other (DistServe's engine).

The loop of the released code (LLMServe/DistServe, branch feat-add-simulator): the disjoint batches of the pipeline take
strict turns. When the step of the batch whose turn it is has ended, accept finished prefills, each migration awaited,
while those accepted and not yet running hold less than `pull_share` of all blocks and the prompt fits the free ones;
swap out the newest running requests until the rest can grow; let those swapped out, then those accepted, join; run the
step; go on to the next batch. Beside our own engine, where transfers run while steps go on, everybody waits for each
migration.
"""

from __future__ import annotations

from planner.compiled import inlined
from planner.simulator.instance import (
    LOOP_WAKES,
    PULL_DONE,
    blocks_of,
    grow,
    joining,
    schedule,
    start_step,
    swapped,
    take_blocks,
)
from planner.simulator.queues import pop, push

_EMPTY_TURN_S = 3e-3
"""A turn with nothing to run sleeps that long."""


@inlined
def take_turn(w, i, now_s):
    """Accept finished prefills into the batch whose turn it is and run it, if the loop waits for nothing else.

    The batches (lanes) take strict turns: the next one is only looked at when its own step has ended.
    """
    me = w.instance[i]
    lane = me.first_lane + me.turn
    if me.asleep != 0 or w.lane[lane].in_flight != 0:
        return
    now_s = _accept(w, i, lane, now_s)
    grow(w, i, lane)  # with nobody running there is nobody to grow
    start_step(w, lane, now_s)
    me.turn = (me.turn + 1) % me.stages
    if w.lane[lane].in_flight == 0:
        if _is_idle(w, i):
            return
        now_s += _EMPTY_TURN_S
    if w.lane[me.first_lane + me.turn].in_flight == 0:
        me.asleep = 1
        schedule(w, now_s, LOOP_WAKES, i)


@inlined
def _is_idle(w, i):
    """Return True when no batch runs and nobody waits for one."""
    me = w.instance[i]
    busy = w.queue[i].size + w.queue[swapped(w, i)].size
    for lane in range(me.first_lane, me.first_lane + me.stages):
        busy += w.lane[lane].in_flight + w.lane[lane].running + w.queue[joining(w, lane)].size
    return busy == 0


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
