"""Cost laws of single operators: what they promise by construction, and how far off they are on what they never saw."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import held_out_operators as held_out
from benchmarks.held_out import Line, table
from planner.cost.chip import Chip, chip
from planner.cost.measured_link import measured_link
from planner.cost.operator_physics import (
    Attention,
    Collective,
    Gemm,
    Link,
    Physics,
    Streaming,
    attention_families,
)
from planner.cost.operators import Curve, OperatorLaw, fit_operator, graded, spread_out
from planner.errors import InputError
from planner.specs.cluster import find_gpu
from planner.specs.gpu import Gpu

A100 = Chip(108, 312e12, 2039e9, (64, 128), (128, 256))
UNKNOWN = Chip(None, 312e12, 2039e9, (64, 128), (128, 256))
PHYSICS: list[Physics] = [
    Gemm(A100),
    Gemm(UNKNOWN),
    Streaming(),
    Collective(),
    Link(),
    *attention_families(A100),
    Attention(UNKNOWN),
]
GROWING = {
    "tokens": 20_000,
    "outputs": 60_000,
    "inputs": 30_000,
    "bytes": 10**9,
    "batch": 300,
    "new": 9000,
    "cached": 9000,
}
"""Columns along which nothing may get cheaper, and how far to look."""


def median_and_p95(results: list[held_out.Result]) -> tuple[float, float]:
    errors = np.concatenate([result.errors for result in results])
    return float(np.median(errors)), float(np.percentile(errors, 95))


# --- held out, against what was aimed at


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_a_layer_is_within_3_percent_at_token_counts_between_powers_of_two(gpu: str):
    results = [held_out.layer(gpu, tp) for tp in held_out.TPS]
    assert [len(result.errors) for result in results] == [246] * 4  # 259 counts, 13 trained on
    median, p95 = median_and_p95(results)
    assert median <= 0.03
    assert p95 <= 0.15


def test_decode_attention_is_within_6_percent_from_64_points():
    errors = held_out.frontier("decode")
    assert len(errors) == 10_048  # 10,112 different points
    assert np.median(errors) <= 0.06
    assert np.percentile(errors, 95) <= 0.20


def test_point_to_point_transfers_are_within_3_percent_from_13_sizes():
    median, p95 = median_and_p95(held_out.collectives_of("send_recv"))
    assert median <= 0.026
    assert p95 <= 0.20


def test_all_reduce_is_within_2_percent_from_13_sizes():
    # 1.3 % and 25 % were aimed at. A rising curve through all 993 sizes of each table leaves a p95 of 22 %: NCCL gets
    # twice as fast at 8 MiB between two A100 nodes, and small messages take 20 or 60 us as the ranks happen to meet.
    median, p95 = median_and_p95(held_out.collectives_of("all_reduce"))
    assert median <= 0.02
    assert p95 <= 0.30


def test_tables_that_had_no_say_are_predicted_too():
    tokens, shapes, *attention = held_out.checks()
    assert np.median(tokens.errors) <= 0.05
    assert np.median(shapes.errors) <= 0.08
    assert len(attention) == 8
    assert max(np.median(result.errors) for result in attention) <= 0.07


def test_the_table_of_errors_says_what_was_missed_and_fits_a_terminal():
    text = table([Line("a layer", 13, np.array([0.01, 0.02, 0.5]), (0.03, 0.15)), Line("other", 3, np.array([0.1]))])
    assert text.splitlines()[1].split() == ["a", "layer", "13", "3", "2.00", "45.2", "50", "3/15", "MISSED"]
    assert max(map(len, text.splitlines())) <= 80  # p95 of (1, 2, 50) is 2 + 0.9 x 48 = 45.2


# --- promises by construction


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_no_law_is_ever_negative_or_cheaper_for_more_work(data: st.DataObject):
    physics = data.draw(st.sampled_from(PHYSICS))
    count = len(physics.start(*_tiny(physics))[0])
    parameters = np.array(data.draw(st.lists(st.floats(-20.0, 3.0), min_size=count, max_size=count)))
    point = np.array([_draw(data, name) for name in physics.columns])
    column = data.draw(st.sampled_from([i for i, name in enumerate(physics.columns) if name in GROWING]))
    points = np.tile(point, (300, 1))
    points[:, column] = np.unique(np.r_[np.arange(1, 150), np.geomspace(150, GROWING[physics.columns[column]], 151)])
    time_s = physics.time_s(parameters, points)
    assert (time_s > 0).all()
    assert np.isfinite(time_s).all()
    assert (np.diff(time_s) >= -1e-9 * time_s[1:]).all()


def _tiny(physics: Physics) -> tuple[np.ndarray, np.ndarray]:
    return np.ones((2, len(physics.columns))), np.ones(2)


def _draw(data: st.DataObject, name: str) -> float:
    """A value of a column; query heads are a multiple of KV heads."""
    if name in ("heads", "kv_heads", "head_dim"):
        return {"heads": 32.0, "kv_heads": 8.0, "head_dim": 128.0}[name]
    return float(data.draw(st.integers(1, GROWING[name])))


@given(
    st.lists(st.floats(1e-6, 1e-2), min_size=6, max_size=14),
    st.lists(st.floats(0.0, 2.0), min_size=14, max_size=14),
)
@settings(max_examples=25, deadline=None)
def test_whatever_was_measured_a_fitted_law_rises(times: list[float], spread: list[float]):
    sizes = 2.0 ** np.arange(len(times)) * 1000
    law = fit_operator(sizes[:, None], np.array(times), (Streaming(), Collective()), np.array(spread[: len(times)]))
    predicted = law.time_s(np.geomspace(10, 1e8, 500)[:, None])
    assert (predicted > 0).all()
    assert (np.diff(predicted) >= -1e-9 * predicted[1:]).all()


def noisy_products(seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return (points, times) of two shapes at six counts of tokens, 5 % off a law of ours."""
    generator = np.random.default_rng(seed)
    points = np.array([(2.0**i, n, 4096) for i in range(0, 12, 2) for n in (4096, 16384)])
    law = Gemm(A100)
    time_s = law.time_s(law.start(points, np.ones(len(points)))[0], points)
    return points, time_s * generator.lognormal(0.0, 0.05, len(points))


