"""The agent of a host that is not the head: it starts the instances of its node, and does as the head says.

It joins, starts them, and tells when one ends. Instances speak to the conductor themselves. The agent ends its
instances when the head is gone, and joins again when it is back; it ends when the head ends in good order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from planner.errors import InputError, PlannerError
from planner.specs.deployment import Deployment
from runtime.host_messages import (
    AGENT,
    BEAT_S,
    HEAD_SILENT_S,
    Bye,
    End,
    Forgotten,
    Gone,
    HeadBeat,
    HostBeat,
    JoinHost,
    Leave,
    ToAgent,
    TurnedAway,
    Welcome,
    decode_to_agent,
)
from runtime.messages import encode
from runtime.nodes import check_node, instances_by_node
from runtime.serving import Placed, ServeOptions, check_transports, digest_of, open_served, task_of
from runtime.supervisor import Supervisor
from runtime.wire import Keys, guard, host_and_port, own_address

log = logging.getLogger("goodput.agent")

_MOST_HANDSHAKES = 3
_JOIN_S = 1.0


class HeadLostError(PlannerError):
    """The head could not be reached for long."""

    exit_code = 1


class _HeadGone(Exception):
    """The head has been silent, or is another one: join again."""


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """Where an agent belongs."""

    node: str
    head: str
    """tcp://HOST:PORT where the head listens."""
    token: str = field(repr=False)
    advertise: str = ""
    """This host's address for others; empty: the one on the way to the head."""
    patience_s: float = 300.0
    """A head that cannot be reached for so long is given up."""


