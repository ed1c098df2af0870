"""Which instances there can be: every (tensor, pipeline) layout per GPU type, and for each that cannot be, why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from planner.cost.base import BatchShape, CostModel
from planner.simulator.cluster import Instance, Limits
from planner.specs.engine import Engine
from planner.specs.gpu import Gpu
from planner.specs.layout import Layout, Phase
from planner.specs.model import ModelSpec

PREFILL_BUDGETS = (512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """One kind of instance: everything but where it stands."""

    phase: Phase
    layout: Layout
    gpu: str
    cost: CostModel
    limits: Limits

    @property
    def gpus(self) -> int:
        """GPUs per instance."""
        return self.layout.gpus

    @property
    def key(self) -> tuple[Phase, Layout, str]:
        """What tells kinds apart in a placement."""
        return (self.phase, self.layout, self.gpu)

    def instance(self) -> Instance:
        """Return one to simulate."""
        return Instance(self.phase, self.cost, self.limits)

    def __str__(self) -> str:
        chunk = f" ({self.limits.max_tokens} tokens)" if self.phase == "aggregated" else ""
        return f"{self.phase} {self.layout}{chunk}"


def show_mix(kinds: Iterable[tuple[Kind, int]]) -> str:
    """Return `2 x prefill TP4 + 1 x decode TP8`, with the GPU types where there are several."""
    mix = list(kinds)
    several = len({kind.gpu for kind, _ in mix}) > 1
    counts: dict[str, int] = {}
    for kind, count in mix:
        name = f"{kind} on {kind.gpu}" if several else str(kind)
        counts[name] = counts.get(name, 0) + count
    return " + ".join(f"{count} x {name}" for name, count in sorted(counts.items(), reverse=True))


@dataclass(frozen=True, slots=True)
class Rejected:
    """A layout that is not considered, and the reason."""

    phase: Phase | str
    layout: Layout
    gpu: str
    reason: str
    max_tokens: int | None = None
    """Token budget of a step, where only that one is meant."""

    def __str__(self) -> str:
        phase = "" if self.phase == "any" else f"{self.phase} "
        return f"{phase}{self.layout}" + (f" ({self.max_tokens} tokens)" if self.max_tokens else "")


def kv_blocks(model: ModelSpec, gpu: Gpu, layout: Layout, engine: Engine, max_tokens: int) -> int:
    """Return how many KV blocks an instance holds: what the fullest stage has left beside weights and work space.

    May be negative, by how much it misses. Weights and KV are per rank and stage; the work space is the activations
    of `max_tokens` tokens (four hidden-size and two MLP-size rows each) plus what the engine keeps for itself.
    """
    work = max_tokens * model.activation_bytes_per_token * 4 + 2 * max_tokens * _mlp_bytes(model, layout.tp)
    usable = gpu.memory_bytes * engine.memory_fraction - engine.reserved_bytes - work
    blocks = []
    stages = zip(model.stage_weight_bytes(layout), model.stage_kv_bytes_per_token(layout), strict=True)
    for weights, kv in stages:
        blocks.append(int((usable - weights) // (kv * engine.block_tokens)))
    return min(blocks)


def _mlp_bytes(model: ModelSpec, tp: int) -> float:
    """Bytes of one token's widest MLP row on one rank."""
    moe = model.moe
    width = model.intermediate_size or 0
    if moe is not None:
        width = max(width, moe.experts_per_token * moe.intermediate_size)
    return width / tp * model.activation_bytes_per_token / model.hidden_size


def efficient_budget(cost: CostModel, longest: int) -> int:
    """Return the prefill batch size [tokens] from which on a larger batch gains little: 90 % of the best rate.

    DistServe's L_m (OSDI '24, section 3.1): below it the GPU is not yet saturated, beyond it everybody just waits.
    """
    sizes = [size for size in PREFILL_BUDGETS if size <= max(longest, PREFILL_BUDGETS[0])] or [PREFILL_BUDGETS[0]]
    rates = [size / max(cost.stages_s(BatchShape.prefill(512, max(size // 512, 1)))) for size in sizes]
    return next(size for size, rate in zip(sizes, rates, strict=True) if rate >= 0.9 * max(rates))


def pipelines(model: ModelSpec, most: int) -> Iterator[int]:
    """Yield the pipeline depths to try: powers of two and three up to `most`."""
    for pp in range(1, most + 1):
        if pp in (1, 2, 3, 4, 6, 8, 12, 16) and model.pp_fault(pp) is None:
            yield pp


def rejected_or_blocks(
    model: ModelSpec, gpu: Gpu, layout: Layout, engine: Engine, max_tokens: int, longest: int, unit_gpus: int
) -> str | int:
    """Return the reason why no instance of this layout can be, or else the KV blocks that it has."""
    if fault := model.tp_fault(layout.tp):
        return fault
    if layout.tp > unit_gpus:
        return f"a tensor-parallel group of {layout.tp} does not fit into a node (or NVLink domain) of {unit_gpus} GPUs"
    blocks = kv_blocks(model, gpu, layout, engine, max_tokens)
    weights = max(model.stage_weight_bytes(layout))
    if blocks <= 0:
        return (
            f"weights of {weights / 1e9:.1f} GB per GPU leave no room for KV cache in "
            f"{engine.memory_fraction:.0%} of {gpu.memory_bytes / 1e9:.1f} GB"
        )
    needed = -(-longest // engine.block_tokens)
    if blocks < needed:
        return (
            f"beside {weights / 1e9:.1f} GB of weights there is room for {blocks * engine.block_tokens} KV tokens, "
            f"but the longest request needs {longest}"
        )
    return blocks


def with_budget(kind: Kind, max_tokens: int) -> Kind:
    """Return the kind with another token budget per iteration."""
    return replace(kind, limits=replace(kind.limits, max_tokens=max_tokens))


def by_reason(rejected: Iterable[Rejected]) -> dict[str, list[Rejected]]:
    """Return the rejected layouts grouped by their reason, in order of appearance."""
    groups: dict[str, list[Rejected]] = {}
    for one in rejected:
        groups.setdefault(one.reason, []).append(one)
    return groups
