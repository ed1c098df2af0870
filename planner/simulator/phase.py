"""Prefill and decode pools: the cluster simulator's results, to the last bit, in about half the time.

A decode instance meets the rest of the cluster only when a finished prefill looks for the one with the least KV spoken
for, and when KV arrives. So its steps are no events here: they are worked off in a tight loop, up to the moment at
which somebody asks. All else is as in `cluster.py`, in rules, in the order of what happens at one instant and in
arithmetic. What makes it fast: few events, no divisions in a step, transfers without links done at once, and the law of
a prompt that runs by itself looked up instead of computed.

It does not apply to aggregated instances, to another loop than our own engine's, nor from the moment a decode instance
has to preempt. Then `simulate_phases` returns None, and `simulate` asks the cluster simulator.
"""

from __future__ import annotations

import numpy as np

from planner.compiled import compiled, inlined
from planner.cost.kernel import iteration_s
from planner.policies.decode import admits
from planner.policies.prefill import joins_batch
from planner.policies.routing import decode_load, pick_least, work_left_s
from planner.simulator import cluster
from planner.simulator.clock import drop_first
from planner.simulator.cluster import Run, System
from planner.simulator.instance import (
    BATCH_DONE,
    PULL_BEGINS,
    STAGE_FREE,
    begin_pull,
    blocks_of,
    check_ttft,
    finish,
    join_lane,
    joining,
    pass_stages,
    schedule,
    slowest_share,
    take_blocks,
)
from planner.simulator.network import next_end_s, settle, take_finished
from planner.simulator.queues import pop, push
from planner.simulator.state import DECODE, World
from planner.specs.slo import Slo
from planner.specs.workload import Requests

_LEFT = -1
"""What `_run` returns when a decode instance would have to preempt."""
_NOTHING, _PULLED, _ARRIVAL = 5, 6, 7  # beside the kinds of events in `instance.py`
_LONGEST_KNOWN = 1 << 16
"""Up to so many tokens, the time of a prompt that runs by itself is kept."""

LOOKUP = np.dtype(
    [
        ("prompt_blocks", "i8"),
        ("whole_blocks", "i8"),  # of prompt and output
        ("lone_s", "f8"),  # how long the prompt takes by itself, all stages together
    ]
)
"""What is worked out once per request, when it arrives."""


def simulate(
    system: System, requests: Requests, slos: tuple[Slo, ...], warmup_s: float = 0.0, stop_when_missed: bool = False
) -> Run:
    """Return what `cluster.simulate` returns, by the fast path as far as that applies."""
    run = simulate_phases(system, requests, slos, warmup_s, stop_when_missed)
    return cluster.simulate(system, requests, slos, warmup_s, stop_when_missed) if run is None else run


def simulate_phases(
    system: System, requests: Requests, slos: tuple[Slo, ...], warmup_s: float = 0.0, stop_when_missed: bool = False
) -> Run | None:
    """Return what happens to `requests` on `system`, or None where this simulator does not apply."""
    if not applies(system):
        return None
    world = _world(system, requests, slos, warmup_s, stop_when_missed)
    laws: dict[bytes, int] = {}
    row = np.array([laws.setdefault(one.cost.parameters.tobytes(), len(laws)) for one in system.instances])
    lone_s = np.full((len(laws), min(int(requests.prompt_tokens.max(initial=0)), _LONGEST_KNOWN) + 1), np.nan)
    events = _run(world, np.zeros(len(requests), LOOKUP), lone_s, row)
    return None if events == _LEFT else cluster._result(system, world, requests, events)


def applies(system: System) -> bool:
    """Return True when `system` is made of prefill and decode instances that run our own engine's loop.

    Prompts that pass a pipeline in chunks are left to `cluster.simulate`.
    """
    split = all(one.phase in ("prefill", "decode") for one in system.instances)
    in_chunks = any(one.limits.pipeline_tokens and len(one.cost.stage_share) > 1 for one in system.instances)
    return system.loop_pulls is None and split and not in_chunks


def _world(system: System, requests: Requests, slos: tuple[Slo, ...], warmup_s: float, stop: bool) -> World:
    """Return the world at time zero. Here `step` has one entry per lane, and `due` a width of a power of two."""
    world = cluster._world(system, requests, slos, warmup_s, stop)
    world.step["time_s"] = np.inf
    width = 1 << int(requests.output_tokens.max(initial=1) + 1).bit_length()
    return world._replace(due=np.full((len(world.lane), width), -1, np.int64))


