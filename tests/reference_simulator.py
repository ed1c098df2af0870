"""A slow and plain simulator: the oracle that the compiled one must agree with, request by request.

It is written from the rules alone, with none of the compiled one's short cuts: every decode step is an event, every
request holds a counted number of KV blocks, sums are taken anew each time they are needed, and bandwidth is shared out
one bottleneck at a time. The decisions are the policies' own, called as plain Python functions.

Order at equal times: ends of transfers, then other events, then ends of steps, then arrivals; first come, first served.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, inf, nan
from random import Random

import numpy as np

from planner.cost.base import CostModel
from planner.cost.kernel import FAMILY, LINEAR, MEASURED, PREFIX, ROOFLINE, SIZE, iteration_s
from planner.policies import decode, prefill, routing
from planner.simulator.cluster import Instance, KvPath, Limits, System
from planner.specs.layout import Layout, Phase
from planner.specs.workload import Clients, Requests, make_requests

admits, admits_whole = decode.admits.py_func, decode.admits_whole.py_func
joins_batch, joins_padded_batch, chunk_tokens = (
    function.py_func for function in (prefill.joins_batch, prefill.joins_padded_batch, prefill.chunk_tokens)
)
pick_least, work_left_s, decode_load = (
    function.py_func for function in (routing.pick_least, routing.work_left_s, routing.decode_load)
)

TICK_S = 1e-9


@dataclass(eq=False)
class Job:
    """One request and what happened to it."""

    arrival_s: float
    prompt: int
    output: int
    generated: int = 0
    prefilled: int = 0
    chunk: int = 0
    decoding: bool = False
    blocks: list[int] = field(default_factory=list)
    prefill_at: int = -1
    decode_at: int = -1
    prefill_start_s: float = nan
    prefill_end_s: float = nan
    pull_start_s: float = nan
    pull_end_s: float = nan
    first_step_s: float = nan
    finish_s: float = nan

    @property
    def context(self) -> int:
        """Tokens so far, the newest included, whose KV is written by the next step."""
        return self.prompt + self.generated


@dataclass(eq=False)
class Lane:
    """One of the groups of requests that take turns in a pipeline."""

    joining: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    chunking: list[Job] = field(default_factory=list)
    decoding: list[Job] = field(default_factory=list)
    """Who gets a token from the step in flight."""
    in_flight: bool = False
    penalty_s: float = 0.0
    planned: list[tuple[float, list[Job]]] = field(default_factory=list)
    """Steps under way where prompts come in chunks, oldest first: when each ends, and who is done then."""


@dataclass(eq=False)
class Box:
    """One instance."""

    number: int
    spec: Instance
    block_tokens: int
    queue: list[Job] = field(default_factory=list)
    swapped: list[Job] = field(default_factory=list)
    pulling: list[Job] = field(default_factory=list)
    held: dict[Job, int] = field(default_factory=dict)
    lanes: list[Lane] = field(default_factory=list)
    stage_free_s: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    batch_s: float = 0.0
    steps: int = 0
    preemptions: int = 0
    least_free_blocks: int = 0
    free: list[int] = field(default_factory=list)
    """Where prompts come in chunks: the free blocks in the order in which they are taken."""
    content: dict[int, tuple[Job, int]] = field(default_factory=dict)
    """Whose n-th block's tokens a block holds, as long as nobody else has taken it."""

    def __post_init__(self) -> None:
        stages = len(self.spec.cost.stage_share)
        self.free = list(range(self.spec.limits.kv_blocks)) if self.chunked else []
        self.lanes = [Lane() for _ in range(stages)]
        self.stage_free_s = [0.0] * stages
        self.least_free_blocks = self.spec.limits.kv_blocks

    @property
    def chunked(self) -> bool:
        return self.spec.phase == "aggregated" and self.spec.max_padding is None

    @property
    def free_blocks(self) -> int:
        if self.chunked:
            return len(self.free)
        return self.spec.limits.kv_blocks - sum(self.held.values())

    @property
    def members(self) -> int:
        lanes = sum(len(lane.joining) + len(lane.running) + len(lane.chunking) for lane in self.lanes)
        lanes += sum(len(done) for lane in self.lanes for _, done in lane.planned)
        return lanes + len(self.swapped) + len(self.pulling)

    def blocks(self, tokens: int) -> int:
        return ceil(tokens / self.block_tokens)

    def hold(self, job: Job, blocks: int) -> None:
        self.held[job] = blocks
        assert self.free_blocks >= 0
        self.least_free_blocks = min(self.least_free_blocks, self.free_blocks)

    def allocate(self, job: Job, tokens: int) -> bool:
        """Take blocks off the line of free ones until `job` has room for `tokens`; False when they do not last."""
        missing = self.blocks(tokens) - len(job.blocks)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            block = self.free.pop(0)
            self.content.pop(block, None)
            job.blocks.append(block)
        self.least_free_blocks = min(self.least_free_blocks, len(self.free))
        return True

    def release(self, job: Job, computed: int) -> None:
        """Append the blocks of `job` to the line of free ones, last one first; full ones keep what they hold."""
        for n in reversed(range(len(job.blocks))):
            self.free.append(job.blocks[n])
            if n < computed // self.block_tokens:
                self.content[job.blocks[n]] = (job, n)
        job.blocks = []

    def reuse(self, job: Job) -> None:
        """Give a job the first blocks of its own that nobody has taken since; its last token always runs anew."""
        held = {n: block for block, (owner, n) in self.content.items() if owner is job}
        while len(job.blocks) in held and (len(job.blocks) + 1) * self.block_tokens < job.context:
            job.blocks.append(held[len(job.blocks)])
            self.free.remove(job.blocks[-1])
        self.content = {block: owned for block, owned in self.content.items() if owned[0] is not job}
        job.prefilled = len(job.blocks) * self.block_tokens
        self.least_free_blocks = min(self.least_free_blocks, len(self.free))

    def law_s(self, prefills: int, tokens: int, attended: float, decodes: int, context: int) -> float:
        """Time of one iteration of the whole model [s]; the linear law by hand, any other by its own function."""
        p = self.spec.cost.parameters.tolist()
        if tokens == 0 and decodes == 0:
            return 0.0
        if p[FAMILY] != LINEAR:
            return float(iteration_s(self.spec.cost.parameters, prefills, tokens, attended, decodes, context))
        a, b, c = p[4:7] if decodes < p[10] else p[7:10]
        decode_s = a + b * decodes + c * context if decodes else 0.0
        if tokens == 0:
            return decode_s
        return max(p[1] + p[2] * (tokens + decodes) + p[3] * attended + (c * context if decodes else 0.0), decode_s)

    def alone_s(self, prompt: int) -> float:
        return max(self.spec.cost.stage_share) * self.law_s(1, prompt, float(prompt) ** 2, 0, 0)

    def queued_s(self) -> float:
        return sum(self.alone_s(job.context) for job in self.queue)

    def iterate(self, now_s: float, extra_s: float, prefills: list[tuple[int, int]], decodes: list[Job]) -> list[float]:
        """Send one iteration ((new, cached) tokens per prefill) through the stages; return when it clears each of them.

        Entry 0 is when it starts.
        """
        tokens = sum(new for new, _ in prefills)
        reading = float(self.spec.cost.parameters[PREFIX])
        attended = float(sum(new * new + 2 * (new + reading) * cached for new, cached in prefills))
        whole_s = self.law_s(len(prefills), tokens, attended, len(decodes), sum(job.context for job in decodes))
        cost = self.spec.cost
        handoff_s = cost.handoff_s + cost.handoff_s_per_token * (tokens + len(decodes))
        times, taken = [max(now_s, self.stage_free_s[0])], []
        for s, share in enumerate(cost.stage_share):
            last = s == len(cost.stage_share) - 1
            taken.append((whole_s + extra_s) * share + (0.0 if last else handoff_s))
            times.append(max(times[-1], self.stage_free_s[s]) + taken[-1])
            self.stage_free_s[s] = times[-1]
        self.busy_s += max(taken)
        self.batch_s += max(taken) * (len(prefills) + len(decodes))
        self.steps += 1
        return times

    def iterate_in_chunks(self, now_s: float, prompts: list[int]) -> list[float]:
        """Send a prefill batch through the stages in chunks; return when it starts and when it clears each stage."""
        cost, tokens, size = self.spec.cost, sum(prompts), self.spec.limits.pipeline_tokens
        attended = float(sum(n * n for n in prompts))
        times = [max(now_s, self.stage_free_s[0])]
        start_s = times[0]
        for done in range(0, tokens, size):
            upto = min(done + size, tokens)
            share = (upto**2 - done**2) / tokens**2
            reads = 2 * cost.parameters[PREFIX] * done / len(prompts)
            whole_s = self.law_s(len(prompts) if upto == tokens else 1, upto - done, attended * share + reads, 0, 0)
            handoff_s = cost.handoff_s + cost.handoff_s_per_token * (upto - done)
            times, taken = [start_s], []
            for s, part in enumerate(cost.stage_share):
                taken.append(whole_s * part + (handoff_s if s < len(cost.stage_share) - 1 else 0.0))
                times.append(max(times[-1], self.stage_free_s[s]) + taken[-1])
                self.stage_free_s[s] = times[-1]
            self.busy_s += max(taken)
            self.batch_s += max(taken) * len(prompts)
            self.steps += 1
        return times


