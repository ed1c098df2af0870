"""The whole cluster, event by event: routing, queues, batches, stages, KV blocks, pulls over shared links.

This is the judge of every claim. Its mechanisms are the engine's own (`policies/`), so what it assumes can be read
there: prefill forms batches first come first served; a finished prefill keeps its blocks until the decode side, which
reserves blocks first, has pulled them; transfers share links max-min fairly; decode runs continuous batching and, when
its blocks run short, swaps out the newest request (an aggregated instance recomputes it instead: `chunked.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from planner.compiled import compiled, inlined
from planner.cost.base import CostModel
from planner.cost.kernel import iteration_s, with_tables
from planner.policies.routing import decode_load, pick_least, work_left_s
from planner.simulator.chunked import go_on, start_lane
from planner.simulator.clock import EVENT, drop_first
from planner.simulator.in_loop import take_turn
from planner.simulator.instance import (
    BATCH_DONE,
    LOOP_WAKES,
    PULL_DONE,
    STAGE_FREE,
    admit_pulls,
    alone_s,
    begin_pull,
    blocks_of,
    check_ttft,
    coast,
    finish,
    finish_step,
    join_lane,
    release,
    start_prefill,
    start_step,
    take_blocks,
)
from planner.simulator.network import FLOW, HOP, LINK, PATH, next_end_s, settle, take_finished
from planner.simulator.queues import QUEUE, push
from planner.simulator.state import (
    AGGREGATED,
    DECODE,
    GOAL,
    INSTANCE,
    LANE,
    PREFILL,
    REQUEST,
    SCALAR,
    STAGE,
    World,
)
from planner.specs.layout import Phase
from planner.specs.slo import Slo
from planner.specs.workload import Clients, Requests

_PHASE = {"prefill": PREFILL, "decode": DECODE, "aggregated": AGGREGATED}


@dataclass(frozen=True, slots=True)
class Limits:
    """An engine's settings for one instance; what is simulated is what gets deployed."""

    max_batch: int
    """Requests at once: in a prefill batch, or holding KV in a decode or aggregated instance."""
    max_tokens: int
    """New tokens of one iteration (a longer prompt runs alone; an aggregated instance cuts it into chunks)."""
    kv_blocks: int
    block_tokens: int = 16
    swap_bytes_per_s: float = 25e9
    """Between this instance's GPUs and host memory, all ranks together."""
    plans_ahead: bool = True
    """An aggregated instance of one stage plans a step while another one runs (vLLM's asynchronous scheduling)."""
    pipeline_tokens: int = 0
    """A prefill batch passes pipeline stages in chunks of so many tokens, one behind the other; 0: whole."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance to simulate."""

    phase: Phase
    cost: CostModel
    limits: Limits
    max_padding: int | None = None
    """None: an aggregated instance mixes chunks of prompts with decoding. Else, as vLLM 0.2 did: while a prompt waits
    and fits, a step runs whole prompts and nothing else, padded to the longest by at most this many tokens in all."""


@dataclass(frozen=True, slots=True)
class KvPath:
    """How KV gets from prefill instance `source` to decode instance `target` (their positions in the list).

    `shares` holds (link, share of the bytes that crosses it); none means that the transfer costs `fixed_s` only.
    """

    source: int
    target: int
    fixed_s: float = 0.0
    shares: tuple[tuple[int, float], ...] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class LoopPulls:
    """A decode loop that awaits each migration by itself (DistServe's engine, see `in_loop.py`)."""

    pull_s: float
    """Time of one migration, whatever the prompt [s]."""
    bytes_per_s: float = float("inf")
    """At which each pipeline stage pulls its share of the KV, all of them at once."""
    share: float = 0.05
    """Blocks that accepted requests may hold before they run, as a share of all."""
    look_again_s: float = 0.0
    """How long after it handed over a step, with the next batch empty, the loop looks for finished prefills [s]."""


