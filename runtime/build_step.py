"""A plan of the scheduler -> the arrays of a Step."""

from __future__ import annotations

from collections.abc import Sequence as Several

import numpy as np

from runtime.draws import sequence_seed
from runtime.kv_cache import KVCache
from runtime.scheduler import Entry, Plan
from runtime.step import Choices, Ints, Step


def build_step(plan: Plan, cache: KVCache, number: int, eos_ids: tuple[int, ...], most_logprobs: int) -> Step:
    """Return the arrays of `plan`; its entries are put in order first, those of a single token in front."""
    plan.entries.sort(key=lambda entry: entry.last - entry.first > 1)  # stable: the order of admission is kept
    entries = plan.entries
    lengths = np.array([entry.last - entry.first for entry in entries], np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    rows = np.array([entry.rows for entry in entries], np.int64)
    return Step(
        number=number,
        token_ids=np.array([t for it in entries for t in it.sequence.tokens[it.first : it.last]], np.int64),
        positions=np.concatenate([np.arange(it.first, it.last, dtype=np.int64) for it in entries]),
        slots=np.concatenate([cache.slots(it.sequence.id, it.first, it.last) for it in entries]),
        query_starts=starts,
        contexts=np.array([entry.last for entry in entries], np.int64),
        block_tables=_block_tables(entries, cache),
        sampled=np.repeat(starts[1:] - 1, rows),
        choices=_choices(entries, eos_ids, most_logprobs),
        copies=tuple(plan.copies),
        tickets=tuple(it.sequence.request.ticket for it in entries if it.rows and it.sequence.request.ticket),
    )


def _block_tables(entries: Several[Entry], cache: KVCache) -> np.ndarray:
    tables = [cache.blocks(entry.sequence.id) for entry in entries]
    padded = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def _choices(entries: Several[Entry], eos_ids: tuple[int, ...], most_logprobs: int) -> Choices:
    """Return one row for each answer that starts or goes on; those of one prompt differ in their seed alone."""
    rows = [(entry.sequence, index) for entry in entries for index in range(entry.rows)]
    asked = [sequence.request.sampling for sequence, _ in rows]
    return Choices(
        temperature=np.array([it.temperature for it in asked], np.float32),
        top_p=np.array([it.top_p for it in asked], np.float32),
        top_k=np.array([it.top_k for it in asked], np.int64),
        seed=_whole([sequence_seed(it.request.seed, it.index + index) for it, index in rows]),
        draw=_whole([sequence.chosen for sequence, _ in rows]),
        logprobs=most_logprobs,
        banned=tuple(
            (row, tuple(sorted(sequence.request.sampling.ends(eos_ids))))
            for row, (sequence, _) in enumerate(rows)
            if sequence.chosen < sequence.request.sampling.min_tokens
        ),
    )


def _whole(values: list[int]) -> Ints:
    return np.array(values, np.int64)
