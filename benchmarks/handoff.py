"""Prints what handing a prompt's KV over costs: with and without overlap, and beside one instance that does it all.

python -m benchmarks.handoff [PROMPT_TOKENS] [REPEATS]      one request at a time; wants an idle machine
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from runtime.sampling import Sampling
from runtime.service import Times
from runtime.serving import ServeOptions, Serving
from tests.serving import Kind, deployment, served

OUTPUT_TOKENS = 16
PAIR: list[Kind] = [("prefill", 1, 1), ("decode", 1, 1)]
ALONE: list[Kind] = [("aggregated", 1, 1)]
TERMS: dict[str, Callable[[Times], float]] = {
    "to the instance": lambda t: t.prefill_start_s - t.arrival_s,
    "prefill": lambda t: t.prefill_end_s - t.prefill_start_s,
    "visible hand-off": lambda t: t.pull_end_s - t.prefill_end_s,
    "to the first decode step": lambda t: t.first_step_s - t.pull_end_s,
    "TTFT": lambda t: t.first_token_s - t.arrival_s,
    "a token after the first": lambda t: (t.finish_s - t.first_token_s) / (OUTPUT_TOKENS - 1),
}


def main() -> None:
    """Run the three ways and print their medians."""
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    ways = {
        "pulled while it runs": times_of(PAIR, True, tokens, repeats),
        "pulled once it has run": times_of(PAIR, False, tokens, repeats),
        "one instance": times_of(ALONE, True, tokens, repeats),
    }
    table = Table(title=f"SmolLM2, fp32, prompts of {tokens} tokens one at a time, medians of {repeats} [ms]", box=None)
    table.add_column("")
    for way in ways:
        table.add_column(way, justify="right")
    for term, of in TERMS.items():
        table.add_row(term, *(_shown([of(times) for times in each]) for each in ways.values()))
    Console(highlight=False, width=90).print(table)


def _shown(values: list[float]) -> str:
    middle = statistics.median(values)
    return "" if np.isnan(middle) else f"{1e3 * middle:.1f}"


def times_of(kinds: list[Kind], overlap: bool, tokens: int, repeats: int) -> list[Times]:
    """Return when each of `repeats` requests passed which station; one before them does not count."""
    found: list[Times] = []
    rng = np.random.default_rng(0)

    async def work(serving: Serving) -> None:
        for _ in range(repeats + 1):
            prompt = rng.integers(0, serving.conductor.config.vocab_size, tokens).tolist()
            stream = serving.conductor.submit(prompt, Sampling(max_tokens=OUTPUT_TOKENS, ignore_eos=True))
            async for _ in stream:
                pass
            found.append(stream.times)
            await asyncio.sleep(0.2)

    settings = {"kv_blocks": 512, "max_tokens": 4096, "first_token_at": "decode"}
    served(deployment(kinds, **settings), work, ServeOptions(overlap=overlap))
    return found[1:]


if __name__ == "__main__":
    main()
