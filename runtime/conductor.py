"""Leads requests through the instances of a deployment. It holds no tensors: blocks and layers are for instances.

A request arrives, is sent to the prefill instance with the least work left, and, once its prompt begins to run, to the
decode instance with the smallest load, which pulls its KV meanwhile (policies of `planner.policies.routing`, as in the
simulator). Aggregated instances do both. When an instance is lost, its requests start over on what is left, or wait for
it: tokens that the client has are kept, their KV is computed again.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from planner.errors import InputError
from planner.policies.decode import blocks_for
from planner.policies.routing import decode_load, pick_least, work_left_s
from planner.specs.deployment import Deployment, InstanceSpec
from planner.specs.slo import Slo, attains, tpot_s
from runtime.admissible import Room, check_request, no_room_for
from runtime.answer import Delta
from runtime.host_messages import AGENT
from runtime.hosts import Hosts
from runtime.instance import BEAT_SUFFIX
from runtime.messages import (
    Beat,
    Begin,
    Broken,
    Drop,
    Expect,
    FromInstance,
    Hello,
    Join,
    News,
    PullEnded,
    PullStarted,
    Refused,
    Started,
    ToInstance,
    decode_from_instance,
    encode,
)
from runtime.model_config import ModelConfig
from runtime.predict import Law
from runtime.sampling import Sampling
from runtime.service import InstanceState, RejectedError, Snapshot, Times, UnavailableError
from runtime.supervisor import Supervisor
from runtime.tokenizer import Tokenizer
from runtime.tracked import Tracked
from runtime.transfer.base import Source
from runtime.wire import Keys, bind_guarded

log = logging.getLogger("goodput.conductor")

_MOST_TRIES = 4
_FAREWELL_MS = 300
"""For what other hosts are told last."""
_JUDGED = 500
"""Requests over which attainment is told."""


@dataclass(slots=True, eq=False)
class Member:
    """One instance, as far as it is known here."""

    spec: InstanceSpec
    law: Law
    room: Room
    ready: bool = False
    identity: str = ""
    process_ids: tuple[int, ...] = ()
    sources: tuple[Source, ...] = ()
    beat: Beat = field(default_factory=lambda: Beat(0.0))
    batch: list[int] = field(default_factory=list)
    """Prompts of the batch that a prefill instance runs."""
    batch_at_s: float = 0.0
    busy_until_s: float = 0.0
    queued_s: float = 0.0

    @property
    def name(self) -> str:
        """Return its name in the deployment."""
        return self.spec.name

    def starts_prompt(self, tokens: int, at_s: float) -> None:
        """Take note of a prompt that has begun to run; those of one batch begin at the same time."""
        if at_s != self.batch_at_s:
            self.batch, self.batch_at_s = [], at_s
        self.batch.append(tokens)
        self.busy_until_s = at_s + self.law.slowest_share * self.law.prompts_s(self.batch)

    def lose(self) -> None:
        """Forget what died with its process."""
        self.ready, self.sources, self.process_ids = False, (), ()
        self.beat, self.queued_s, self.busy_until_s = Beat(0.0), 0.0, 0.0


class Conductor:
    """A `Service` over the instances of one deployment."""

    def __init__(
        self,
        deployment: Deployment,
        model: str,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        supervisor: Supervisor,
        *,
        reject: bool = False,
        overlap: bool = True,
        hosts: Hosts | None = None,
    ):
        self.deployment, self.model, self.config, self.tokenizer = deployment, model, config, tokenizer
        self._supervisor, self._reject, self._overlap = supervisor, reject, overlap
        self._hosts = hosts
        self._members = {spec.name: _member(deployment, spec) for spec in deployment.instances}
        self._order = list(self._members.values())
        self._routes = {(route.source, route.target) for route in deployment.routes}
        self._first_at_prefill = deployment.engine.first_token_at == "prefill"
        self._requests: dict[str, Tracked] = {}
        """By key of the current try."""
        self._parked: deque[Tracked] = deque()
        """Accepted, while no instance that could take them is ready."""
        self._last_entry = self._last_target = -1
        self._ids = count(1)
        self._counts = dict.fromkeys(("accepted", "finished", "cancelled", "rejected", "lost", "retries"), 0)
        self._met: deque[bool] = deque(maxlen=_JUDGED)
        self.draining = False
        self._socket: zmq.asyncio.Socket | None = None

    # ---- the wire

    def bind(self, address: str) -> str:
        """Listen for instances at a ZeroMQ address; return the one to connect to."""
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)  # nothing is dropped
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.bind(address)
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def listen(self, address: str, keys: Keys) -> str:
        """Listen for other hosts, too, at a tcp:// address; return the one to connect to. Raises InputError."""
        assert self._socket is not None
        return bind_guarded(self._socket, address, keys)

    async def run(self) -> None:
        """Take in what instances and agents say, for ever."""
        assert self._socket is not None
        while True:
            sender, payload = await self._socket.recv_multipart()
            try:
                identity = sender.decode()
                if self._hosts is not None and identity.startswith(AGENT):
                    self._hosts.hear(identity, payload)
                else:
                    self._hear(identity, decode_from_instance(payload))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # whoever it is, no instance of ours
                log.warning("%r sent what cannot be read, and was ignored: %s", sender, error)

    def close(self) -> None:
        """Leave the wire."""
        if self._socket is not None:
            self._socket.close(linger=0 if self._hosts is None else _FAREWELL_MS)

    def _send(self, member: Member, message: ToInstance) -> None:
        self.tell(member.identity, encode(message))

    def tell(self, identity: str, payload: bytes) -> None:
        """Send to whoever has that identity on the wire."""
        assert self._socket is not None
        self._socket.send_multipart([identity.encode(), payload])

    def _hear(self, identity: str, message: FromInstance) -> None:
        identity = identity.removesuffix(BEAT_SUFFIX)
        name = identity.rpartition("@")[0]
        keeper = self._keeper(name)
        if not keeper.is_current(identity):
            return  # the last words of a process that was ended
        member = self._members[name]
        keeper.beat(identity, ready=isinstance(message, Hello))
        if isinstance(keeper, Hosts):
            message = keeper.here(identity, message)
        match message:
            case Beat():
                member.beat = message
            case Hello():
                self._joined(member, identity, message)
            case Started():
                self._started(member, message)
            case News(at_s, deltas, handed_over):
                for delta in deltas:
                    self._tell(member, delta)
                for key, answers in handed_over:
                    self._handed_over(key, answers, at_s)
            case PullStarted(key, at_s):
                if request := self._requests.get(key):
                    request.times.pull_start_s = at_s
            case PullEnded():
                self._pull_ended(message)
            case Refused(key, why):
                if request := self._requests.get(key):
                    self._end(request, "lost", InputError(why))
            case Broken(why, traceback):
                log.error("%s: %s\n%s", member.name, why, traceback)

    def _keeper(self, name: str) -> Supervisor | Hosts:
        """Return who keeps account of an instance's process."""
        return self._hosts if self._hosts is not None and self._hosts.knows(name) else self._supervisor

    # ---- Service

    @property
    def ready(self) -> bool:
        """Return True while every instance can take requests."""
        return not self.draining and all(member.ready for member in self._order)

    def submit(self, prompt: Sequence[int], sampling: Sampling, request_id: str = "") -> Tracked:
        """Take in a request; see `Service`."""
        if self.draining:
            raise UnavailableError("the server is about to stop; send the request elsewhere")
        check_request(prompt, sampling, self.config, self.tokenizer is not None)
        self._check_room(prompt, sampling)
        if sampling.seed is None:  # drawn here, so that a second try draws the same
            sampling = replace(sampling, seed=secrets.randbits(62))
        name = f"{request_id or 'request'}-{next(self._ids)}"
        request = Tracked(name, list(prompt), sampling, Times(arrival_s=time.monotonic()), self._cancelled)
        if self._reject:
            self._check_slo(request)
        self._counts["accepted"] += 1
        self._requests[request.key] = request
        self._route(request)
        return request

    def _check_room(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Raise InputError when the largest instance of some phase that it has to pass cannot ever hold it."""
        for phase in dict.fromkeys(member.spec.phase for member in self._order):
            rooms = [member.room for member in self._order if member.spec.phase == phase]
            reasons = [no_room_for(len(prompt), sampling, room) for room in rooms]
            if all(reasons):
                raise InputError(reasons[0] or "")

    def _check_slo(self, request: Tracked) -> None:
        """Raise RejectedError when its TTFT is predicted to be past what every class of requests is promised."""
        entries = [member for member in self._order if self._may_enter(member, request)]
        if not entries:
            return
        bound_s = max(slo.ttft_s for slo in self.deployment.slo)
        tokens = len(request.prompt)
        ttft_s = min(self._work_left_s(member) + member.law.prompts_s([tokens]) for member in entries)
        if ttft_s > bound_s:
            self._counts["rejected"] += 1
            message = f"its first token would come after {ttft_s:.2f} s, {bound_s:.2f} s are promised"
            raise RejectedError(message, ttft_s - bound_s)

    def snapshot(self) -> Snapshot:
        """Return what is going on."""
        attained = {"all": sum(self._met) / len(self._met)} if self._met else {}
        states = tuple(self._state(member) for member in self._order)
        return Snapshot(states, len(self._requests), **self._counts, attained=attained)

    def _state(self, member: Member) -> InstanceState:
        counts = msgspec.structs.asdict(member.beat)
        del counts["at_s"]
        return InstanceState(
            name=member.name,
            phase=member.spec.phase,
            state="ready" if member.ready else "starting",
            kv_blocks=member.room.kv_blocks,
            starts=self._keeper(member.name).starts(member.name),
            process_ids=member.process_ids,
            **counts,
        )

    # ---- routing

    def _route(self, request: Tracked) -> None:
        """Send a request to the instance with the least work left; it waits while none is ready."""
        at = self._least(self._work_left_s, lambda member: self._may_enter(member, request), self._last_entry)
        if at < 0:
            self._parked.append(request)
            return
        self._last_entry, member = at, self._order[at]
        request.entry, request.queued_s = member.name, member.law.alone_s(len(request.prompt))
        request.times.prefill_at = member.name
        member.queued_s += request.queued_s
        begun, prompt_only = request.begun, False
        if member.spec.phase == "prefill":  # answers go on, and beams begin, where they decode
            begun, prompt_only = (), bool(begun) or request.sampling.beam_width > 0
        self._send(member, Begin(request.key, request.prompt, request.sampling, begun, prompt_only))

    def _least(self, score: Callable[[Member], float], may: Callable[[Member], bool], last: int) -> int:
        """Return the place of the instance that may and has the least score, or -1; ties go on from the `last` pick."""
        scores = np.array([score(member) for member in self._order])
        return int(pick_least(scores, np.array([float(may(member)) for member in self._order]), last))

    def _may_enter(self, member: Member, request: Tracked) -> bool:
        return member.spec.phase != "decode" and self._can_hold(member, request)

    def _can_hold(self, member: Member, request: Tracked) -> bool:
        return member.ready and not no_room_for(len(request.prompt), request.sampling, member.room)

    def _work_left_s(self, member: Member) -> float:
        now_s = time.monotonic()
        busy_until_s = member.busy_until_s
        if member.spec.phase == "aggregated":  # its steps can be joined soon: what counts is how long they have become
            decoding = [it for it in self._requests.values() if it.entry == member.name and it.told]
            busy_until_s = now_s + member.law.step_s(len(decoding), sum(it.tokens for it in decoding))
        return float(work_left_s(now_s, busy_until_s, member.queued_s))

    def _route_on(self, request: Tracked) -> None:
        """Choose the decode instance of a prompt that runs; it is asked again later while none is ready."""
        assert request.started is not None
        at = self._least(self._load, lambda member: self._may_decode(request, member), self._last_target)
        if at < 0:
            return
        self._last_target, member, started = at, self._order[at], request.started
        request.target = request.times.decode_at = member.name
        sources = self._members[request.entry].sources
        expect = Expect(
            request.key, request.prompt, request.sampling, request.pulls, sources, started.ticket, started.blocks
        )
        self._send(member, expect)
        if request.handed_over is not None:
            self._send(member, Join(request.key, request.handed_over))

    def _may_decode(self, request: Tracked, member: Member) -> bool:
        return (request.entry, member.name) in self._routes and self._can_hold(member, request)

    def _load(self, member: Member) -> float:
        """Return the share of a decode instance's blocks that is spoken for."""
        block_tokens = self.deployment.engine.block_tokens
        mine = (it for it in self._requests.values() if it.target == member.name)
        return float(decode_load(sum(blocks_for(it.tokens, block_tokens) for it in mine), 0, member.room.kv_blocks))

    # ---- what instances say

    def _joined(self, member: Member, identity: str, hello: Hello) -> None:
        """An instance is ready: what waited for one like it goes on."""
        member.ready, member.identity = True, identity
        member.process_ids, member.sources = hello.process_ids, hello.sources
        parked, self._parked = self._parked, deque()
        for request in parked:
            self._route(request)
        for request in self._requests.values():
            runs = request.started is not None and (self._overlap or request.handed_over is not None)
            if runs and not request.target and request.goes_on and member.spec.phase == "decode":
                self._route_on(request)

    def _started(self, member: Member, started: Started) -> None:
        request = self._requests.get(started.key)
        if request is None:
            return
        if member.spec.phase == "decode":
            request.times.first_step_s = started.at_s
            for delta in request.kept_back:
                self._pass_on(request, delta)
            request.kept_back.clear()
            return
        self._leave_queue(member, request)
        request.times.prefill_start_s = started.at_s
        request.times.cached_tokens = started.cached_tokens
        if member.spec.phase == "prefill":
            request.started = started
            member.starts_prompt(len(request.prompt), started.at_s)
            if request.goes_on and self._overlap:
                self._route_on(request)

    def _leave_queue(self, member: Member, request: Tracked) -> None:
        member.queued_s = max(0.0, member.queued_s - request.queued_s)
        request.queued_s = 0.0

    def _handed_over(self, key: str, answers: tuple, at_s: float) -> None:
        request = self._requests.get(key)
        if request is None:
            return
        request.times.prefill_end_s = at_s
        request.handed_over = request.begun or answers
        if request.target:
            self._send(self._members[request.target], Join(key, request.handed_over))
        elif request.started is not None:
            self._route_on(request)

    def _pull_ended(self, ended: PullEnded) -> None:
        request = self._requests.get(ended.key)
        if request is None:
            return
        if ended.error:
            self._start_over(request, ended.error)
            return
        request.pulled, request.times.pull_end_s = True, ended.at_s
        self._send(self._members[request.entry], Drop(ended.key))

    def _tell(self, member: Member, delta: Delta) -> None:
        request = self._requests.get(delta.request_id)
        if request is None:
            return
        if member.spec.phase == "prefill" and not self._first_at_prefill and not delta.finish_reason:
            request.kept_back.append(delta)
            return
        if member.spec.phase != "decode" and math.isnan(request.times.prefill_end_s):
            request.times.prefill_end_s = time.monotonic()
        self._pass_on(request, delta)

    def _pass_on(self, request: Tracked, delta: Delta) -> None:
        if math.isnan(request.times.first_token_s):
            request.times.first_token_s = time.monotonic()
        request.tell(replace(delta, request_id=request.request_id))
        if delta.last:
            self._end(request, "finished")

    # ---- ends

    def _end(self, request: Tracked, how: str, error: Exception | None = None) -> None:
        """Take a request off the list, and off the instances that may still hold something of it."""
        if request.done:
            return
        request.done, request.times.finish_s = True, time.monotonic()
        self._forget(request)
        self._counts[how] += 1
        if how == "finished":
            self._judge(request)
        if error is not None:
            request.fail(error)

    def _forget(self, request: Tracked) -> None:
        del self._requests[request.key]
        with suppress(ValueError):
            self._parked.remove(request)
        if request.entry and request.queued_s:
            self._leave_queue(self._members[request.entry], request)
        for name in filter(None, (request.entry, request.target)):
            if self._members[name].ready:
                self._send(self._members[name], Drop(request.key))

    def _cancelled(self, request: Tracked) -> None:
        self._end(request, "cancelled")

    def _judge(self, request: Tracked) -> None:
        times = request.times
        tokens = max((len(ids) for ids in request.told.values()), default=0)
        pace_s = tpot_s(times.first_token_s, times.finish_s, tokens)
        slo: Slo = self.deployment.slo[0]
        self._met.append(bool(attains(times.first_token_s - times.arrival_s, pace_s, slo)))

    # ---- faults

    def lost(self, name: str, why: str) -> None:
        """An instance is gone: its requests start over elsewhere, or when it is back."""
        member = self._members[name]
        log.warning("%s %s; starting it again", name, why)
        member.lose()
        for request in list(self._requests.values()):
            if name == request.target or (name == request.entry and not request.pulled):
                self._start_over(request, f"{name} {why}")

    def _start_over(self, request: Tracked, why: str) -> None:
        if request.times.retries + 1 >= _MOST_TRIES:
            message = f"given up after {_MOST_TRIES} tries, the last of which failed: {why}"
            self._end(request, "lost", UnavailableError(message))
            return
        self._counts["retries"] += 1
        self._forget(request)
        request.start_over()
        self._requests[request.key] = request
        self._route(request)


def _member(deployment: Deployment, spec: InstanceSpec) -> Member:
    limits = spec.limits
    room = Room(limits.kv_blocks, limits.block_tokens, limits.max_batch, prompts_only=spec.phase == "prefill")
    return Member(spec, Law.of(deployment.costs[spec.cost]), room)
