"""The process of one instance: takes requests from the conductor, steps its engine, says what came of it.

    python -m runtime.instance        its InstanceTask comes on standard input, which the supervisor keeps open

When standard input ends, the supervisor is gone, and the process ends, too. `Instance.turn` is the whole loop: take in
what was said, admit pulls, step, tell.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections import deque

import msgspec
import numpy as np
import zmq

from planner.errors import InputError
from runtime.answer import Begun
from runtime.engine import Engine, Reserved
from runtime.executor import ServingExecutor
from runtime.messages import (
    Beat,
    Begin,
    Broken,
    Drop,
    Expect,
    FromInstance,
    Hello,
    InstanceTask,
    Join,
    News,
    PullEnded,
    PullStarted,
    Refused,
    Started,
    ToInstance,
    decode_to_instance,
    encode,
)
from runtime.sampling import Sampling
from runtime.scheduler import Plan
from runtime.transfer.pull import Pull, Pulled
from runtime.wire import end_when_disconnected, guard

BEAT_S = 0.5
_IDLE_MS = 200
BEAT_SUFFIX = "!"
"""Ends the identity of the second socket of an instance, that of its signs of life."""


class _Pulling:
    """A request whose KV is on its way, and what has been said of it meanwhile."""

    __slots__ = ("answers", "arrived", "dropped")

    def __init__(self, answers: tuple[Begun, ...] | None):
        self.answers = answers
        self.arrived = self.dropped = False


class Instance:
    """An engine between two sides: the conductor's messages, and the executor's pulls."""

    def __init__(self, engine: Engine, executor: ServingExecutor, wire: zmq.Socket[bytes]):
        self.engine, self._executor, self._wire = engine, executor, wire
        self._expected: deque[Expect] = deque()
        """Waiting for blocks, in order."""
        self._joined_early: dict[str, tuple[Begun, ...]] = {}
        self._pulling: dict[str, _Pulling] = {}
        self._seen: set[str] = set()
        """Requests that a step has run some tokens of."""
        engine.on_submit = self._tell_started

    def turn(self) -> None:
        """Take in what was said, let pulls begin and end, run a step, and say what it has brought."""
        self._wait()
        while self._wire.poll(0):
            self._take(decode_to_instance(self._wire.recv()))
        for pulled in self._executor.pulled():
            self._pull_ended(pulled)
        self._admit_pulls()
        if self.engine.scheduler.busy:
            self._step()

    def _wait(self) -> None:
        """Return at once while there is work, else when there may be some."""
        if self.engine.scheduler.busy and not self.engine.idle:
            return
        poller = zmq.Poller()
        for each in (self._wire, *self._executor.wakers()):
            poller.register(each, zmq.POLLIN)
        poller.poll(_IDLE_MS)

    def say(self, message: FromInstance) -> None:
        """Send to the conductor."""
        self._wire.send(encode(message))

    # ---- what the conductor says

    def _take(self, message: ToInstance) -> None:
        match message:
            case Begin():
                self._begin(message)
            case Expect():
                self._expected.append(message)
            case Join(key, answers):
                self._join(key, answers)
            case Drop(key):
                self._drop(key)

    def _begin(self, begin: Begin) -> None:
        sampling = Sampling(max_tokens=2, ignore_eos=True, seed=0) if begin.prompt_only else begin.sampling
        try:
            self.engine.add(begin.prompt, sampling, begin.key, begin.answers, begin.prompt_only)
        except InputError as error:
            self.say(Refused(begin.key, str(error)))

    def _join(self, key: str, answers: tuple[Begun, ...]) -> None:
        pulling = self._pulling.get(key)
        if pulling is None:
            if any(expect.key == key for expect in self._expected):
                self._joined_early[key] = answers
            return
        pulling.answers = answers
        self._run_if_whole(key, pulling)

    def _drop(self, key: str) -> None:
        """Free a request: at once, or where its KV is being pulled, when nobody writes to its blocks any more."""
        self._expected = deque(expect for expect in self._expected if expect.key != key)
        self._joined_early.pop(key, None)
        self._seen.discard(key)
        pulling = self._pulling.get(key)
        if pulling is None or pulling.arrived:
            self._pulling.pop(key, None)
            self.engine.abort(key)
            return
        pulling.dropped = True
        self._executor.cancel_pull(key)

    # ---- pulls

    def _admit_pulls(self) -> None:
        """Reserve blocks for the next expected requests, in order, and let their pulls begin."""
        most = self.engine.settings.max_pulls
        while self._expected and sum(not each.arrived for each in self._pulling.values()) < most:
            expect = self._expected[0]
            try:
                reserved = self.engine.reserve(expect.prompt, expect.cached_tokens, expect.sampling, expect.key)
            except InputError as error:
                self._expected.popleft()
                self.say(Refused(expect.key, str(error)))
                continue
            if reserved is None:
                return
            self._expected.popleft()
            self._pull(expect, reserved)

    def _pull(self, expect: Expect, reserved: Reserved) -> None:
        """Pull the blocks that are not here yet."""
        self._pulling[expect.key] = _Pulling(self._joined_early.pop(expect.key, None))
        now_s = time.monotonic()
        self.say(PullStarted(expect.key, now_s))
        known = reserved.known_tokens // self.engine.settings.block_tokens
        if known == len(reserved.blocks):
            self._pull_ended(Pulled(expect.key, now_s, now_s, 0.0, 0))
            return
        source = np.array(expect.blocks[known : len(reserved.blocks)], np.int64)
        target = np.array(reserved.blocks[known:], np.int64)
        self._executor.pull(Pull(expect.key, expect.ticket, expect.sources, source, target))

    def _pull_ended(self, pulled: Pulled) -> None:
        pulling = self._pulling[pulled.key]
        if pulling.dropped or pulled.error:
            del self._pulling[pulled.key]
            self.engine.abort(pulled.key)
        else:
            pulling.arrived = True
        if not pulling.dropped:
            self.say(PullEnded(pulled.key, pulled.end_s, pulled.copied_s, pulled.size, pulled.error))
        if pulling.arrived:
            self._run_if_whole(pulled.key, pulling)

    def _run_if_whole(self, key: str, pulling: _Pulling) -> None:
        """Let a request run once both its KV and its first tokens are here."""
        if pulling.arrived and pulling.answers is not None:
            del self._pulling[key]
            self.engine.join(key, pulling.answers)

    # ---- steps

    def _step(self) -> None:
        deltas = self.engine.step()
        handed_over = tuple((it.request_id, it.answers) for it in self.engine.take_handed_over())
        self._seen.difference_update(delta.request_id for delta in deltas if delta.last)
        if deltas or handed_over:
            self.say(News(time.monotonic(), tuple(deltas), handed_over))

    def _tell_started(self, plan: Plan) -> None:
        """Say which requests run for the first time in a step that is about to begin."""
        now_s = time.monotonic()
        for entry in plan.entries:
            request = entry.sequence.request
            if request.id not in self._seen:
                self._seen.add(request.id)
                blocks = list(self.engine.cache.blocks(entry.sequence.id)) if request.ticket else []
                cached = entry.first if self.engine.settings.role != "decode" else 0
                self.say(Started(request.id, now_s, cached, request.ticket, blocks))

    def beat(self) -> Beat:
        """Return a sign of life. Called from another thread: it only reads numbers."""
        engine, counters = self.engine, self.engine.counters
        scheduler = engine.scheduler
        return Beat(
            at_s=time.monotonic(),
            running=len(scheduler.running) + len(scheduler.held),
            waiting=len(scheduler.waiting) + len(scheduler.swapped) + len(self._expected) + len(self._pulling),
            used_blocks=engine.cache.counts().used,
            steps=counters.steps,
            run_tokens=counters.run_tokens,
            output_tokens=counters.output_tokens,
            cached_tokens=counters.cached_tokens,
            preemptions=counters.preemptions,
        )


def main() -> None:
    """Serve until standard input ends or the process is told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, which then ends its instances
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=InstanceTask)
    threading.Thread(target=_end_with_supervisor, daemon=True).start()
    context = zmq.Context()
    wire = _connect(context, task, task.name)
    try:
        instance = _open(task, wire)
        threading.Thread(target=_beat, args=(context, task, instance), daemon=True).start()
        while True:
            instance.turn()
    except Exception as error:
        why = str(error) or type(error).__name__
        wire.send(encode(Broken(why, traceback.format_exc())))
        wire.close(linger=1000)
        context.term()
        print(traceback.format_exc(), file=sys.stderr, flush=True)
        os._exit(1)  # threads that pull or beat are not waited for


