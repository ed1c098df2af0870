"""An instance of several ranks, each a process of its own, watched from here."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from planner.errors import InputError, PlannerError
from runtime.memory import OutOfMemoryError
from runtime.model_files import LoadFormat
from runtime.rank_process import Allocate, CancelPull, Failure, Ping, RankTask, Ready, rank_main
from runtime.settings import EngineSettings
from runtime.step import Step, StepOutput
from runtime.transfer.pull import Pull, Pulled

_LOOPBACK = "127.0.0.1"
_GRACE_S = 2.0
_PING_S, _SILENT_S = 1.0, 8.0
"""While a result is awaited, ranks are asked so often whether they are there; silent for so long, one is lost."""


class RankDiedError(PlannerError):
    """A rank process has ended, or failed. The others have been ended, too; its traceback comes first."""

    exit_code = 1


class RankExecutor:
    """Steps go to all ranks; the first rank of the last stage answers. `depth` steps may be under way."""

    def __init__(self, source: str, load_format: LoadFormat, settings: EngineSettings):
        self.depth = settings.pp
        self._store = dist.TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._outputs: deque[StepOutput] = deque()
        self._parts: dict[str, list[Pulled]] = {}
        self._heard: dict[Connection, float] = {}
        try:
            for rank in range(settings.ranks):
                self._start(RankTask(source, load_format, settings, rank, _LOOPBACK, self._store.port))
            ready = self._all_ready()
            self.kv_blocks = settings.kv_blocks or min(each.fitting_blocks for each in ready)
            self._send(Allocate(self.kv_blocks, settings.host_blocks))
            self.sources = tuple(each.source for each in self._all_ready() if each.source)
        except BaseException:
            self.close()
            raise

    def _start(self, task: RankTask) -> None:
        # ranks are forked off a server that has imported torch once: starting one takes milliseconds, not seconds
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["runtime.rank_process", "runtime.model_files"])
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        ours, theirs = context.Pipe()
        process = context.Process(target=rank_main, args=(task, theirs), name=f"rank-{task.rank}", daemon=True)
        process.start()
        theirs.close()
        self._pipes.append(ours)
        self._processes.append(process)

    def submit(self, step: Step) -> None:
        """Start a step on all ranks."""
        self._send(step)

    def collect(self) -> StepOutput:
        """Return the result of the oldest step under way. Raises RankDiedError when a rank has ended, or is stuck."""
        self._begin_to_wait()
        while not self._outputs:
            self._take_note(self._receive(self._pipes)[1])
        return self._outputs.popleft()

    def pull(self, pull: Pull) -> None:
        """Start to pull KV, on all ranks."""
        self._send(pull)

    def cancel_pull(self, key: str) -> None:
        """Let a pull end early."""
        self._send(CancelPull(key))

    def pulled(self) -> list[Pulled]:
        """Return the pulls that every rank is through with: as long as the slowest, with the first error of any."""
        while any(pipe.poll() for pipe in self._pipes):
            self._take_note(self._receive(self._pipes)[1])
        whole = [key for key, parts in self._parts.items() if len(parts) == len(self._pipes)]
        return [_slowest(self._parts.pop(key)) for key in whole]

    def wakers(self) -> Sequence[int]:
        """Return the pipes' descriptors."""
        return [pipe.fileno() for pipe in self._pipes]

    def _begin_to_wait(self) -> None:
        self._heard = dict.fromkeys(self._pipes, time.monotonic())

    def _take_note(self, message: StepOutput | Pulled | Ping) -> None:
        if isinstance(message, StepOutput):
            self._outputs.append(message)
        elif isinstance(message, Pulled):
            self._parts.setdefault(message.key, []).append(message)

    @property
    def process_ids(self) -> list[int]:
        """Return the process of each rank."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End all ranks: by closing their pipes, then by force."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + _GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    # ---- messages

    def _send(self, message: Step | Allocate | Pull | CancelPull | Ping) -> None:
        for pipe in self._pipes:
            try:
                pipe.send(message)
            except OSError:
                self._fail()

    def _all_ready(self) -> list[Ready]:
        answers: dict[int, Ready] = {}
        self._begin_to_wait()
        while len(answers) < len(self._pipes):
            silent = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            rank, message = self._receive(silent)
            if isinstance(message, Ready):
                answers[rank] = message
        return [answers[rank] for rank in sorted(answers)]

    def _receive(self, pipes: list[Connection]) -> tuple[int, Any]:
        """Return the next message and its rank; raise when a rank fails or dies first, or answers nothing."""
        while True:
            watched = wait([*pipes, *(process.sentinel for process in self._processes)], _PING_S)
            if not watched:
                self._ask(pipes)
                continue
            for pipe in pipes:
                if pipe in watched:
                    try:
                        message = pipe.recv()
                    except (EOFError, OSError):
                        self._fail()
                    if isinstance(message, Failure):
                        self._fail(message)
                    self._heard[pipe] = time.monotonic()
                    return self._pipes.index(pipe), message
            if not any(pipe in watched for pipe in pipes):
                self._fail()

    def _ask(self, pipes: list[Connection]) -> None:
        """Ask all ranks whether they are there; raise when one of `pipes` has not answered for long."""
        silent = [pipe for pipe in pipes if time.monotonic() - self._heard[pipe] > _SILENT_S]
        if silent:
            rank = self._pipes.index(silent[0])
            self.close()
            raise RankDiedError(f"rank {rank} has not answered for {_SILENT_S:g} s; all ranks have been ended")
        self._send(Ping())

    def _fail(self, first: Failure | None = None) -> None:
        """End all ranks and raise, with the failure that came first: the others may only have missed that rank."""
        time.sleep(0.2)  # let the rank that is the cause be found dead, or have its say
        failures = [first] if first else []
        for pipe in self._pipes:
            try:
                while pipe.poll():
                    message = pipe.recv()
                    failures += [message] if isinstance(message, Failure) else []
            except (EOFError, OSError):
                continue  # a dead rank has nothing more to say
        killed = [(rank, it.exitcode) for rank, it in enumerate(self._processes) if (it.exitcode or 0) < 0]
        self.close()
        if killed:
            rank, code = killed[0]
            raise RankDiedError(f"rank {rank} was ended by signal {-code}; the other ranks have been ended, too")
        if not failures:
            raise RankDiedError("a rank has ended without a word; the other ranks have been ended, too")
        cause = min(failures, key=lambda failure: failure.at_s)
        if isinstance(cause.error, InputError | OutOfMemoryError):
            raise cause.error
        raise RankDiedError(f"rank {cause.rank}: {cause.error}\n{cause.traceback}")


def _slowest(parts: list[Pulled]) -> Pulled:
    """Return one account of all ranks' parts of a pull."""
    return Pulled(
        parts[0].key,
        min(part.start_s for part in parts),
        max(part.end_s for part in parts),
        max(part.copied_s for part in parts),
        sum(part.size for part in parts),
        next((part.error for part in parts if part.error), ""),
    )
