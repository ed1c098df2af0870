"""The table family: each part of a step is what was measured, interpolated straight."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.recorded_vllm import PRO_6000, RUNS
from planner.cost.base import BatchShape
from planner.cost.table import Unmeasured, table, with_unmeasured
from planner.deploy import _law_fault
from planner.sources.hf_config import read_model
from planner.sources.layer_tables import llmservingsim_steps
from planner.specs.base import load_preset
from planner.specs.cluster import find_gpu
from planner.specs.layout import Layout
from planner.specs.step_tables import StepTables

Row = tuple[float, float, float, float, float]
BESIDE_MS = 5.0


def attention_ms(chunk: float, cached: float, decodes: float, context: float) -> float:
    """1 ms per token of the chunk, 0.1 ms per cached one, 0.01 ms per KV token read, 5 ms where both run."""
    prompt_ms = chunk + 0.1 * cached if chunk else 0.0
    return prompt_ms + 0.01 * decodes * context + (BESIDE_MS if chunk and decodes else 0.0)


def rows(keep: Callable[[Row], bool] = lambda _: True) -> np.ndarray:
    """Measured at 16 and 32 tokens, 0 and 16 cached ones, one and two requests, contexts of 16 and 32."""
    at = [
        (c, k, n, m)
        for c in (0, 16, 32)
        for k in ((0, 16) if c else (0,))
        for n in (0, 1, 2)
        for m in ((16, 32) if n else (0,))
        if c or n
    ]
    found = [(*row, attention_ms(*row) / 1e3) for row in at]
    return np.array([row for row in found if keep(row)], float)


def tables(attention: np.ndarray) -> StepTables:
    """1 ms per token of the step (at 1, 8, 16, 600 tokens) and 10 ms per request (at one and at three)."""
    tokens = np.array([1.0, 8.0, 16.0, 600.0])
    sequences = np.array([1.0, 3.0])
    return StepTables((tokens, tokens / 1e3), (sequences, sequences / 1e2), attention)


def test_a_decode_step_is_the_sum_of_its_parts():
    """Two requests of 24 tokens: 2 ms + 2 x 10 ms + 48 x 0.01 ms, and half a millisecond that is in no table."""
    cost = with_unmeasured(table(tables(rows()), Layout(1)), Unmeasured(decode_s=0.5e-3))
    assert cost.iteration_s(BatchShape.decode(2, 48)) == pytest.approx(22.98e-3)


def test_a_mixed_step_reads_the_rows_that_were_measured_mixed():
    """Two chunks of 16 tokens behind 8 each, beside one request of 16. The 33 tokens run in a graph of 40: 40 ms; three
    requests: 30 ms; the first chunk beside the request 16 + 0.8 + 0.16 + 5 ms, the second one alone 16.8 ms; 3 ms more.
    """
    cost = with_unmeasured(table(tables(rows()), Layout(1)), Unmeasured(prefill_s=3e-3))
    shape = BatchShape(prefills=2, tokens=32, attended=2 * (16 * 16 + 2 * 16 * 8), decodes=1, context=16)
    assert cost.iteration_s(shape) == pytest.approx((40 + 30 + 21.96 + 16.8 + 3) / 1e3)


@pytest.mark.parametrize(
    ("max_batch", "tokens", "ran"), [(256, 3, 4), (256, 300, 304), (256, 512, 512), (256, 513, 600), (8, 17, 600)]
)
def test_steps_are_padded_to_the_next_graph_or_measured_count(max_batch: int, tokens: int, ran: int):
    """With 8 requests at once graphs reach 16 tokens; 17 run as 600 do, the next count that was measured."""
    cost = table(tables(rows()), Layout(1), max_batch)
    prompt_s = attention_ms(16, 0, 0, 0) / 16 * tokens / 1e3  # straight on behind its last point, as it is before it
    assert cost.iteration_s(BatchShape.prefill(tokens)) == pytest.approx(ran / 1e3 + 10e-3 + prompt_s)


def test_behind_its_last_point_a_table_goes_straight_on():
    """700 tokens: as steep as from 300 (304 ms, padded) to 600. Four requests: 40 ms. One context of 64: 0.64 ms."""
    cost = table(tables(rows()), Layout(1))
    tokens_s = 0.6 + (0.6 - 0.304) / 300 * 100
    assert cost.iteration_s(BatchShape.prefill(700)) == pytest.approx(tokens_s + 0.7 + 10e-3)
    # at 0 requests the curve is as at one, so beyond three it is as steep as from one to three
    assert cost.iteration_s(BatchShape.decode(4, 64)) == pytest.approx(4e-3 + 40e-3 + 0.64e-3)
    assert cost.iteration_s(BatchShape.decode(1, 64)) == pytest.approx(1e-3 + 10e-3 + 0.64e-3)


def test_a_batch_that_was_only_timed_alone_grows_beside_a_chunk_as_it_does_alone():
    whole, holes = (
        table(tables(rows(keep)), Layout(1)) for keep in (lambda _: True, lambda r: not (r[0] and r[2] == 2))
    )
    shape = BatchShape(prefills=1, tokens=16, attended=256.0, decodes=2, context=40)
    assert holes.iteration_s(shape) == pytest.approx(whole.iteration_s(shape))


def test_rows_between_the_grid_points_say_how_far_interpolation_is_off():
    """Powers of two make the grid. Context 24 lies between 16 and 32, where the table says 0.24 ms; it took 0.32 ms:
    a quarter too little, and so for a chunk of 24 tokens that took 20 ms: 20 % too much."""
    fine = np.array([(0, 0, 1, 24, 0.32e-3), (24, 0, 0, 0, 20e-3)])
    many = [(0, 0, n, m, 1e-5 * n * m) for n in (1, 2, 4, 8) for m in (16, 32, 64, 128)]
    prompts = [(c, k, 0, 0, attention_ms(c, k, 0, 0) / 1e3) for c in (16, 32, 64, 128) for k in (0, 16, 32, 64, 128)]
    mixed = [
        (c, k, n, m, attention_ms(c, k, n, m) / 1e3)
        for c, k, *_ in prompts for _, _, n, m, _ in many
    ]  # fmt: skip
    cost = table(tables(np.array([*many, *prompts, *mixed, *fine.tolist()])), Layout(1))
    assert cost.decode_error is not None and cost.prefill_error is not None
    assert (cost.decode_error.settings, cost.decode_error.worst) == (1, pytest.approx(0.25))
    assert (cost.prefill_error.settings, cost.prefill_error.worst) == (1, pytest.approx(0.2))


@pytest.mark.parametrize(("card", "settings"), [("RTX4090", 0), ("RTXPRO6000", 10_000)])
def test_real_layer_tables_are_looked_up_as_they_are(card: str, settings: int):
    """At grid points the law is the sum of the tables' own numbers; the finer grid is met within 2 % at the median."""
    preset = load_preset("models", "llama3.1-8b")
    gpu = find_gpu(card) or PRO_6000
    assert preset is not None
    model = read_model(preset)
    parts = [RUNS / f"{part}_{card}.csv" for part in ("dense", "attention", "per_sequence")]
    found = llmservingsim_steps(parts[0], model, gpu, parts[1], parts[2])
    cost = table(found, Layout(1))
    dense, sequences = dict(zip(*found.by_tokens, strict=True)), dict(zip(*found.by_sequences, strict=True))
    compared = 0
    for chunk, cached, decodes, context, time_s in found.attention:
        on_grid = all(x == 0 or np.log2(x) % 1 == 0 for x in (chunk, cached, decodes, context))
        tokens, requests = chunk + decodes, (chunk > 0) + decodes
        if on_grid and tokens % 16 == 0 and tokens in dense and requests in sequences:  # no padding, nothing between
            shape = BatchShape(int(chunk > 0), int(chunk), chunk**2 + 2 * chunk * cached, decodes, decodes * context)
            assert cost.iteration_s(shape) == pytest.approx(dense[tokens] + sequences[requests] + time_s)
            compared += 1
    assert compared > 50
    errors = [error for error in (cost.prefill_error, cost.decode_error) if error is not None]
    assert sum(error.settings for error in errors) >= settings
    assert all(error.median < 0.02 for error in errors)


def test_a_table_law_with_wrong_lengths_or_axes_is_refused():
    good = table(tables(rows()), Layout(1)).parameters
    assert _law_fault(tuple(good.tolist())) is None
    axis = 20 + 601 + 4
    for place, value, says in ((3, 1e5, "numbers for tables"), (5, 1.5, "whole numbers"), (axis, 1.0, "rise from 0"),
                               (axis + 2, 0.0, "rise from 0"), (8, 0.0, "whole numbers")):  # fmt: skip
        bad = good.copy()
        bad[place] = value
        assert says in (_law_fault(tuple(bad.tolist())) or "")
    assert "numbers for tables" in (_law_fault(tuple(good[:-1].tolist())) or "")