@dataclass(frozen=True, slots=True)
class System:
    """What is simulated: instances, the ways between them, the links, and the engine's common settings."""

    instances: tuple[Instance, ...]
    kv_bytes_per_token: float
    paths: tuple[KvPath, ...] | None = None
    """None: any prefill instance reaches any decode instance at no cost (to study queues alone)."""
    link_bytes_per_s: tuple[float, ...] = ()
    first_token_at: str = "decode"
    """Who sends the first token: "decode" once the KV has arrived there, or "prefill" at once (DistServe)."""
    max_pulls: int = 4
    """Transfers that one decode instance runs at a time."""
    loop_pulls: LoopPulls | None = None
    """How a decode instance pulls between its steps; None: transfers run while steps go on."""


@dataclass(frozen=True, slots=True)
class Run:
    """What happened. Arrays have one entry per request [s], nan where it never happened; others one per instance."""

    requests: Requests
    first_token_s: np.ndarray
    prefill_start_s: np.ndarray
    prefill_end_s: np.ndarray
    pull_start_s: np.ndarray
    pull_end_s: np.ndarray
    first_step_s: np.ndarray
    finish_s: np.ndarray
    prefill_at: np.ndarray
    decode_at: np.ndarray
    busy_s: np.ndarray
    batch_s: np.ndarray
    steps: np.ndarray
    preemptions: np.ndarray
    least_free_blocks: np.ndarray
    link_bytes: np.ndarray
    events: int
    stopped_early: bool

    @property
    def ttft_s(self) -> np.ndarray:
        """Time to first token of each request [s]."""
        return self.first_token_s - self.requests.arrival_s

    @property
    def tpot_s(self) -> np.ndarray:
        """Time per output token after the first, of each request [s]; nan for one token."""
        gaps = self.requests.output_tokens - 1
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(gaps > 0, (self.finish_s - self.first_token_s) / np.where(gaps > 0, gaps, 1), np.nan)

    def first(self, count: int) -> Run:
        """Return the run of its first `count` requests; figures per instance and link stay those of all."""
        trail = {name: getattr(self, name)[:count] for name in ("first_token_s", *_TRAIL)}
        return replace(self, requests=self.requests.take(np.arange(count)), **trail)


def simulate(
    system: System, requests: Requests, slos: tuple[Slo, ...], warmup_s: float = 0.0, stop_when_missed: bool = False
) -> Run:
    """Return what happens to `requests` on `system`.

    With `stop_when_missed` the run ends as soon as some class can no longer reach its attainment: enough to reject a
    candidate, and several times faster. Requests that arrive before `warmup_s` load the system but are not counted.
    """
    world = _world(system, requests, slos, warmup_s, stop_when_missed)
    events = _run(world)
    return _result(system, world, requests, events)


def simulate_clients(system: System, requests: Requests, slos: tuple[Slo, ...], clients: Clients) -> Run:
    """Return what happens when `clients` send `requests`, in order, each its next one when its last has ended.

    Their arrival times are not read: they follow from the run, and requests that were never sent are left out. A
    refused request ends at once.
    """
    world = _world(system, replace(requests, arrival_s=clients.starts_s(len(requests))), slos, 0.0, False)
    world.scalar["timed"] = min(clients.count, len(requests))
    world.scalar["until_s"] = clients.until_s
    world.request["pause_s"] = clients.pauses_s(len(requests))
    events = _run(world)
    run = _result(system, world, replace(requests, arrival_s=world.request["arrival_s"]), events)
    return run.first(int(np.isfinite(run.requests.arrival_s).sum()))


# ---- the event loop


