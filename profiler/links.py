"""How fast bytes move: between ranks over torch.distributed, between memories, and to the disk and back.

Sizes are those that the engine moves: hidden states of a step between stages and over ranks, and KV blocks. Every size
is timed several times and given as its median with the 10 % and 90 % quantiles.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from planner.errors import InputError
from planner.specs.measured import Transfer

if TYPE_CHECKING:
    from runtime.transfer.base import Reader, Source

REPEATS = 15
_BATCH_S = 0.002
_JOIN_S = 120.0

Row = tuple[int, float, float, float]


class Ranks(NamedTuple):
    """A group of processes to be timed: one per device, or several on a processor."""

    devices: tuple[str, ...]
    threads: int

    @property
    def backend(self) -> str:
        """The library that carries the bytes."""
        return "nccl" if all(device.startswith("cuda") for device in self.devices) else "gloo"


def message_sizes(activation_bytes: int, block_bytes: int) -> list[int]:
    """Return the bytes to be timed: activations of 1 to 4,096 tokens and 1 to 256 KV blocks, in powers of 16."""
    sizes = {activation_bytes * tokens for tokens in (1, 16, 256, 4096)} | {block_bytes * n for n in (1, 16, 256)}
    return sorted(min(size, 256 * 2**20) for size in {1024, *sizes})


def quantiles(nbytes: int, times_s: Sequence[float]) -> Row:
    """Return the row of one size."""
    low, middle, high = np.percentile(times_s, (10, 50, 90))
    return nbytes, float(middle), float(low), float(high)


def timed(run: Callable[[], object], finish: Callable[[], object], most_s: float) -> list[float]:
    """Return the time of each of several runs [s], three at least, then for `most_s` at most.

    Runs that are too short for the clock are timed in batches."""
    run()
    finish()
    before = time.perf_counter()
    run()
    finish()
    each = max(1, min(64, round(_BATCH_S / max(time.perf_counter() - before, 1e-7))))
    times_s: list[float] = []
    begun = time.perf_counter()
    while len(times_s) < REPEATS and (len(times_s) < 3 or time.perf_counter() - begun < most_s):
        before = time.perf_counter()
        for _ in range(each):
            run()
        finish()
        times_s.append((time.perf_counter() - before) / each)
    return times_s


# ---- between ranks


def between_ranks(ranks: Ranks, sizes: Sequence[int]) -> list[Transfer]:
    """Return one-way sends between two ranks, and all-reduces over all of them, per message size.

    Raises InputError when a rank fails or hangs.
    """
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    address = f"tcp://127.0.0.1:{_free_port()}"
    processes = [
        context.Process(target=_rank, args=(rank, ranks, tuple(sizes), address, results), daemon=True)
        for rank in range(len(ranks.devices))
    ]
    for process in processes:
        process.start()
    try:
        found = _answer(processes, results)
    finally:
        for process in processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
    count = len(ranks.devices)
    return [
        Transfer(what="send", over=ranks.backend, ranks=2, rows=tuple(found["send"])),
        Transfer(what="all-reduce", over=ranks.backend, ranks=count, rows=tuple(found["all-reduce"])),
    ]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _answer(processes: Sequence[Any], results: Any) -> dict[str, list[Row]]:
    """Return what rank 0 found; raise InputError when a rank ends before."""
    deadline = time.monotonic() + _JOIN_S
    while results.empty():
        failed = [process for process in processes if process.exitcode not in (None, 0)]
        if failed or time.monotonic() > deadline:
            why = f"rank process ended with {failed[0].exitcode}" if failed else f"no answer in {_JOIN_S:.0f} s"
            raise InputError(f"timing the links between ranks failed: {why}; give --no-links to go without")
        time.sleep(0.02)
    found: dict[str, list[Row]] = results.get()
    return found


def _rank(rank: int, ranks: Ranks, sizes: tuple[int, ...], address: str, results: Any) -> None:
    """Time every size with the other ranks; rank 0 says what it saw."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(ranks.threads)
    place = torch.device(ranks.devices[rank])
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(ranks.backend, init_method=address, rank=rank, world_size=len(ranks.devices))
    try:
        found: dict[str, list[Row]] = {"send": [], "all-reduce": []}
        for nbytes in sizes:
            buffer = torch.zeros(nbytes, dtype=torch.uint8, device=place)
            if rank < 2:
                found["send"].append(_pinged(buffer, rank))
            dist.barrier()
            found["all-reduce"].append(_reduced(torch.zeros(max(nbytes // 4, 1), device=place), nbytes))
        if rank == 0:
            results.put(found)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _pinged(buffer: Any, rank: int) -> Row:
    """Return the time of one way: half of there and back, since two clocks cannot be compared."""
    import torch.distributed as dist

    def there_and_back() -> None:
        (dist.send if rank == 0 else dist.recv)(buffer, 1 - rank)
        (dist.recv if rank == 0 else dist.send)(buffer, 1 - rank)
        _finish(buffer)

    times_s = [time_s / 2 for time_s in _in_step(there_and_back)]
    return quantiles(buffer.numel(), times_s)


def _reduced(buffer: Any, nbytes: int) -> Row:
    import torch.distributed as dist

    def reduce() -> None:
        dist.all_reduce(buffer)
        _finish(buffer)

    return quantiles(nbytes, _in_step(reduce))


def _in_step(run: Callable[[], None]) -> list[float]:
    """Return the times of a fixed number of runs: every rank must make the same number."""
    times_s = []
    for _ in range(REPEATS + 2):
        before = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - before)
    return times_s[2:]


def _finish(buffer: Any) -> None:
    import torch

    if buffer.device.type == "cuda":
        torch.cuda.synchronize(buffer.device)


def _all_done(*buffers: Any) -> None:
    for buffer in buffers:
        _finish(buffer)


# ---- KV blocks from one process to another


class Blocks(NamedTuple):
    """The KV memory of one rank."""

    layers: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: str

    def source(self, address: str, blocks: int) -> Source:
        """Return it as what others read: `blocks` of it in shared memory, in the file `address`."""
        from runtime.transfer.base import Source

        layers, heads = (0, self.layers), (0, self.kv_heads)
        return Source("shm", address, layers, heads, blocks, self.block_tokens, self.head_dim, self.dtype)


def pulls(kind: Blocks, counts: Sequence[int], cores: Sequence[int]) -> Transfer:
    """Return the times to take so many scattered KV blocks out of another process's memory, layer by layer.

    With the runtime's own transport, as a decode instance does once a prompt has run; the other process writes the
    blocks anew before each pull. cores: where to run the one that takes and the one that has (one core may do both).
    Raises InputError when the other fails.
    """
    import torch
    import torch.multiprocessing as mp

    from runtime.memory import shared_memory
    from runtime.transfer.base import open_reader

    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    before, rng, rows = os.sched_getaffinity(0), torch.Generator().manual_seed(0), []
    with tempfile.TemporaryDirectory(dir=shared_memory()) as folder:
        source = kind.source(f"{folder}/kv", max(counts))
        giver = context.Process(target=_give, args=(source, theirs, cores[1 % len(cores)]), daemon=True)
        giver.start()
        theirs.close()
        try:
            os.sched_setaffinity(0, {cores[0]})
            _written(ours)
            reader, target = open_reader(source), torch.ones(source.shape, dtype=source.torch_dtype)
            for count in counts:
                times_s = []
                for _ in range(REPEATS + 1):
                    found, free = (torch.randperm(max(counts), generator=rng)[:count] for _ in range(2))
                    _written(ours)
                    times_s.append(_pulled(reader, target, found, free))
                rows.append(quantiles(target[:, :, 0].nbytes * count, times_s[1:]))
            reader.close()
        finally:
            os.sched_setaffinity(0, before)
            ours.close()
            giver.join(5.0)
            if giver.is_alive():
                giver.kill()
                giver.join()
    return Transfer(what="pull", over="shared memory", ranks=2, rows=tuple(rows))


def _written(giver: Any) -> None:
    """Have the other process write its blocks anew, and wait for it."""
    try:
        giver.send(True)
        if not giver.poll(_JOIN_S):
            raise EOFError
        giver.recv()
    except (EOFError, OSError):
        raise InputError("timing pulls of KV blocks failed: the other process ended; give --no-links") from None


def _pulled(reader: Reader, target: Any, found: Any, free: Any) -> float:
    """Return the time to read the blocks `found` into the blocks `free` of `target`, as a `runtime.transfer` pull."""
    before = time.perf_counter()
    for layer, ours in enumerate(target):
        ours[:, free] = reader.read(layer, found, slice(0, target.shape[-2]))
    return time.perf_counter() - before


def _give(source: Source, ours: Any, core: int) -> None:
    """Write the blocks whenever asked, until nobody asks any more."""
    import torch

    from runtime.transfer.base import open_outlet

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    outlet = open_outlet(source.transport, source, torch.device("cpu"))
    try:
        with contextlib.suppress(EOFError, OSError):
            while True:
                ours.recv()
                outlet.kv.add_(1)
                ours.send(True)
    finally:
        outlet.close()


# ---- between memories, and to the disk


def copies(devices: Sequence[str], sizes: Sequence[int], most_s: float) -> Iterator[Transfer]:
    """Yield copies within a device or to the next one, to host memory and back; `most_s` for each size."""
    import torch

    here = torch.device(devices[0])
    there = torch.device(devices[1]) if len(set(devices)) > 1 else here
    pinned = here.type == "cuda"
    over = "memory" if there == here else "peer copy"
    memory = {"device to device": (here, there), "device to host": (here, None), "host to device": (None, here)}
    for what, (source, target) in memory.items():
        rows = []
        for nbytes in sizes:
            a, b = (_buffer(nbytes, place, pinned) for place in (source, target))
            rows.append(
                quantiles(nbytes, timed(partial(b.copy_, a, non_blocking=True), partial(_all_done, a, b), most_s))
            )
        notes = ("host memory is pinned",) if pinned and over == "memory" else ()
        yield Transfer(
            what=what,  # type: ignore[arg-type]
            over=over if what == "device to device" else ("pcie" if pinned else "memory"),
            rows=tuple(rows),
            notes=notes if what != "device to device" else (),
        )


def _buffer(nbytes: int, place: Any, pinned: bool) -> Any:
    import torch

    if place is None:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
    return torch.zeros(nbytes, dtype=torch.uint8, device=place)


def disk(folder: Path, sizes: Sequence[int]) -> list[Transfer]:
    """Return the times to write blocks to a disk (until it says that they are there), and to read them back.

    The kernel is asked to forget what it holds of a file before it is read; where the disk has a cache of its own, that
    cache is measured. Raises InputError when the folder cannot be written.
    """
    written, read = [], []
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="profile-") as inside:
            path = Path(inside) / "blocks"
            for nbytes in sizes:
                content = os.urandom(min(nbytes, 2**20)) * -(-nbytes // 2**20)
                times = [_written_and_read(path, memoryview(content)[:nbytes]) for _ in range(4)][1:]
                written.append(quantiles(nbytes, [time_s for time_s, _ in times]))
                read.append(quantiles(nbytes, [time_s for _, time_s in times]))
    except OSError as error:
        raise InputError(f"{folder}: the disk cannot be timed: {error.strerror or error}; give --no-links") from None
    kind = _file_system(folder)
    return [
        Transfer(what="host to disk", over=kind, rows=tuple(written), notes=("with fsync",)),
        Transfer(what="disk to host", over=kind, rows=tuple(read), notes=("after the kernel was told to forget it",)),
    ]


def _file_system(folder: Path) -> str:
    """Return the kind of file system that a folder is on, as the kernel names it."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return "unknown"
    inside = [(mount[1], mount[2]) for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    return max(inside, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]


def _written_and_read(path: Path, content: memoryview) -> tuple[float, float]:
    """Return the seconds to write and to read `content`."""
    before = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        done = 0
        while done < len(content):
            done += file.write(content[done:])
        os.fsync(file.fileno())
    written_s = time.perf_counter() - before
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        target = bytearray(len(content))
        view, done = memoryview(target), 0
        before = time.perf_counter()
        while done < len(content):
            done += file.readinto(view[done:]) or 0
        read_s = time.perf_counter() - before
    path.unlink()
    return written_s, read_s
