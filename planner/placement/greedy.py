"""The placement people draw by hand: the best kind per GPU, node after node, prefill and decode balanced.

A baseline to compare the program with. It knows no bound, and looks at neither cards nor uplinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from time import process_time

from planner.placement.assign import assign
from planner.placement.base import Candidate, Placement, Pool, Program, Site, Unplaceable, site
from planner.placement.patterns import Block, group_sizes, pack
from planner.placement.solve import Hosted, Solution, capacity_bound


def place_greedily(program: Program) -> Placement:
    """Return the baseline placement; its bound is the capacity bound, its gap the distance from that.

    Raises Unplaceable when it finds no room for a prefill and a decode instance, or misses the demand.
    """
    start = process_time()
    place = site(program.topology)
    candidates = tuple(candidate for candidate in program.candidates if _leaves_room(candidate, place))
    done: dict[str, float] = dict.fromkeys((candidate.phase for candidate in program.candidates), 0.0)
    hosted = tuple(
        Hosted((pool,), ((_fill(pool, candidates, done, program.rate_rps or inf), 1),)) for pool in place.pools
    )
    if not done or min(done.values()) == 0:
        raise Unplaceable("filling node after node leaves no room for every phase")
    seconds = process_time() - start
    bound = capacity_bound(program.topology, candidates, program.kv_bytes_per_request)
    return assign(program, Solution(candidates, hosted, bound, None, seconds, "greedy"))


def _leaves_room(candidate: Candidate, place: Site) -> bool:
    """False for an instance that would take more than half of its GPU type from the other phase."""
    have = sum(len(pool.gpus) for pool in place.pools if pool.gpu == candidate.gpu)
    shared = 1 if candidate.phase == "aggregated" else 2
    return candidate.rate_rps > 0 and candidate.layout.gpus * shared <= have


def _fill(pool: Pool, candidates: Sequence[Candidate], done: dict[str, float], wanted: float) -> tuple[Block, ...]:
    """Return the blocks that fill one pool, each time for the phase that is behind; count them in `done`."""
    blocks: tuple[Block, ...] = ()
    while True:
        fitting = [
            (candidate, block)
            for block, candidate in ((Block(c, each.layout.pp), each) for c, each in enumerate(candidates))
            if candidate.gpu == pool.gpu and done[candidate.phase] < wanted
            if pack(pool.sizes, group_sizes((*blocks, block), candidates)) is not None
        ]
        if not fitting:
            return blocks
        behind = min(done[candidate.phase] for candidate, _ in fitting)
        best, block = max(
            (pair for pair in fitting if done[pair[0].phase] == behind),
            key=lambda pair: (pair[0].rate_rps / pair[0].layout.gpus, -pair[1].candidate),
        )
        blocks, done[best.phase] = (*blocks, block), done[best.phase] + best.rate_rps
