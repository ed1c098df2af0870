"""What it costs to move one request's KV cache from a prefill instance to a decode instance.

    time = fixed + latency + per_piece * pieces + bytes / bandwidth of the route

The bandwidth is that of the links the shards really cross, effective and never nominal. Rates that users
measured lie anywhere between 0.05 % and 100 % of the line rate, because of a wrong path or of small pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf, lcm

from planner.errors import InputError
from planner.specs.layout import split_layers
from planner.specs.topology import GpuId, Topology

FALLBACK_BYTES_PER_S = 0.5e9
"""What is left of a path whose direct way turns out not to work: a pull within a node that fell back to TCP
(vllm#52607; 0.36 GB/s in dynamo#1314, 0.26 over sockets in Mooncake#6)."""

Shards = Sequence[Sequence[GpuId]]
"""The GPUs of one instance: per pipeline stage, its tensor-parallel ranks in order."""


@dataclass(frozen=True, slots=True)
class TransferCost:
    """What a transfer costs beside its bytes.

    fixed_s: one message to ask for the blocks and one to say they are there. An assumption, within what the
        fastest report leaves room for (655 MB in 3.08 ms in all, dynamo#1314).
    per_piece_s: posting one descriptor. 32k descriptors of 16 KB ran at 9 GB/s on a 400 Gb/s card
        (vllm#53825): 58 ms where the bytes alone take 14 ms at 37 GB/s, so 1.4 us each.
    piece_bytes: the size of one descriptor, when the engine posts each contiguous run (block, layer, K or V)
        by itself. None for an engine that gathers: the efficiency of a network link was measured with 64 KiB
        pieces and holds their posting already.
    """

    fixed_s: float = 100e-6
    per_piece_s: float = 1.4e-6
    piece_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """How the KV cache of one request spreads over links between two instances."""

    shares: tuple[tuple[int, float], ...]
    """(link id, bytes crossing it per byte of KV cache), by link id. Empty when nothing leaves its GPU."""
    latency_s: float = 0.0
    fixed_s: float = 0.0
    pieces: int = 0
    """Pairs of ranks that exchange a shard."""
    widest: float = 0.0
    """The largest part of the KV cache that one rank posts."""
    cost: TransferCost = TransferCost()

    def bytes_per_s(self, topology: Topology) -> float:
        """Return KV bytes per second of this route alone, bound by its tightest link; inf when empty."""
        return min((topology.links[id_].bytes_per_s / share for id_, share in self.shares), default=inf)

    def setup_s(self, kv_bytes: float) -> float:
        """Return the time [s] that does not depend on who else uses the links."""
        if not self.shares:
            return 0.0
        size = self.cost.piece_bytes
        posts = 1 if size is None else max(1, ceil(self.widest * kv_bytes / size))
        return self.fixed_s + self.latency_s + posts * self.cost.per_piece_s

    def alone_s(self, kv_bytes: float, topology: Topology) -> float:
        """Return the time [s] to move `kv_bytes` with the links to itself."""
        return self.setup_s(kv_bytes) + kv_bytes / self.bytes_per_s(topology)

    def is_verified(self, topology: Topology) -> bool:
        """Return True when the speed of every link was given for this cluster, and none is assumed."""
        return not any(topology.links[id_].assumed for id_, _ in self.shares)

    def fallen_back_s(self, kv_bytes: float) -> float:
        """Return the time [s] to move `kv_bytes` where the way round the host is all that works."""
        return self.setup_s(kv_bytes) + kv_bytes / FALLBACK_BYTES_PER_S if self.shares else 0.0


def route(
    topology: Topology,
    source: Shards,
    target: Shards,
    *,
    layers: int | None = None,
    kv_heads: int | None = None,
    cost: TransferCost | None = None,
) -> Route:
    """Return the route of one request's KV cache from `source` to `target`.

    A stage holds an interval of layers, a rank an interval of heads; pairs that overlap carry the overlap.
    Give `layers` for uneven stages, and `kv_heads` (1 for a latent that all heads share) where ranks may
    outnumber them: such ranks hold copies, each target rank gets one, and the source's copies share the work.
    Raises InputError for GPUs that the topology has not, or ragged stages.
    """
    cost = cost or TransferCost()
    shares: dict[int, float] = {}
    posted: dict[GpuId, float] = {}
    latency_s, pieces = 0.0, 0
    for giver, taker, part in _overlaps(_shape(source), _shape(target), layers, kv_heads):
        a, b = source[giver[0]][giver[1]], target[taker[0]][taker[1]]
        path = topology.path(a, b)
        if not path:
            continue
        for id_ in path:
            shares[id_] = shares.get(id_, 0.0) + part
        posted[a] = posted.get(a, 0.0) + part
        latency_s, pieces = max(latency_s, topology.path_latency_s(a, b)), pieces + 1
    if not pieces:
        return Route(())
    widest = max(posted.values())
    return Route(tuple(sorted(shares.items())), latency_s, cost.fixed_s, pieces, widest, cost)


def _shape(shards: Shards) -> tuple[int, int]:
    """Return (stages, ranks)."""
    sizes = {len(stage) for stage in shards}
    if len(sizes) != 1 or 0 in sizes:
        raise InputError("expected pipeline stages with the same number of ranks each, at least one")
    return len(shards), sizes.pop()


def _overlaps(
    source: tuple[int, int], target: tuple[int, int], layers: int | None, kv_heads: int | None
) -> list[tuple[tuple[int, int], tuple[int, int], float]]:
    """Return ((stage, rank) of the source, of the target, share of the KV cache) of every transfer."""
    (giving_stages, giving_ranks), (taking_stages, taking_ranks) = source, target
    depth = layers or lcm(giving_stages, taking_stages)
    width = lcm(_heads(giving_ranks, kv_heads), _heads(taking_ranks, kv_heads))
    found = []
    for s, giving in enumerate(_stages(giving_stages, depth)):
        for t, taking in enumerate(_stages(taking_stages, depth)):
            deep = _common(giving, taking)
            for rank in range(taking_ranks) if deep else ():
                wanted = _span(rank, taking_ranks, kv_heads, width)
                for giver in _givers(rank, giving_ranks, kv_heads):
                    wide = _common(_span(giver, giving_ranks, kv_heads, width), wanted)
                    if wide:
                        found.append(((s, giver), (t, rank), deep * wide / (depth * width)))
    return found


def _heads(ranks: int, kv_heads: int | None) -> int:
    """Return into how many different shards the heads are cut."""
    return ranks if kv_heads is None else min(ranks, kv_heads)


def _stages(stages: int, layers: int) -> list[tuple[int, int]]:
    ends = [0]
    for size in split_layers(layers, stages):
        ends.append(ends[-1] + size)
    return list(pairwise(ends))


def _span(rank: int, ranks: int, kv_heads: int | None, width: int) -> tuple[int, int]:
    """Return the interval of 0..width that a rank holds; ranks beyond the number of heads hold copies."""
    shards = _heads(ranks, kv_heads)
    shard = rank * shards // ranks
    return shard * width // shards, (shard + 1) * width // shards


def _givers(taker: int, ranks: int, kv_heads: int | None) -> list[int]:
    """Return one source rank per shard: of several copies the one whose turn it is for this taker."""
    shards = _heads(ranks, kv_heads)
    copies: list[list[int]] = [[] for _ in range(shards)]
    for rank in range(ranks):
        copies[rank * shards // ranks].append(rank)
    return [same[taker % len(same)] for same in copies]


def _common(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))
