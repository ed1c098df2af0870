"""KV over NIXL, which reads the memory of another process or host by itself (UCX: RDMA, TCP, shared memory).

The prefill rank registers its board and its KV blocks once, and does nothing more. Its address holds all that a reader
needs: what NIXL calls the agent's metadata, and where the two memories begin. NIXL lets nobody read beside them.

A descriptor costs about 20 us, whatever its size. So whole blocks are read, neighbours at once, and unwanted heads are
left out when copying. UCX listens on the loopback alone unless UCX_NET_DEVICES says otherwise.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import secrets
import threading
import time
from collections.abc import Iterator
from importlib import import_module, util
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.transfer.base import (
    ANSWER_S,
    CLOSED,
    TICKETS,
    Source,
    TransferError,
    check_bounds,
    checksum_of,
    layers_ran,
    stamp,
)

_PACKAGES = ("nixl_cu12", "nixl_cu13")
_SCHEME = "nixl:"
_LOOK_S = 2e-5
_PAUSE_US = 100
"""Between two looks of NIXL's thread: 2.5 % of a core."""
_LEAST_STAGING_BYTES = 1 << 20
Descriptors = NDArray[np.uint64]
"""[descriptors, 3]: address, bytes, device."""


def reason_against(device: torch.device) -> str | None:
    """Return why NIXL cannot serve KV of `device`, or None when it can."""
    if _package() is None:
        return "the package nixl is not installed: pip install 'goodput-planner[nixl]'"
    return None


def wished_address(place: str, host: str) -> str:
    """Return nothing: NIXL finds its own; between hosts UCX_NET_DEVICES says over which devices."""
    return ""


def open_outlet(source: Source, device: torch.device) -> NixlOutlet:
    """Return KV memory on `device`, registered with NIXL."""
    return NixlOutlet(source, device)


def open_reader(source: Source, timeout_s: float = ANSWER_S) -> NixlReader:
    """Return a reader of the memory that `source.address` tells of."""
    return NixlReader(source, timeout_s)


class NixlOutlet:
    """Owns the memory; NIXL's own thread serves it."""

    def __init__(self, source: Source, device: torch.device):
        self.kv = torch.zeros(source.shape, dtype=source.torch_dtype, device=device)
        self._board = torch.zeros(TICKETS, dtype=torch.int64)
        kind, index = ("VRAM", device.index or 0) if device.type == "cuda" else ("DRAM", 0)
        name = _unique(f"{source.instance}.{source.rank}@{source.start}")
        self._agent, backend = _served_agent(name)
        self._registered = [_regions(kind, self.kv, index), _regions("DRAM", self._board, 0)]
        for regions in self._registered:
            self._agent.registerMem(regions, [backend])
        metadata = base64.urlsafe_b64encode(self._agent.getLocalMD()).decode()
        where = f"{kind}:{index}:{self.kv.data_ptr()}:{self._board.data_ptr()}"
        self.source = source.at(f"{_SCHEME}{name}:{where}:{metadata}")

    def ran(self, ticket: int, layers: int) -> None:
        """Say that the first `layers` layers have run for a ticket."""
        self._board[ticket % TICKETS] = stamp(ticket, layers)

    def close(self) -> None:
        """End the agent, and free the memory; who still reads gets an error. The board stays, as one may see it."""
        self._board.fill_(CLOSED)
        for regions in self._registered:
            self._agent.deregisterMem(regions, [])
        self._registered = []
        self._agent = None
        self.kv = torch.zeros(0)


class NixlReader:
    """Reads a prefill rank's memory. Threads read side by side."""

    def __init__(self, source: Source, timeout_s: float):
        if reason_against(torch.device("cpu")):
            raise TransferError(f"{source.name}: {reason_against(torch.device('cpu'))}")
        self._source, self._timeout_s = source, timeout_s
        try:
            name, kind, device, kv, board, metadata = source.address.removeprefix(_SCHEME).rsplit(":", 5)
            self._name, self._kind, self._device = name, kind, int(device)
            self._kv, self._board, decoded = int(kv), int(board), base64.urlsafe_b64decode(metadata)
        except ValueError:
            raise TransferError(f"{source.name}: {source.address[:80]!r} is not an address of NIXL's") from None
        self._remotes = _remotes()
        with self._errors():
            self._remotes.add(name, decoded)
        self._closed = False

    def ran(self, ticket: int) -> int:
        """Return how many layers have run for a ticket."""
        place = self._board + 8 * (ticket % TICKETS)
        remote = np.array([[place, 8, 0]], np.uint64)
        return layers_ran(int(self._fetch(remote, "DRAM", 8).view(torch.int64)), ticket)

    def read(self, layer: int, blocks: torch.Tensor, heads: slice) -> torch.Tensor:
        """Return [2, blocks, block_tokens, heads, head_dim]."""
        source = self._source
        check_bounds(source, layer, blocks, heads)
        shape = (2, len(blocks), *source.shape[3:])
        whole = self._fetch(self._descriptors(layer, blocks), self._kind, prod(shape) * source.torch_dtype.itemsize)
        return whole.view(source.torch_dtype).view(shape)[..., heads, :]

    def checksum(self, layer: int, blocks: torch.Tensor, heads: slice) -> int:
        """Return the CRC-32 of a second reading: nobody works at the other end who could compute one."""
        return checksum_of(self.read(layer, blocks, heads))

    def close(self) -> None:
        """Forget the other side."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(*_errors()):  # it has gone first
                self._remotes.remove(self._name)

    def _descriptors(self, layer: int, blocks: torch.Tensor) -> Descriptors:
        """Return where the blocks' keys, then their values are; runs of neighbours are one."""
        source = self._source
        block_bytes = prod(source.shape[3:]) * source.torch_dtype.itemsize
        numbers = blocks.numpy()
        begins = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
        lengths = np.diff(begins, append=len(numbers))
        plane = source.blocks * block_bytes
        both = [
            np.stack(
                [
                    self._kv + (2 * layer + side) * plane + numbers[begins] * block_bytes,
                    lengths * block_bytes,
                    np.full(len(begins), self._device),
                ],
                axis=1,
            )
            for side in (0, 1)
        ]
        return np.concatenate(both).astype(np.uint64)

    def _fetch(self, remote: Descriptors, kind: str, size: int) -> torch.Tensor:
        """Return a copy of other memory, as bytes."""
        if self._closed:
            raise TransferError(f"{self._source.name}: the reader is closed")
        agent, staging = self._remotes.agent, self._remotes.staging
        buffer, registered = staging.take(size)
        sizes = remote[:, 1]
        local = np.zeros_like(remote)
        local[:, 0] = np.uint64(buffer.data_ptr()) + np.cumsum(sizes) - sizes
        local[:, 1] = sizes
        with self._errors():
            to, of = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, kind)
            handle = agent.initialize_xfer("READ", to, of, self._name)
            try:
                self._await(agent, handle)
            finally:
                agent.release_xfer_handle(handle)
        fetched = buffer[:size].clone()
        staging.give_back(buffer, registered)  # not after an error: who knows what still writes to it
        return fetched

    def _await(self, agent: Any, handle: Any) -> None:
        deadline = time.monotonic() + self._timeout_s
        state = agent.transfer(handle)
        while state == "PROC":
            if time.monotonic() > deadline:
                raise TransferError(f"{self._source.name}: no answer in {self._timeout_s:g} s")
            time.sleep(_LOOK_S)
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise TransferError(f"{self._source.name}: reading its KV failed; has the prefill instance ended?")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn NIXL's errors into ours."""
        try:
            yield
        except _errors() as error:
            raise TransferError(f"{self._source.name}: {error}; has the prefill instance ended?") from None


