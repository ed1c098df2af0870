"""A process that offers KV as the ranks of a prefill instance do, and does what a test tells it over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import torch

from runtime.transfer.base import Outlet, Source, open_outlet, wished_address

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Model:
    """The KV of a model, all its layers and heads, made up from a seed."""

    layers: int
    heads: int
    head_dim: int
    blocks: int
    block_tokens: int
    dtype: str
    seed: int

    def kv(self) -> torch.Tensor:
        """Return [layers, 2, blocks, block_tokens, heads, head_dim]."""
        shape = (self.layers, 2, self.blocks, self.block_tokens, self.heads, self.head_dim)
        made = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed))
        return made.to(getattr(torch, self.dtype))


def shares(whole: int, parts: int) -> list[tuple[int, int]]:
    """Return first and end of each of nearly equal shares."""
    ends = [whole * part // parts for part in range(parts + 1)]
    return list(pairwise(ends))


class Peer:
    """The other process. Every order is answered before the method returns."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["runtime.transfer.distributed", "tests.kv_peer"])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_main, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def open(self, model: Model, transport: str, place: str, tp: int = 1, pp: int = 1, start: int = 1) -> list[Source]:
        """Return where the KV of each rank can be read; earlier outlets are closed."""
        return self._order("open", model, transport, place, tp, pp, start)

    def ran(self, ticket: int, layers: int) -> None:
        """Let all ranks say so."""
        self._order("ran", ticket, layers)

    def memory(self) -> int:
        """Return the most bytes that the process has ever held."""
        return self._order("memory")

    def cpu_s(self) -> float:
        """Return the CPU time that the process has taken, all threads."""
        return self._order("cpu")

    def close_outlets(self) -> None:
        """Let no one in any more."""
        self._order("close")

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        os.kill(self.process.pid or 0, number)

    def end(self) -> None:
        """Kill the process, if that is still to be done."""
        self._pipe.close()
        self.process.kill()
        self.process.join()

    def _order(self, *order: Any) -> Any:
        self._pipe.send(order)
        assert self._pipe.poll(60), f"the other process does not answer {order[0]}"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextmanager
def peer() -> Iterator[Peer]:
    """Give a process, and end it."""
    made = Peer()
    try:
        yield made
    finally:
        made.end()


def _main(pipe: Connection) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outlets: list[Outlet] = []
    while True:
        try:
            order, *arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(_ORDERS[order](outlets, *arguments))
        except Exception as error:
            pipe.send(error)


def _open(outlets: list[Outlet], model: Model, transport: str, place: str, tp: int, pp: int, start: int) -> Any:
    _close(outlets)
    kv = model.kv()
    for stage, layers in enumerate(shares(model.layers, pp)):
        for rank, heads in enumerate(shares(model.heads, tp), stage * tp):
            address = wished_address(transport, f"{place}/prefill0@{start}").format(rank=rank)
            made = Source(
                transport,
                address,
                layers,
                heads,
                model.blocks,
                model.block_tokens,
                model.head_dim,
                model.dtype,
                "prefill0",
                rank,
                start,
            )
            outlets.append(open_outlet(transport, made, CPU))
            outlets[-1].kv.copy_(kv[slice(*layers), :, :, :, slice(*heads)])
    return [outlet.source for outlet in outlets]


def _ran(outlets: list[Outlet], ticket: int, layers: int) -> None:
    for outlet in outlets:
        outlet.ran(ticket, layers)


def _cpu(outlets: list[Outlet]) -> float:
    return time.process_time()


def _memory(outlets: list[Outlet]) -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _close(outlets: list[Outlet]) -> None:
    while outlets:
        outlets.pop().close()


_ORDERS: dict[str, Any] = {"open": _open, "ran": _ran, "cpu": _cpu, "memory": _memory, "close": _close}
