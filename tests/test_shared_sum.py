"""Sums through shared memory: exact, in any order of arrival, of any size."""

from __future__ import annotations

import multiprocessing
import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from runtime.shard import Shard
from runtime.shared_sum import MOST_BYTES, SharedSum, available

pytestmark = pytest.mark.skipif(not available(), reason="gloo adds up here")
SUMS = 400
SIZES = ((1,), (3, 64), (16, 576), (0, 8), (MOST_BYTES // 8,))


def part(turn: int, rank: int) -> torch.Tensor:
    """Return what a rank adds: whole numbers, so that no order of adding loses a bit."""
    dtype = (torch.float32, torch.bfloat16)[turn % 2]
    return ((torch.arange(torch.Size(SIZES[turn % len(SIZES)]).numel()) + turn) % 7 + rank).to(dtype)


def add_up(rank: int, ranks: int, port: int) -> None:
    """Make all sums as one rank, at a pace of its own; end with 1 when one is wrong."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    group = dist.new_group(list(range(ranks)))
    shared, pace = SharedSum(group), random.Random(rank)
    for turn in range(SUMS):
        if pace.random() < 0.02:
            time.sleep(0.003)
        got = shared(part(turn, rank))
        expected = sum(part(turn, other).float() for other in range(ranks)).to(got.dtype)  # type: ignore[union-attr]
        if not torch.equal(got, expected):
            raise SystemExit(1)
    large = torch.full((MOST_BYTES // 4 + 1,), float(rank + 1))
    shard = Shard(range(1), 1, ranks, rank, group, rank, shared)
    if not torch.equal(shard.sum(large), torch.full_like(large, float(sum(range(1, ranks + 1))))):
        raise SystemExit(2)
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_gets_the_exact_sum_whoever_comes_late(ranks):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_shared_sum"])
    processes = [context.Process(target=add_up, args=(rank, ranks, store.port), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * ranks