def test_the_order_of_rows_does_not_matter_and_the_same_rows_give_the_same_law():
    points, time_s = noisy_products()
    shuffled = np.random.default_rng(3).permutation(len(points))
    grid = np.array([(n, 4096, 4096) for n in range(1, 2000, 7)], dtype=float)
    once, again = (fit_operator(points, time_s, Gemm(A100)).time_s(grid) for _ in range(2))
    mixed = fit_operator(points[shuffled], time_s[shuffled], Gemm(A100)).time_s(grid)
    assert once.tobytes() == again.tobytes() == mixed.tobytes()


def test_repeats_of_a_point_count_as_their_median():
    sizes = 2.0 ** np.arange(10, 20)
    time_s = 1e-5 + sizes / 1e11
    thrice = np.tile(sizes, 3)[:, None]
    repeats = np.concatenate([time_s, time_s * 0.5, time_s * 7.0])
    one, three = fit_operator(sizes[:, None], time_s, Link()), fit_operator(thrice, repeats, Link())
    np.testing.assert_array_equal(one.time_s(sizes[:, None]), three.time_s(sizes[:, None]))


# --- what the laws mean


def test_one_block_more_than_there_are_processors_takes_a_second_wave():
    # whole waves (e^20), no overhead, memory far away: 108 tiles of 128 x 256 run at once, the 109th waits for one
    # (with tiles of 128 x 128 to choose from it would not be twice: 218 of them take three waves of half the length)
    parameters = np.array([-40.0, 30.0, 0.0, 4.0, 20.0, 30.0])
    full, one_more = Gemm(replace(A100, tile_columns=(256,))).time_s(
        parameters, np.array([(128, 108 * 256, 8192), (128, 109 * 256, 8192)])
    )
    assert one_more / full == pytest.approx(2.0)
    # 2 x 128 x 256 x 8192 FLOP on one of 108 processors of 312 TFLOP/s
    assert full == pytest.approx(2 * 128 * 256 * 8192 / (312e12 / 108), rel=0.02)