@dataclass(eq=False)
class Flow:
    """One transfer."""

    job: Job
    path: KvPath
    left_bytes: float
    rate: float = 0.0


def fair_rates(shares: list[dict[int, float]], capacity: list[float]) -> list[float]:
    """Return the max-min fair rate of each flow: find the tightest link, fix the flows on it, go on without them."""
    rates: list[float] = [inf] * len(shares)
    open_flows = {f for f, links in enumerate(shares) if links}
    room = list(capacity)
    while open_flows:
        load = {link: sum(shares[f].get(link, 0.0) for f in open_flows) for link in range(len(capacity))}
        rate, tightest = min((room[link] / load[link], link) for link in load if load[link] > 0)
        for f in [f for f in open_flows if tightest in shares[f]]:
            rates[f] = rate
            open_flows.remove(f)
            for link, share in shares[f].items():
                room[link] = max(room[link] - rate * share, 0.0)
    return rates


class Reference:
    """The cluster. `run()` plays the requests to the end; read the results off `jobs` and `boxes`."""

    def __init__(self, system: System, requests: Requests, clients: Clients | None = None) -> None:
        self.system = system
        self.block_tokens = system.instances[0].limits.block_tokens
        self.boxes = [Box(i, spec, self.block_tokens) for i, spec in enumerate(system.instances)]
        rows = zip(requests.arrival_s, requests.prompt_tokens, requests.output_tokens, strict=True)
        self.jobs = [Job(float(t), int(n), int(out)) for t, n, out in rows]
        self.clients = clients
        for job in self.jobs if clients is not None else ():
            job.arrival_s = inf
        self.sends_s = [] if clients is None else self._starts_s(clients)
        self.pauses_s = dict(zip(self.jobs, clients.pauses_s(len(self.jobs)).tolist(), strict=True)) if clients else {}
        self.events: list[tuple[float, int, str, object]] = []
        self.step_ends: list[tuple[float, int, Box, Lane]] = []
        self.flows: list[Flow] = []
        self.settled_s = 0.0
        self.serial = 0
        self.last_entry = self.last_decode = -1
        self.link_bytes = [0.0] * len(system.link_bytes_per_s)
        self.paths = {(path.source, path.target): path for path in self._paths()}

    def _paths(self) -> list[KvPath]:
        if self.system.paths is not None:
            return [path for path in self.system.paths if path.weight > 0]
        givers = [box.number for box in self.boxes if box.spec.phase == "prefill"]
        takers = [box.number for box in self.boxes if box.spec.phase == "decode"]
        return [KvPath(p, d) for p in givers for d in takers]

    def run(self) -> Reference:
        waiting = list(self.jobs)
        while True:
            if self.clients is not None and waiting:
                waiting[0].arrival_s = min(self.sends_s, default=inf)
            flow_s = min((self._end_s(flow) for flow in self.flows), default=inf)
            event_s = min(self.events, key=lambda e: e[:2])[0] if self.events else inf
            step_s = min(self.step_ends, key=lambda e: e[:2])[0] if self.step_ends else inf
            arrival_s = waiting[0].arrival_s if waiting else inf
            now_s = min(flow_s, event_s, step_s, arrival_s)
            if now_s == inf:
                return self
            if flow_s == now_s:
                self._end_flow(now_s)
            elif event_s == now_s:
                event = min(self.events, key=lambda e: e[:2])
                self.events.remove(event)
                getattr(self, event[2])(event[3], now_s)
            elif step_s == now_s:
                step = min(self.step_ends, key=lambda e: e[:2])
                self.step_ends.remove(step)
                self._step_done(step[2], step[3], now_s)
            else:
                if self.clients is not None:
                    self.sends_s.remove(now_s)
                self._arrive(waiting.pop(0), now_s)

    # ---- a closed loop: `sends_s` are the times at which some client will send what is then the next request

    def _starts_s(self, clients: Clients) -> list[float]:
        starts = [clients.ramp_s / clients.count * k for k in range(clients.count)]
        return [start for start in starts if start < clients.until_s]

    def _ended(self, job: Job, now_s: float) -> None:
        """A request has ended, or was refused: its client thinks, then sends the next one."""
        if self.clients is not None and now_s + self.pauses_s[job] < self.clients.until_s:
            self.sends_s.append(now_s + self.pauses_s[job])

    def _schedule(self, time_s: float, what: str, who: object) -> None:
        self.events.append((time_s, self.serial, what, who))
        self.serial += 1

    # ---- arrival and prefill

    def _arrive(self, job: Job, now_s: float) -> None:
        scores, allowed = [], []
        for box in self.boxes:
            allowed.append(float(self._fits(box, job)))
            busy_until_s = box.stage_free_s[0]
            if box.spec.phase == "aggregated":
                running = [job for lane in box.lanes for job in lane.running if job.decoding or not box.chunked]
                context = sum(job.context for job in running)
                busy_until_s = now_s + box.law_s(0, 0, 0.0, len(running), context)
            scores.append(work_left_s(now_s, busy_until_s, box.queued_s()))
        i = pick_least(scores, allowed, self.last_entry)
        if i < 0:
            self._ended(job, now_s)
            return
        self.last_entry = job.prefill_at = i
        box = self.boxes[i]
        box.queue.append(job)
        if box.spec.phase == "prefill":
            self._start_prefill(box, now_s)
        else:
            self._start_idle_lanes(box, now_s)

    def _fits(self, box: Box, job: Job) -> bool:
        whole = box.blocks(job.prompt + job.output)
        if box.spec.phase == "aggregated":
            return whole <= box.spec.limits.kv_blocks
        if box.spec.phase == "decode" or box.blocks(job.prompt) > box.spec.limits.kv_blocks:
            return False
        reached = [self.boxes[d].spec.limits.kv_blocks for (p, d) in self.paths if p == box.number]
        return job.output == 1 or any(whole <= blocks for blocks in reached)

    def _start_prefill(self, box: Box, now_s: float) -> None:
        limits = box.spec.limits
        if now_s < box.stage_free_s[0]:
            return
        batch: list[Job] = []
        while box.queue:
            job, tokens = box.queue[0], sum(job.prompt for job in batch)
            if box.blocks(job.prompt) > box.free_blocks:
                break
            if not joins_batch(len(batch), tokens, job.prompt, limits.max_batch, limits.max_tokens):
                break
            batch.append(box.queue.pop(0))
            box.hold(job, box.blocks(job.prompt))
        if not batch:
            return
        if limits.pipeline_tokens and len(box.stage_free_s) > 1:
            times = box.iterate_in_chunks(now_s, [job.prompt for job in batch])
        else:
            times = box.iterate(now_s, 0.0, [(job.prompt, 0) for job in batch], [])
        for job in batch:
            job.prefill_start_s = times[0]
        self._schedule(times[-1], "_prefilled", (box, batch))
        if len(box.stage_free_s) > 1:
            self._schedule(times[1], "_stage_free", box)

    def _stage_free(self, box: Box, now_s: float) -> None:
        self._start_prefill(box, now_s)

    def _prefilled(self, who: tuple[Box, list[Job]], now_s: float) -> None:
        box, batch = who
        for job in batch:
            job.prefill_end_s = now_s
            if job.output == 1:
                del box.held[job]
                job.first_step_s = job.finish_s = now_s
                self._ended(job, now_s)
            else:
                self._send_to_decode(job, box, now_s)
        self._start_prefill(box, now_s)

    # ---- hand-off

    def _send_to_decode(self, job: Job, box: Box, now_s: float) -> None:
        scores, allowed = [], []
        for other in self.boxes:
            total = other.spec.limits.kv_blocks
            fits = other.blocks(job.prompt + job.output) <= total
            allowed.append(float(fits and (box.number, other.number) in self.paths))
            asked = sum(other.blocks(waiting.prompt + 1) for waiting in other.queue)
            scores.append(decode_load(total - other.free_blocks, asked, total))
        d = pick_least(scores, allowed, self.last_decode)
        self.last_decode = job.decode_at = d
        self.boxes[d].queue.append(job)
        self._admit_pulls(self.boxes[d], now_s)

    def _admit_pulls(self, box: Box, now_s: float) -> None:
        limits = box.spec.limits
        while box.queue and not box.swapped and len(box.pulling) < self.system.max_pulls:
            job = box.queue[0]
            blocks = box.blocks(job.prompt + 1)
            if not admits(box.free_blocks, blocks, limits.kv_blocks, box.members, limits.max_batch):
                return
            box.pulling.append(box.queue.pop(0))
            box.hold(job, blocks)
            job.pull_start_s = now_s
            self._schedule(now_s + self.paths[job.prefill_at, box.number].fixed_s, "_pull_begins", job)

    def _pull_begins(self, job: Job, now_s: float) -> None:
        self._settle(now_s)
        path = self.paths[job.prefill_at, job.decode_at]
        self.flows.append(Flow(job, path, self.system.kv_bytes_per_token * job.prompt))
        self._share_out()

    def _settle(self, now_s: float) -> None:
        for flow in self.flows:
            if flow.path.shares and now_s > self.settled_s:
                moved = min(flow.left_bytes, flow.rate * (now_s - self.settled_s))
                flow.left_bytes -= moved
                for link, share in flow.path.shares:
                    self.link_bytes[link] += moved * share
        self.settled_s = now_s

    def _share_out(self) -> None:
        rates = fair_rates([dict(flow.path.shares) for flow in self.flows], list(self.system.link_bytes_per_s))
        for flow, rate in zip(self.flows, rates, strict=True):
            flow.rate = rate

    def _end_s(self, flow: Flow) -> float:
        left_s = flow.left_bytes / flow.rate
        return self.settled_s + (left_s if left_s > TICK_S else 0.0)

    def _end_flow(self, now_s: float) -> None:
        self._settle(now_s)
        flow = next(flow for flow in self.flows if flow.left_bytes / flow.rate <= TICK_S)
        self.flows.remove(flow)
        self._share_out()
        job, giver, taker = flow.job, self.boxes[flow.job.prefill_at], self.boxes[flow.job.decode_at]
        job.pull_end_s = now_s
        taker.pulling.remove(job)
        del giver.held[job]
        self._start_prefill(giver, now_s)
        lane = min(taker.lanes, key=lambda lane: len(lane.running) + len(lane.joining))
        lane.joining.append(job)
        self._start_step(taker, lane, now_s)
        self._admit_pulls(taker, now_s)

    # ---- steps

    def _start_idle_lanes(self, box: Box, now_s: float) -> None:
        for lane in box.lanes:
            if not box.queue:
                return
            if not box.chunked:
                self._start_step(box, lane, now_s)
            elif not lane.planned:
                self._plan(box, lane, now_s)
                self._await(box, lane)

    def _start_step(self, box: Box, lane: Lane, now_s: float) -> None:
        if lane.in_flight:
            return
        self._swap_in(box, lane)
        joined, lane.joining = lane.joining, []
        for job in joined:
            job.generated = 1
            lane.running.append(job)
        prompts_first = box.spec.phase == "aggregated" and box.spec.max_padding is not None
        chunks: list[tuple[int, int]] = []
        if prompts_first:
            chunks = self._take_prompts(box, lane, now_s)
        if not lane.running and not chunks:
            return
        lane.decoding = [] if prompts_first and chunks else list(lane.running)
        times = box.iterate(now_s, lane.penalty_s, chunks, lane.decoding)
        lane.penalty_s, lane.in_flight = 0.0, True
        for job in joined:
            job.first_step_s = times[0]
        self.step_ends.append((times[-1], self.serial, box, lane))
        self.serial += 1

    def _block_swap_s(self, box: Box) -> float:
        return self.block_tokens * self.system.kv_bytes_per_token / box.spec.limits.swap_bytes_per_s

    def _swap_in(self, box: Box, lane: Lane) -> None:
        while box.swapped:
            job = box.swapped[0]
            blocks = box.blocks(job.context)
            if not admits(box.free_blocks, blocks, box.spec.limits.kv_blocks, len(lane.running), 10**9):
                return
            lane.running.append(box.swapped.pop(0))
            box.hold(job, blocks)
            lane.penalty_s += blocks * self._block_swap_s(box)

    def _take_prompts(self, box: Box, lane: Lane, now_s: float) -> list[tuple[int, int]]:
        """Return the padded prompts of a step that decodes nobody; none when no prompt waits or fits."""
        limits, batch = box.spec.limits, []
        while box.queue:
            longest = max((job.context for job in batch), default=0)
            tokens, joins = sum(job.context for job in batch), box.queue[0].context
            if not joins_padded_batch(len(batch), longest, tokens, joins, limits.max_tokens, box.spec.max_padding):
                break
            if not self._admit_prompt(box, lane, now_s):
                break
            batch.append(lane.chunking[-1])
        for job in batch:
            job.chunk = job.context
        return [(max((job.context for job in batch), default=0), 0)] * len(batch)

    def _admit_prompt(self, box: Box, lane: Lane, now_s: float) -> bool:
        limits = box.spec.limits
        in_lane = len(lane.running) + len(lane.chunking)
        if not box.queue or in_lane * len(box.lanes) >= limits.max_batch:
            return False
        job = box.queue[0]
        blocks = box.blocks(job.context + 1)
        if not admits(box.free_blocks, blocks, limits.kv_blocks, box.members, limits.max_batch):
            return False
        lane.chunking.append(box.queue.pop(0))
        box.hold(job, blocks)
        if job.generated == 0:
            job.prefill_start_s = now_s
        return True

    def _step_done(self, box: Box, lane: Lane, now_s: float) -> None:
        if box.chunked:
            self._mixed_step_done(box, lane, now_s)
            return
        lane.in_flight = False
        for job in lane.decoding:
            job.generated += 1
        if lane.decoding:
            self._finish(box, lane, now_s)
            self._grow(box, lane)
        self._finish_chunks(box, lane, now_s)
        self._start_step(box, lane, now_s)
        if box.spec.phase == "decode":
            self._admit_pulls(box, now_s)
        elif len(box.lanes) > 1:
            self._start_idle_lanes(box, now_s)

    def _finish(self, box: Box, lane: Lane, now_s: float) -> None:
        for job in [job for job in lane.running if job.generated == job.output]:
            lane.running.remove(job)
            del box.held[job]
            job.finish_s = now_s
            self._ended(job, now_s)

    def _grow(self, box: Box, lane: Lane) -> None:
        def missing() -> list[Job]:
            return [job for job in lane.running if box.blocks(job.context) > box.held[job]]

        while len(missing()) > box.free_blocks:
            job = lane.running.pop()
            held = box.held.pop(job)
            box.preemptions += 1
            if box.spec.phase == "decode":
                lane.penalty_s += held * self._block_swap_s(box)
                box.swapped.append(job)
            else:
                job.prefilled = 0
                box.queue.insert(0, job)
        for job in missing():
            box.hold(job, box.held[job] + 1)

    def _finish_chunks(self, box: Box, lane: Lane, now_s: float) -> None:
        for job in list(lane.chunking):
            job.prefilled += job.chunk
            job.chunk = 0
            if job.prefilled < job.context:
                continue
            lane.chunking.remove(job)
            if job.generated == 0:
                job.prefill_end_s = job.first_step_s = now_s
            job.generated += 1
            if job.generated < job.output:
                lane.running.append(job)
            else:
                del box.held[job]
                job.finish_s = now_s
                self._ended(job, now_s)

    # ---- mixed steps of an aggregated instance, planned one request after the other as the engine does

    def _mixed_step_done(self, box: Box, lane: Lane, now_s: float) -> None:
        _, done = lane.planned.pop(0)
        for job in done:
            box.release(job, 0)
        self._plan(box, lane, now_s)
        self._await(box, lane)
        if len(box.lanes) > 1:
            self._start_idle_lanes(box, now_s)

    def _await(self, box: Box, lane: Lane) -> None:
        if lane.planned:
            self.step_ends.append((lane.planned[0][0], self.serial, box, lane))
            self.serial += 1

    def _plan(self, box: Box, lane: Lane, now_s: float) -> None:
        depth = 2 if box.spec.limits.plans_ahead and len(box.lanes) == 1 else 1
        while len(lane.planned) < depth:
            chunks, decodes = self._choose(box, lane, max(now_s, box.stage_free_s[0]))
            if not chunks and not decodes:
                return
            prefills = [(new, job.prefilled) for job, new in chunks.items()]
            end_s = box.iterate(now_s, 0.0, prefills, decodes)[-1]
            lane.planned.append((end_s, self._outcome(lane, chunks, decodes, end_s)))

    def _choose(self, box: Box, lane: Lane, start_s: float) -> tuple[dict[Job, int], list[Job]]:
        """Return who prefills how many tokens and who decodes in the next step."""
        chunks: dict[Job, int] = {}
        decodes: list[Job] = []
        left, preempted = box.spec.limits.max_tokens, False
        for job in list(lane.running):
            new = 1 if job.decoding else chunk_tokens(left, job.context - job.prefilled)
            if new <= 0 or job not in lane.running:
                continue
            while job in lane.running and not box.allocate(job, (job.context if job.decoding else job.prefilled + new)):
                self._preempt(box, lane.running.pop())
                preempted = True
            if job in lane.running:
                left -= new
                if job.decoding:
                    decodes.append(job)
                else:
                    chunks[job] = new
        while left > 0 and not preempted and self._may_start(box, lane):
            job = box.queue.pop(0)
            lane.running.append(job)
            box.reuse(job)
            if np.isnan(job.prefill_start_s):
                job.prefill_start_s = start_s
            chunks[job] = chunk_tokens(left, job.context - job.prefilled)
            assert box.allocate(job, job.prefilled + chunks[job])
            left -= chunks[job]
        return chunks, decodes

    def _may_start(self, box: Box, lane: Lane) -> bool:
        limits = box.spec.limits
        if not box.queue or len(lane.running) * len(box.lanes) >= limits.max_batch:
            return False
        return admits_whole(len(box.free), box.blocks(box.queue[0].context), box.members, limits.max_batch)

    def _preempt(self, box: Box, job: Job) -> None:
        box.release(job, job.context - 1 if job.decoding else job.prefilled)
        job.decoding, job.prefilled = False, 0
        box.preemptions += 1
        box.queue.insert(0, job)

    def _outcome(self, lane: Lane, chunks: dict[Job, int], decodes: list[Job], end_s: float) -> list[Job]:
        """Give each request what the step brings it; return who is done."""
        for job, new in chunks.items():
            job.prefilled += new
        ready = [job for job in chunks if job.prefilled == job.context]
        for job in ready:
            job.decoding = True
            if job.generated == 0:
                job.prefill_end_s = job.first_step_s = end_s
        for job in decodes + ready:
            job.generated += 1
        done = [job for job in decodes + ready if job.generated == job.output]
        for job in done:
            lane.running.remove(job)
            job.finish_s = end_s
            self._ended(job, end_s)
        return done


