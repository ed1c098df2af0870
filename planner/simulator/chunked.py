"""An aggregated instance as the V1 engine of vLLM 0.19 runs one: prompts in chunks, in one step with decoding requests.

One step: every running request goes first, in the order of admission (one token each, then the chunk of a prompt that
is half in), then waiting requests are admitted, first come first served, while the token budget, the seats and the KV
blocks last. Blocks are taken for what the step computes; a request is only let in when all its tokens so far would fit.
When blocks run out the last one in is put back to the head of the queue and its KV forgotten, and nobody is admitted in
that step; what of its blocks has not been used for others by the time it comes back need not be computed again (the
engine's prefix cache).

The engine plans a step while another one runs: with one pipeline stage two steps are under way at a time. All that a
step decides is known when it is planned, so the state here is that of the planned steps, one ahead of the clock; only
blocks and seats of those who finish are let go of when their step has ended.
"""

from __future__ import annotations

from planner.compiled import inlined
from planner.cost.kernel import PREFIX
from planner.policies.decode import admits_whole, reusable_blocks
from planner.policies.preempt import prefill_leaves_first
from planner.policies.prefill import chunk_tokens
from planner.simulator.instance import (
    alone_s,
    blocks_of,
    chunking,
    enter_lane,
    finish,
    leave_lane,
    leave_queue,
    next_prefilled,
    pass_pipeline,
    schedule_step,
    take_blocks,
)
from planner.simulator.queues import pop, push, push_front

# ---- the steps of a lane


@inlined
def start_lane(w, lane, now_s):
    """Let an idle lane begin, if there is any work."""
    if w.lane[lane].in_flight == 0:
        _plan_steps(w, lane, now_s)
        if w.lane[lane].in_flight > 0:
            schedule_step(w, w.lane[lane].end_s, lane)


@inlined
def go_on(w, lane, now_s, horizon_s):
    """End the lane's step that ends now, plan the next one, and so on while a step ends before the horizon.

    `horizon_s` is when anything else happens in the cluster: until then no event is needed, unless somebody is done,
    which may concern others.
    """
    mine = w.lane[lane]
    me = w.instance[mine.instance]
    while True:
        _let_go(w, lane)
        leaving = _plan_steps(w, lane, now_s)
        if mine.in_flight == 0:
            return
        now_s = mine.end_s
        if me.stages > 1 or leaving > 0 or now_s >= horizon_s:
            schedule_step(w, now_s, lane)
            return


@inlined
def _let_go(w, lane):
    """Take the older of the steps under way as ended: its blocks and seats are free, and the younger is the older."""
    mine = w.lane[lane]
    take_blocks(w, mine.instance, -mine.leaving_blocks)
    w.instance[mine.instance].members -= mine.leaving
    mine.in_flight -= 1
    mine.end_s, mine.leaving, mine.leaving_blocks = mine.next_end_s, mine.next_leaving, mine.next_leaving_blocks


@inlined
def _plan_steps(w, lane, now_s):
    """Plan steps until enough are under way, or there is nothing to do; return how many requests are done with them."""
    mine = w.lane[lane]
    i, done = mine.instance, 0
    while mine.in_flight < w.instance[i].depth:
        preempted = _make_room(w, i, lane)
        prefills, tokens, attended = _take_chunks(w, i, lane, now_s, preempted)
        if mine.running == 0 and tokens == 0:
            break
        _, _, end_s = pass_pipeline(w, i, now_s, 0.0, prefills, tokens, attended, mine.running, mine.context)
        leaving, blocks = _book(w, lane, end_s)
        if mine.in_flight == 0:
            mine.end_s, mine.leaving, mine.leaving_blocks = end_s, leaving, blocks
        else:
            mine.next_end_s, mine.next_leaving, mine.next_leaving_blocks = end_s, leaving, blocks
        mine.in_flight += 1
        done += leaving
    return done


# ---- KV blocks


@inlined
def _take_new(w, i, count):
    """Take blocks off the head of the line of free ones: what they held is lost."""
    take_blocks(w, i, count)
    w.instance[i].taken += count


@inlined
def _make_room(w, i, lane):
    """Give a block to each running request whose next token starts one; return True when somebody had to leave."""
    me, mine = w.instance[i], w.lane[lane]
    at = (1 - mine.steps) % w.residue.shape[1]
    preempted = w.residue[lane, at] > me.free_blocks
    if preempted:  # the first of them get the last blocks before somebody has to leave
        me.least_free_blocks = 0
    while w.residue[lane, at] > me.free_blocks:
        if prefill_leaves_first(w.queue[chunking(w, lane)].size):
            _put_back_chunk(w, i, lane)
        else:
            r = mine.newest
            context = leave_lane(w, lane, r)  # its newest token has no KV yet
            _put_back(w, i, r, context - 1)
    _take_new(w, i, w.residue[lane, at])
    return preempted


