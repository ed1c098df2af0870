"""Tokens chosen from logits, against transformers' own filters and numpy's own random stream."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from runtime.draws import keys, sequence_seed
from runtime.sampler import LogitsError, choose
from runtime.step import Choices, StepOutput

VOCAB = 53


def choices(rows: int, temperature=1.0, top_p=1.0, top_k=0, seed=7, draw=None, logprobs=0, banned=()) -> Choices:
    return Choices(
        temperature=np.full(rows, temperature, np.float32),
        top_p=np.full(rows, top_p, np.float32),
        top_k=np.full(rows, top_k, np.int64),
        seed=np.full(rows, seed, np.int64),
        draw=np.arange(rows, dtype=np.int64) if draw is None else np.asarray(draw, np.int64),
        logprobs=logprobs,
        banned=banned,
    )


def row(*values: float, dtype=torch.float32) -> torch.Tensor:
    return torch.tensor([values], dtype=dtype)


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB, scale: float = 2.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, (rows, vocab))).float()


def filtered(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Return transformers' probabilities [vocab] after temperature, top-k and top-p, in float64."""
    scores = TemperatureLogitsWarper(temperature)(None, logits.double())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(-1)[0].numpy()


def splitmix(seed: int, count: int) -> list[int]:
    """Return the first numbers of SplitMix64, as its paper's listing makes them."""
    numbers = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) % 2**64
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        numbers.append(z ^ (z >> 31))
    return numbers


def expected_tokens(probabilities: np.ndarray, draws: int, seed: int = 7) -> list[int]:
    """Return who wins each race: the least waiting time, an exponential with the token's probability as its rate."""
    bits = np.random.Philox(key=seed).random_raw(draws).tolist()
    numbers = np.array([splitmix(b, len(probabilities)) for b in bits], np.uint64)
    fractions = ((numbers >> np.uint64(12)) + 0.5) / 2.0**52
    with np.errstate(divide="ignore"):
        return (-np.log(fractions) / probabilities).argmin(-1).tolist()


# ---- greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocab", [53, 384])  # 384 = 3 blocks of 128
def test_greedy_takes_the_lowest_id_of_those_that_tie(dtype, vocab):
    logits = torch.zeros(5, vocab, dtype=dtype)
    for at, ids in enumerate([(51, 52), (0, 50), (7,), (30, 31, 32), ()]):
        logits[at, list(ids)] = 3.0
    assert choose(logits, choices(5, temperature=0.0), 1).token_ids.tolist() == [51, 0, 7, 30, 0]


def test_greedy_takes_the_first_of_two_blocks_that_tie():
    logits = torch.zeros(1, 384)
    logits[0, [130, 260]] = 1.0
    assert choose(logits, choices(1, temperature=0.0), 1).token_ids.tolist() == [130]


@given(st.integers(0, 2**32 - 1), st.sampled_from([VOCAB, 512]))
@settings(max_examples=30, deadline=None)
def test_greedy_equals_argmax_on_coarse_logits(seed, vocab):
    logits = torch.round(random_logits(seed, 8, vocab))  # whole numbers: ties everywhere
    assert choose(logits, choices(8, temperature=0.0), 1).token_ids.tolist() == logits.numpy().argmax(-1).tolist()


def test_a_banned_token_is_passed_over_and_the_model_s_logits_stay_as_they_were():
    logits = row(1.0, 5.0, 3.0, 4.0)
    out = choose(logits, choices(1, temperature=0.0, banned=((0, (1, 3)),)), 1)
    assert out.token_ids.tolist() == [2]
    assert logits.tolist() == [[1.0, 5.0, 3.0, 4.0]]


def test_a_ban_concerns_its_own_row():
    logits = random_logits(1).repeat(3, 1)
    likeliest = int(logits[0].argmax())
    out = choose(logits, choices(3, temperature=0.0, banned=((1, (likeliest,)),)), 1)
    assert out.token_ids[0] == out.token_ids[2] == likeliest != out.token_ids[1]


# ---- drawing


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 5, 53, 900])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.01])
def test_draws_come_from_the_distribution_that_transformers_filters(temperature, top_k, top_p):
    logits = random_logits(11)
    out = choose(logits.expand(60, -1), choices(60, temperature, top_p, top_k), 1)
    assert out.token_ids.tolist() == expected_tokens(filtered(logits, temperature, top_k, top_p), 60)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 6, 1.0), (1.3, 0, 0.8), (1.0, 8, 0.9)]
)
def test_the_filtered_distribution_is_met_in_the_long_run(temperature, top_k, top_p):
    logits = random_logits(5, vocab=12, scale=1.0)
    drawn = choose(logits.expand(20_000, -1), choices(20_000, temperature, top_p, top_k), 1).token_ids
    probabilities = filtered(logits, temperature, top_k, top_p)
    counts, kept = np.bincount(drawn, minlength=12), probabilities > 0
    assert counts[~kept].sum() == 0
    assert chisquare(counts[kept], probabilities[kept] * 20_000).pvalue > 0.001


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (0, 0.3), (1100, 0.99), (1100, 1.0), (40, 0.9)])
def test_cuts_beyond_the_tokens_that_are_ranked_first_are_found_all_the_same(top_k, top_p):
    logits = random_logits(3, vocab=1300, scale=0.3)  # flat: 0.9 of the mass takes over 1,100 tokens
    out = choose(logits.expand(60, -1), choices(60, 1.0, top_p, top_k), 1)
    assert out.token_ids.tolist() == expected_tokens(filtered(logits, 1.0, top_k, top_p), 60)