@compiled
def _run(w, lookup, lone_s, row):
    """Work through the load; return how many events there were, or -1 when a decode instance has to preempt."""
    arrived, events, arrived_s, flow_end_s = 0, 0, -np.inf, np.inf
    while not cluster._lost(w):
        arrival_s = w.request[arrived].arrival_s if arrived < len(w.request) else np.inf
        event_s = w.event[0].time_s if w.scalar[0].events > 0 else np.inf
        # while somebody waits for blocks or a place, any step's end may let go of blocks on the prefill side
        lane = _next_lane(w, 0, len(w.lane)) if w.scalar[0].waiting_pulls > 0 else -1
        step_s = w.step[lane].time_s if lane >= 0 else np.inf
        now_s = min(flow_end_s, event_s, step_s, arrival_s)
        # whose steps must be worked off first, and until when: at one instant come transfers, events, steps, arrivals
        first, end, until_s, kind, who = 0, 0, now_s, _NOTHING, -1
        if now_s == np.inf:
            end = len(w.instance)
        elif flow_end_s <= now_s:
            settle(w, now_s)
            kind, who = _PULLED, take_finished(w)
            flow_end_s = next_end_s(w) if w.scalar[0].flows > 0 else np.inf
        elif event_s <= now_s:
            kind, who = _next_event(w)
            if kind == PULL_BEGINS and len(w.hop) > 0:
                begin_pull(w, who, now_s)
                flow_end_s = next_end_s(w)
            elif kind == PULL_BEGINS:
                kind = _PULLED
            elif kind == BATCH_DONE:
                end = len(w.instance)
                if arrived_s == now_s:  # a batch of no length: it began after the steps that end now
                    arrived_s, until_s = -np.inf, np.nextafter(now_s, np.inf)
        elif step_s <= now_s:
            first, end, until_s = w.lane[lane].instance, w.lane[lane].instance + 1, np.nextafter(now_s, np.inf)
        else:
            kind, who = _ARRIVAL, arrived
            arrived, arrived_s = arrived + 1, now_s
        if kind == _PULLED and who >= 0:
            first, end = w.request[who].decode_at, w.request[who].decode_at + 1
        for i in range(first, end):
            if w.instance[i].phase == DECODE and not _advance(w, lookup, i, until_s):
                return _LEFT
        if now_s == np.inf:
            return events
        events += 1
        _handle(w, lookup, lone_s, row, kind, who, now_s)
    return events


@inlined
def _next_event(w):
    """Take the first event off the clock; return its kind and whom it concerns."""
    kind, who = w.event[0].kind, w.event[0].who
    drop_first(w.event, w.scalar[0].events)
    w.scalar[0].events -= 1
    return kind, who


@inlined
def _handle(w, lookup, lone_s, row, kind, who, now_s):
    """Let happen what the steps did not hold up, and start the prefill batch that it may allow."""
    if kind == _PULLED:
        if who >= 0:
            _pulled(w, lookup, who, now_s)
        return
    prefill = who if kind == STAGE_FREE else -1
    if kind == BATCH_DONE:
        prefill = _prefilled(w, lookup, who, now_s)
    elif kind == _ARRIVAL:
        prefill = _arrive(w, lookup, lone_s, row, who, now_s)
    if prefill >= 0:
        _start_prefill(w, lookup, prefill, now_s)


@inlined
def _advance(w, lookup, i, until_s):
    """Work off the steps of decode instance `i` that end before `until_s`; return False where one would preempt."""
    first_lane, end_lane = w.instance[i].first_lane, w.instance[i].first_lane + w.instance[i].stages
    while True:
        lane = _next_lane(w, first_lane, end_lane)
        now_s = w.step[lane].time_s
        if now_s >= until_s:
            return True
        if not _end_step(w, lookup, i, lane, now_s):
            return False


@inlined
def _next_lane(w, first_lane, end_lane):
    """Return the lane whose step ends first, of equals the one that began first."""
    best = first_lane
    for lane in range(first_lane + 1, end_lane):
        this, other = w.step[lane], w.step[best]
        if this.time_s < other.time_s or (this.time_s == other.time_s and this.serial < other.serial):
            best = lane
    return best


@inlined
def _wrapped(value, width):
    """Return value modulo width, without a division where width is a power of two."""
    return value & (width - 1) if width & (width - 1) == 0 else value % width