# ---- small random clusters, made so that everything happens: queues, back-pressure, preemption, shared links

LONGEST_PROMPT, LONGEST_OUTPUT = 60, 30


def random_system(r: Random) -> System:
    """Return one to eight instances of any phase and depth, most of them short of KV blocks, with links or without."""
    block_tokens = r.choice([1, 2, 4, 16])
    with_prefill, with_aggregated = r.choice([(True, False), (True, False), (False, True), (True, True)])
    phases: list[Phase] = []
    if with_prefill:
        phases.extend(["prefill"] * r.randint(1, 3))
        phases.extend(["decode"] * r.randint(1, 3))
    if with_aggregated:
        phases.extend(["aggregated"] * r.randint(1, 3))
    r.shuffle(phases)
    instances = [_random_instance(r, phase, block_tokens) for phase in phases]
    if r.random() < 0.4:
        instances.append(instances[0])  # equals, so that ties occur
    links = tuple(r.uniform(1e3, 1e5) for _ in range(r.randint(1, 4)))
    paths = _random_paths(r, instances, len(links)) if r.random() < 0.8 else None
    return System(
        tuple(instances), r.choice([10.0, 100.0]), paths, links, r.choice(["decode", "prefill"]), r.randint(1, 4)
    )


def _random_instance(r: Random, phase: Phase, block_tokens: int) -> Instance:
    longest = ceil((LONGEST_PROMPT + LONGEST_OUTPUT) / block_tokens)
    blocks = r.randint(max(longest - 3, 1), 2 * longest + 4) if r.random() < 0.7 else 50 * longest
    limits = Limits(
        r.choice([1, 2, 3, 8, 64]), r.choice([4, 16, 40, 120]), blocks, block_tokens, r.choice([1e3, 1e6, 1e9]),
        plans_ahead=r.random() < 0.7,
    )  # fmt: skip
    max_padding = r.choice([None, None, 5, 100]) if phase == "aggregated" else None
    return Instance(phase, random_cost(r, r.randint(1, 3)), limits, max_padding)


