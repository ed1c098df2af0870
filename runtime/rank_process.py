"""The process of one rank: it loads its part of the model, then runs the steps that the engine sends.

The engine's pipe is read by a thread of its own: when the engine is gone the pipe ends, and the process ends with it,
even while it waits for another rank in the middle of a step. The first failure is told with its traceback.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import PlannerError
from runtime.model_files import LoadFormat, open_model, torch_dtype
from runtime.near import cores_near
from runtime.settings import EngineSettings
from runtime.shard import Shard, stages
from runtime.shared_sum import SharedSum, available
from runtime.step import Step, StepOutput
from runtime.transfer.base import Source
from runtime.transfer.pull import Pull
from runtime.worker import Worker

STORE_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class RankTask:
    """What a rank process is started with. Rank r is tensor-parallel rank r % tp of stage r // tp."""

    source: str
    """What `runtime.model_files.open_model` opens."""
    load_format: LoadFormat
    settings: EngineSettings
    rank: int
    host: str
    port: int
    """Of the store where the ranks meet."""


@dataclass(frozen=True, slots=True)
class Allocate:
    """Take memory for so many KV blocks."""

    kv_blocks: int
    host_blocks: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank has done what it was asked; at first it says how many KV blocks it has room for."""

    fitting_blocks: int = 0
    source: Source | None = None
    """Where its KV can be read, once there is some."""


@dataclass(frozen=True, slots=True)
class CancelPull:
    """Let a pull end early."""

    key: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there? Answered at once, whatever the rank is doing: a process that was stopped does not answer."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank cannot go on. `at_s` is its time.monotonic: the first of several is the cause."""

    rank: int
    at_s: float
    error: Exception
    traceback: str


def rank_main(task: RankTask, pipe: Connection) -> None:
    """Serve steps from `pipe` until it ends. Never returns an error: it is sent, and the process exits with 1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which then ends its ranks
    inbox: SimpleQueue[Any] = SimpleQueue()
    engine = _Engine(pipe)
    threading.Thread(target=_receive, args=(engine, inbox), daemon=True).start()
    try:
        _serve(task, engine, inbox)
    except Exception as error:
        with suppress(OSError):  # the engine is gone: nobody is left to tell
            engine.send(Failure(task.rank, time.monotonic(), _sendable(error), traceback.format_exc()))
        os._exit(1)
    os._exit(0)  # other ranks may be in the middle of a step: no orderly farewell waits for them


def _sendable(error: Exception) -> Exception:
    """Return `error` itself if it is one of ours, which are for users; else one that any process can read."""
    return error if isinstance(error, PlannerError) else RuntimeError(f"{type(error).__name__}: {error}")


class _Engine:
    """The way back to the engine, for several threads."""

    def __init__(self, pipe: Connection):
        self.pipe, self._lock = pipe, threading.Lock()

    def send(self, message: object) -> None:
        with self._lock:
            self.pipe.send(message)


def _receive(engine: _Engine, inbox: SimpleQueue[Any]) -> None:
    try:
        while True:
            message = engine.pipe.recv()
            if isinstance(message, Ping):
                engine.send(message)
            else:
                inbox.put(message)
    except (EOFError, OSError):
        os._exit(0)


def _serve(task: RankTask, engine: _Engine, inbox: SimpleQueue[Any]) -> None:
    stage = _Stage(task, place(task.settings, task.rank))
    worker, puller = stage.worker, stage.worker.puller(engine.send)
    engine.send(Ready(worker.fitting_blocks()))
    while True:
        message = inbox.get()
        if isinstance(message, Allocate):
            worker.allocate(message.kv_blocks, message.host_blocks)
            engine.send(Ready(source=worker.outlet.source if worker.outlet else None))
        elif isinstance(message, Pull):
            puller.start(message, worker.kv)
        elif isinstance(message, CancelPull):
            puller.cancel(message.key)
        else:
            output = stage.run(message)
            if output is not None:
                engine.send(output)


def place(settings: EngineSettings, rank: int) -> torch.device:
    """Return the device of a rank, after binding this process to it: a GPU, or some cores and as many threads."""
    if settings.device == "cuda":
        index = settings.device_indices[rank] if settings.device_indices else rank
        torch.cuda.set_device(index)
        near = cores_near(torch.cuda.get_device_properties(index)) & os.sched_getaffinity(0)
        if near:
            os.sched_setaffinity(0, near)
        return torch.device("cuda", index)
    cores = list(settings.device_indices) or sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // settings.ranks)
    if settings.device_indices:
        first = rank * share % len(cores)
        os.sched_setaffinity(0, cores[first : first + share])
    torch.set_num_threads(settings.threads or int(os.environ.get("OMP_NUM_THREADS", share)))
    return torch.device("cpu")


class _Stage:
    """A worker and its neighbours: the stage before it, the stage after it."""

    def __init__(self, task: RankTask, device: torch.device):
        settings, rank = task.settings, task.rank
        store = dist.TCPStore(task.host, task.port, is_master=False, timeout=STORE_TIMEOUT)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=settings.ranks)
        groups = [
            dist.new_group(list(range(stage * settings.tp, (stage + 1) * settings.tp))) for stage in range(settings.pp)
        ]
        files = open_model(task.source, torch_dtype(settings.dtype), task.load_format, tokenizer=False)
        stage, tp_rank = divmod(rank, settings.tp)
        layers = stages(files.config, settings.pp, settings.stage_layers)[stage]
        group = groups[stage] if settings.tp > 1 else None
        shared = SharedSum(group) if group is not None and device.type == "cpu" and available() else None
        shard = Shard(layers, files.config.layers, settings.tp, tp_rank, group, rank, shared)
        self.worker = Worker(files.config, files.weights, shard, settings, device)
        self._before, self._after = rank - settings.tp, rank + settings.tp
        self._tells = shard.last and tp_rank == 0
        self._sending: tuple[Any, torch.Tensor] | None = None

    def run(self, step: Step) -> StepOutput | None:
        """Return the chosen tokens on the rank that tells them, None on the others."""
        worker = self.worker
        hidden = None
        if not worker.shard.first:
            shape = (step.tokens, worker.config.hidden_size)
            hidden = torch.empty(shape, dtype=worker.dtype, device=worker.device)
            dist.recv(hidden, self._before)
        result = worker.run(step, hidden)
        if isinstance(result, StepOutput):
            return result if self._tells else None
        if self._sending is not None:
            self._sending[0].wait()
        self._sending = (dist.isend(result, self._after), result)  # keeps the tensor until it is sent
        return None
