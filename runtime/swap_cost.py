"""What it takes to keep the KV of a preempted request, and what to compute it again: measured when an engine starts."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from runtime.copies import Copy, Direction
from runtime.executor import Executor
from runtime.step import Step, prompt_step

_TOKENS = 128
_BLOCKS = 64
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class SwapCost:
    """The numbers that `planner.policies.preempt.swaps` weighs."""

    swap_s_per_block: float
    """One way."""
    recompute_s_per_token: float


def measure_swap_cost(executor: Executor, block_tokens: int, host_blocks: int) -> SwapCost:
    """Return the cost of both ways. Runs a few steps, so nothing may be in the cache yet.

    A step with copies out and back is compared with the same step without, for ranks have no other way to be asked.
    """
    blocks = min(_BLOCKS, host_blocks, executor.kv_blocks)
    step = prompt_step(min(_TOKENS, executor.kv_blocks * block_tokens), block_tokens)
    out = tuple(Copy(block, block, Direction.OUT) for block in range(blocks))
    back = tuple(Copy(block, block, Direction.IN) for block in range(blocks))
    alone_s = _shortest_s(executor, step)
    moving_s = _shortest_s(executor, replace(step, copies=out + back))
    return SwapCost(max(0.0, moving_s - alone_s) / (2 * blocks), alone_s / step.tokens)


def _shortest_s(executor: Executor, step: Step) -> float:
    """Return the seconds of the fastest of a few runs, the first of which warms up."""
    return min([_seconds(executor, step) for _ in range(1 + _REPEATS)][1:])


def _seconds(executor: Executor, step: Step) -> float:
    since_s = time.perf_counter()
    executor.submit(step)
    executor.collect()
    return time.perf_counter() - since_s