def random_cost(r: Random, stages: int) -> CostModel:
    """Return a law of any family, cut into uneven stages, with a hand-off or without."""
    weights = [r.uniform(0.5, 1.5) for _ in range(stages)]
    share = tuple(weight / sum(weights) for weight in weights)
    handoff = r.choice([(0.0, 0.0), (r.uniform(0, 0.002), r.uniform(0, 1e-5))])
    return CostModel(Layout(1, stages), _random_law(r), share, *handoff)


def _random_law(r: Random) -> np.ndarray:
    p = np.zeros(SIZE)
    p[1:4] = r.uniform(0.001, 0.02), r.uniform(1e-5, 5e-4), r.uniform(0, 1e-6)
    for regime in (4, 7):
        p[regime : regime + 3] = r.uniform(0.005, 0.03), r.uniform(0, 1e-3), r.uniform(0, 2e-5)
    p[10] = r.choice([2, 4, 8, 1000])
    if r.random() < 0.2:
        p[FAMILY] = ROOFLINE
        p[3:16] = 3.0, 1e-4, 1e-7, 1e-4, 5e-3, 5e-3, 0.2, 1e-5, 1e-4, 1e-5, 2e-3, 30.0, 0.3
    elif r.random() < 0.15:
        p[FAMILY] = MEASURED
        p[1:11] = 1e-3, 5e-4, 3, 3, 2, 2, 2, 2, 0, 0
        curves, axes, grid = np.linspace(5e-3, 6e-3, 3), [0.0, 10.0] * 4, [r.uniform(0, 5e-3) for _ in range(16)]
        p = np.concatenate([p, curves, curves, axes, grid])
    p[PREFIX] = r.choice([0.0, 20.0])
    return p