def test_draws_of_many_seeds_are_spread_as_the_probabilities_are():
    logits = random_logits(5, vocab=12, scale=1.0)
    seeds = replace(choices(4_000, draw=np.full(4_000, 3)), seed=np.arange(4_000, dtype=np.int64))
    drawn = choose(logits.expand(4_000, -1), seeds, 1).token_ids
    probabilities = logits.double().softmax(-1)[0].numpy()
    assert chisquare(np.bincount(drawn, minlength=12), probabilities * 4_000).pvalue > 0.001


def test_ties_at_a_cut_keep_the_lowest_ids():
    logits = row(2.0, 1.0, 3.0, 2.0, 2.0, 0.0).expand(500, -1)
    assert set(choose(logits, choices(500, 5.0, top_k=3), 1).token_ids.tolist()) == {0, 2, 3}
    assert set(choose(torch.zeros(500, 4), choices(500, top_p=0.5), 1).token_ids.tolist()) == {0, 1}  # 2/4 is enough
    even = torch.zeros(500, 8)  # 3 of 8 reach a mass of 0.3: 2/8 < 0.3 <= 3/8
    assert set(choose(even, choices(500, top_p=0.3), 1).token_ids.tolist()) == {0, 1, 2}


def test_top_k_1_is_greedy_at_any_temperature():
    logits = torch.round(random_logits(9, 50))
    greedy = choose(logits, choices(50, temperature=0.0), 1).token_ids
    assert choose(logits, choices(50, temperature=50.0, top_k=1), 1).token_ids.tolist() == greedy.tolist()


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-44])
def test_a_temperature_near_zero_neither_overflows_nor_leaves_the_likeliest(temperature):
    logits = random_logits(2, 20, scale=100.0)
    out = choose(logits, choices(20, temperature), 1)
    assert out.token_ids.tolist() == logits.argmax(-1).tolist()


def test_banned_tokens_and_those_with_minus_infinity_are_never_drawn():
    logits = row(0.0, -torch.inf, 0.0, 0.0).expand(400, -1)
    banned = tuple((at, (3,)) for at in range(400))
    for cuts in ({}, {"top_k": 3}, {"top_p": 0.99}):
        assert set(choose(logits, choices(400, banned=banned, **cuts), 1).token_ids.tolist()) == {0, 2}


SETTINGS = st.tuples(
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    st.sampled_from([1.0, 0.9, 0.2]),
    st.sampled_from([0, 1, 4, 1100]),
    st.integers(0, 2**63 - 1),
    st.integers(0, 10_000),
)


@given(st.lists(SETTINGS, min_size=2, max_size=7), st.integers(0, 2**32 - 1), st.sampled_from([VOCAB, 1280]), st.data())
@settings(max_examples=60, deadline=None)
def test_a_row_s_token_does_not_depend_on_the_rows_beside_it(rows, seed, vocab, data):
    logits = random_logits(seed, len(rows), vocab).bfloat16()
    temperature, top_p, top_k, seeds, draws = (np.array(column) for column in zip(*rows, strict=True))
    batch = Choices(temperature.astype(np.float32), top_p.astype(np.float32), top_k, seeds, draws)
    together = choose(logits, batch, 1).token_ids
    order = data.draw(st.permutations(range(len(rows))))
    kept = np.array(order[: data.draw(st.integers(1, len(rows)))])
    part = Choices(*(getattr(batch, name)[kept] for name in ("temperature", "top_p", "top_k", "seed", "draw")))
    assert choose(logits[kept], part, 2).token_ids.tolist() == together[kept].tolist()


def test_keys_are_the_numbers_of_numpy_s_philox_stream():
    stream = np.random.Philox(key=123456789).random_raw(1000)
    assert keys(np.full(1000, 123456789), np.arange(1000)).astype(np.uint64).tolist() == stream.tolist()


