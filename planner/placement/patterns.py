"""Node-packing patterns: every sensible way to fill one pool of GPUs with (parts of) instances.

A tensor-parallel group lies inside one fast-linked group where it can; only a group larger than all of these
spreads over the pool. A pattern is a multiset of blocks; a block is some pipeline stages of one candidate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from planner.placement.base import Candidate, Unplaceable

Sizes = tuple[int, ...]
MOST_PATTERNS = 20_000


class Block(NamedTuple):
    """`stages` tensor-parallel groups of candidate number `candidate`, side by side in one pool."""

    candidate: int
    stages: int


@dataclass(frozen=True, slots=True)
class Pattern:
    """What one pool holds. The `own_` rates are of instances that lie in it whole: their KV can stay."""

    blocks: tuple[Block, ...] = ()
    gpus: int = 0
    prefill_rps: float = 0.0
    decode_rps: float = 0.0
    own_prefill_rps: float = 0.0
    own_decode_rps: float = 0.0
    aggregated_rps: float = 0.0
    counts: Counter[Block] = field(default_factory=Counter, compare=False)


def pattern_of(blocks: Sequence[Block], candidates: Sequence[Candidate]) -> Pattern:
    """Return the pattern with its GPUs and rates; part of an instance counts for its share of the stages."""
    gpus, total, own = 0, Counter[str](), Counter[str]()
    for candidate, stages in ((candidates[block.candidate], block.stages) for block in blocks):
        gpus += candidate.layout.tp * stages
        rate = candidate.rate_rps * stages / candidate.layout.pp
        total[candidate.phase] += rate  # type: ignore[assignment]
        own[candidate.phase] += rate if stages == candidate.layout.pp else 0  # type: ignore[assignment]
    rates = (total["prefill"], total["decode"], own["prefill"], own["decode"], total["aggregated"])
    return Pattern(tuple(sorted(blocks)), gpus, *rates, counts=Counter(blocks))


@lru_cache(maxsize=1 << 16)
def pack(sizes: Sizes, tps: Sizes) -> tuple[tuple[int, ...], ...] | None:
    """Return how many GPUs of each fast group every tensor-parallel group takes, in the order of `tps`.

    `tps` must fall. None when they do not fit. Exact: best fit first, then backtracking over unequal groups.
    """
    small = [tp for tp in tps if tp <= max(sizes, default=0)]
    if sum(tps) > sum(sizes) or (bins := _pack_small(list(sizes), small)) is None:
        return None
    free = list(sizes)
    for tp, at in zip(small, bins, strict=True):
        free[at] -= tp
    spread = [_take(free, tp) for tp in tps if tp > max(sizes)]
    inside = [tuple(tp if i == at else 0 for i in range(len(sizes))) for tp, at in zip(small, bins, strict=True)]
    return (*spread, *inside)


def _pack_small(free: list[int], tps: Sequence[int]) -> list[int] | None:
    if not tps:
        return []
    tried: set[int] = set()
    for at in sorted(range(len(free)), key=lambda i: (free[i], i)):
        if free[at] < tps[0] or free[at] in tried:
            continue
        tried.add(free[at])
        free[at] -= tps[0]
        rest = _pack_small(free, tps[1:])
        free[at] += tps[0]
        if rest is not None:
            return [at, *rest]
    return None


def _take(free: list[int], tp: int) -> tuple[int, ...]:
    """Take `tp` GPUs from the emptiest groups: as few groups as possible, whole ones where it can."""
    taken = [0] * len(free)
    for at in sorted(range(len(free)), key=lambda i: (-free[i], i)):
        taken[at] = min(tp, free[at])
        free[at] -= taken[at]
        tp -= taken[at]
    return tuple(taken)


def most_groups(sizes: Sizes, tp: int) -> int:
    """Return how many tensor-parallel groups of `tp` fit into one pool."""
    if tp > max(sizes, default=0):
        return sum(sizes) // tp
    return sum(size // tp for size in sizes)


def blocks_of(candidates: Sequence[Candidate], pools: Sequence[tuple[str, Sizes]]) -> list[tuple[Block, ...]]:
    """Return for each (GPU type, sizes) of `pools` the blocks that may lie in it.

    An instance that fits into some pool of its type lies in one pool whole. A larger one is cut into blocks
    that fill a pool, and the stages left over; the program only has to make their sum come out right.
    """
    found: list[set[Block]] = [set() for _ in pools]
    for number, candidate in enumerate(candidates):
        tp, pp = candidate.layout
        room = {i: most_groups(sizes, tp) for i, (gpu, sizes) in enumerate(pools) if gpu == candidate.gpu}
        whole = any(most >= pp for most in room.values())
        parts = {pp} if whole else {pp % most for most in room.values() if most} - {0}
        for i, most in room.items():
            wanted = parts if whole else parts | {most}
            found[i] |= {Block(number, stages) for stages in wanted if 0 < stages <= most}
    return [tuple(sorted(blocks)) for blocks in found]


def useful(blocks: Sequence[Block], sizes: Sizes, candidates: Sequence[Candidate]) -> tuple[Block, ...]:
    """Return the blocks that no copies of another one can replace in the same GPUs without loss of rate."""
    kept = []
    for block in blocks:
        others = (other for other in blocks if other != block)
        if not any(_replaces(other, block, sizes, candidates) for other in others):
            kept.append(block)
    return tuple(kept)


def _replaces(new: Block, old: Block, sizes: Sizes, candidates: Sequence[Candidate]) -> bool:
    a, b = candidates[old.candidate], candidates[new.candidate]
    if a.phase != b.phase or old.stages < a.layout.pp or new.stages < b.layout.pp:
        return False
    inside = a.layout.tp <= max(sizes) or b.layout.tp == 1
    if not inside and b.layout.tp <= max(sizes):
        return False  # the old one lies over several fast groups: the new one may not fit in any of its pieces
    copies = most_groups((a.layout.tp,) * a.layout.pp, b.layout.tp) // b.layout.pp
    if b.layout.tp > a.layout.tp or copies == 0:
        return False
    better = copies * b.rate_rps - a.rate_rps
    equal_goes_to_fewer = (-copies * b.layout.gpus, new) < (-a.layout.gpus, old)
    return better > 0 or (better == 0 and (copies * b.layout.gpus < a.layout.gpus or equal_goes_to_fewer))


def fill(
    blocks: Sequence[Block],
    sizes: Sizes,
    candidates: Sequence[Candidate],
    counts: Mapping[Block, int] | None = None,
) -> list[Pattern]:
    """Return the patterns of a pool that any best placement can be made of, the empty one left out.

    Only sums of rates matter, so of the patterns with as many GPUs only the Pareto-best stay: at most one for
    each split of the GPUs into prefill, decode and idle. With `counts` (at most so many of each block) all
    stay. Raises Unplaceable when these are too many to list.
    """
    phases = sorted({candidates[block.candidate].phase for block in blocks})
    alone = [[b for b in blocks if candidates[b.candidate].phase == phase] for phase in phases]
    found = [Pattern()]
    for filled in (_one_phase(some, sizes, candidates, counts) for some in alone):
        pairs = (a.blocks + b.blocks for a in found for b in filled if a.gpus + b.gpus <= sum(sizes))
        found = [pattern_of(both, candidates) for both in pairs if _fits(both, sizes, candidates)]
        _limit(found, sizes)
    spanning = frozenset(b.candidate for b in blocks if b.stages < candidates[b.candidate].layout.pp)
    return [p for p in (pareto(found, spanning) if counts is None else found) if p.blocks]


def _one_phase(
    blocks: Sequence[Block], sizes: Sizes, candidates: Sequence[Candidate], counts: Mapping[Block, int] | None
) -> list[Pattern]:
    spanning = frozenset(b.candidate for b in blocks if b.stages < candidates[b.candidate].layout.pp)
    found = [Pattern()]
    for block in blocks:
        most = sum(sizes) if counts is None else counts[block]
        found = [grown for pattern in found for grown in _copies(pattern, block, most, sizes, candidates)]
        if counts is None and len(sizes) == 1:  # any GPUs of a single fast group pack alike
            found = pareto(found, spanning)
        _limit(found, sizes)
    return found


def _limit(found: Sequence[Pattern], sizes: Sizes) -> None:
    if len(found) > MOST_PATTERNS:
        raise Unplaceable(f"more than {MOST_PATTERNS} ways to fill one pool of {sum(sizes)} GPUs; force fewer kinds")


def group_sizes(blocks: Sequence[Block], candidates: Sequence[Candidate]) -> Sizes:
    """Return the sizes of the tensor-parallel groups of these blocks, largest first."""
    return tuple(sorted((candidates[b.candidate].layout.tp for b in blocks for _ in range(b.stages)), reverse=True))


def _fits(blocks: Sequence[Block], sizes: Sizes, candidates: Sequence[Candidate]) -> bool:
    tps = group_sizes(blocks, candidates)
    return sum(tps) <= sum(sizes) if len(sizes) == 1 else pack(sizes, tps) is not None


def _copies(
    pattern: Pattern, block: Block, most: int, sizes: Sizes, candidates: Sequence[Candidate]
) -> Iterator[Pattern]:
    """Yield `pattern` with 0, 1, ... `most` copies of `block`, as long as they fit."""
    for copies in range(most + 1):
        blocks = pattern.blocks + (block,) * copies
        if not _fits(blocks, sizes, candidates):
            return
        yield pattern_of(blocks, candidates) if copies else pattern


def pareto(patterns: Sequence[Pattern], spanning: frozenset[int]) -> list[Pattern]:
    """Return the patterns that no other one matches with as few GPUs and as much of every rate.

    Blocks of instances that span pools are counted exactly elsewhere: only patterns with equal ones compare.
    """
    fronts: dict[tuple[Block, ...], list[tuple[float, float]]] = {}
    kept = []
    for pattern in sorted(patterns, key=lambda p: (p.gpus, -_rates(p)[0], -_rates(p)[1], p.blocks)):
        front = fronts.setdefault(tuple(b for b in pattern.blocks if b.candidate in spanning), [])
        if _advance(front, *_rates(pattern)):
            kept.append(pattern)
    return kept


def _rates(pattern: Pattern) -> tuple[float, float]:
    return (pattern.prefill_rps + pattern.aggregated_rps, pattern.decode_rps)


def _advance(front: list[tuple[float, float]], x: float, y: float) -> bool:
    """True when no point of the front has at least `x` and `y`; then the point joins. Kept by rising x."""
    at = bisect_left(front, (x, y))
    if at < len(front) and front[at][1] >= y:
        return False
    end = at
    while end > 0 and front[end - 1][1] <= y:
        end -= 1
    front[end:at] = [(x, y)]
    return True