def _random_paths(r: Random, instances: list[Instance], links: int) -> tuple[KvPath, ...]:
    """Return paths between most pairs, over any number of links (none: the fixed time only), some switched off."""
    found = []
    for p, source in enumerate(instances):
        for d, target in enumerate(instances):
            if (source.phase, target.phase) == ("prefill", "decode") and r.random() < 0.9:
                crossed = sorted(r.sample(range(links), r.randint(0, links)))
                shares = tuple((link, r.choice([1.0, 0.5, r.uniform(0.1, 1)])) for link in crossed)
                found.append(KvPath(p, d, r.choice([0.0, r.uniform(0, 0.01)]), shares, r.choice([1.0, 0.3, 0.0])))
    return tuple(found)


def random_requests(r: Random, most: int = 60) -> Requests:
    """Return up to `most` requests, some of them at the same instant, at a rate anywhere from idle to overload."""
    rate_rps, now_s, arrivals = 10 ** r.uniform(0, 2.5), 0.0, []
    for _ in range(r.randint(1, most)):
        now_s += r.expovariate(rate_rps) if r.random() > 0.15 else 0.0
        arrivals.append(now_s)
    prompts = [r.randint(1, LONGEST_PROMPT) for _ in arrivals]
    outputs = [r.choice([1, 2, r.randint(1, LONGEST_OUTPUT)]) for _ in arrivals]
    return make_requests(np.array(arrivals), np.array(prompts), np.array(outputs))


def in_chunks(system: System, r: Random) -> System:
    """Return the system with prefill pipelines that take prompts in chunks."""
    chunked = [
        replace(one, limits=replace(one.limits, pipeline_tokens=r.choice([3, 7, 16]))) for one in system.instances
    ]
    return replace(system, instances=tuple(chunked))


def random_clients(r: Random) -> Clients:
    """Return 1 to 12 clients, some of which think, start one by one, or stop early."""
    think_s, ramp_s = r.choice([0.0, 0.0, r.uniform(0, 0.5)]), r.choice([0.0, 0.0, r.uniform(0, 1)])
    return Clients(r.randint(1, 12), think_s, ramp_s, r.choice([inf, r.uniform(0.1, 5)]), r.choice([0.0, 1.0]))
