"""Starts the processes of instances, watches them, and starts them again when they end or fall silent.

It knows processes alone: what runs in them is the conductor's business, which is told of every change.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from planner.errors import PlannerError
from runtime.memory import shared_memory
from runtime.messages import InstanceTask

_WATCH_S = 0.1
_SILENT_S = 6.0
"""An instance that has not given a sign of life for so long is ended."""
_STARTING_S = 300.0
_PAUSES_S = (0.0, 0.5, 2.0, 5.0)
"""Before an instance is started again that has ended so often without having been ready."""
_KILLED_S = 3.0
_LOG_LINES = 15
_RUNS = "goodput-planner-"


class StartError(PlannerError):
    """An instance ends again and again before it is ready. Holds the last lines that it wrote."""

    exit_code = 1


@dataclass(slots=True)
class Child:
    """One instance's process, over all its starts."""

    name: str
    task: Callable[[str], InstanceTask]
    """Given the identity of a start, what the process is told."""
    starts: int = 0
    ready: bool = False
    last_beat_s: float = 0.0
    failures: int = 0
    """Ends in a row before it was ready."""
    again_at_s: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    log: Path = field(default_factory=Path)

    @property
    def identity(self) -> str:
        """Return the name of this start on the wire; addresses of its KV end in it, too."""
        return f"{self.name}@{self.starts}"


class Supervisor:
    """Keeps instances running. `lost` is called once for each process that has ended, or was ended, with the reason."""

    def __init__(self, lost: Callable[[str, str], None], silent_s: float = _SILENT_S):
        _remove_old_runs()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_RUNS}{os.getpid()}-", dir=shared_memory()))
        self._children: dict[str, Child] = {}
        self._lost, self._silent_s = lost, silent_s
        self._closing = False
        self.fault: StartError | None = None
        """Set when an instance cannot be started at all."""

    def start(self, name: str, task: Callable[[str], InstanceTask], starts: int = 0) -> None:
        """Start an instance that was started `starts` times before, and keep it running."""
        child = self._children[name] = Child(name, task, starts)
        self._spawn(child)

    def beat(self, identity: str, ready: bool = False) -> None:
        """Take note of a sign of life."""
        child = self._children.get(identity.rpartition("@")[0])
        if child is not None and child.identity == identity:
            child.last_beat_s = time.monotonic()
            child.ready = child.ready or ready
            if ready:
                child.failures = 0

    def starts(self, name: str) -> int:
        """Return how often an instance was started."""
        return self._children[name].starts

    def all_starts(self) -> dict[str, int]:
        """Return how often each instance was started."""
        return {name: child.starts for name, child in self._children.items()}

    def is_current(self, identity: str) -> bool:
        """Return True for the name on the wire of a process that is running."""
        child = self._children.get(identity.rpartition("@")[0])
        return child is not None and child.process is not None and child.identity == identity

    async def watch(self) -> None:
        """Start what has ended, until closed. Returns when an instance cannot be started: see `fault`."""
        while not self._closing and self.fault is None:
            for child in self._children.values():
                self._look_after(child)
            await asyncio.sleep(_WATCH_S)

    def _look_after(self, child: Child) -> None:
        now_s = time.monotonic()
        if child.process is None:
            if now_s >= child.again_at_s:
                self._spawn(child)
            return
        code = child.process.poll()
        if code is not None:
            self._gone(child, f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}")
        elif now_s - child.last_beat_s > (self._silent_s if child.ready else _STARTING_S):
            self.end(child.name, f"gave no sign of life for {now_s - child.last_beat_s:.0f} s and was ended")

    def end(self, name: str, why: str) -> None:
        """End an instance's processes at once; it is started again."""
        child = self._children[name]
        if child.process is not None:
            _kill(child.process)
            self._gone(child, why)

    def _gone(self, child: Child, why: str) -> None:
        assert child.process is not None
        _kill(child.process)  # ranks of an instance that ended by itself
        child.process = None
        child.failures = 0 if child.ready else child.failures + 1
        if child.failures > len(_PAUSES_S):
            self.fault = StartError(f"{child.name} {why}, {child.failures} times in a row\n{_tail(child.log)}")
        child.again_at_s = time.monotonic() + _PAUSES_S[min(child.failures, len(_PAUSES_S) - 1)]
        child.ready = False
        self._remove_segments(child.identity)
        self._lost(child.name, why)

    def _remove_segments(self, identity: str) -> None:
        for path in self.folder.glob(f"{identity}.*"):  # its ranks' KV memory
            path.unlink(missing_ok=True)

    def _spawn(self, child: Child) -> None:
        child.starts += 1
        child.last_beat_s = time.monotonic()
        child.log = self.folder / f"{child.name}.log"
        task = child.task(child.identity)
        with child.log.open("ab") as log:
            child.process = subprocess.Popen(
                [sys.executable, "-m", "runtime.instance"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **task.environment},
                start_new_session=True,  # its ranks are ended with it, as a group; Ctrl-C does not reach it
            )
        assert child.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ended at once: seen at the next look
            child.process.stdin.write(msgspec.json.encode(task) + b"\n")
            child.process.stdin.flush()

    def close(self) -> None:
        """End all processes and remove what they shared."""
        self._closing = True
        for child in self._children.values():
            if child.process is not None:
                _kill(child.process)
                child.process = None
        shutil.rmtree(self.folder, ignore_errors=True)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started, and wait for it; not for ever, as a driver may hold it up."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _remove_old_runs() -> None:
    """Remove what servers have left behind that were killed."""
    for folder in Path(shared_memory() or tempfile.gettempdir()).glob(f"{_RUNS}*"):
        pid = folder.name.removeprefix(_RUNS).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-_LOG_LINES:])