@compiled
def _run(w):
    """Work through the events in order of time; return how many there were."""
    count, arrived, events = len(w.request), 0, 0
    while True:
        flow_end_s = next_end_s(w) if w.scalar[0].flows > 0 else np.inf
        arrival_s = w.request[arrived].arrival_s if arrived < count else np.inf
        event_s = w.event[0].time_s if w.scalar[0].events > 0 else np.inf
        step_s = w.step[0].time_s if w.scalar[0].steps > 0 else np.inf
        now_s = min(flow_end_s, event_s, step_s, arrival_s)
        if now_s == np.inf or _lost(w):
            return events
        events += 1
        if flow_end_s <= now_s:
            settle(w, now_s)
            r = take_finished(w)
            if r >= 0:
                _pulled(w, r, now_s)
        elif event_s <= now_s:
            kind, who = w.event[0].kind, w.event[0].who
            drop_first(w.event, w.scalar[0].events)
            w.scalar[0].events -= 1
            _dispatch(w, kind, who, now_s)
        elif step_s <= now_s:
            lane = w.step[0].who
            drop_first(w.step, w.scalar[0].steps)
            w.scalar[0].steps -= 1
            _step_done(w, lane, now_s, min(flow_end_s, arrival_s, event_s))
        else:
            _arrive(w, arrived, now_s)
            arrived += 1


@inlined
def _lost(w):
    """Return True when some class has missed too often to reach its attainment."""
    for of_class in range(len(w.goal)):  # noqa: SIM110  (compiled code knows no generators)
        if w.goal[of_class].missed > w.goal[of_class].budget:
            return True
    return False


@inlined
def _step_done(w, lane, now_s, horizon_s):
    """Finish the step of a lane that ends now, and start its next one. Nothing but steps happens before the horizon."""
    i = w.lane[lane].instance
    # the end of a step elsewhere concerns this lane only through shared stages, by letting a waiting pull begin, or
    # when it ends a request and so lets a client send its next one
    concerns = w.instance[i].stages > 1 or w.scalar[0].waiting_pulls > 0 or w.scalar[0].until_s > now_s
    if w.scalar[0].steps > 0 and concerns:
        horizon_s = min(horizon_s, w.step[0].time_s)
    if w.instance[i].phase == AGGREGATED and w.instance[i].prompts_first == 0:
        go_on(w, lane, now_s, horizon_s)
        if w.instance[i].stages > 1:  # blocks that this lane let go of may be what an idle one waited for
            _start_lanes(w, i, now_s)
        return
    takes_turns = w.scalar[0].pulls_in_loop != 0 and w.instance[i].stages > 1
    now_s = now_s if takes_turns else coast(w, lane, now_s, horizon_s)
    if now_s >= 0.0:
        finish_step(w, lane, now_s)
        if w.scalar[0].pulls_in_loop != 0 and w.instance[i].phase == DECODE:
            take_turn(w, i, now_s)
        else:
            start_step(w, lane, now_s)
        if w.instance[i].phase == DECODE:
            if w.scalar[0].pulls_in_loop == 0:
                admit_pulls(w, i, now_s)
        elif w.instance[i].stages > 1:  # blocks that this lane let go of may be what an idle one waited for
            _start_lanes(w, i, now_s)


@inlined
def _dispatch(w, kind, who, now_s):
    if kind == BATCH_DONE:
        _prefilled(w, who, now_s)
    elif kind == STAGE_FREE:
        start_prefill(w, who, now_s)
    elif kind == PULL_DONE:
        _let_go(w, who, now_s)
    elif kind == LOOP_WAKES:
        w.instance[who].asleep = 0
        take_turn(w, who, now_s)
    else:
        begin_pull(w, who, now_s)


@inlined
def _arrive(w, r, now_s):
    """Send a new request to the instance with the least work left."""
    for i in range(len(w.instance)):
        me = w.instance[i]
        w.choice[1, i] = _may_enter(w, i, r)
        if w.choice[1, i] > 0.0:
            busy_until_s = w.stage[i, 0].free_s
            if me.phase == AGGREGATED:  # its steps can be joined soon: what counts is how long they have become
                busy_until_s = now_s + _step_length_s(w, i)
            w.choice[0, i] = work_left_s(now_s, busy_until_s, me.queued_s)
    i = pick_least(w.choice[0], w.choice[1], w.scalar[0].last_entry)
    if i < 0:
        check_ttft(w, r, np.inf)  # nobody can ever hold it: refused
        release(w, r, now_s)
        return
    w.scalar[0].last_entry = i
    it, me = w.request[r], w.instance[i]
    it.prefill_at = i
    me.queued_s += alone_s(w, i, it.prompt)
    push(w, i, r)
    if me.phase == PREFILL:
        start_prefill(w, i, now_s)
    else:
        _start_lanes(w, i, now_s)


