"""A machine whose law is known: what the profiler measures there must give the law back. It has its own time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from planner.specs.gpu import Gpu
from planner.specs.model import ModelSpec
from profiler.setting import Setting
from profiler.subject import Limits
from profiler.timer import Repeat

MODEL = ModelSpec(
    name="lawful", layers=16, hidden_size=1024, intermediate_size=4096, heads=16, kv_heads=4, vocab_size=32000
)
GPU = Gpu(
    name="lawful-gpu",
    memory_bytes=40 * 2**30,
    memory_bytes_per_s=500e9,
    fp16_flop_per_s=100e12,
    host_bytes_per_s=20e9,
)


def law_s(setting: Setting) -> float:
    """A host part that hides short prompts, tokens, attention; weights once, then KV and requests."""
    shape = setting.shape
    prefill_s = max(6e-3, 2e-3 + 9e-6 * shape.tokens + 1.1e-10 * shape.attended) if setting.prefills else 0.0
    decode_s = 4e-3 + 25e-6 * shape.decodes + 9e-8 * shape.context if setting.decodes else 0.0
    return prefill_s + decode_s


@dataclass
class Lawful:
    """A `Subject`, its timer and its clock in one. `noise` is relative; repeats of a seed are the same."""

    noise: float = 0.005
    budget_s: float = 60.0
    limits: Limits = field(default_factory=lambda: Limits(8192, 16, 8192, 64, 8192))
    law: Callable[[Setting], float] = law_s
    kv_tokens: int = 8192 * 16
    process_ids: tuple[int, ...] = ()
    spent_s: float = 0.0
    interrupt_after: int = 10**9
    steps: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))

    def place(self, setting: Setting) -> None:
        self._setting = setting

    def step(self) -> float | None:
        self.steps += 1
        if self.steps > self.interrupt_after:
            raise KeyboardInterrupt
        return None

    def timer(self, step: Callable[[], float | None]) -> Repeat:
        step()
        time_s = self.law(self._setting) * float(np.exp(self.noise * self.rng.standard_normal()))
        self.spent_s += time_s
        return Repeat(time_s, 1e-4)

    def close(self) -> None:
        pass
