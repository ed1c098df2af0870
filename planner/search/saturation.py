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
    work_s = []
    for n in prompts.tolist():
        full = BatchShape(prefills=max(budget // n, 1), tokens=max(budget, n), attended=float(max(budget, n)) * n)
        work_s.append(min(n / budget, 1.0) * max(kind.cost.stages_s(full)))
    return 1.0 / float(np.mean(work_s))


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
    within = _largest_batch(kind, held, loosest, most)
    return (
        max(within / target, 0.0)
        and min(_tokens_per_s(kind, most, held), _tokens_per_s(kind, within, held) / target) / steps
    )


def _tokens_per_s(kind: Kind, batch: float, held: float) -> float:
    """Return tokens per second of a pipeline full of batches that together hold `batch` requests."""
    if batch <= 0:
        return 0.0
    stages = len(kind.cost.stage_share)
    shape = BatchShape(decodes=max(batch / stages, 1e-9), context=batch / stages * held)
    return batch / stages / max(kind.cost.stages_s(shape))


def _largest_batch(kind: Kind, held: float, tpot_s: float, most: float) -> float:
    """Return the batch, up to `most`, whose step through all stages takes `tpot_s`; 0 when even one takes longer."""
    stages = len(kind.cost.stage_share)

    def token_s(batch: float) -> float:
        lane = max(batch / stages, 1.0)
        busy = kind.cost.stages_s(BatchShape(decodes=lane, context=lane * held))
        # with all lanes full a lane's turn comes once per `stages` slots of the slowest stage
        return max(sum(busy), min(batch, stages) * max(busy))

    if token_s(1.0) > tpot_s:
        return 0.0
    low, high = 1.0, max(most, 1.0)
    if token_s(high) <= tpot_s:
        return most
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if token_s(middle) <= tpot_s else (low, middle)
    return high


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
