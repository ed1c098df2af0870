"""What one instance does: prefill batches, decode steps, KV blocks, preemption. Mixed steps are in `chunked.py`.

An iteration passes the pipeline stages one after the other, and each stage works on one iteration at a time. Since
nothing overtakes inside a pipeline, its whole passage is known when it enters (a tandem queue).
"""

from __future__ import annotations

from planner.compiled import inlined
from planner.cost.kernel import PREFIX, iteration_s
from planner.policies.decode import admits, blocks_for
from planner.policies.prefill import joins_batch, joins_padded_batch
from planner.simulator.clock import add_event
from planner.simulator.network import begin_flow, settle
from planner.simulator.queues import pop, push, push_front
from planner.simulator.state import AGGREGATED, DECODE

STAGE_FREE, BATCH_DONE, PULL_BEGINS, PULL_DONE, LOOP_WAKES = 0, 1, 2, 3, 4
_NO_LIMIT = 1 << 40


# ---- queues: one of waiting and one of swapped-out requests per instance, one joining and one chunking per lane


@inlined
def swapped(w, i):
    return len(w.instance) + i


@inlined
def joining(w, lane):
    return 2 * len(w.instance) + lane


@inlined
def chunking(w, lane):
    return 2 * len(w.instance) + len(w.lane) + lane


@inlined
def schedule(w, time_s, kind, who):
    """Add an event to the clock."""
    add_event(w.event, w.scalar[0].events, w.scalar[0].serial, time_s, kind, who)
    w.scalar[0].events += 1
    w.scalar[0].serial += 1


@inlined
def schedule_step(w, time_s, lane):
    """Add the end of a lane's step. Steps have a heap of their own because they rarely concern anybody else."""
    add_event(w.step, w.scalar[0].steps, w.scalar[0].serial, time_s, 0, lane)
    w.scalar[0].steps += 1
    w.scalar[0].serial += 1


@inlined
def accepted(w, i):
    """A decode loop's own: requests that were pulled and wait for a batch (such an instance chunks nothing)."""
    return chunking(w, w.instance[i].first_lane)


# ---- blocks and stages


@inlined
def blocks_of(w, tokens):
    """Return the KV blocks for `tokens`."""
    return blocks_for(tokens, w.scalar[0].block_tokens)


@inlined
def take_blocks(w, i, count):
    """Take (or with a negative count give back) KV blocks of instance `i`."""
    me = w.instance[i]
    me.free_blocks -= count
    me.least_free_blocks = min(me.least_free_blocks, me.free_blocks)


@inlined
def alone_s(w, i, prompt):
    """Return the time [s] for which a prompt of its own would keep the slowest stage of instance `i` busy."""
    return slowest_share(w, i) * iteration_s(w.law[i], 1, prompt, float(prompt) * prompt, 0, 0)


@inlined
def slowest_share(w, i):
    """Return the share of an iteration that the slowest stage of instance `i` takes."""
    share = 0.0
    for s in range(w.instance[i].stages):
        share = max(share, w.stage[i, s].share)
    return share


@inlined
def leave_queue(w, i, prompt):
    """Take a prompt that was popped off the work that waits: exactly none is left with the last, or ties break."""
    left_s = w.instance[i].queued_s - alone_s(w, i, prompt)
    w.instance[i].queued_s = left_s if w.queue[i].size > 0 else 0.0


@inlined
def pass_pipeline(w, i, now_s, extra_s, prefills, tokens, attended, decodes, context):
    """Send one iteration through the stages of instance `i`; return when it starts, clears stage 0, and ends."""
    whole_s = iteration_s(w.law[i], prefills, tokens, attended, decodes, context) + extra_s
    return pass_stages(w, i, now_s, whole_s, prefills + decodes, tokens + decodes)