@inlined
def _lone_s(w, lone_s, row, i, prompt):
    """Return how long a prompt takes by itself on instance `i` [s]; `lone_s[row[i], prompt]` keeps it."""
    if prompt >= lone_s.shape[1]:
        return iteration_s(w.law[i], 1, prompt, float(prompt) * prompt, 0, 0)
    known_s = lone_s[row[i], prompt]
    if np.isnan(known_s):
        known_s = iteration_s(w.law[i], 1, prompt, float(prompt) * prompt, 0, 0)
        lone_s[row[i], prompt] = known_s
    return known_s


@inlined
def _arrive(w, lookup, lone_s, row, r, now_s):
    """Send a new request to the instance with the least work left; return it, or -1 where nobody can ever hold it."""
    it, mine = w.request[r], lookup[r]
    mine.prompt_blocks = blocks_of(w, it.prompt)
    mine.whole_blocks = blocks_of(w, it.prompt + it.output)
    needed = mine.whole_blocks if it.output > 1 else 0
    for i in range(len(w.instance)):
        me = w.instance[i]
        fits = me.entry > 0.0 and mine.prompt_blocks <= me.blocks and needed <= me.reach_blocks
        w.choice[1, i] = 1.0 if fits else 0.0
        w.choice[0, i] = work_left_s(now_s, w.stage[i, 0].free_s, me.queued_s)
    i = pick_least(w.choice[0], w.choice[1], w.scalar[0].last_entry)
    if i < 0:
        check_ttft(w, r, np.inf)
        return -1
    w.scalar[0].last_entry = i
    it.prefill_at = i
    mine.lone_s = _lone_s(w, lone_s, row, i, it.prompt)
    w.instance[i].queued_s += slowest_share(w, i) * mine.lone_s
    push(w, i, r)
    return i


@inlined
def _start_prefill(w, lookup, i, now_s):
    """Form a batch from the head of the queue and run it, unless the first stage is busy or blocks are short."""
    me, line = w.instance[i], w.queue[i]
    if now_s < w.stage[i, 0].free_s or line.size == 0:
        return
    first, last = -1, -1
    count, tokens, attended = 0, 0, 0.0
    while line.size > 0:
        prompt = w.request[line.head].prompt
        blocks = lookup[line.head].prompt_blocks
        if blocks > me.free_blocks or not joins_batch(count, tokens, prompt, me.max_batch, me.max_tokens):
            break
        r = pop(w, i)
        take_blocks(w, i, blocks)
        left_s = me.queued_s - slowest_share(w, i) * lookup[r].lone_s
        me.queued_s = left_s if line.size > 0 else 0.0
        w.request[r].after = -1
        if first < 0:
            first = r
        else:
            w.request[last].after = r
        last = r
        count, tokens, attended = count + 1, tokens + prompt, attended + float(prompt) * prompt
    if count > 0:
        whole_s = lookup[first].lone_s if count == 1 else iteration_s(w.law[i], count, tokens, attended, 0, 0)
        start_s, first_end_s, end_s = pass_stages(w, i, now_s, whole_s, count, tokens)
        r = first
        while r >= 0:
            w.request[r].prefill_start_s = start_s
            r = w.request[r].after
        schedule(w, end_s, BATCH_DONE, first)
        if me.stages > 1:
            schedule(w, first_end_s, STAGE_FREE, i)


@inlined
def _prefilled(w, lookup, first, now_s):
    """Hand a prefill batch on, or see off who is done with one token; return the instance that is free now."""
    i = w.request[first].prefill_at
    r = first
    while r >= 0:
        it = w.request[r]
        after = it.after
        it.prefill_end_s = now_s
        if it.output < 2 or w.scalar[0].first_token_at_prefill != 0:
            check_ttft(w, r, now_s)
        if it.output < 2:
            take_blocks(w, i, -lookup[r].prompt_blocks)
            it.first_step_s = now_s
            finish(w, r, now_s)
        else:
            _send_to_decode(w, lookup, r, i, now_s)
        r = after
    return i


@inlined
def _one_more(w, lookup, r):
    """Return the KV blocks of the prompt of `r` and one token."""
    full = lookup[r].prompt_blocks * w.scalar[0].block_tokens == w.request[r].prompt
    return lookup[r].prompt_blocks + (1 if full else 0)