def _open(task: InstanceTask, wire: zmq.Socket[bytes]) -> Instance:
    from runtime.load import load_serving
    from runtime.settings import EngineSettings

    settings = msgspec.convert(task.settings, EngineSettings)
    engine, executor = load_serving(task.source, settings, task.load_format)  # type: ignore[arg-type]
    instance = Instance(engine, executor, wire)
    process_ids = (os.getpid(), *getattr(executor, "process_ids", ()))
    instance.say(Hello(process_ids, executor.kv_blocks, executor.sources))
    return instance


def _connect(context: zmq.Context[zmq.Socket[bytes]], task: InstanceTask, identity: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    socket.setsockopt(zmq.SNDHWM, 0)  # nothing is dropped: what is said must arrive, or the process is lost
    socket.setsockopt(zmq.RCVHWM, 0)
    if task.server_key:
        guard(socket, task.server_key)
        end_when_disconnected(socket)
    socket.connect(task.conductor)
    return socket


def _beat(context: zmq.Context[zmq.Socket[bytes]], task: InstanceTask, instance: Instance) -> None:
    socket = _connect(context, task, task.name + BEAT_SUFFIX)
    while True:
        socket.send(encode(instance.beat()))
        time.sleep(BEAT_S)


def _end_with_supervisor() -> None:
    while sys.stdin.buffer.read(1024):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