@inlined
def _put_back_chunk(w, i, lane):
    """Preempt the lane's prompt that is half in: there is never more than one, since it ate the step's budget."""
    r = pop(w, chunking(w, lane))
    _put_back(w, i, r, w.request[r].prefilled)


@inlined
def _put_back(w, i, r, computed):
    """Preempt request `r`, which holds the KV of `computed` tokens: first in the queue, to start over."""
    me, it = w.instance[i], w.request[r]
    held = blocks_of(w, computed)
    it.edge = me.taken + me.free_blocks + held
    it.kept = computed // w.scalar[0].block_tokens
    take_blocks(w, i, -held)
    me.preemptions += 1
    me.members -= 1
    me.queued_s += alone_s(w, i, it.prompt + it.generated)
    it.prefilled, it.chunk = 0, 0
    push_front(w, i, r)


# ---- prompts


@inlined
def _take_chunks(w, i, lane, now_s, preempted):
    """Fill the step's token budget with prompt chunks, oldest first; return (prefills, tokens, attended)."""
    me, line = w.instance[i], w.queue[chunking(w, lane)]
    start_s = max(now_s, w.stage[i, 0].free_s)
    budget = me.max_tokens - w.lane[lane].running
    prefills, tokens, attended = 0, 0, 0.0
    r = line.head if line.size > 0 else -1
    while budget > 0:
        if r < 0:
            r = -1 if preempted else _admit_prompt(w, i, lane, start_s)
            if r < 0:
                break
        it = w.request[r]
        chunk = chunk_tokens(budget, it.prompt + it.generated - it.prefilled)
        blocks = blocks_of(w, it.prefilled + chunk) - blocks_of(w, it.prefilled)
        if blocks > me.free_blocks:  # only one that is half in: the others grew in the meantime
            _put_back_chunk(w, i, lane)
            break
        _take_new(w, i, blocks)
        it.chunk = chunk
        attended += float(chunk) * chunk + 2.0 * (chunk + w.law[i][PREFIX]) * it.prefilled
        prefills, tokens, budget = prefills + 1, tokens + chunk, budget - chunk
        r = it.after
    return prefills, tokens, attended


@inlined
def _admit_prompt(w, i, lane, start_s):
    """Move the first waiting prompt into the lane if all its tokens fit; return it, or -1."""
    me, line = w.instance[i], w.queue[i]
    if line.size == 0:
        return -1
    context = w.request[line.head].prompt + w.request[line.head].generated
    in_lane = w.lane[lane].running + w.queue[chunking(w, lane)].size
    lane_is_full = in_lane * me.stages >= me.max_batch
    if lane_is_full or not admits_whole(me.free_blocks, blocks_of(w, context), me.members, me.max_batch):
        return -1
    r = pop(w, i)
    it = w.request[r]
    me.members += 1
    leave_queue(w, i, context)
    again = reusable_blocks(it.edge, me.taken, it.kept, context, w.scalar[0].block_tokens)
    take_blocks(w, i, again)
    it.prefilled, it.kept = again * w.scalar[0].block_tokens, 0
    if it.prefill_start_s != it.prefill_start_s:  # nan: not preempted in the middle of its prompt
        it.prefill_start_s = start_s
    push(w, chunking(w, lane), r)
    return r


# ---- what a step brings


@inlined
def _book(w, lane, end_s):
    """Book a token for each request that has one at the end of the step; return (leaving, their blocks)."""
    mine = w.lane[lane]
    leaving, blocks = 0, 0
    if mine.running > 0:
        mine.steps += 1
        mine.context += mine.running
        r = w.due[lane, mine.steps % w.due.shape[1]]
        while r >= 0:
            after = w.request[r].due_after
            context = leave_lane(w, lane, r)
            leaving, blocks = leaving + 1, blocks + blocks_of(w, context - 1)  # the last token's KV is never written
            finish(w, r, end_s)
            r = after
    r = next_prefilled(w, lane, end_s)
    while r >= 0:
        it = w.request[r]
        if it.generated < it.output:
            enter_lane(w, lane, r, it.prompt + it.generated)
        else:  # the last token's KV is never written
            leaving, blocks = leaving + 1, blocks + blocks_of(w, it.prompt + it.generated - 1)
            finish(w, r, end_s)
        r = next_prefilled(w, lane, end_s)
    return leaving, blocks
