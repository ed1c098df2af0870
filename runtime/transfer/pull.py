"""What a decode rank does to pull a prompt's KV: threads that wait for layers of prefill ranks and copy them in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from planner.errors import PlannerError
from runtime.transfer.base import Reader, Source, TransferError, checksum_of, open_reader

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 5e-4, 2e-2


@dataclass(frozen=True, slots=True)
class Pull:
    """A prompt's KV to be pulled: block `source_blocks[i]` of the prefill instance into `target_blocks[i]`."""

    key: str
    """The request's."""
    ticket: int
    """Its place on the prefill ranks' boards."""
    sources: tuple[Source, ...]
    """All ranks of the prefill instance."""
    source_blocks: NDArray[np.int64]
    target_blocks: NDArray[np.int64]
    timeout_s: float = 60.0
    """For each layer."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """A rank is through with a pull: its target blocks are nobody's but the request's again."""

    key: str
    start_s: float
    """By time.monotonic, as all times."""
    end_s: float
    copied_s: float
    """Of which the copying took so long; the rest is waiting for layers to run."""
    size: int
    """Bytes."""
    error: str = ""


class _Run:
    """A pull under way."""

    __slots__ = ("begun_s", "cancelled", "pull", "ran")

    def __init__(self, pull: Pull):
        self.pull, self.cancelled, self.begun_s = pull, False, time.monotonic()
        self.ran: dict[Source, int] = {}
        """Layers that a rank is known to have run: asking it again would cost a round trip."""


class Puller:
    """Pulls of one decode rank, each in a thread of its own, up to `most` at a time."""

    def __init__(self, layers: range, heads: slice, done: Callable[[Pulled], None], most: int, checksums: bool = False):
        self._layers, self._heads, self._done, self._checksums = layers, heads, done, checksums
        self._threads = ThreadPoolExecutor(max(1, most), thread_name_prefix="pull")
        self._readers: dict[Source, Reader] = {}
        self._opening: dict[Source, threading.Lock] = {}
        self._runs: dict[str, _Run] = {}
        self._closed = False

    def start(self, pull: Pull, kv: torch.Tensor) -> None:
        """Begin to pull into `kv`; `done` is called in the end, from a thread, whatever comes of it."""
        run = self._runs[pull.key] = _Run(pull)
        self._threads.submit(self._run, run, kv)

    def cancel(self, key: str) -> None:
        """Let a pull end early. It still is told when its blocks are free of it."""
        run = self._runs.get(key)
        if run is not None:
            run.cancelled = True

    def close(self) -> None:
        """End all pulls; when this returns none of them runs any more, and all have been told."""
        self._closed = True
        self._threads.shutdown()
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _run(self, run: _Run, kv: torch.Tensor) -> None:
        start_s = time.monotonic()
        copied_s, size, error = 0.0, 0, ""
        try:
            for took_s, moved in self._layer_by_layer(run, kv):
                copied_s, size = copied_s + took_s, size + moved
        except PlannerError as failure:
            error = str(failure)
        except Exception as failure:  # a thread's exception would be lost, and the request with it
            error = f"{type(failure).__name__}: {failure}"
        del self._runs[run.pull.key]
        self._done(Pulled(run.pull.key, start_s, time.monotonic(), copied_s, size, error))

    def _layer_by_layer(self, run: _Run, kv: torch.Tensor) -> Iterator[tuple[float, int]]:
        """Yield the seconds and bytes of each copy made."""
        pull = run.pull
        source_blocks, target_blocks = torch.from_numpy(pull.source_blocks), torch.from_numpy(pull.target_blocks)
        target_blocks = target_blocks.to(kv.device)
        for index, layer in enumerate(self._layers):
            parts = list(self._parts(pull.sources, layer))  # all are known before one is waited for
            for source, theirs, ours in parts:
                self._check(run)
                reader = self._reader(source)
                self._wait(run, reader, source, layer - source.layers[0])
                before = time.monotonic()
                read = reader.read(layer - source.layers[0], source_blocks, theirs)
                kv[index][:, target_blocks, :, ours] = read.to(kv.device)
                if self._checksums:
                    wanted = reader.checksum(layer - source.layers[0], source_blocks, theirs)
                    _compare(kv[index][:, target_blocks, :, ours], wanted, source, layer)
                yield time.monotonic() - before, read.numel() * read.element_size()

    def _parts(self, sources: tuple[Source, ...], layer: int) -> Iterator[tuple[Source, slice, slice]]:
        """Yield who has which of our heads of `layer`: the heads in its own count, and in ours."""
        wanted = self._heads.start
        for source in sorted(sources, key=lambda each: each.heads):
            first, end = max(wanted, source.heads[0]), min(self._heads.stop, source.heads[1])
            if source.layers[0] <= layer < source.layers[1] and first == wanted and first < end:
                theirs = slice(first - source.heads[0], end - source.heads[0])
                yield source, theirs, slice(first - self._heads.start, end - self._heads.start)
                wanted = end
        if wanted < self._heads.stop:
            raise TransferError(f"no prefill rank holds KV head {wanted} of layer {layer}")

    def _wait(self, run: _Run, reader: Reader, source: Source, layer: int) -> None:
        """Return once a layer has run."""
        begun, ticket = time.monotonic(), run.pull.ticket
        while run.ran.get(source, 0) <= layer:
            run.ran[source] = reader.ran(ticket)
            if run.ran[source] > layer:
                return
            self._check(run)
            waited_s = time.monotonic() - begun
            if waited_s > run.pull.timeout_s:
                raise TransferError(
                    f"{source.name}: layer {layer} of hand-off {ticket} did not come in {run.pull.timeout_s:g} s"
                )
            left = min(self._layers.stop, source.layers[1]) - source.layers[0] - run.ran[source]
            time.sleep(pause_s(time.monotonic() - run.begun_s, run.ran[source], left))

    def _check(self, run: _Run) -> None:
        """Raise when a pull is to end early."""
        if self._closed or run.cancelled:
            raise TransferError("cancelled")

    def _reader(self, source: Source) -> Reader:
        with self._opening.setdefault(source, threading.Lock()):  # a rank that is silent holds up no pull from others
            found = self._readers.get(source)
            if found is None:
                found = self._readers[source] = open_reader(source)
                self._forget_older(source)
        return found

    def _forget_older(self, source: Source) -> None:
        """Close the readers of a rank's earlier starts: those processes are gone."""
        for old in [it for it in list(self._readers) if source.replaces(it)]:
            self._opening.pop(old, None)
            reader = self._readers.pop(old, None)
            if reader is not None:
                reader.close()


def pause_s(gone_s: float, ran: int, left: int) -> float:
    """Return how long to sleep when `ran` layers have run in `gone_s`, and `left` more are wanted.

    A third of what they will take at that pace: what has run meanwhile is copied at once, and only the last layers are
    waited for closely. Looking every millisecond would be seen sooner by nobody, and four pulls that do so take a fifth
    of a decode instance's core.
    """
    expected_s = gone_s / ran * left if ran else gone_s
    return min(max(_SHORTEST_WAIT_S, expected_s / 3), _LONGEST_WAIT_S)


def _compare(copied: torch.Tensor, wanted: int, source: Source, layer: int) -> None:
    """Raise TransferError when KV is not what the source holds."""
    found = checksum_of(copied)
    if found != wanted:
        raise TransferError(f"{source.name}: layer {layer} arrived damaged: checksum {found:08x}, sent {wanted:08x}")