class Agent:
    """`run` joins, keeps the node's instances running, and returns when the head says goodbye or `stop` was called."""

    def __init__(self, deployment: Deployment, options: ServeOptions, join: JoinOptions):
        check_node(deployment, join.node)
        check_transports(deployment, options)
        open_served(deployment, options)
        host, port = host_and_port(join.head, "--join")
        self._address = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
        self._deployment, self._options, self._join = deployment, options, join
        self._keys = Keys.of(join.token)
        self._advertise = join.advertise or own_address(host)
        self._session = secrets.token_hex(8)
        self._socket: zmq.asyncio.Socket
        self._stopping = asyncio.Event()
        self.supervisor: Supervisor | None = None
        """While the head wants instances."""
        self._heard_s = time.monotonic()

    def stop(self) -> None:
        """Let `run` end."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve the node. Raises InputError when turned away, StartError, HeadLostError."""
        self._socket = self._connect()
        refusals = asyncio.create_task(self._refused(self._socket.get_monitor_socket()))
        rounds = asyncio.create_task(self._rounds())
        told = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait([refusals, rounds, told], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (refusals, rounds, told):
                task.cancel()
            await asyncio.gather(refusals, rounds, told, return_exceptions=True)
            self._say(Leave(self._join.node, self._session, "its agent ends"))
            self._end_instances()
            self._socket.disable_monitor()
            self._socket.close(linger=500)

    def _connect(self) -> zmq.asyncio.Socket:
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"{AGENT}{self._join.node}@{self._session}".encode())
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        guard(socket, self._keys.public)
        socket.connect(self._address)
        return socket

    async def _refused(self, monitor: Any) -> None:
        """Raise InputError when the head does not know our key. Later ones are those of a restart."""
        failures, known = 0, False
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                known = True
            elif not known and event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                failures += 1
                if failures >= _MOST_HANDSHAKES:
                    raise InputError(f"--join {self._address}: turned away; is the token the same there (--token)?")

    async def _rounds(self) -> None:
        while True:
            run = await self._welcomed()
            try:
                await self._serve(run)
                return
            except _HeadGone as gone:
                log.warning("%s; the instances are ended, and join again with it", gone)
            finally:
                self._end_instances()

    async def _welcomed(self) -> str:
        """Ask to join until let in, start the instances, and return the name of the head's run."""
        digest, begun_s = digest_of(self._deployment, self._options), time.monotonic()
        while time.monotonic() - begun_s < self._join.patience_s:
            self._say(JoinHost(self._join.node, self._session, digest))
            message = await self._hear(_JOIN_S)
            match message:
                case Welcome(run, starts):
                    self._start_instances(starts)
                    return run
                case TurnedAway(why):
                    raise InputError(f"--join {self._address}: turned away: {why}")
                case _:
                    continue
        raise HeadLostError(
            f"{self._address}: no answer for {self._join.patience_s:.0f} s; does the head listen there?"
        )

    def _start_instances(self, starts: dict[str, int]) -> None:
        supervisor = self.supervisor = Supervisor(self._lost, silent_s=HEAD_SILENT_S + 5.0)
        place = Placed(self._address, str(supervisor.folder), self._advertise, self._keys.public)
        for spec in instances_by_node(self._deployment)[self._join.node]:
            task = task_of(self._deployment, spec, self._options, place)
            supervisor.start(spec.name, task, starts.get(spec.name, 0))
        log.warning("joined %s as %s: %s", self._address, self._join.node, ", ".join(starts))

    def _lost(self, name: str, why: str) -> None:
        assert self.supervisor is not None
        log.warning("%s %s; starting it again", name, why)
        identity = f"{name}@{self.supervisor.starts(name)}"
        self._say(Gone(self._join.node, self._session, identity, why))

    async def _serve(self, run: str) -> None:
        """Do as the head says until it says goodbye. Raises _HeadGone, StartError."""
        assert self.supervisor is not None
        supervisor, self._heard_s = self.supervisor, time.monotonic()
        watch = asyncio.create_task(supervisor.watch())
        try:
            while not watch.done():
                self._say(HostBeat(self._join.node, self._session, supervisor.all_starts()))
                if await self._obey(supervisor, run):
                    return
                if time.monotonic() - self._heard_s > HEAD_SILENT_S:
                    raise _HeadGone(f"the head has given no sign of life for {HEAD_SILENT_S:.0f} s")
            watch.result()
            if supervisor.fault is not None:
                raise supervisor.fault
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _obey(self, supervisor: Supervisor, run: str) -> bool:
        """Take in what the head says for a moment. Return True for a goodbye."""
        until_s = time.monotonic() + BEAT_S
        while (left_s := until_s - time.monotonic()) > 0.0:
            message = await self._hear(left_s)
            match message:
                case HeadBeat(other, heard):
                    if other != run:
                        raise _HeadGone("the head was started again")
                    self._heard_s = time.monotonic()
                    for identity, ready in heard.items():
                        supervisor.beat(identity, ready)
                case End(identity, why):
                    if supervisor.is_current(identity):
                        supervisor.end(identity.rpartition("@")[0], why)
                case Forgotten():
                    raise _HeadGone("the head knows this host no more")
                case TurnedAway(why):
                    raise InputError(f"{self._address}: {why}")
                case Bye():
                    log.warning("the head has stopped")
                    return True
        return False

    async def _hear(self, within_s: float) -> ToAgent | None:
        """Return what the head says next; None when it says nothing in time."""
        if not await self._socket.poll(int(within_s * 1000) + 1):
            return None
        return decode_to_agent(await self._socket.recv())

    def _say(self, message: JoinHost | HostBeat | Gone | Leave) -> None:
        failure = asyncio.ensure_future(self._socket.send(encode(message), zmq.NOBLOCK)).exception()
        if failure is not None and not isinstance(failure, zmq.Again):  # while the head is away, nothing is kept for it
            raise failure

    def _end_instances(self) -> None:
        if self.supervisor is not None:
            self.supervisor.close()
            self.supervisor = None


def serve_node(deployment: Deployment, options: ServeOptions, join: JoinOptions) -> None:
    """Run an agent until it is told to stop (SIGTERM, Ctrl-C) or the head stops. Raises InputError, StartError."""
    logging.basicConfig(level=logging.WARNING, format="planner: %(message)s", stream=sys.stderr)
    asyncio.run(until_signal(lambda: Agent(deployment, options, join)))


async def until_signal(make: Callable[[], Agent]) -> None:
    """Run an agent, and stop it at a signal."""
    agent, loop = make(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stop)
    await agent.run()