@inlined
def _may_enter(w, i, r):
    """Return 1.0 when instance `i` takes new requests and its blocks, and those it hands over to, can ever hold `r`."""
    me, it = w.instance[i], w.request[r]
    if me.entry <= 0.0 or blocks_of(w, it.prompt) > me.blocks:
        return 0.0
    ends_here = me.phase == PREFILL and it.output < 2
    return 1.0 if ends_here or blocks_of(w, it.prompt + it.output) <= me.reach_blocks else 0.0


@inlined
def _start_lanes(w, i, now_s):
    """Let the idle lanes of an aggregated instance take what waits."""
    me = w.instance[i]
    for lane in range(me.first_lane, me.first_lane + me.stages):
        if w.queue[i].size > 0:
            if me.prompts_first != 0:
                start_step(w, lane, now_s)
            else:
                start_lane(w, lane, now_s)


@inlined
def _step_length_s(w, i):
    """Return how long a decode step of all members of an aggregated instance takes [s]."""
    running, context = 0, 0
    for lane in range(w.instance[i].first_lane, w.instance[i].first_lane + w.instance[i].stages):
        running += w.lane[lane].running
        context += w.lane[lane].context
    return iteration_s(w.law[i], 0, 0, 0.0, running, context)


@inlined
def _prefilled(w, first, now_s):
    """A prefill batch has left the pipeline: each request goes to a decode instance, or is done with one token."""
    i = w.request[first].prefill_at
    r = first
    while r >= 0:
        it = w.request[r]
        after = it.after
        it.prefill_end_s = now_s
        if it.output < 2 or w.scalar[0].first_token_at_prefill != 0:
            check_ttft(w, r, now_s)
        if it.output < 2:
            take_blocks(w, i, -blocks_of(w, it.prompt))
            it.first_step_s = now_s
            finish(w, r, now_s)
        else:
            _send_to_decode(w, r, i, now_s)
        r = after
    start_prefill(w, i, now_s)
    if w.scalar[0].pulls_in_loop != 0:
        for d in range(len(w.instance)):
            if w.instance[d].phase == DECODE:
                take_turn(w, d, now_s)


@inlined
def _let_go(w, r, now_s):
    """The migration of request `r` has ended: the prefill side may use its blocks again."""
    p = w.request[r].prefill_at
    w.request[r].pull_end_s = now_s
    take_blocks(w, p, -blocks_of(w, w.request[r].prompt))
    start_prefill(w, p, now_s)


@inlined
def _send_to_decode(w, r, i, now_s):
    """Queue request `r` at the decode instance with the least of its KV blocks spoken for."""
    whole = blocks_of(w, w.request[r].prompt + w.request[r].output)
    for d in range(len(w.instance)):
        me = w.instance[d]
        w.choice[1, d] = w.path[i, d].allowed if whole <= me.blocks else 0.0
        if w.choice[1, d] > 0.0:
            w.choice[0, d] = decode_load(me.blocks - me.free_blocks, me.waiting_blocks, me.blocks)
    d = pick_least(w.choice[0], w.choice[1], w.scalar[0].last_decode)
    w.scalar[0].last_decode = d
    w.request[r].decode_at = d
    w.instance[d].waiting_blocks += blocks_of(w, w.request[r].prompt + 1)
    w.scalar[0].waiting_pulls += 1
    push(w, d, r)
    if w.scalar[0].pulls_in_loop == 0:
        admit_pulls(w, d, now_s)


