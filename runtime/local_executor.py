"""An instance of one rank, in this process."""

from __future__ import annotations

from collections import deque

from runtime.step import Step, StepOutput
from runtime.worker import Worker


class LocalExecutor:
    """A step runs while it is submitted."""

    depth = 1

    def __init__(self, worker: Worker, kv_blocks: int, host_blocks: int):
        self.kv_blocks = kv_blocks or worker.fitting_blocks()
        worker.allocate(self.kv_blocks, host_blocks)
        self._worker = worker
        self._done: deque[StepOutput] = deque()

    def submit(self, step: Step) -> None:
        output = self._worker.run(step)
        assert isinstance(output, StepOutput)
        self._done.append(output)

    def collect(self) -> StepOutput:
        return self._done.popleft()

    def close(self) -> None:
        self._worker.allocate(0, 0)