def test_rounding_hardly_ever_changes_a_drawn_token():
    logits = random_logits(6, 2000, 1024, scale=3.0)
    rounded = logits + torch.from_numpy(np.random.default_rng(1).normal(0, 3e-6, logits.shape)).float()
    for cuts in ({}, {"top_k": 50}, {"top_p": 0.9}):
        same = choose(logits, choices(2000, **cuts), 1).token_ids == choose(rounded, choices(2000, **cuts), 1).token_ids
        assert same.all(), cuts  # inverting the cumulative distribution changes some


def test_answers_to_one_prompt_have_seeds_of_their_own_and_the_first_has_the_request_s():
    seeds = {sequence_seed(seed, index) for seed in range(50) for index in range(128)}
    assert len(seeds) == 50 * 128
    assert sequence_seed(42, 0) == 42
    assert all(0 <= seed < 2**63 for seed in seeds)


# ---- log-probabilities


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_logprobs_are_the_model_s_own_before_temperature_and_cuts(dtype, temperature):
    logits = random_logits(4, 6).to(dtype)
    expected = logits.float().log_softmax(-1)
    out = choose(logits, choices(6, temperature, top_k=3, logprobs=5), 1)
    assert out.logprobs == pytest.approx(expected.gather(-1, torch.from_numpy(out.token_ids)[:, None])[:, 0].numpy())
    order = np.lexsort((np.broadcast_to(np.arange(VOCAB), (6, VOCAB)), -expected.numpy()))[:, :5]
    assert out.top_ids.tolist() == order.tolist()
    assert out.top_logprobs == pytest.approx(np.take_along_axis(expected.numpy(), order, 1))
    assert (out.logprobs.dtype, out.top_logprobs.dtype, out.top_ids.dtype) == (np.float32, np.float32, np.int64)


def test_the_likeliest_that_tie_come_by_id_whatever_their_sign():
    logits = row(-1.0, 0.0, -0.0, -1.0, 0.0, -2.0, 5.0, -1.0, 1e-45, -1e-45)
    out = choose(logits, choices(1, temperature=0.0, logprobs=10), 1)
    assert out.top_ids.tolist() == [[6, 8, 1, 2, 4, 9, 0, 3, 7, 5]]


def test_logprobs_hold_the_mass_of_banned_tokens_which_are_listed_last():
    logits = row(1.0, 5.0, 3.0, 4.0)
    out = choose(logits, choices(1, temperature=0.0, logprobs=4, banned=((0, (1,)),)), 1)
    expected = logits.log_softmax(-1)[0]
    assert out.top_ids.tolist() == [[3, 2, 0, 1]]
    assert out.top_logprobs[0, :3] == pytest.approx(expected[[3, 2, 0]].numpy())
    assert out.top_logprobs[0, 3] == -np.inf
    assert out.logprobs == pytest.approx(expected[3].item())


def test_more_logprobs_than_tokens_list_them_all():
    assert choose(random_logits(1, 2, vocab=6), choices(2, logprobs=20), 1).top_ids.shape == (2, 6)


def test_without_logprobs_none_are_computed():
    out = choose(random_logits(1, 2), choices(2, logprobs=0), 9)
    assert np.isnan(out.logprobs).all()
    assert isinstance(out, StepOutput)
    assert (out.number, out.top_ids.shape, out.top_logprobs.shape) == (9, (0, 0), (0, 0))


# ---- logits that are no numbers


@pytest.mark.parametrize("vocab", [53, 256])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error_that_names_step_and_row(vocab, temperature, value):
    logits = random_logits(1, 4, vocab)
    logits[2, 33] = value
    with pytest.raises(LogitsError, match=rf"step 12, row 2 of 4: .* hold {value}: .*float32"):
        choose(logits, choices(4, temperature), 12)


def test_a_row_with_nothing_left_to_choose_is_an_error():
    with pytest.raises(LogitsError, match=r"step 3, row 0 of 1: .*-inf or is banned"):
        choose(row(1.0, 2.0), choices(1, banned=((0, (0, 1)),)), 3)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_gpu_chooses_what_the_cpu_chooses():
    logits = random_logits(8, 256, vocab=128_256, scale=3.0).bfloat16()
    rng = np.random.default_rng(0)
    batch = Choices(
        temperature=rng.choice([0.0, 0.7, 1.0], 256).astype(np.float32),
        top_p=rng.choice([1.0, 0.9], 256).astype(np.float32),
        top_k=rng.choice([0, 50], 256),
        seed=rng.integers(0, 2**63 - 1, 256),
        draw=rng.integers(0, 5000, 256),
        logprobs=5,
    )
    here, there = choose(logits, batch, 1), choose(logits.cuda(), batch, 1)
    assert there.token_ids.tolist() == here.token_ids.tolist()
    assert there.top_ids.tolist() == here.top_ids.tolist()
    assert there.top_logprobs == pytest.approx(here.top_logprobs, rel=1e-4, abs=1e-4)
