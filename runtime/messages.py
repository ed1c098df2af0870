"""What conductor and instances say to each other. One type per thing said; MessagePack over ZeroMQ.

A `key` names one try of one request, `REQUEST/TRY`, so that what is left of an earlier try can be told and dropped.
Times are time.monotonic of the sender's host [s].
"""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.answer import Begun, Delta
from runtime.sampling import Sampling
from runtime.transfer.base import Source


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all."""


# ---- to an instance


class Begin(Message, frozen=True):
    """Run a prompt. An aggregated instance answers it, a prefill instance hands it over."""

    key: str
    prompt: list[int]
    sampling: Sampling
    answers: tuple[Begun, ...] = ()
    """Answers that an instance since lost has begun."""
    prompt_only: bool = False


class Expect(Message, frozen=True):
    """Reserve blocks for a prompt that a prefill instance runs now, and pull its KV."""

    key: str
    prompt: list[int]
    sampling: Sampling
    cached_tokens: int
    """Of the prompt: how many will be pulled."""
    sources: tuple[Source, ...]
    ticket: int
    blocks: list[int]


class Join(Message, frozen=True):
    """The prompt of an expected request has run; its answers go on from here once the KV is there."""

    key: str
    answers: tuple[Begun, ...]


class Drop(Message, frozen=True):
    """Free whatever a request holds: it was cancelled, or another instance has it now. Unknown keys are no error."""

    key: str


# ---- from an instance


class Hello(Message, frozen=True):
    """An instance is ready."""

    process_ids: tuple[int, ...]
    kv_blocks: int
    sources: tuple[Source, ...]


class Started(Message, frozen=True):
    """The first step that runs some tokens of a request is about to begin."""

    key: str
    at_s: float
    cached_tokens: int = 0
    ticket: int = 0
    blocks: list[int] = []
    """A prefill instance's: where its KV will be."""


class News(Message, frozen=True):
    """What a step has brought: tokens, and prompts that are held to be handed over."""

    at_s: float
    deltas: tuple[Delta, ...]
    """Their request_id is a key."""
    handed_over: tuple[tuple[str, tuple[Begun, ...]], ...] = ()


class PullStarted(Message, frozen=True):
    """Blocks are reserved; the pull begins."""

    key: str
    at_s: float


class PullEnded(Message, frozen=True):
    """A prompt's KV has arrived: the prefill instance may let go of it. Or it could not be had."""

    key: str
    at_s: float
    copied_s: float
    size: int
    """Bytes."""
    error: str = ""


class Refused(Message, frozen=True):
    """An instance cannot serve a request at all."""

    key: str
    why: str


class Beat(Message, frozen=True):
    """A sign of life with what is going on; from a thread of its own, so that a long step does not silence it."""

    at_s: float
    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    steps: int = 0
    run_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0


class Broken(Message, frozen=True):
    """An instance ends because of an error."""

    why: str
    traceback: str


ToInstance = Begin | Expect | Join | Drop
FromInstance = Hello | Started | News | PullStarted | PullEnded | Refused | Beat | Broken


class InstanceTask(msgspec.Struct, frozen=True):
    """What an instance process is started with, as JSON on its standard input."""

    name: str
    """Its identity on the wire: the instance's name and its number of starts."""
    conductor: str
    """Address of the conductor's socket."""
    source: str
    load_format: str
    settings: dict[str, Any]
    """Of runtime.settings.EngineSettings."""
    environment: dict[str, str] = {}
    """Variables that libraries read when they are loaded."""
    server_key: str = ""
    """Of a conductor on another host; empty on its own."""


encode = msgspec.msgpack.Encoder().encode
decode_to_instance = msgspec.msgpack.Decoder(ToInstance).decode
decode_from_instance = msgspec.msgpack.Decoder(FromInstance).decode