@inlined
def pass_stages(w, i, now_s, whole_s, requests, tokens):
    """Send an iteration of `whole_s` through the stages; return when it starts, clears stage 0, and ends."""
    me = w.instance[i]
    start_s = max(now_s, w.stage[i, 0].free_s)
    handoff_s = me.handoff_s + me.handoff_s_per_token * tokens
    at_s, longest_s, first_end_s = start_s, 0.0, start_s
    for s in range(me.stages):
        stage_s = whole_s * w.stage[i, s].share + (handoff_s if s + 1 < me.stages else 0.0)
        at_s = max(at_s, w.stage[i, s].free_s) + stage_s
        w.stage[i, s].free_s = at_s
        longest_s = max(longest_s, stage_s)
        if s == 0:
            first_end_s = at_s
    me.busy_s += longest_s
    me.batch_s += longest_s * requests
    me.steps += 1
    return start_s, first_end_s, at_s


@inlined
def _pass_in_chunks(w, i, now_s, count, tokens, attended):
    """Send a prefill batch through the stages chunk by chunk (chunked pipeline parallelism, Mooncake, section 5.1).

    A chunk attends to all before it, so its share of `attended` grows, and it reads back what its prompt has cached.
    Exact for one prompt, and for several the same in all. Return when the batch starts, clears stage 0, and ends.
    """
    me = w.instance[i]
    start_s = max(now_s, w.stage[i, 0].free_s)
    done, end_s = 0, start_s
    while done < tokens:
        size = min(me.pipeline_tokens, tokens - done)
        upto = done + size
        share = (float(upto) * upto - float(done) * done) / (float(tokens) * tokens)
        reads = 2.0 * w.law[i][PREFIX] * done / count
        chunk_s = iteration_s(w.law[i], count if upto == tokens else 1, size, attended * share + reads, 0, 0)
        _, _, end_s = pass_stages(w, i, now_s, chunk_s, count, size)
        done = upto
    return start_s, w.stage[i, 0].free_s, end_s


# ---- prefill instances


@inlined
def start_prefill(w, i, now_s):
    """Form a batch from the head of the queue and run it, unless the first stage is busy or blocks are short."""
    me, line = w.instance[i], w.queue[i]
    if now_s < w.stage[i, 0].free_s or line.size == 0:
        return
    first, last = -1, -1
    count, tokens, attended = 0, 0, 0.0
    while line.size > 0:
        prompt = w.request[line.head].prompt
        blocks = blocks_of(w, prompt)
        if blocks > me.free_blocks or not joins_batch(count, tokens, prompt, me.max_batch, me.max_tokens):
            break
        r = pop(w, i)
        take_blocks(w, i, blocks)
        leave_queue(w, i, prompt)
        w.request[r].after = -1
        if first < 0:
            first = r
        else:
            w.request[last].after = r
        last = r
        count, tokens, attended = count + 1, tokens + prompt, attended + float(prompt) * prompt
    if count > 0:
        if me.stages > 1 and me.pipeline_tokens > 0:
            start_s, first_end_s, end_s = _pass_in_chunks(w, i, now_s, count, tokens, attended)
        else:
            start_s, first_end_s, end_s = pass_pipeline(w, i, now_s, 0.0, count, tokens, attended, 0, 0)
        r = first
        while r >= 0:
            w.request[r].prefill_start_s = start_s
            r = w.request[r].after
        schedule(w, end_s, BATCH_DONE, first)
        if me.stages > 1:  # with one stage the end of the batch says it all
            schedule(w, first_end_s, STAGE_FREE, i)


# ---- decode instances: pulling the KV


@inlined
def admit_pulls(w, i, now_s):
    """Let the requests that wait for decode instance `i` reserve blocks and begin to pull, in order."""
    me, line = w.instance[i], w.queue[i]
    while line.size > 0 and w.queue[swapped(w, i)].size == 0 and me.pulls < w.scalar[0].max_pulls:
        blocks = blocks_of(w, w.request[line.head].prompt + 1)
        if not admits(me.free_blocks, blocks, me.blocks, me.members, me.max_batch):
            return
        r = pop(w, i)
        me.waiting_blocks -= blocks
        w.scalar[0].waiting_pulls -= 1
        take_blocks(w, i, blocks)
        me.members += 1
        me.pulls += 1
        w.request[r].pull_start_s = now_s
        schedule(w, now_s + w.path[w.request[r].prefill_at, i].fixed_s, PULL_BEGINS, r)


