"""The decision to swap a request's KV to the host or to compute it again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.policies.preempt import prefill_leaves_first, swaps


def test_a_prompt_that_is_half_in_leaves_before_any_that_decodes():
    assert prefill_leaves_first(1)
    assert not prefill_leaves_first(0)


@pytest.mark.parametrize(
    ("swap_s_per_block", "expected"),
    [
        (100e-6, True),  # out and in: 2 * 64 * 100 us = 12.8 ms < 1024 * 20 us = 20.48 ms
        (159e-6, True),  # 20.35 ms
        (161e-6, False),  # 20.61 ms
        (math.inf, False),
        (math.nan, False),
    ],
)
def test_swapping_is_chosen_while_both_ways_take_less_than_to_compute_anew(swap_s_per_block, expected):
    assert swaps(64, 64, 1024, swap_s_per_block, 20e-6) is expected


@pytest.mark.parametrize(("free", "expected"), [(64, True), (63, False)])
def test_blocks_that_do_not_fit_on_the_host_are_computed_again(free, expected):
    assert swaps(64, free, 1024, 1e-6, 20e-6) is expected


def test_who_has_computed_nothing_is_not_swapped():
    assert not swaps(0, 10, 0, 1e-6, 20e-6)


@given(st.integers(1, 10**6), st.integers(1, 32), st.floats(1e-9, 1.0), st.floats(1e-9, 1.0))
def test_a_longer_request_of_full_blocks_decides_as_a_short_one_does(blocks, block_tokens, swap_s, recompute_s):
    one = swaps(1, 10**6, block_tokens, swap_s, recompute_s)
    if not math.isclose(2 * swap_s, block_tokens * recompute_s, rel_tol=1e-9):
        assert swaps(blocks, 10**6, blocks * block_tokens, swap_s, recompute_s) is one