def test_a_token_past_a_tile_costs_as_much_as_the_tile():
    parameters = np.array([-40.0, 30.0, 0.0, 4.0, 20.0, 30.0])
    at, past, end = Gemm(A100).time_s(
        parameters, np.array([(128, 27648, 8192), (129, 27648, 8192), (256, 27648, 8192)])
    )
    assert past == pytest.approx(2 * at)
    assert end == past


def test_few_tokens_cost_the_reading_of_the_weights():
    parameters = np.array([-40.0, 0.0, 0.0, 4.0, 0.0, 0.0])
    [time_s] = Gemm(A100).time_s(parameters, np.array([(1.0, 8192.0, 8192.0)]))
    assert time_s == pytest.approx(2 * 8192 * 8192 / 2039e9, rel=0.01)


def test_decode_attention_of_many_long_requests_costs_the_reading_of_their_kv():
    # 128 requests of 4000 tokens with 32 heads of 128, 2 bytes, keys and values: 8.4 GB at 2.039 TB/s
    parameters = np.array([-40.0, 0.0, -40.0, -40.0, 3.0])
    [time_s] = Attention(A100).time_s(parameters, np.array([(128.0, 1.0, 4000.0, 32.0, 32.0, 128.0)]))
    assert time_s == pytest.approx(128 * 4000 * 32 * 128 * 2 * 2 / 2039e9, rel=0.01)


def test_a_link_is_found_again_from_exact_times_with_nothing_left_over():
    sizes = np.geomspace(1e3, 1e8, 13)
    link = measured_link(sizes, 20e-6 + sizes / 46e9)
    assert link.fixed_s == pytest.approx(20e-6, rel=1e-3)
    assert link.bytes_per_s == pytest.approx(46e9, rel=1e-3)
    assert link.error.worst < 0.01
    assert link.transfer_cost().fixed_s == link.fixed_s


def test_one_wild_row_does_not_bend_a_link():
    sizes = np.geomspace(1e3, 1e8, 21)
    time_s = 20e-6 + sizes / 46e9
    time_s[-4] *= 5
    assert measured_link(sizes, time_s).bytes_per_s == pytest.approx(46e9, rel=0.03)


def test_a_row_whose_repeats_disagree_weighs_little():
    sizes = 2.0 ** np.arange(10, 24)
    time_s = 1e-5 + sizes / 1e11
    time_s[0] *= 3  # smaller and slower than the next: a rising curve must give way somewhere
    spread = np.where(np.arange(len(sizes)) == 0, 1.0, 0.001)
    law = fit_operator(sizes[:, None], time_s, Streaming(), spread)
    assert law.time_s(sizes[1:2, None])[0] == pytest.approx(time_s[1], rel=0.02)


# --- the curve of what a law misses


def test_a_curve_keeps_the_steps_of_the_law_between_two_measurements():
    curve = Curve(np.array([1.0, 3.0]), np.array([2.0, 4.0]))
    np.testing.assert_allclose(curve(np.array([0.5, 1.0, 2.0, 3.0, 6.0])), [1.0, 2.0, 3.0, 4.0, 8.0])