# ---- what all readers of a process share


class _Remotes:
    """The agent that reads, and the agents that it knows. One for a process: each has threads and sockets."""

    def __init__(self) -> None:
        self.agent = _reading_agent()
        self.staging = _Staging(self.agent)
        self._lock = threading.Lock()
        self._known: dict[str, int] = {}

    def add(self, name: str, metadata: bytes) -> None:
        """Learn of an agent; each time is to be followed by a `remove`."""
        with self._lock:
            if name not in self._known:
                self.agent.add_remote_agent(metadata)
            self._known[name] = self._known.get(name, 0) + 1

    def remove(self, name: str) -> None:
        """Forget an agent that nobody reads from any more."""
        with self._lock:
            self._known[name] -= 1
            if not self._known[name]:
                del self._known[name]
                self.agent.remove_remote_agent(name)


class _Staging:
    """Registered host memory to read into; registering anew for each layer would cost more than the reading."""

    def __init__(self, agent: Any):
        self._agent = agent
        self._lock = threading.Lock()
        self._free: list[tuple[torch.Tensor, Any]] = []

    def take(self, size: int) -> tuple[torch.Tensor, Any]:
        """Return memory of at least `size` bytes, and its registration."""
        with self._lock:
            fitting = [it for it in self._free if it[0].numel() >= size]
            if fitting:
                self._free = [it for it in self._free if it is not fitting[0]]
                return fitting[0]
            if self._free:
                self._agent.deregister_memory(self._free.pop()[1])
        buffer = torch.empty(max(_LEAST_STAGING_BYTES, 1 << (size - 1).bit_length()), dtype=torch.uint8)
        return buffer, self._agent.register_memory(_region(buffer, 0), "DRAM")

    def give_back(self, buffer: torch.Tensor, registered: Any) -> None:
        """Let others use it."""
        with self._lock:
            self._free.append((buffer, registered))


@functools.cache
def _remotes() -> _Remotes:
    return _Remotes()


def _region(tensor: torch.Tensor, device: int) -> list[tuple[int, int, int, str]]:
    return [(tensor.data_ptr(), tensor.numel() * tensor.element_size(), device, "")]


def _regions(kind: str, tensor: torch.Tensor, device: int) -> Any:
    bindings = _api().nixlBind
    return bindings.nixlRegDList(getattr(bindings, f"{kind}_SEG"), _region(tensor, device))


def _unique(name: str) -> str:
    return f"{name}-{os.getpid()}-{secrets.token_hex(4)}"


def _reading_agent() -> Any:
    """Return an agent for several threads. What it waits for is moved on by those who wait: no thread of its own."""
    api = _api()
    sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    return api.nixl_agent(_unique("reader"), api.nixl_agent_config(False, backends=["UCX"], sync_mode=sync))


def _served_agent(name: str) -> tuple[Any, Any]:
    """Return an agent with a thread that serves others, and its backend.

    Made of the bindings, since NIXL's Python class lets that thread spin, on a core that prefills are to have.
    """
    bindings = _api().nixlBind
    config = bindings.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, _PAUSE_US
    config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
    agent = bindings.nixlAgent(name, config)
    return agent, agent.createBackend("UCX", {})


@functools.cache
def _api() -> Any:
    """Return NIXL's module; what it reads from the environment is set before."""
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    return import_module(f"{_package()}._api")


@functools.cache
def _package() -> str | None:
    """Return the package of NIXL that is installed; there is one for each version of CUDA."""
    return next((name for name in _PACKAGES if util.find_spec(name)), None)


@functools.cache
def _errors() -> tuple[type[Exception], ...]:
    """Return all errors that NIXL raises: they have no base of their own."""
    bindings = import_module(f"{_package()}._bindings")
    return tuple(it for it in vars(bindings).values() if isinstance(it, type) and issubclass(it, Exception))