@inlined
def begin_pull(w, r, now_s):
    """Put the KV of request `r` on the wire."""
    it = w.request[r]
    settle(w, now_s)
    begin_flow(w, r, it.prefill_at, it.decode_at, w.scalar[0].kv_bytes_per_token * it.prompt)


@inlined
def join_lane(w, i, r):
    """Assign request `r` to the emptiest lane of instance `i` and return that lane."""
    best, fewest = -1, 0
    for lane in range(w.instance[i].first_lane, w.instance[i].first_lane + w.instance[i].stages):
        held = w.lane[lane].running + w.queue[joining(w, lane)].size
        if best < 0 or held < fewest:
            best, fewest = lane, held
    push(w, joining(w, best), r)
    return best


# ---- decode and aggregated instances: who is in a lane


@inlined
def enter_lane(w, lane, r, context):
    """Add a decoding request that holds `context` KV tokens (its newest token included)."""
    it, mine = w.request[r], w.lane[lane]
    it.key = (context - mine.steps) % w.residue.shape[1]
    w.residue[lane, it.key] += 1
    mine.running += 1
    mine.context += context
    it.older, it.newer = mine.newest, -1
    if mine.newest >= 0:
        w.request[mine.newest].newer = r
    mine.newest = r
    it.last_step = mine.steps + it.output - it.generated
    day = it.last_step % w.due.shape[1]
    it.due_before, it.due_after = -1, w.due[lane, day]
    if it.due_after >= 0:
        w.request[it.due_after].due_before = r
    w.due[lane, day] = r


@inlined
def leave_lane(w, lane, r):
    """Remove a decoding request and return the KV tokens that it held."""
    it, mine = w.request[r], w.lane[lane]
    it.generated = it.output - (it.last_step - mine.steps)
    context = it.prompt + it.generated
    w.residue[lane, it.key] -= 1
    mine.running -= 1
    mine.context -= context
    if it.newer >= 0:
        w.request[it.newer].older = it.older
    else:
        mine.newest = it.older
    if it.older >= 0:
        w.request[it.older].newer = it.newer
    if it.due_before >= 0:
        w.request[it.due_before].due_after = it.due_after
    else:
        w.due[lane, it.last_step % w.due.shape[1]] = it.due_after
    if it.due_after >= 0:
        w.request[it.due_after].due_before = it.due_before
    return context


# ---- decode and aggregated instances: one step


@inlined
def start_step(w, lane, now_s):
    """Let waiting requests join, and send the lane's next iteration into the pipeline, if there is any work."""
    mine = w.lane[lane]
    i = mine.instance
    if mine.in_flight != 0:
        return
    if w.scalar[0].pulls_in_loop == 0:
        swap_in(w, i, lane)
    joined, first_joined = 0, w.queue[joining(w, lane)].head
    while w.queue[joining(w, lane)].size > 0:
        r = pop(w, joining(w, lane))
        joined += 1
        w.request[r].generated = 1
        enter_lane(w, lane, r, w.request[r].prompt + 1)
    prefills, tokens, attended = 0, 0, 0.0
    if w.instance[i].prompts_first != 0:
        prefills, tokens, attended = _take_prompts(w, i, lane, now_s)
        mine.prompts_only = prefills
    if mine.running == 0 and tokens == 0:
        return
    decodes, context = (0, 0) if mine.prompts_only != 0 else (mine.running, mine.context)
    start_s, _, end_s = pass_pipeline(w, i, now_s, mine.penalty_s, prefills, tokens, attended, decodes, context)
    mine.penalty_s = 0.0
    mine.in_flight = 1
    r = first_joined
    for _ in range(joined):  # those who just joined are still linked
        w.request[r].first_step_s = start_s
        if w.scalar[0].first_token_at_prefill == 0:
            check_ttft(w, r, start_s)
        r = w.request[r].after
    schedule_step(w, end_s, lane)


@inlined
def finish_step(w, lane, now_s):
    """Book one token for every decoding request of the lane, see off those that are done, and make room to grow."""
    mine = w.lane[lane]
    mine.in_flight = 0
    if mine.running > 0 and mine.prompts_only == 0:
        mine.steps += 1
        mine.context += mine.running
        _finish_due(w, mine.instance, lane, now_s)
        if w.scalar[0].pulls_in_loop == 0:
            grow(w, mine.instance, lane)
    if w.instance[mine.instance].phase == AGGREGATED:
        _finish_chunks(w, mine.instance, lane, now_s)


