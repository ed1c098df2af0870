"""Print how much of the KV memory handed out holds tokens: blocks on demand beside contiguous reservation.

    make kv-waste

The shipped ShareGPT lengths, shuffled (seed 0) and all there at time 0, are served first come first served by an
instance of 15,700 token slots (OPT-13B on a 40 GB A100: PagedAttention, SOSP '23, table 1). A request's first step
writes its prompt, each later one a token. Blocks are kept by `runtime.kv_cache` and given by
`planner.policies.decode.admits`; when they run short the newest request is put back and recomputed. The reservations
are those of the paper's section 6.1:

    maximum        2,048 slots, the model's longest context, whatever the request needs
    power of two   the prompt, and the output rounded up to a power of two
    oracle         the prompt and the output, which no engine knows beforehand

They are given memory without holes (no external fragmentation), which flatters them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.policies.decode import admits, blocks_for
from planner.sources.workloads import read_workload
from planner.specs.base import load_preset
from runtime.kv_cache import KVCache

SLOTS, MAX_TOKENS, MAX_BATCH, SEED = 15_700, 2_048, 256, 0
BLOCK_TOKENS = (1, 16, 32)


@dataclass(slots=True)
class Served:
    """Sums over the steps of one run."""

    steps: int = 0
    held: int = 0  # slots handed out
    filled: int = 0  # those of them that hold a token
    running: int = 0
    preemptions: int = 0
    most_unused: float = 0.0  # slots without a token per running request, in the worst step

    def add(self, held: int, filled: int, running: int) -> None:
        self.steps += 1
        self.held, self.filled, self.running = self.held + held, self.filled + filled, self.running + running
        self.most_unused = max(self.most_unused, (held - filled) / running)


@dataclass(slots=True)
class Run:
    """A request as it is served: `tokens` are in the cache after this step, `last` after its last one."""

    number: int
    tokens: int
    last: int
    reserved: int = 0


Rule = Callable[[int, int], int]
RESERVATIONS: dict[str, Rule] = {
    "maximum": lambda prompt, output: MAX_TOKENS,
    "power of two": lambda prompt, output: prompt + (1 << (output - 1).bit_length()),
    "oracle": lambda prompt, output: prompt + output,
}


def main() -> None:
    """Print one line per way to hand out memory."""
    requests = lengths()
    print(f"{len(requests):,} requests of ShareGPT lengths, {SLOTS:,} token slots\n")
    print("| KV memory | holds tokens | running | steps | restarts | unused per request, at most |")
    print("|---|---|---|---|---|---|")
    for name, rule in RESERVATIONS.items():
        print(line(name, contiguous(requests, rule)))
    for block_tokens in BLOCK_TOKENS:
        print(line(f"blocks of {block_tokens}", paged(requests, block_tokens)), flush=True)


def line(name: str, served: Served) -> str:
    """Return a row of the table; `running` is the mean number of requests in a step."""
    return (
        f"| {name} | {served.filled / served.held:.1%} | {served.running / served.steps:.1f} | {served.steps:,} | "
        f"{served.preemptions} | {served.most_unused:,.1f} |"
    )


def lengths() -> list[tuple[int, int]]:
    """Return (prompt, output) tokens of the shipped ShareGPT lengths, shuffled."""
    document = load_preset("workloads", "sharegpt")
    assert document is not None
    table = read_workload(document).table
    order = np.random.default_rng(SEED).permutation(len(table))
    return list(zip(table.prompt_tokens[order].tolist(), table.output_tokens[order].tolist(), strict=True))


def contiguous(requests: list[tuple[int, int]], rule: Rule) -> Served:
    """Return what happens when a request reserves `rule(prompt, output)` slots from start to end."""
    waiting, running, served, free = deque(_runs(requests)), list[Run](), Served(), SLOTS
    for run in waiting:
        run.reserved = rule(*requests[run.number])
    while waiting or running:
        for run in running:
            run.tokens += 1
        while waiting and waiting[0].reserved <= free and len(running) < MAX_BATCH:
            free -= waiting[0].reserved
            running.append(waiting.popleft())
        served.add(SLOTS - free, sum(run.tokens for run in running), len(running))
        free += sum(run.reserved for run in running if run.tokens == run.last)
        running = [run for run in running if run.tokens < run.last]
    return served


def paged(requests: list[tuple[int, int]], block_tokens: int) -> Served:
    """Return what happens when a request takes a block whenever its tokens have filled the last one."""
    waiting, running, served = deque(_runs(requests)), list[Run](), Served()
    cache = KVCache(SLOTS // block_tokens, 0, block_tokens, prefix_caching=False)
    while waiting or running:
        _grow(cache, running, waiting, served)
        _admit(cache, running, waiting)
        held = cache.device.used * block_tokens
        served.add(held, held - cache.waste_tokens(), len(running))
        for run in running:
            if run.tokens == run.last:
                cache.free(run.number)
        running = [run for run in running if run.tokens < run.last]
    assert cache.device.free == cache.device.total
    return served


def _grow(cache: KVCache, running: list[Run], waiting: deque[Run], served: Served) -> None:
    """Give each running request a slot for its next token, the oldest first; put back the newest while short."""
    at = 0
    while at < len(running):
        if cache.needed_to_grow(running[at].number, 1) > cache.device.available:
            newest = running.pop()
            cache.free(newest.number)
            newest.tokens += 1  # recomputed together with the token that it was about to write
            waiting.appendleft(newest)
            served.preemptions += 1
        else:
            _write(cache, running[at].number, 1)
            running[at].tokens += 1
            at += 1


def _admit(cache: KVCache, running: list[Run], waiting: deque[Run]) -> None:
    while waiting and admits(
        cache.device.available,
        blocks_for(waiting[0].tokens, cache.block_tokens),
        cache.device.total,
        len(running),
        MAX_BATCH,
    ):
        run = waiting.popleft()
        cache.start(run.number)
        _write(cache, run.number, run.tokens)
        running.append(run)


def _write(cache: KVCache, number: int, tokens: int) -> None:
    cache.grow(number, tokens)
    cache.commit(number, range(tokens))


def _runs(requests: list[tuple[int, int]]) -> list[Run]:
    """The first step leaves the prompt's KV; the last token's own is never written."""
    return [Run(number, prompt, prompt + output - 1) for number, (prompt, output) in enumerate(requests)]


if __name__ == "__main__":
    main()
