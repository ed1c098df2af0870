"""The head's side of several hosts: which agents have joined, and which of their instances live.

To the conductor it is what a supervisor is: it says whose words count, and tells of losses. An instance of another host
is lost when its agent says so, when it falls silent, when a newer start of it speaks up, or with its host.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from runtime.clocks import Clock
from runtime.host_messages import (
    BEAT_S,
    HOST_SILENT_S,
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
    decode_from_agent,
)
from runtime.messages import encode

log = logging.getLogger("goodput.hosts")

_REPLACED = "another agent has joined for {}"


@dataclass(slots=True)
class Remote:
    """An instance on another host."""

    name: str
    node: str
    start: int = 0
    """The latest that has spoken."""
    starts: int = 0
    alive: bool = False
    ready: bool = False
    heard_s: float = 0.0
    clock: Clock = field(default_factory=Clock)

    @property
    def identity(self) -> str:
        """Return its name on the wire."""
        return f"{self.name}@{self.start}"


@dataclass(slots=True)
class Host:
    """A node whose agent has joined."""

    node: str
    session: str
    address: str
    """Its agent's identity on the wire."""
    heard_s: float


class Hosts:
    """Keeps account of the instances on other hosts. `lost` is told of each that is gone, with the reason."""

    def __init__(
        self,
        nodes: dict[str, list[str]],
        digest: str,
        send: Callable[[str, bytes], None],
        lost: Callable[[str, str], None],
    ):
        self._remotes = {name: Remote(name, node) for node, names in nodes.items() for name in names}
        self._hosts: dict[str, Host] = {}
        self._nodes, self._digest, self._send, self._lost = nodes, digest, send, lost
        self._run = secrets.token_hex(8)

    @property
    def missing(self) -> list[str]:
        """Return the nodes whose agents have not joined."""
        return [node for node in self._nodes if node not in self._hosts]

    # ---- what the conductor asks, as of a supervisor

    def knows(self, name: str) -> bool:
        """Return True for an instance that belongs on another host."""
        return name in self._remotes

    def is_current(self, identity: str) -> bool:
        """Return True when what an instance says counts: it was not lost, and is the newest start of its name."""
        name, _, text = identity.rpartition("@")
        remote = self._remotes.get(name)
        if remote is None or not text.isdigit() or remote.node not in self._hosts:
            return False
        start = int(text)
        if start > remote.start:
            self._lose(remote, "was started again")
            remote.start, remote.starts = start, max(start, remote.starts)
            remote.alive, remote.heard_s, remote.clock = True, time.monotonic(), Clock()
        return start == remote.start and remote.alive

    def beat(self, identity: str, ready: bool = False) -> None:
        """Take note of a sign of life of a current instance."""
        remote = self._remotes[identity.rpartition("@")[0]]
        remote.heard_s = time.monotonic()
        remote.ready = remote.ready or ready

    def starts(self, name: str) -> int:
        """Return how often an instance was started."""
        return self._remotes[name].starts

    def here(self, identity: str, message: Any) -> Any:
        """Return what a current instance says, with its times by our clock."""
        return self._remotes[identity.rpartition("@")[0]].clock.here(message, time.monotonic())

    # ---- what agents say

    def hear(self, identity: str, payload: bytes) -> None:
        """Take in what an agent says. Raises MsgspecError for what no agent would say."""
        message = decode_from_agent(payload)
        if isinstance(message, JoinHost):
            self._join(identity, message)
            return
        host = self._hosts.get(message.node)
        if host is None or host.session != message.session:
            if isinstance(message, HostBeat):
                self._tell(identity, Forgotten() if host is None else TurnedAway(_REPLACED.format(message.node)))
            return
        host.heard_s = time.monotonic()
        match message:
            case Gone(_, _, who, why):
                self._gone(who, why)
            case Leave(_, _, why):
                log.warning("%s leaves: %s", message.node, why)
                self._give_up(host, "ended with its host's agent")
            case HostBeat(_, _, starts):
                for name in starts.keys() & set(self._nodes[host.node]):
                    self._remotes[name].starts = max(self._remotes[name].starts, starts[name])

    def _join(self, identity: str, join: JoinHost) -> None:
        reason = self._reason_against(join)
        if reason:
            log.warning("%s was turned away: %s", join.node, reason)
            self._tell(identity, TurnedAway(reason))
            return
        before = self._hosts.get(join.node)
        if before is not None and before.session != join.session:
            self._tell(before.address, TurnedAway(_REPLACED.format(join.node)))
            self._give_up(before, "ended with its host's agent, which was started again")
        if join.node not in self._hosts:
            log.warning("%s has joined", join.node)
            self._hosts[join.node] = Host(join.node, join.session, identity, time.monotonic())
        names = self._nodes[join.node]
        self._tell(identity, Welcome(self._run, {name: self._remotes[name].starts for name in names}))

    def _reason_against(self, join: JoinHost) -> str:
        if join.node not in self._nodes:
            return f"expected an agent for {' or '.join(self._nodes)}, got {join.node!r}"
        if join.digest != self._digest:
            return "it serves another deployment, or with another version, device, load format or transport"
        return ""

    def _gone(self, identity: str, why: str) -> None:
        remote = self._remotes.get(identity.rpartition("@")[0])
        if remote is not None and remote.identity == identity:
            self._lose(remote, why)

    # ---- losses

    async def watch(self) -> None:
        """Give signs of life to agents, and find who gives none any more; for ever."""
        while True:
            now_s = time.monotonic()
            for host in list(self._hosts.values()):
                if now_s - host.heard_s > HOST_SILENT_S:
                    log.warning("%s has given no sign of life for %.0f s", host.node, now_s - host.heard_s)
                    self._give_up(host, "is lost with its host")
                else:
                    self._end_silent(host, now_s)
                    self._tell(host.address, HeadBeat(self._run, self._heard(host, now_s)))
            await asyncio.sleep(BEAT_S)

    def _on(self, host: Host) -> list[Remote]:
        return [self._remotes[name] for name in self._nodes[host.node]]

    def _heard(self, host: Host, now_s: float) -> dict[str, bool]:
        return {each.identity: each.ready for each in self._on(host) if each.alive and now_s - each.heard_s < 2.0}

    def _end_silent(self, host: Host, now_s: float) -> None:
        for remote in self._on(host):
            if remote.alive and now_s - remote.heard_s > HOST_SILENT_S:
                why = f"gave no sign of life for {now_s - remote.heard_s:.0f} s and was ended"
                self._tell(host.address, End(remote.identity, why))
                self._lose(remote, why)

    def _give_up(self, host: Host, why: str) -> None:
        if self._hosts.get(host.node) is host:
            del self._hosts[host.node]
        for remote in self._on(host):
            self._lose(remote, why)

    def _lose(self, remote: Remote, why: str) -> None:
        if remote.alive:
            remote.alive = remote.ready = False
            self._lost(remote.name, why)

    def say_goodbye(self) -> None:
        """Tell all agents that this was it."""
        for host in self._hosts.values():
            self._tell(host.address, Bye())

    def _tell(self, address: str, message: ToAgent) -> None:
        self._send(address, encode(message))
