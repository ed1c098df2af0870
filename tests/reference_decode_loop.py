"""A plain decode loop that pulls by itself: the oracle for `simulator/in_loop.py`, request by request.

One coroutine's view: the loop waits, looks, decides, and waits again, and everybody else moves while it waits. One
prefill instance of one stage feeds one decode instance of any depth.
"""

from __future__ import annotations

from math import ceil, inf
from random import Random

from planner.simulator.cluster import Instance, Limits, LoopPulls, System
from planner.specs.workload import Requests
from tests.reference_simulator import LONGEST_OUTPUT, LONGEST_PROMPT, Job, Lane, Reference, joins_batch, random_cost

EMPTY_TURN_S = 3e-3


class DecodeLoop(Reference):
    """The two instances; `run()` plays the requests to the end."""

    def __init__(self, system: System, requests: Requests) -> None:
        super().__init__(system, requests)
        assert system.loop_pulls is not None
        self.pulls = system.loop_pulls
        self.giver, self.box = sorted(self.boxes, key=lambda box: box.spec.phase == "decode")
        self.coming = [job for job in self.jobs if self._fits(self.giver, job)]
        self.left = len(self.coming)
        self.batch: list[Job] = []
        self.batch_end_s = inf
        self.may_start_s = 0.0
        self.accepted: list[Job] = []
        self.end_s: dict[int, float] = {}
        self.now_s = 0.0

    def run(self) -> Reference:
        for job in self.coming:
            job.prefill_at = self.giver.number
        turn = 0
        while self.left > 0:
            self._take_turn(turn)
            turn = (turn + 1) % len(self.box.lanes)
        return self

    # ---- the loop

    def _take_turn(self, turn: int) -> None:
        box, lane = self.box, self.box.lanes[turn]
        if lane.in_flight:
            self._wait(self.end_s[turn])
        self._idle()
        self._accept()
        self._grow(box, lane)
        self._swap_in_all(lane)
        joined = self._join(lane)
        if lane.running:
            times = box.iterate(self.now_s, lane.penalty_s, [], lane.running)
            lane.penalty_s, lane.in_flight, self.end_s[turn] = 0.0, True, times[-1]
            for job in joined:
                job.first_step_s = times[0]
            if not box.lanes[(turn + 1) % len(box.lanes)].in_flight:
                self._wait(self.now_s + self.pulls.look_again_s)
        else:
            self._wait(self.now_s + EMPTY_TURN_S)

    def _accept(self) -> None:
        box = self.box
        while box.queue:
            job, waiting = box.queue[0], sum(box.held[other] for other in self.accepted)
            blocks, members = box.blocks(job.prompt + 1), box.members + len(self.accepted)
            if waiting >= self.pulls.share * box.spec.limits.kv_blocks or blocks > box.free_blocks:
                return
            if members >= box.spec.limits.max_batch:
                return
            box.queue.pop(0)
            box.hold(job, blocks)
            self.accepted.append(job)
            job.pull_start_s = self.now_s
            bytes_per_stage = job.prompt * self.system.kv_bytes_per_token / len(box.lanes)
            self._wait(self.now_s + self.pulls.pull_s + bytes_per_stage / self.pulls.bytes_per_s, job)

    def _swap_in_all(self, lane: Lane) -> None:
        box = self.box
        while box.swapped and box.blocks(box.swapped[0].context) <= box.free_blocks:
            job = box.swapped.pop(0)
            box.hold(job, box.blocks(job.context))
            lane.running.append(job)
            lane.penalty_s += box.held[job] * self._block_swap_s(box)

    def _join(self, lane: Lane) -> list[Job]:
        box, joined = self.box, list[Job]()
        regardless = not any(other.running for other in box.lanes)
        while self.accepted:
            fits = not box.swapped and box.blocks(self.accepted[0].prompt + 1) <= box.free_blocks
            if not fits and not regardless:
                break
            joined.append(self.accepted.pop(0))
        for job in joined:
            job.generated = 1
            lane.running.append(job)
        return joined

    # ---- what happens meanwhile

    def _wait(self, until_s: float, pulled: Job | None = None) -> None:
        """Let time pass: steps end, prefills end and begin; at the end of it the pull of `pulled` is over."""
        self.now_s = until_s
        for turn, lane in enumerate(self.box.lanes):
            if lane.in_flight and self.end_s[turn] <= until_s:
                lane.in_flight = False
                for job in lane.running:
                    job.generated += 1
                self.left -= sum(job.generated == job.output for job in lane.running)
                self._finish(self.box, lane, self.end_s[turn])
        self._prefill(until_s)
        if pulled is not None:
            pulled.pull_end_s = until_s
            self._give_back(pulled, until_s)
            self._prefill(until_s)

    def _idle(self) -> None:
        """With nobody here, wait for the next prefill that is not over with its one token."""
        box = self.box
        if box.swapped or self.accepted or any(lane.running for lane in box.lanes):
            return
        while self.left > 0 and not box.queue:
            start_s = max(self.giver.stage_free_s[0], self.coming[0].arrival_s) if self.coming else inf
            self._wait(max(self.now_s, self.batch_end_s if self.batch else start_s))

    def _give_back(self, job: Job, now_s: float) -> None:
        del self.giver.held[job]
        self.may_start_s = min(self.may_start_s, now_s)

    def _prefill(self, until_s: float) -> None:
        """Let the prefill instance end and begin batches up to a moment."""
        while True:
            if self.batch:
                if self.batch_end_s > until_s:
                    return
                self._end_batch()
            start_s = max(self.may_start_s, self.giver.stage_free_s[0])
            start_s = max(start_s, self.coming[0].arrival_s) if self.coming else inf
            if start_s > until_s:
                return
            self._begin_batch(start_s)

    def _begin_batch(self, start_s: float) -> None:
        box, limits = self.giver, self.giver.spec.limits
        # an idle instance starts with the first to come, even when others come in the same instant
        first_only = start_s == self.coming[0].arrival_s
        while self.coming and self.coming[0].arrival_s <= start_s and not (first_only and self.batch):
            job, tokens = self.coming[0], sum(job.prompt for job in self.batch)
            if box.blocks(job.prompt) > box.free_blocks:
                break
            if not joins_batch(len(self.batch), tokens, job.prompt, limits.max_batch, limits.max_tokens):
                break
            self.batch.append(self.coming.pop(0))
            box.hold(job, box.blocks(job.prompt))
            job.prefill_start_s = start_s
        if self.batch:
            self.batch_end_s = box.iterate(start_s, 0.0, [(job.prompt, 0) for job in self.batch], [])[-1]
        else:
            self.may_start_s = inf  # until somebody gives blocks back

    def _end_batch(self) -> None:
        batch, self.batch = self.batch, []
        for job in batch:
            job.prefill_end_s = self.batch_end_s
            if job.output == 1:
                job.first_step_s = job.finish_s = self.batch_end_s
                self._give_back(job, self.batch_end_s)
                self.left -= 1
            else:
                job.decode_at = self.box.number
                self.box.queue.append(job)


def random_loop(r: Random) -> System:
    """Return a prefill instance and a decode instance that pulls in its loop, most often short of blocks."""
    block_tokens = r.choice([1, 4, 16])
    longest = ceil((LONGEST_PROMPT + LONGEST_OUTPUT) / block_tokens)
    limits = [
        Limits(
            r.choice([3, 8, 64]),
            r.choice([16, 120]),
            r.randint(longest, r.choice([2, 9, 90]) * longest),
            block_tokens,
            r.choice([1e4, 1e6]),
        )
        for _ in range(2)
    ]
    instances = (
        Instance("prefill", random_cost(r, 1), limits[0]),
        Instance("decode", random_cost(r, r.randint(1, 3)), limits[1]),
    )
    pulls = LoopPulls(
        r.choice([0.0, r.uniform(0, 0.005)]),
        r.choice([inf, 1e6]),
        r.choice([0.02, 0.05, 0.5]),
        r.choice([0.0, r.uniform(0, 0.01)]),
    )
    return System(instances, 100.0, first_token_at="prefill", loop_pulls=pulls)