@inlined
def coast(w, lane, now_s, horizon_s):
    """Book the steps at whose end nothing happens but one more token each, from the one that ends at `now_s` on.

    `horizon_s` is when anything else happens in the cluster. Return when a step ends that needs care, or -1 when the
    next one ends beyond the horizon (it is scheduled then). Same result as an event per step, without the events.
    """
    mine = w.lane[lane]
    i = mine.instance
    if not _is_settled(w, i, lane):
        return now_s
    while True:
        step = mine.steps + 1
        growing = w.residue[lane, (1 - step) % w.residue.shape[1]]
        if w.due[lane, step % w.due.shape[1]] >= 0 or growing > w.instance[i].free_blocks:
            return now_s
        mine.steps = step
        mine.context += mine.running
        take_blocks(w, i, growing)
        _, _, end_s = pass_pipeline(w, i, now_s, 0.0, 0, 0, 0.0, mine.running, mine.context)
        if end_s >= horizon_s:
            schedule_step(w, end_s, lane)
            return -1.0
        now_s = end_s


@inlined
def _is_settled(w, i, lane):
    """Return True when nobody waits to join, to come back or to prefill here."""
    waiting = w.queue[i].size + w.queue[swapped(w, i)].size
    return waiting + w.queue[joining(w, lane)].size + w.queue[chunking(w, lane)].size == 0


@inlined
def _finish_due(w, i, lane, now_s):
    """See off the requests whose last token came with this step."""
    r = w.due[lane, w.lane[lane].steps % w.due.shape[1]]
    while r >= 0:
        after = w.request[r].due_after
        context = leave_lane(w, lane, r)
        take_blocks(w, i, -blocks_of(w, context - 1))  # the last token's own KV is never written
        w.instance[i].members -= 1
        finish(w, r, now_s)
        r = after


@inlined
def grow(w, i, lane):
    """Give a block to each request whose next token starts one; preempt the newest while there are too few."""
    me, mine = w.instance[i], w.lane[lane]
    at = (1 - mine.steps) % w.residue.shape[1]
    while w.residue[lane, at] > me.free_blocks:
        r = mine.newest
        context = leave_lane(w, lane, r)
        held = blocks_of(w, context) - (1 if w.request[r].key == at else 0)
        take_blocks(w, i, -held)
        me.preemptions += 1
        if me.phase == DECODE:
            mine.penalty_s += held * me.swap_s_per_block
            push(w, swapped(w, i), r)
        else:
            me.members -= 1
            me.queued_s += alone_s(w, i, context)
            w.request[r].prefilled = 0
            push_front(w, i, r)
    take_blocks(w, i, w.residue[lane, at])


@inlined
def swap_in(w, i, lane):
    """Bring back swapped-out requests, oldest first, while their blocks fit. The copy delays the step."""
    me, line = w.instance[i], w.queue[swapped(w, i)]
    no_reserve = w.scalar[0].pulls_in_loop != 0
    while line.size > 0:
        context = w.request[line.head].prompt + w.request[line.head].generated
        blocks = blocks_of(w, context)
        if not admits(me.free_blocks, blocks, me.blocks, 0 if no_reserve else w.lane[lane].running, _NO_LIMIT):
            return
        r = pop(w, swapped(w, i))
        take_blocks(w, i, blocks)
        w.lane[lane].penalty_s += blocks * me.swap_s_per_block
        enter_lane(w, lane, r, context)


# ---- aggregated instances: prompts first (vLLM 0.2)


@inlined
def _finish_chunks(w, i, lane, now_s):
    """Book the prompt chunks of this step; whoever has its whole prompt in gets its next token and decodes on."""
    r = next_prefilled(w, lane, now_s)
    while r >= 0:
        it = w.request[r]
        if it.generated < it.output:
            enter_lane(w, lane, r, it.prompt + it.generated)
        else:
            take_blocks(w, i, -blocks_of(w, it.prompt + it.generated))
            w.instance[i].members -= 1
            finish(w, r, now_s)
        r = next_prefilled(w, lane, now_s)