@inlined
def _send_to_decode(w, lookup, r, i, now_s):
    """Queue request `r` at the decode instance with the least of its KV blocks spoken for."""
    whole = lookup[r].whole_blocks
    for d in range(len(w.instance)):
        me = w.instance[d]
        w.choice[1, d] = w.path[i, d].allowed if whole <= me.blocks else 0.0
        if w.choice[1, d] > 0.0:
            w.choice[0, d] = decode_load(me.blocks - me.free_blocks, me.waiting_blocks, me.blocks)
    d = pick_least(w.choice[0], w.choice[1], w.scalar[0].last_decode)
    w.scalar[0].last_decode = d
    w.request[r].decode_at = d
    w.instance[d].waiting_blocks += _one_more(w, lookup, r)
    w.scalar[0].waiting_pulls += 1
    push(w, d, r)
    _admit_pulls(w, lookup, d, now_s)


@inlined
def _admit_pulls(w, lookup, i, now_s):
    """Let the requests that wait for decode instance `i` reserve blocks and begin to pull, in order."""
    me, line = w.instance[i], w.queue[i]
    while line.size > 0 and me.pulls < w.scalar[0].max_pulls:
        blocks = _one_more(w, lookup, line.head)
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
def _pulled(w, lookup, r, now_s):
    """The KV of request `r` has arrived: prefill lets go of its blocks, decode lets it join at the next step."""
    p, d = w.request[r].prefill_at, w.request[r].decode_at
    w.request[r].pull_end_s = now_s
    w.instance[d].pulls -= 1
    take_blocks(w, p, -lookup[r].prompt_blocks)
    _start_prefill(w, lookup, p, now_s)
    lane = join_lane(w, d, r)
    if w.lane[lane].in_flight == 0:
        _start_step(w, d, lane, now_s)
    if w.queue[d].size > 0:
        _admit_pulls(w, lookup, d, now_s)


@inlined
def _end_step(w, lookup, i, lane, now_s):
    """End the step of a lane and begin its next; return False when blocks are too few to grow."""
    me, mine = w.instance[i], w.lane[lane]
    mine.in_flight = 0
    mine.steps += 1
    mine.context += mine.running
    if w.due[lane, mine.steps & (w.due.shape[1] - 1)] >= 0:
        _finish_due(w, lookup, i, lane, now_s)
    growing = w.residue[lane, _wrapped(1 - mine.steps, w.residue.shape[1])]
    if growing > me.free_blocks:
        return False
    take_blocks(w, i, growing)
    _start_step(w, i, lane, now_s)
    if w.queue[i].size > 0:
        _admit_pulls(w, lookup, i, now_s)
    return True


@inlined
def _finish_due(w, lookup, i, lane, now_s):
    """See off the requests whose last token came with this step."""
    mine, day = w.lane[lane], w.lane[lane].steps & (w.due.shape[1] - 1)
    r = w.due[lane, day]
    w.due[lane, day] = -1
    while r >= 0:
        it = w.request[r]
        context = it.prompt + it.output
        w.residue[lane, it.key] -= 1
        mine.running -= 1
        mine.context -= context
        # the last token's own KV is never written
        block_less = (lookup[r].whole_blocks - 1) * w.scalar[0].block_tokens == context - 1
        take_blocks(w, i, (1 if block_less else 0) - lookup[r].whole_blocks)
        w.instance[i].members -= 1
        finish(w, r, now_s)
        r = it.due_after


@inlined
def _start_step(w, i, lane, now_s):
    """Let waiting requests join, and send the lane's next iteration into the pipeline, if anybody is in it."""
    mine = w.lane[lane]
    joined, first_joined = w.queue[joining(w, lane)].size, w.queue[joining(w, lane)].head
    for _ in range(joined):
        r = pop(w, joining(w, lane))
        it = w.request[r]
        context = it.prompt + 1
        it.key = _wrapped(context - mine.steps, w.residue.shape[1])
        w.residue[lane, it.key] += 1
        mine.running += 1
        mine.context += context
        day = (mine.steps + it.output - 1) & (w.due.shape[1] - 1)
        it.due_after = w.due[lane, day]
        w.due[lane, day] = r
    if mine.running == 0:
        w.step[lane].time_s = np.inf
        return
    whole_s = iteration_s(w.law[i], 0, 0, 0.0, mine.running, mine.context)
    start_s, _, end_s = pass_stages(w, i, now_s, whole_s, mine.running, mine.running)
    mine.in_flight = 1
    r = first_joined
    for _ in range(joined):
        w.request[r].first_step_s = start_s
        if w.scalar[0].first_token_at_prefill == 0:
            check_ttft(w, r, start_s)
        r = w.request[r].after
    w.step[lane].time_s = end_s
    w.step[lane].serial = w.scalar[0].serial
    w.scalar[0].serial += 1
