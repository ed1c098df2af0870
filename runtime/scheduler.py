"""What runs next: continuous batching with chunked prefill over paged KV memory, without a tensor.

One pass (`schedule`) plans one step. Everything that runs goes first, in the order of admission: one token of each
decoding sequence, then a chunk of a prompt that is half in. Requests that were swapped out return next, then waiting
ones are admitted, first come first served, while the token budget, the seats and the KV blocks last. Who is short of
blocks takes them from the last request that was admitted (PagedAttention, SOSP '23, section 4.5). The decisions are
those of `planner.policies`, which the simulator calls as well.

`settle` takes in what a step has brought: blocks become readable, tokens are appended, answers fork, end and are freed.
With several pipeline stages, several planned steps are under way; a sequence whose next token is not known yet waits,
while the chunks of a prompt follow each other through the stages (chunked pipeline parallelism, Mooncake, FAST '25,
section 5.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from planner.policies.decode import admits, admits_whole
from planner.policies.preempt import prefill_leaves_first, swaps
from planner.policies.prefill import chunk_tokens, joins_batch
from runtime.answer import Begun
from runtime.copies import Copy
from runtime.counters import Counters
from runtime.kv_cache import KVCache
from runtime.out_of_blocks import OutOfBlocksError
from runtime.request import Request, Sequence
from runtime.settings import Role
from runtime.step import StepOutput
from runtime.swap_cost import SwapCost

_NO_BOUND = 2**40


@dataclass(frozen=True, slots=True)
class Entry:
    """Tokens first..last-1 of a sequence that run in a step, and how many rows of logits it wants of the last one."""

    sequence: Sequence
    first: int
    last: int
    rows: int


@dataclass(slots=True)
class Plan:
    """One step in the making. Rows of logits come in the order of `entries`."""

    budget: int
    seats: int
    """Sequences that may still join."""
    entries: list[Entry] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    """Due before the step, in this order."""
    joined: set[Request] = field(default_factory=set)
    preempted: set[Request] = field(default_factory=set)


class Scheduler:
    """Requests of one instance: waiting, running, swapped out."""

    def __init__(
        self,
        cache: KVCache,
        *,
        max_batch: int,
        step_tokens: int,
        depth: int,
        preemption: SwapCost | Literal["swap", "recompute"],
        role: Role = "aggregated",
    ):
        self.cache = cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.swapped: deque[Request] = deque()
        self.reserved: dict[Request, int] = {}
        """Whose KV is on its way here, and how many of its tokens were here before."""
        self.held: set[Request] = set()
        """Whose KV is here to be fetched by a decode instance."""
        self._role = role
        self._max_batch, self._depth = max_batch, depth
        self._budget = step_tokens or _NO_BOUND
        self._preemption = preemption
        self.counters = Counters()
        self._sequences = 0
        self._due: list[Copy] = []
        """Copies for the next step: a pass may move blocks and then find nothing to run."""

    # ---- requests

    def add(self, request: Request, answers: Several[Begun] = ()) -> None:
        """Queue a request, some answers of which another instance may have begun."""
        self._begin(request, answers)
        request.chain = self._chain(request)
        self.waiting.append(request)

    def _begin(self, request: Request, answers: Several[Begun]) -> None:
        request.live = [self._sequence(request, 0, list(request.prompt)) for _ in answers or (None,)]
        for sequence, begun in zip(request.live, answers, strict=False):
            sequence.go_on(begun)

    # ---- KV that goes from one instance to another

    def reserve(self, request: Request, cached_tokens: int) -> int | None:
        """Take blocks for the first tokens of a request, whose KV another instance has; None: it is not admitted now.

        Returns how many of them are here already, of a prefix that is known; the rest has to be pulled.
        """
        if self.swapped or self.waiting:  # they were admitted before
            return None
        self._begin(request, ())
        request.chain = self._chain(request)
        needed = self.cache.needed_to_start(request.chain, cached_tokens + 1)
        members = self._members + request.seats - 1
        device = self.cache.device
        if not admits(device.available, needed, device.total, members, self._max_batch):
            return None
        return self._place(request, request.chain, cached_tokens)

    def _place(self, request: Request, chain: Several[bytes], tokens: int) -> int:
        """Take blocks for the first tokens of a request; return how many were known. Raises OutOfBlocksError."""
        leader = request.leader
        known = self.cache.start(leader.id, chain)
        try:
            if tokens > known:
                self.cache.grow(leader.id, tokens - known)
        except OutOfBlocksError:
            self.cache.free(leader.id)
            raise
        leader.started = True
        self.reserved[request] = known
        return known

    def join(self, request: Request, answers: Several[Begun]) -> None:
        """Let a request run that has blocks reserved, its KV having arrived; its answers go on where they stand."""
        known, leader = self.reserved.pop(request), request.leader
        self.cache.commit(leader.id, request.prompt[known : self.cache.tokens(leader.id)])
        for begun in answers[1:]:
            request.live.append(self._sequence(request, begun.index, []))
        for sequence, begun in zip(request.live, answers, strict=False):
            sequence.go_on(begun)
        self._share_prompt(request)
        self.running.append(request)

    def hold(self, request: Request) -> None:
        """Take a request out whose prompt has run, and keep the prompt's KV until it is dropped."""
        self.running.remove(request)
        for sequence in request.live[1:]:
            self._free(sequence)
        self.held.add(request)

    @property
    def _members(self) -> int:
        """Return the seats of all that hold KV here and decode, or soon will."""
        return sum(request.seats for request in (*self.running, *self.reserved))

    def adopt(self, request: Request, cached_tokens: int) -> None:
        """Let a waiting request run, the KV of whose first tokens is there already, in blocks of its own.

        With none cached it goes on waiting. Raises OutOfBlocksError, with nothing changed.
        """
        if not cached_tokens:
            return
        self._place(request, (), cached_tokens)
        self.waiting.remove(request)
        self.join(request, ())

    def abort(self, request: Request) -> None:
        """Drop a request: at once, or when the last step that runs some of its tokens has ended."""
        request.aborted = True
        if not request.in_flight:
            self._drop(request)

    @property
    def busy(self) -> bool:
        """Return True while a step may have something to run, or is under way."""
        return bool(self.waiting or self.running or self.swapped)

    @property
    def unfinished(self) -> int:
        """Return the requests that are not done."""
        return len(self.waiting) + len(self.running) + len(self.swapped)

    # ---- planning

    def schedule(self) -> Plan | None:
        """Return the next step, or None when nothing can run before a step under way has ended."""
        plan = Plan(self._budget, self._share_of_seats())
        self._go_on(plan)
        if not plan.preempted:
            self._swap_in(plan)
        if not plan.preempted and not self.swapped:
            self._admit_batch(plan) if self._role == "prefill" else self._admit(plan)
        for entry in plan.entries:
            entry.sequence.flights += 1
        if not plan.entries:
            return None
        plan.copies, self._due = self._due, []
        return plan

    def _share_of_seats(self) -> int:
        """Return how many sequences one step takes: with stages to keep busy, an equal share of all there are."""
        live = sum(len(request.live) for request in self.running)
        return -(-live // self._depth) if self._depth > 1 and live >= self._depth else self._max_batch

    def _go_on(self, plan: Plan) -> None:
        """Give every running sequence its next tokens, those admitted first before the others."""
        for request in tuple(self.running):
            for sequence in tuple(request.live):
                tokens = chunk_tokens(plan.budget, self._todo(sequence))
                if tokens < 1 or plan.seats < 1 or not sequence.started or request in plan.preempted:
                    continue
                if self._make_room(plan, sequence, tokens):
                    self._enter(plan, sequence, tokens)

    def _todo(self, sequence: Sequence) -> int:
        placed = self.cache.tokens(sequence.id) if sequence.started else 0
        return sequence.request.goal(sequence) - placed

    def _make_room(self, plan: Plan, sequence: Sequence, tokens: int) -> bool:
        """Preempt others until `tokens` fit; return False when they do not, or when it was put out itself."""
        while self.cache.needed_to_grow(sequence.id, tokens) > self.cache.device.available:
            victim = self._last_admitted(plan)
            if victim is None:
                return False
            plan.preempted.add(victim)
            self.preempt(victim)
            if victim is sequence.request:
                return False
        return True

    def _last_admitted(self, plan: Plan) -> Request | None:
        """Return who has to make room, out of those that no step runs or is about to run."""
        free = [it for it in self.running if it not in plan.joined and not it.in_flight]
        prefilling = [it for it in free if self._todo(it.leader) > 1]
        return next(reversed(prefilling if prefill_leaves_first(len(prefilling)) else free), None)

    def _enter(self, plan: Plan, sequence: Sequence, tokens: int) -> None:
        first = self.cache.tokens(sequence.id)
        self._due += self.cache.grow(sequence.id, tokens)
        plan.entries.append(Entry(sequence, first, first + tokens, self._rows(sequence, first + tokens)))
        plan.joined.add(sequence.request)
        plan.budget -= tokens
        self.counters.run_tokens += tokens
        plan.seats -= 1

    def _rows(self, sequence: Sequence, last: int) -> int:
        """Return the rows of logits wanted: one for each answer that starts here, none in the middle of a prompt."""
        if last < len(sequence.tokens):
            return 0
        sampling = sequence.request.sampling
        return sampling.n if not sequence.chosen and not sampling.beam_width else 1

    # ---- room

    def preempt(self, request: Request) -> None:
        """Take the KV blocks of a running request, none of whose tokens are under way.

        All its sequences go together, for they share blocks: to the host, or they start over.
        """
        self.running.remove(request)
        self.counters.preemptions += 1
        started = [sequence.id for sequence in request.live if sequence.started]
        if request.forked and self._worth_keeping(started):
            self.swapped.appendleft(request)
            self._due += self.cache.swap_out(started)
            return
        self._forget(request)
        request.chain = self._chain(request)
        self.waiting.appendleft(request)

    def _worth_keeping(self, sequences: list[int]) -> bool:
        """Return True when the KV of these sequences is to be swapped out rather than computed again."""
        if self._preemption == "recompute":
            return False
        blocks = len({block for sequence in sequences for block in self.cache.blocks(sequence)})
        free = self.cache.host.available
        if self._preemption == "swap":
            return blocks <= free
        cost, tokens = self._preemption, blocks * self.cache.block_tokens
        return bool(swaps(blocks, free, tokens, cost.swap_s_per_block, cost.recompute_s_per_token))

    def _forget(self, request: Request) -> None:
        for sequence in request.live:
            self._free(sequence)
            sequence.row = None

    def _swap_in(self, plan: Plan) -> None:
        """Bring back requests from the host, those preempted last first, for they were admitted before the others."""
        while self.swapped and plan.budget > 0 and plan.seats > 0:
            request = self.swapped[0]
            ids = [sequence.id for sequence in request.live]
            growth = sum(self._todo(sequence) > 0 for sequence in request.live)  # a block each, at the most
            if self.cache.needed_to_swap_in(ids) + growth > self.cache.device.available:
                return
            self._due += self.cache.swap_in(ids)
            self.running.append(self.swapped.popleft())
            for sequence in request.live:
                tokens = chunk_tokens(plan.budget, self._todo(sequence))
                if tokens > 0 and self.cache.needed_to_grow(sequence.id, tokens) <= self.cache.device.available:
                    self._enter(plan, sequence, tokens)

    def _admit(self, plan: Plan) -> None:
        while self.waiting and plan.budget > 0 and plan.seats > 0:
            request = self.waiting[0]
            goal = request.goal(request.leader)
            needed = self.cache.needed_to_start(request.chain, goal)
            members = sum(it.seats for it in self.running) + request.seats - 1
            if not admits_whole(self.cache.device.available, needed, members, self._max_batch):
                return
            self.running.append(self.waiting.popleft())
            known = self.cache.start(request.leader.id, request.chain)
            request.leader.started = True
            self.counters.cached_tokens += known
            self._enter(plan, request.leader, chunk_tokens(plan.budget, goal - known))

    def _admit_batch(self, plan: Plan) -> None:
        """Let whole prompts in, first come, first served, up to a budget of tokens (a prefill instance)."""
        prompts, tokens = 0, 0
        while self.waiting:
            request = self.waiting[0]
            needed = self.cache.needed_to_start(request.chain, len(request.prompt))
            left = len(request.prompt) - self.cache.prefix(request.chain).tokens
            if needed > self.cache.device.available:
                return
            if not joins_batch(prompts, tokens, left, self._max_batch, self._budget):
                return
            self.running.append(self.waiting.popleft())
            self.cache.start(request.leader.id, request.chain)
            request.leader.started = True
            self.counters.cached_tokens += len(request.prompt) - left
            self._enter(plan, request.leader, left)
            prompts, tokens = prompts + 1, tokens + left

    # ---- what a step has brought

    def settle(self, plan: Plan, output: StepOutput) -> list[Request]:
        """Take in the results of a step; return the requests that have new tokens or have ended."""
        row, changed = 0, []
        for entry in plan.entries:
            entry.sequence.flights -= 1
            self.cache.commit(entry.sequence.id, entry.sequence.tokens[entry.first : entry.last])
        for entry in plan.entries:
            request = entry.sequence.request
            if entry.rows and not request.aborted:
                self._choose(entry.sequence, output, range(row, row + entry.rows))
                changed.append(request)
            elif not request.forked and not request.aborted:
                self._share_prompt(request)
            row += entry.rows
        for request in dict.fromkeys(entry.sequence.request for entry in plan.entries):
            if request.aborted and not request.in_flight and request in self.running:
                self._drop(request)
        return list(dict.fromkeys(changed))

    def _share_prompt(self, request: Request) -> None:
        """Let sequences that start over share the prompt, once the first of them has run it."""
        if self.cache.tokens(request.leader.id) < len(request.prompt) or request.leader.flights:
            return
        for sequence in request.live[1:]:
            self.cache.fork(request.leader.id, sequence.id)
            sequence.started = True

    def _choose(self, sequence: Sequence, output: StepOutput, rows: range) -> None:
        request = sequence.request
        if request.prompt_only:
            return
        if request.beams is not None:
            count = request.logprobs_wanted  # rows of others in the step may want more
            sequence.row = (output.top_ids[rows[0], :count], output.top_logprobs[rows[0], :count])
            if all(each.row is not None for each in request.live):
                self._advance_beams(request)
            return
        answers = [sequence, *(self._fork(sequence, index) for index in range(1, len(rows)))]
        for answer, row in zip(answers, rows, strict=True):
            answer.tokens.append(int(output.token_ids[row]))
            self.counters.output_tokens += 1
            if request.sampling.logprobs is not None:
                answer.logprobs.append(float(output.logprobs[row]))
                wanted = request.sampling.logprobs
                ids, values = output.top_ids[row, :wanted].tolist(), output.top_logprobs[row, :wanted].tolist()
                answer.top.append(tuple(zip(ids, values, strict=True)))

    def _fork(self, parent: Sequence, index: int) -> Sequence:
        """Return a new answer that shares all KV blocks of `parent`."""
        child = self._sequence(parent.request, index, list(parent.tokens))
        self.cache.fork(parent.id, child.id)
        child.started = True
        parent.request.live.append(child)
        return child

    def _advance_beams(self, request: Request) -> None:
        """Let the best beams go on: the first child of a beam takes over its blocks, the others fork, the rest end."""
        assert request.beams is not None
        old = list(request.live)
        rows = [sequence.row for sequence in old if sequence.row is not None]
        chosen = request.beams.advance(np.stack([ids for ids, _ in rows]), np.stack([values for _, values in rows]))
        request.live = []
        heirs: dict[int, Sequence] = {}
        for index, (parent, _) in enumerate(chosen):
            heir = heirs.get(parent)
            if heir is None:
                heirs[parent] = old[parent]
                request.live.append(old[parent])
            else:
                self._fork(heir, index)
        for sequence in old:
            sequence.row = None
            if sequence not in request.live:
                self._free(sequence)
        for sequence, (_, token) in zip(request.live, chosen, strict=True):
            sequence.tokens.append(token)
        if not request.live:
            self.running.remove(request)

    # ---- ends

    def finish(self, sequence: Sequence) -> None:
        """End one answer and free its blocks; the request ends with the last one."""
        request = sequence.request
        request.live.remove(sequence)
        self._free(sequence)
        if not request.live and request in self.running:
            self.running.remove(request)

    def _free(self, sequence: Sequence) -> None:
        if sequence.started:
            self.cache.free(sequence.id)
            sequence.started = False

    def _drop(self, request: Request) -> None:
        for queue in (self.waiting, self.running, self.swapped):
            if request in queue:
                queue.remove(request)
        self.held.discard(request)
        self.reserved.pop(request, None)
        for sequence in tuple(request.live):
            self.finish(sequence)

    # ---- parts

    def _sequence(self, request: Request, index: int, tokens: list[int]) -> Sequence:
        self._sequences += 1
        return Sequence(self._sequences, request, index, tokens)

    def _chain(self, request: Request) -> tuple[bytes, ...]:
        if not self.cache.prefix_caching:
            return ()
        return self.cache.prompt_chain(request.leader.tokens[: request.goal(request.leader)])
