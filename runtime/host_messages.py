"""What the head, where the conductor is, and the agents of other hosts say to each other. MessagePack over ZeroMQ."""

from __future__ import annotations

import msgspec

from runtime.messages import Message

AGENT = "\x01"
"""Begins the identity of an agent on the wire; names of instances do not."""
BEAT_S = 0.5
HOST_SILENT_S = 6.0
"""A host that the head has not heard of for so long is lost, and so is an instance on it."""
HEAD_SILENT_S = 15.0
"""A head that an agent has not heard of for so long is gone: the agent ends its instances, and waits for it."""


# ---- from an agent


class JoinHost(Message, frozen=True):
    """An agent offers to start the instances of its node. Asked again until it is answered."""

    node: str
    session: str
    """Drawn by the agent when it starts, so that a new one is told from the one before."""
    digest: str
    """Of what is served, which has to be the same everywhere."""


class HostBeat(Message, frozen=True):
    """A sign of life of an agent."""

    node: str
    session: str
    starts: dict[str, int]
    """How often each instance was started, also where it ended before it was ready."""


class Gone(Message, frozen=True):
    """An instance's process has ended; it is started again."""

    node: str
    session: str
    identity: str
    why: str


class Leave(Message, frozen=True):
    """An agent ends, and all its instances with it."""

    node: str
    session: str
    why: str


# ---- to an agent


class Welcome(Message, frozen=True):
    """Start the instances of your node."""

    run: str
    """Of the head: another one knows nothing of what was started for it."""
    starts: dict[str, int]
    """How often each of them was started before."""


class TurnedAway(Message, frozen=True):
    """An agent cannot join, or has been replaced."""

    why: str


class Forgotten(Message, frozen=True):
    """The head does not know an agent, as it gave it up or was started again: the agent has to join anew."""


class HeadBeat(Message, frozen=True):
    """A sign of life of the head, and of which instances it has heard lately: True for those that are ready."""

    run: str
    heard: dict[str, bool]


class End(Message, frozen=True):
    """End an instance's process; it is started again."""

    identity: str
    why: str


class Bye(Message, frozen=True):
    """The head stops, as it was told to: agents stop, too."""


FromAgent = JoinHost | HostBeat | Gone | Leave
ToAgent = Welcome | TurnedAway | Forgotten | HeadBeat | End | Bye

decode_from_agent = msgspec.msgpack.Decoder(FromAgent).decode
decode_to_agent = msgspec.msgpack.Decoder(ToAgent).decode
