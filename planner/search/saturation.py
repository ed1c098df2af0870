"""The rate beyond which an instance cannot keep up, whatever the queueing: work per request over capacity.

This is the only true upper bound on goodput (count x single-instance goodput is none: pools do better than the sum of
their parts), so the search prunes on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.cost.base import BatchShape
from planner.search.layouts import Kind
from planner.specs.slo import Slo
from planner.specs.workload import Workload

_SAMPLE = 2000
_SIZES = 200
"""Batch sizes that are looked at, 3 % apart at most for 256 requests."""


def saturation_rps(kind: Kind, workload: Workload, slos: Sequence[Slo]) -> float:
    """Return the request rate [1/s] that saturates one instance of `kind` under the lengths of `workload`."""
    if kind.phase == "prefill":
        return _prefill_rps(kind, workload)
    if kind.phase == "decode":
        return _decode_rps(kind, workload, slos)
    return _aggregated_rps(kind, workload, slos)


def _lengths(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Return up to 2000 (prompt, output) lengths, evenly out of the sorted table so that the mean is kept."""
    order = np.argsort(workload.table.prompt_tokens, kind="stable")
    if len(order) > _SAMPLE:
        order = order[np.linspace(0, len(order) - 1, _SAMPLE).round().astype(int)]
    return workload.table.prompt_tokens[order], workload.table.output_tokens[order]


def _prefill_rps(kind: Kind, workload: Workload) -> float:
    """Batches are full at best: a prompt of n tokens takes n / budget of a full batch of its like."""
    prompts, _ = _lengths(workload)
    budget = kind.limits.max_tokens
    chunk = kind.limits.pipeline_tokens
    work_s = []
    for n in prompts.tolist():
        full = BatchShape(prefills=max(budget // n, 1), tokens=max(budget, n), attended=float(max(budget, n)) * n)
        busy_s = _in_chunks_s(kind, full, chunk) if chunk else max(kind.cost.stages_s(full))
        work_s.append(min(n / budget, 1.0) * busy_s)
    return 1.0 / float(np.mean(work_s))


def _in_chunks_s(kind: Kind, full: BatchShape, chunk: int) -> float:
    """Return for how long a batch that passes the stages in chunks keeps the busiest one [s], at least.

    Chunks that are cut evenly share all that is dear in a batch, and each holds a part of one prompt at least.
    """
    chunks = -(-full.tokens // chunk)
    one = full._replace(prefills=1, tokens=full.tokens // chunks, attended=full.attended / chunks)
    return chunks * max(kind.cost.stages_s(one))


def _decode_rps(kind: Kind, workload: Workload, slos: Sequence[Slo]) -> float:
    """The largest batch that KV blocks hold, or that steps within TPOT.

    Attaining requests average at most the TPOT bound per step. Tokens per second are concave in the step time, so at
    that bound they are at most X; attaining requests are at least the target share, hence rate <= X / share.
    """
    prompts, outputs = _lengths(workload)
    steps = float(np.maximum(outputs - 1, 0).mean())
    if steps == 0:
        return float("inf")
    # context averaged over a request's steps, weighted by how many it makes
    held = float((np.maximum(outputs - 1, 0) * (prompts + outputs / 2)).mean()) / steps
    most = min(kind.limits.max_batch, kind.limits.kv_blocks * kind.limits.block_tokens / held)
    loosest = max(slo.tpot_s for slo in slos)
    target = min(slo.attainment for slo in slos)
    # all sizes, because a law in regimes can step more slowly just below its threshold than above it
    sizes = np.geomspace(1.0, max(most, 1.0), _SIZES)
    tokens_per_s = np.array([_tokens_per_s(kind, size, held) for size in sizes])
    in_time = np.flatnonzero([_token_s(kind, size, held) <= loosest for size in sizes])
    if not len(in_time):
        return 0.0
    within = tokens_per_s[: in_time[-1] + 2]  # and the next size: the bound lies between the two
    return float(min(tokens_per_s.max(), within.max() / target)) / steps


def _tokens_per_s(kind: Kind, batch: float, held: float) -> float:
    """Return tokens per second of a pipeline full of batches that together hold `batch` requests."""
    lane = batch / len(kind.cost.stage_share)
    return lane / max(kind.cost.stages_s(BatchShape(decodes=lane, context=lane * held)))


def _token_s(kind: Kind, batch: float, held: float) -> float:
    """Return the time between two tokens of a request [s]: with all lanes full, one slot of the slowest stage each."""
    lane = max(batch / len(kind.cost.stage_share), 1.0)
    busy = kind.cost.stages_s(BatchShape(decodes=lane, context=lane * held))
    return max(sum(busy), min(batch, len(busy)) * max(busy))


def _aggregated_rps(kind: Kind, workload: Workload, slos: Sequence[Slo]) -> float:
    """Every token of a request passes once; at best each step is full. Never more than decode alone would allow."""
    prompts, _ = _lengths(workload)
    budget = kind.limits.max_tokens
    work_s = []
    for n in prompts.tolist():
        full = BatchShape(prefills=max(budget // n, 1), tokens=budget, attended=float(budget) * n)
        work_s.append(n / budget * max(kind.cost.stages_s(full)))
    decode_rps = _decode_rps(kind, workload, slos)
    return min(1.0 / float(np.mean(work_s)), decode_rps)
