"""The runtime's own engine as a subject: its scheduler, its executor, one step at a time, at any layout."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import numpy as np

from planner.errors import InvariantError
from profiler.setting import Setting
from profiler.subject import Limits
from runtime.copies import Copy
from runtime.engine import Engine
from runtime.executor import Executor
from runtime.model_config import ModelConfig
from runtime.sampling import Sampling
from runtime.settings import EngineSettings
from runtime.step import Step, StepOutput

_COPIES = 256
"""KV blocks that are written per step when the cache is filled."""


class OneAtATime:
    """An executor with one step under way: a batch passes through all stages as a whole, and it is timed."""

    depth = 1

    def __init__(self, inner: Executor, most_blocks: int):
        self._inner = inner
        self.found_blocks = inner.kv_blocks
        """What the engine has room for."""
        self.kv_blocks = min(inner.kv_blocks, most_blocks)
        """What is used of it: on a CPU, memory counts from when it is first written."""
        self.copies: tuple[Copy, ...] = ()
        """Made before the next step."""
        self.tokens = 0
        self.model_s = 0.0
        self._since_s = 0.0

    def submit(self, step: Step) -> None:
        """Start a step."""
        self.tokens = step.tokens
        if self.copies:
            step, self.copies = replace(step, copies=(*step.copies, *self.copies)), ()
        self._since_s = time.perf_counter()
        self._inner.submit(step)

    def collect(self) -> StepOutput:
        """Return what the step has chosen."""
        output = self._inner.collect()
        self.model_s = time.perf_counter() - self._since_s
        return output

    def close(self) -> None:
        """End the executor."""
        self._inner.close()


class EngineSubject:
    """One instance of the runtime. Requests are adopted with their first tokens cached, as from a prefill instance."""

    def __init__(
        self,
        config: ModelConfig,
        executor: Executor,
        settings: EngineSettings,
        most_kv_tokens: int,
        most_context: int = 2**30,
    ):
        self._executor = OneAtATime(executor, -(-most_kv_tokens // settings.block_tokens))
        self._engine = Engine(config, self._executor, settings)
        self._vocabulary = config.vocab_size
        self._rng = np.random.default_rng(settings.seed)
        self._placed: list[str] = []
        self._due_tokens = 0
        self.kv_tokens = self._executor.found_blocks * settings.block_tokens
        self.limits = Limits(
            kv_blocks=self._executor.kv_blocks,
            block_tokens=settings.block_tokens,
            max_positions=min(config.max_positions - 2, most_context),  # two that the engine wants room for
            max_requests=settings.max_batch,
            max_step_tokens=settings.step_tokens or config.max_positions,
        )
        self.process_ids = (os.getpid(), *getattr(executor, "process_ids", ()))
        self._fill()

    def place(self, setting: Setting) -> None:
        """Put the requests of a setting in place; those before are gone."""
        for request_id in self._placed:
            self._engine.abort(request_id)
        self._placed = [
            *(self._adopt(setting.context_tokens, setting.context_tokens - 1) for _ in range(setting.decodes)),
            *(
                self._adopt(setting.cached_tokens + setting.new_tokens, setting.cached_tokens)
                for _ in range(setting.prefills)
            ),
        ]
        self._due_tokens = setting.step_tokens

    def _adopt(self, tokens: int, cached: int) -> str:
        """Return the id of a new request of random tokens, no two alike, so that no prefix is found in the cache."""
        prompt = self._rng.integers(0, self._vocabulary, tokens).tolist()
        return self._engine.adopt(prompt, cached, Sampling(max_tokens=2, ignore_eos=True, seed=0))

    def step(self) -> float | None:
        """Run one step over all of them; return the seconds outside of the model."""
        before = time.perf_counter()
        updates = self._engine.step()
        whole_s = time.perf_counter() - before
        if len(updates) != len(self._placed) or self._executor.tokens != self._due_tokens:
            raise InvariantError(
                f"a step ran {self._executor.tokens} tokens of {len(updates)} requests, "
                f"{self._due_tokens} of {len(self._placed)} were to be measured"
            )
        return max(0.0, whole_s - self._executor.model_s)

    def close(self) -> None:
        """End the engine and its ranks."""
        self._engine.close()

    def _fill(self) -> None:
        """Write every KV block that is used: memory that was never written reads faster than any cache would.

        The block of one short prompt is copied to all others, with steps as the engine makes them.
        """
        source = self._run_a_block()
        for start in range(0, self._executor.kv_blocks, _COPIES):
            targets = range(start, min(start + _COPIES, self._executor.kv_blocks))
            self._executor.copies = tuple(Copy(source, target) for target in targets if target != source)
            self._run_a_block()

    def _run_a_block(self) -> int:
        """Run a prompt that fills one KV block, and let it go; return the block, which keeps its values."""
        request_id = self._adopt(self.limits.block_tokens, 0)
        self._engine.step()
        (running,) = self._engine.scheduler.running
        block = self._engine.cache.blocks(running.leader.id)[0]
        self._engine.abort(request_id)
        return block
