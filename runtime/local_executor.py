"""An instance of one rank, in this process."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from runtime.step import Step, StepOutput
from runtime.transfer.base import Source
from runtime.transfer.pull import Pull, Pulled, Puller
from runtime.worker import Worker


class LocalExecutor:
    """A step runs while it is submitted."""

    depth = 1

    def __init__(self, worker: Worker, kv_blocks: int, host_blocks: int):
        self.kv_blocks = kv_blocks or worker.fitting_blocks()
        worker.allocate(self.kv_blocks, host_blocks)
        self.sources: tuple[Source, ...] = (worker.outlet.source,) if worker.outlet else ()
        self._worker = worker
        self._done: deque[StepOutput] = deque()
        self._pulled: SimpleQueue[Pulled] = SimpleQueue()
        self._puller: Puller | None = None
        self._bell, self._ringer = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._ringer, False)

    def submit(self, step: Step) -> None:
        output = self._worker.run(step)
        assert isinstance(output, StepOutput)
        self._done.append(output)

    def collect(self) -> StepOutput:
        return self._done.popleft()

    def pull(self, pull: Pull) -> None:
        if self._puller is None:
            self._puller = self._worker.puller(self._ring)
        self._puller.start(pull, self._worker.kv)

    def _ring(self, pulled: Pulled) -> None:
        """Take note of a pull that has ended; called from its thread."""
        self._pulled.put(pulled)
        with suppress(BlockingIOError):  # it rings already
            os.write(self._ringer, b"!")

    def cancel_pull(self, key: str) -> None:
        if self._puller is not None:
            self._puller.cancel(key)

    def pulled(self) -> list[Pulled]:
        with suppress(BlockingIOError):
            os.read(self._bell, 4096)
        found = []
        with suppress(Empty):
            while True:
                found.append(self._pulled.get_nowait())
        return found

    def wakers(self) -> Sequence[int]:
        return (self._bell,)

    def close(self) -> None:
        if self._puller is not None:
            self._puller.close()
        self._worker.allocate(0, 0)
        os.close(self._bell)
        os.close(self._ringer)
