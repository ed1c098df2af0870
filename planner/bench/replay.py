"""All requests of a load, sent when they are due: an open loop waits for nobody, a closed one for its answers."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import nan
from time import monotonic, process_time
from typing import TYPE_CHECKING

from planner.bench.answer import Answer, ask, body_of
from planner.bench.load import Load
from planner.bench.prompts import Prompts
from planner.bench.server import Server
from planner.specs.workload import Clients

if TYPE_CHECKING:
    import httpx

_BEAT_S = 0.02
_LEAD_S = 0.2
"""From the start of the replay to its time 0, so that the first request is no later than the others."""


@dataclass(slots=True)
class Sent:
    """One request that was sent."""

    row: int
    """Its place in the load."""
    due_s: float
    """When it should have left, counted from the start of the replay: its arrival."""
    sent_s: float = nan
    answer: Answer = field(default_factory=Answer)


@dataclass(slots=True)
class Replayed:
    """What happened to a load."""

    start_s: float = nan
    """time.monotonic at time 0."""
    sent: list[Sent] = field(default_factory=list)
    beats_late_s: list[float] = field(default_factory=list)
    """How late the client's own loop was, each 20 ms: time stamps may be off by as much."""
    cpu_s: float = 0.0
    wall_s: float = 0.0
    interrupted: bool = False

    @property
    def finished(self) -> int:
        """Return how many requests have ended, well or not."""
        return sum(one.answer.status != "cut" for one in self.sent)

    @property
    def failed(self) -> int:
        """Return how many of them got no whole answer."""
        return sum(one.answer.status not in ("ok", "cut") for one in self.sent)


@dataclass(frozen=True, slots=True)
class Sender:
    """What it takes to send a load."""

    client: httpx.AsyncClient
    server: Server
    load: Load
    prompts: Prompts
    timeout_s: float
    result: Replayed = field(default_factory=Replayed)

    def body(self, row: int) -> bytes:
        """Return the body of one request; it takes about a millisecond for some thousand tokens."""
        return body_of(self.server, self.prompts[row], int(self.load.requests.output_tokens[row]))

    def now_s(self) -> float:
        """Return the time since the start of the replay [s]."""
        return monotonic() - self.result.start_s

    async def until(self, due_s: float) -> None:
        """Wait until then."""
        await asyncio.sleep(max(0.0, due_s - self.now_s()))

    async def send(self, row: int, due_s: float, body: bytes) -> None:
        """Send one request and wait for its end."""
        one = Sent(row, due_s, self.now_s())
        self.result.sent.append(one)
        await ask(self.client, self.server, body, one.answer, self.timeout_s)


async def replay(sender: Sender, watch: Callable[[Replayed], None], every_s: float = 0.5) -> Replayed:
    """Return what happened to the load. Ctrl-C or SIGTERM ends it at once; what was measured by then is returned.

    `watch` is called each `every_s` with what has happened so far.
    """
    result = sender.result
    with _no_garbage():
        result.start_s, cpu_s = monotonic() + _LEAD_S, process_time()
        await _run(sender, watch, every_s)
        result.cpu_s, result.wall_s = process_time() - cpu_s, sender.now_s() + _LEAD_S
    return result


async def _run(sender: Sender, watch: Callable[[Replayed], None], every_s: float) -> None:
    result, loop = sender.result, asyncio.get_running_loop()
    sending = loop.create_task(_closed_loop(sender) if sender.load.clients else _open_loop(sender))
    beside = [loop.create_task(_beat(result)), loop.create_task(_look(result, watch, every_s))]

    def stop() -> None:
        result.interrupted = True
        sending.cancel()

    with _on_interrupt(stop):
        try:
            await sending
        except asyncio.CancelledError:
            if not result.interrupted:
                raise
        finally:
            for task in beside:
                task.cancel()


async def _open_loop(sender: Sender) -> None:
    async with asyncio.TaskGroup() as group:
        for row, due_s in enumerate(sender.load.requests.arrival_s.tolist()):
            body = sender.body(row)  # made before it is due
            await sender.until(due_s)
            group.create_task(sender.send(row, due_s, body))


async def _closed_loop(sender: Sender) -> None:
    """Whoever is free takes the next request in order, as in `simulator.cluster.simulate_clients`."""
    clients, count = sender.load.clients, len(sender.load.requests)
    assert clients is not None
    rows, pauses_s = iter(range(count)), clients.pauses_s(count).tolist()
    async with asyncio.TaskGroup() as group:
        for start_s in clients.starts_s(count)[: clients.count].tolist():
            group.create_task(_one_client(sender, clients, start_s, rows, pauses_s))


async def _one_client(
    sender: Sender, clients: Clients, start_s: float, rows: Iterator[int], pauses_s: list[float]
) -> None:
    await sender.until(min(start_s, clients.until_s))
    while sender.now_s() < clients.until_s and (row := next(rows, None)) is not None:
        body = sender.body(row)
        await sender.send(row, sender.now_s(), body)
        await sender.until(min(sender.now_s() + pauses_s[row], clients.until_s))


async def _beat(result: Replayed) -> None:
    while True:
        before_s = monotonic()
        await asyncio.sleep(_BEAT_S)
        result.beats_late_s.append(monotonic() - before_s - _BEAT_S)


async def _look(result: Replayed, watch: Callable[[Replayed], None], every_s: float) -> None:
    while True:
        watch(result)
        await asyncio.sleep(every_s)


@contextmanager
def _on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first SIGINT or SIGTERM; the second one is for Python."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()

    def once() -> None:
        for one in signals:
            loop.remove_signal_handler(one)
        stop()

    with suppress(NotImplementedError):  # Windows: there Ctrl-C ends the run without results
        for one in signals:
            loop.add_signal_handler(one, once)
    try:
        yield
    finally:
        with suppress(NotImplementedError):
            for one in signals:
                loop.remove_signal_handler(one)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Keep what was loaded before out of garbage collection, which else stops the client for 50 ms now and then."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