@inlined
def next_prefilled(w, lane, now_s):
    """Book the first chunk of a step that ends at `now_s`; return its request, or -1 while its prompt is not all in.

    With its prompt in, a request gets its next token and leaves the queue of chunks: ask again, for the one behind it.
    """
    line = w.queue[chunking(w, lane)]
    if line.size == 0:
        return -1
    it = w.request[line.head]
    it.prefilled += it.chunk
    it.chunk = 0
    if it.prefilled < it.prompt + it.generated:
        return -1
    r = pop(w, chunking(w, lane))
    if it.generated == 0:
        it.prefill_end_s = now_s
        it.first_step_s = now_s
        check_ttft(w, r, now_s)
    it.generated += 1
    return r


@inlined
def _take_prompts(w, i, lane, now_s):
    """Fill a step with whole waiting prompts, oldest first; return (prefills, padded tokens, attended)."""
    me, line = w.instance[i], w.queue[i]
    prefills, longest, tokens = 0, 0, 0
    while line.size > 0:
        it = w.request[line.head]
        context = it.prompt + it.generated
        blocks = blocks_of(w, context + 1)
        lane_is_full = (w.lane[lane].running + prefills) * me.stages >= me.max_batch
        if lane_is_full or not admits(me.free_blocks, blocks, me.blocks, me.members, me.max_batch):
            break
        if not joins_padded_batch(prefills, longest, tokens, context, me.max_tokens, me.max_padding):
            break
        r = pop(w, i)
        take_blocks(w, i, blocks)
        me.members += 1
        leave_queue(w, i, context)
        if it.generated == 0:
            it.prefill_start_s = now_s
        it.chunk = context
        push(w, chunking(w, lane), r)
        prefills, longest, tokens = prefills + 1, max(longest, context), tokens + context
    return prefills, prefills * longest, float(prefills) * longest * longest


# ---- clients in a closed loop


@inlined
def release(w, r, now_s):
    """Let the client whose request `r` ends now send the next one, after its pause. Under an open load there is none.

    Times stay in order: while clients still start one by one, the new time may belong before some of theirs, and the
    requests, whose order is fixed, hand the later times on (the last one's is lost when no request is left for it).
    """
    at, sent_s = w.scalar[0].timed, now_s + w.request[r].pause_s
    if sent_s >= w.scalar[0].until_s:
        return
    count = len(w.request)
    w.scalar[0].timed = min(at + 1, count)
    while at > 0 and w.request[at - 1].arrival_s > sent_s:
        if at < count:
            w.request[at].arrival_s = w.request[at - 1].arrival_s
        at -= 1
    if at < count:
        w.request[at].arrival_s = sent_s


# ---- the verdict on one request


@inlined
def _miss(w, r):
    it = w.request[r]
    if it.missed == 0 and it.counted != 0:
        w.goal[it.slo_class].missed += 1
    it.missed = 1


@inlined
def check_ttft(w, r, first_token_s):
    """Note a miss when the first token came too late."""
    if first_token_s - w.request[r].arrival_s > w.goal[w.request[r].slo_class].ttft_s * (1.0 + 1e-9):
        _miss(w, r)


@inlined
def finish(w, r, now_s):
    """Note the end of a request, and a miss when its tokens came too slowly (undefined for one token: met)."""
    it = w.request[r]
    goal = w.goal[it.slo_class]
    it.finish_s = now_s
    if w.scalar[0].until_s > now_s:
        release(w, r, now_s)
    if it.output < 2:
        return
    if goal.inclusive != 0:
        tpot_s = (now_s - it.arrival_s) / it.output
    else:
        tpot_s = (now_s - first_token_s(w, r)) / (it.output - 1)
    if tpot_s > goal.tpot_s * (1.0 + 1e-9):
        _miss(w, r)


@inlined
def first_token_s(w, r):
    """Return when the first token of `r` left [s]: from decode once the KV is there, or at once from prefill."""
    it = w.request[r]
    return it.prefill_end_s if w.scalar[0].first_token_at_prefill != 0 else it.first_step_s