@inlined
def _pulled(w, r, now_s):
    """The KV of request `r` has arrived: prefill lets go of its blocks, decode lets it join at the next step."""
    p, d = w.request[r].prefill_at, w.request[r].decode_at
    w.request[r].pull_end_s = now_s
    w.instance[d].pulls -= 1
    take_blocks(w, p, -blocks_of(w, w.request[r].prompt))
    start_prefill(w, p, now_s)
    start_step(w, join_lane(w, d, r), now_s)
    admit_pulls(w, d, now_s)


# ---- from specs to arrays and back


def _world(system: System, requests: Requests, slos: tuple[Slo, ...], warmup_s: float, stop: bool) -> World:
    """Return the world at time zero."""
    instances = system.instances
    stages = [len(i.cost.stage_share) for i in instances]
    lanes, longest = sum(stages), int(requests.output_tokens.max(initial=1))
    path, hop = _paths(system)
    link = np.zeros(len(system.link_bytes_per_s), LINK)
    link["bytes_per_s"] = system.link_bytes_per_s
    return World(
        instance=_instances(system, path),
        law=with_tables([i.cost.parameters for i in instances]),
        stage=_stages(instances),
        lane=_lanes(stages),
        residue=np.zeros((lanes, instances[0].limits.block_tokens), np.int64),
        due=np.full((lanes, longest + 2), -1, np.int64),
        request=_requests(requests, warmup_s),
        goal=_goals(requests, slos, warmup_s, stop),
        queue=np.zeros(2 * len(instances) + 2 * lanes, QUEUE),
        step=np.zeros(lanes + 1, EVENT),
        # a request is in one event at a time: between uneven stages, batches pile up without limit
        event=np.zeros(len(requests) + 2 * len(instances) + 1, EVENT),
        flow=np.zeros(len(instances) * system.max_pulls + 2, FLOW),
        path=path,
        hop=hop,
        link=link,
        choice=np.zeros((2, len(instances))),
        scalar=_scalars(system),
    )


def _instances(system: System, path: np.ndarray) -> np.ndarray:
    """Return one INSTANCE record per instance."""
    block_bytes = system.instances[0].limits.block_tokens * system.kv_bytes_per_token
    rows, first_lane = np.zeros(len(system.instances), INSTANCE), 0
    for row, instance in zip(rows, system.instances, strict=True):
        limits, stages = instance.limits, len(instance.cost.stage_share)
        row["phase"], row["stages"], row["first_lane"] = _PHASE[instance.phase], stages, first_lane
        row["handoff_s"] = instance.cost.handoff_s
        row["handoff_s_per_token"] = instance.cost.handoff_s_per_token
        row["max_batch"], row["max_tokens"], row["blocks"] = limits.max_batch, limits.max_tokens, limits.kv_blocks
        row["prompts_first"], row["max_padding"] = instance.max_padding is not None, instance.max_padding or 0
        row["pipeline_tokens"] = limits.pipeline_tokens
        row["swap_s_per_block"] = block_bytes / limits.swap_bytes_per_s
        row["entry"] = float(instance.phase != "decode")
        row["depth"] = 2 if limits.plans_ahead and stages == 1 else 1
        row["free_blocks"] = row["least_free_blocks"] = limits.kv_blocks
        first_lane += stages
    reached = np.where(path["allowed"] > 0, rows["blocks"], 0).max(axis=1)
    rows["reach_blocks"] = np.where(rows["phase"] == PREFILL, reached, rows["blocks"])
    return rows


def _stages(instances: tuple[Instance, ...]) -> np.ndarray:
    """Return the STAGE records, one row per instance, padded with empty stages."""
    rows = np.zeros((len(instances), max(len(i.cost.stage_share) for i in instances)), STAGE)
    for row, instance in zip(rows, instances, strict=True):
        row["share"][: len(instance.cost.stage_share)] = instance.cost.stage_share
    return rows


def _lanes(stages: list[int]) -> np.ndarray:
    """Return one LANE record per lane: as many per instance as it has stages."""
    rows = np.zeros(sum(stages), LANE)
    rows["instance"] = np.repeat(np.arange(len(stages)), stages)
    rows["newest"] = -1
    return rows