def test_a_shape_that_was_not_measured_gets_the_usual_factor():
    points, time_s = noisy_products()
    slow = fit_operator(points, 1.5 * time_s, Gemm(A100))
    fresh = np.array([(512.0, 8192.0, 4096.0)])
    assert isinstance(slow, OperatorLaw)
    assert slow.time_s(fresh)[0] == pytest.approx(
        1.5 * fit_operator(points, time_s, Gemm(A100)).time_s(fresh)[0], rel=0.1
    )


def test_a_law_knows_where_it_was_measured():
    points, time_s = noisy_products()
    law = fit_operator(points, time_s, Gemm(A100))
    np.testing.assert_array_equal(law.covers(np.array([(5, 8192, 4096), (5, 70000, 4096)])), [True, False])


def test_the_held_out_error_is_that_of_settings_left_out_and_not_of_the_fit():
    sizes = 2.0 ** np.arange(10, 24)
    exact = fit_operator(sizes[:, None], 1e-5 + sizes / 1e11, Link())
    assert exact.error.settings == 14
    assert exact.error.worst < 1e-2
    noise = np.where(np.arange(14) % 2, 1.3, 1 / 1.3)
    assert fit_operator(sizes[:, None], (1e-5 + sizes / 1e11) * noise, Streaming()).error.median > 0.15


# --- choosing what to measure


def test_spread_out_points_hold_the_corners_and_no_point_twice():
    grid = np.array([(a, b) for a in (1, 2, 4, 8, 16) for b in (10, 100, 1000, 10000)], dtype=float)
    chosen = grid[spread_out(grid, 6)]
    assert {tuple(point) for point in chosen} >= {(1, 10), (1, 10000), (16, 10), (16, 10000)}
    assert len(np.unique(chosen, axis=0)) == 6
    assert len(spread_out(grid, 99)) == len(grid)


def test_graded_sizes_hold_the_ends_and_lie_closer_in_ratio_where_sizes_are_large():
    sizes = np.arange(1.0, 1001.0)
    chosen = sizes[graded(sizes, 5)]
    np.testing.assert_array_equal(chosen, [1, 34, 166, 465, 1000])  # 1, 3.25, 5.5, 7.75 and 10, cubed


# --- bad input


@pytest.mark.parametrize(
    ("points", "time_s", "words"),
    [
        ([[1.0], [2.0], [3.0]], [1.0, 0.0, 1.0], "expected times above 0 s, got"),
        ([[1.0], [2.0], [3.0]], [1.0, np.nan, 1.0], "expected times above 0 s, got"),
        ([[1.0], [1.0], [3.0]], [1.0, 1.0, 1.0], "2 different points, at least 3"),
        ([[1.0, 2.0]] * 3, [1.0] * 3, "expected the columns bytes"),
        ([[1.0], [2.0], [3.0]], [1.0, 1.0], "3 points, 2 times"),
        ([[1.0], [2.0], [-3.0]], [1.0, 1.0, 1.0], "finite sizes of at least 0"),
    ],
)
def test_what_cannot_be_fitted_is_refused_in_one_line(points: list, time_s: list, words: str):
    with pytest.raises(InputError, match=words) as caught:
        fit_operator(np.array(points), np.array(time_s), Link())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a100-80gb", "h100-80gb", "h200", "a40", "l40s", "rtx4090", "gb200"])
def test_the_processors_of_every_preset_are_known(name: str):
    gpu = find_gpu(name)
    assert gpu is not None
    assert chip(gpu).sms is not None


def test_of_an_unknown_gpu_nothing_is_rounded_up_to_waves():
    gpu = Gpu(name="new", memory_bytes=1e9, memory_bytes_per_s=1e12, fp16_flop_per_s=1e14, host_bytes_per_s=1e10)
    assert chip(gpu).sms is None
    parameters = np.array([-40.0, 30.0, 0.0, 4.0, 20.0, 30.0])
    one, two = Gemm(chip(gpu)).time_s(parameters, np.array([(128, 256 * 108, 4096), (128, 256 * 109, 4096)]))
    assert two / one == pytest.approx(109 / 108)
