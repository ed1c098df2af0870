"""A decode loop that pulls by itself, between two steps, one request after the other (DistServe's engine).

The loop of the released code (LLMServe/DistServe, branch feat-add-simulator), in its order. The pipeline's batches
(lanes) are disjoint and take strict turns. A turn: swap out the newest requests of this batch until the others can
grow; let those swapped out, then those accepted, join this batch; hand its step over, or sleep when it is empty; wait
for the step of the next batch, if it has one; accept finished prefills one by one, each migration awaited, while those
accepted and not yet in a batch hold less than `pull_share` of all blocks and the prompt fits the free ones. The next
turn is that of the batch just waited for.

So whoever is accepted while a batch is waited for joins that batch. An empty batch is not waited for: right after the
other's step was handed over it gets what was accepted in that instant, which is hardly ever anything, and may stay
empty as long as the other never runs dry (docs/decisions/0009). `look_again_s` is how long that instant lasts.
"""

from __future__ import annotations

from planner.compiled import inlined
from planner.simulator.instance import (
    LOOP_WAKES,
    PULL_DONE,
    accepted,
    blocks_of,
    grow,
    joining,
    schedule,
    start_step,
    swap_in,
    swapped,
    take_blocks,
)
from planner.simulator.queues import pop, push

_EMPTY_TURN_S = 3e-3
"""A turn with nothing to run sleeps that long."""


@inlined
def take_turn(w, i, now_s):
    """Go on with the loop of instance `i`, unless it sleeps or waits for a step."""
    me = w.instance[i]
    lane = me.first_lane + me.turn
    if me.asleep != 0 or w.lane[lane].in_flight != 0 or _is_idle(w, i) or _accept(w, i, now_s):
        return
    grow(w, i, lane)  # with nobody running there is nobody to grow
    swap_in(w, i, lane)
    _join(w, i, lane)
    start_step(w, lane, now_s)
    me.turn = (me.turn + 1) % me.stages
    if w.lane[lane].in_flight == 0:
        _sleep(w, i, now_s + _EMPTY_TURN_S)
    elif w.lane[me.first_lane + me.turn].in_flight == 0:
        _sleep(w, i, now_s + w.scalar[0].look_again_s)


@inlined
def _sleep(w, i, until_s):
    w.instance[i].asleep = 1
    schedule(w, until_s, LOOP_WAKES, i)


@inlined
def _is_idle(w, i):
    """Return True when no batch runs and nobody waits for one."""
    waiting = w.queue[i].size + w.queue[swapped(w, i)].size + w.queue[accepted(w, i)].size
    return waiting + _runs(w, i) == 0


@inlined
def _runs(w, i):
    """Return how many requests are in a batch."""
    running = 0
    for lane in range(w.instance[i].first_lane, w.instance[i].first_lane + w.instance[i].stages):
        running += w.lane[lane].running
    return running


@inlined
def _accept(w, i, now_s):
    """Begin to migrate the first finished prefill, if it may be accepted; the loop sleeps until that is done."""
    me, line = w.instance[i], w.queue[i]
    if line.size == 0 or me.members >= me.max_batch or me.accepted_blocks >= w.scalar[0].pull_share * me.blocks:
        return False
    blocks = blocks_of(w, w.request[line.head].prompt + 1)
    if blocks > me.free_blocks:
        return False
    r = pop(w, i)
    me.waiting_blocks -= blocks
    me.accepted_blocks += blocks
    w.scalar[0].waiting_pulls -= 1
    take_blocks(w, i, blocks)
    me.members += 1
    push(w, accepted(w, i), r)
    w.request[r].pull_start_s = now_s
    end_s = now_s + w.scalar[0].pull_s + w.request[r].prompt * w.scalar[0].pull_s_per_token / me.stages
    schedule(w, end_s, PULL_DONE, r)
    _sleep(w, i, end_s)
    return True


@inlined
def _join(w, i, lane):
    """Let accepted requests join a batch while their blocks would fit once more, and nobody waits to be swapped in.

    Once more, because that engine counts a prompt that joins both as waiting and as running. When nobody runs they
    join regardless: that engine would hang.
    """
    me, line, regardless = w.instance[i], w.queue[accepted(w, i)], _runs(w, i) == 0
    while line.size > 0:
        blocks = blocks_of(w, w.request[line.head].prompt + 1)
        if not regardless and (w.queue[swapped(w, i)].size > 0 or blocks > me.free_blocks):
            return
        me.accepted_blocks -= blocks
        push(w, joining(w, lane), pop(w, accepted(w, i)))