def _requests(requests: Requests, warmup_s: float) -> np.ndarray:
    """Return one REQUEST record per request."""
    rows = np.zeros(len(requests), REQUEST)
    for name in ("prefill_start_s", "prefill_end_s", "pull_start_s", "pull_end_s", "first_step_s", "finish_s"):
        rows[name] = np.nan
    for name in ("prefill_at", "decode_at", "after", "older", "newer", "due_before", "due_after"):
        rows[name] = -1
    rows["arrival_s"], rows["slo_class"] = requests.arrival_s, requests.slo_class
    rows["prompt"], rows["output"] = requests.prompt_tokens, requests.output_tokens
    rows["counted"] = requests.arrival_s >= warmup_s
    return rows


def _goals(requests: Requests, slos: tuple[Slo, ...], warmup_s: float, stop: bool) -> np.ndarray:
    """Return one GOAL record per class."""
    rows = np.zeros(len(slos), GOAL)
    counted = np.bincount(requests.slo_class[requests.arrival_s >= warmup_s], minlength=len(slos))
    for row, slo, count in zip(rows, slos, counted, strict=True):
        row["ttft_s"], row["tpot_s"] = slo.ttft_s, slo.tpot_s
        row["inclusive"] = slo.tpot_definition == "inclusive"
        row["budget"] = (1 - slo.attainment) * count + 1e-9 if stop else np.inf
    return rows


def _scalars(system: System) -> np.ndarray:
    rows = np.zeros(1, SCALAR)
    rows["block_tokens"] = system.instances[0].limits.block_tokens
    rows["first_token_at_prefill"] = system.first_token_at == "prefill"
    rows["max_pulls"], rows["kv_bytes_per_token"] = system.max_pulls, system.kv_bytes_per_token
    rows["last_entry"] = rows["last_decode"] = -1
    if system.loop_pulls is not None:
        rows["pulls_in_loop"] = 1
        pulls = system.loop_pulls
        rows["pull_s"], rows["pull_share"], rows["look_again_s"] = pulls.pull_s, pulls.share, pulls.look_again_s
        rows["pull_s_per_token"] = system.kv_bytes_per_token / pulls.bytes_per_s
    return rows


def _paths(system: System) -> tuple[np.ndarray, np.ndarray]:
    """Return the PATH and HOP records; without any, every prefill instance reaches every decode one for free."""
    count = len(system.instances)
    phases = [i.phase for i in system.instances]
    paths = system.paths
    if paths is None:
        pairs = [(p, d) for p in range(count) for d in range(count)]
        paths = tuple(KvPath(p, d) for p, d in pairs if (phases[p], phases[d]) == ("prefill", "decode"))
    rows, hops = np.zeros((count, count), PATH), [hop for path in paths for hop in path.shares]
    at = 0
    for path in paths:
        rows[path.source, path.target] = (path.weight, path.fixed_s, at, at + len(path.shares))
        at += len(path.shares)
    return rows, np.array(hops, HOP)


def _result(system: System, w: World, requests: Requests, events: int) -> Run:
    trail = w.request
    phases = np.array([i.phase for i in system.instances])
    early = (system.first_token_at == "prefill") & (phases[trail["prefill_at"]] == "prefill")
    return Run(
        requests=requests,
        first_token_s=np.where(early, trail["prefill_end_s"], trail["first_step_s"]),
        **{name: trail[name] for name in _TRAIL},
        **{name: w.instance[name] for name in _TALLY},
        link_bytes=w.link["carried_bytes"],
        events=events,
        stopped_early=bool(np.any(w.goal["missed"] > w.goal["budget"])),
    )


_TRAIL = (
    "prefill_start_s",
    "prefill_end_s",
    "pull_start_s",
    "pull_end_s",
    "first_step_s",
    "finish_s",
    "prefill_at",
    "decode_at",
)
_TALLY = ("busy_s", "batch_s", "steps", "preemptions", "least_free_blocks")
