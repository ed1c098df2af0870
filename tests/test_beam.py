"""Beam search against transformers' own, on a small random Llama."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from planner.errors import InvariantError
from runtime.beam import Beams, candidates
from runtime.sampler import choose
from runtime.sampling import Sampling
from runtime.step import Choices

VOCAB = 101


@cache
def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,  # close races: with 0.35 the fourth beam never mattered
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).float().eval()


def prompt(seed: int, length: int = 7) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


@torch.no_grad()
def theirs(tokens: list[int], sampling: Sampling, eos_ids: tuple[int, ...]) -> list[tuple[list[int], float]]:
    out = model().generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        num_beams=sampling.beam_width,
        num_return_sequences=sampling.n,
        do_sample=False,
        early_stopping=False,
        length_penalty=sampling.length_penalty,
        max_new_tokens=sampling.max_tokens,
        min_new_tokens=sampling.min_tokens or None,
        eos_token_id=list(eos_ids) or None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    answers = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        made = row[len(tokens) :]
        ends = [at for at, token in enumerate(made) if token in eos_ids]
        answers.append((made[: ends[0] + 1] if ends else made, score))
    return answers


@torch.no_grad()
def step(sequences: list[list[int]], k: int, banned: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the k likeliest next tokens of each sequence, by a forward pass without a cache."""
    logits = model()(torch.tensor(sequences)).logits[:, -1]
    rows = len(sequences)
    zeros, ones = np.zeros(rows), np.ones(rows, np.float32)
    ids = zeros.astype(np.int64)
    bans = tuple((row, banned) for row in range(rows)) if banned else ()
    out = choose(logits, Choices(zeros.astype(np.float32), ones, ids, ids, ids, k, bans), 1)
    return out.top_ids, out.top_logprobs


def ours(tokens: list[int], sampling: Sampling, eos_ids: tuple[int, ...]) -> Beams:
    beams, sequences, made = Beams(sampling, eos_ids), [tokens], 0
    while not beams.done:
        banned = eos_ids if made < sampling.min_tokens else ()
        following = beams.advance(*step(sequences, beams.candidates, banned))
        sequences = [[*sequences[parent], token] for parent, token in following]
        made += 1
        assert [s[len(tokens) :] for s in sequences] == [beams.token_ids(i) for i in range(beams.running)]
    return beams


def check(seed: int, sampling: Sampling, eos_ids: tuple[int, ...]) -> Beams:
    tokens = prompt(seed)
    beams = ours(tokens, sampling, eos_ids)
    expected = theirs(tokens, sampling, eos_ids)
    assert [list(beam.token_ids) for beam in beams.best(sampling.n)] == [ids for ids, _ in expected]
    assert [beam.score for beam in beams.best(sampling.n)] == pytest.approx([s for _, s in expected], rel=1e-5)
    return beams


EOS = {0: (), 1: (5,), 3: (5, 40, 77), 12: tuple(range(4, 100, 8))}


@pytest.mark.parametrize(
    ("seed", "width", "n", "eos_count", "penalty"),
    [
        (13, 4, 4, 3, 1.0),
        (5, 4, 4, 12, 1.0),
        (16, 4, 1, 12, 1.0),
        (0, 4, 4, 12, 1.0),
        (10, 4, 4, 12, 0.0),
        (1, 4, 4, 0, 1.0),
        (4, 4, 4, 12, -1.5),
        (5, 4, 4, 12, 2.5),
        (6, 2, 2, 12, 1.0),
        (7, 8, 8, 3, 1.0),
    ],
)
def test_beams_give_what_transformers_gives(seed, width, n, eos_count, penalty):
    check(seed, Sampling(max_tokens=12, beam_width=width, n=n, length_penalty=penalty), EOS[eos_count])


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_search_of_one_or_two_tokens_gives_what_transformers_gives(max_tokens):
    check(4, Sampling(max_tokens=max_tokens, beam_width=4, n=4), EOS[12])


def test_ends_of_text_are_held_off_for_min_tokens():
    beams = check(2, Sampling(max_tokens=14, beam_width=4, n=4, min_tokens=6), EOS[12])
    assert min(len(beam.token_ids) for beam in beams.best(4)) >= 7  # six, then an end


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_prompts_give_what_transformers_gives(seed):
    rng = np.random.default_rng(seed)
    width = int(rng.integers(2, 9))
    sampling = Sampling(
        max_tokens=int(rng.integers(1, 40)),
        beam_width=width,
        n=int(rng.integers(1, width + 1)),
        length_penalty=float(rng.choice([-2.0, -0.5, 0.0, 0.7, 1.0, 1.6, 4.0])),
    )
    check(seed, sampling, EOS[int(rng.choice(list(EOS)))])


def test_a_search_stops_before_max_tokens_when_no_running_beam_can_win():
    beams = check(0, Sampling(max_tokens=100, beam_width=4, n=4, length_penalty=0.0), EOS[12])
    assert max(len(beam.token_ids) for beam in beams.best(4)) < 60
    assert {beam.finish_reason for beam in beams.best(4)} == {"stop"}


def test_an_answer_cut_by_max_tokens_says_so():
    beams = check(0, Sampling(max_tokens=3, beam_width=4, n=4), ())
    assert {beam.finish_reason for beam in beams.best(4)} == {"length"}


# ---- worked by hand


def test_the_logprobs_of_an_answer_add_up_to_its_score():
    for beam in check(1, Sampling(max_tokens=10, beam_width=4, n=4, length_penalty=2.0), EOS[3]).best(4):
        assert sum(beam.logprobs) / len(beam.token_ids) ** 2 == pytest.approx(beam.score, rel=1e-5)


def rows(*pairs: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([[i for i, _ in row] for row in pairs]), np.array(
        [[p for _, p in row] for row in pairs], np.float32
    )


def test_two_beams_worked_by_hand():
    beams = Beams(Sampling(max_tokens=9, beam_width=2, n=2), eos_ids=(0,))
    assert beams.candidates == candidates(2, 1) == 3
    # the end ranks second of all, within the two beams: an answer with -1.0 / 1
    assert beams.advance(*rows([(7, -0.5), (0, -1.0), (8, -2.0)])) == [(0, 7), (0, 8)]
    # totals: 0.7 -0.6 | 0.0 -1.5 | 0.9 -3.5 ; 1.6 -2.1 | 1.5 -2.4 | 1.0 -4.0: the end ranks second, -1.5 / 2 = -0.75
    following = beams.advance(*rows([(7, -0.1), (0, -1.0), (9, -3.0)], [(6, -0.1), (5, -0.4), (0, -2.0)]))
    assert following == [(0, 7), (1, 6)]
    assert not beams.done  # two answers, the worse with -1.0; the best running beam would have -0.6 / 2 = -0.3
    # totals: 0.0 -8.6 ranks below both of beam 1, which are no ends; the best running, -6.1 / 3, is worse than -1.0
    assert beams.advance(*rows([(0, -8.0), (4, -9.0), (3, -9.5)], [(6, -4.0), (5, -5.0), (4, -6.0)])) == []
    assert beams.done
    assert [(beam.token_ids, beam.score) for beam in beams.best(2)] == [((7, 0), -0.75), ((0,), -1.0)]


def test_a_continuation_without_probability_is_none():
    beams = Beams(Sampling(max_tokens=9, beam_width=2), eos_ids=())
    assert beams.advance(*rows([(7, -0.5), (6, -np.inf)])) == [(0, 7)]


def test_too_few_candidates_are_refused():
    with pytest.raises(InvariantError, match=r"expected \[1, 5 or more\]"):
        Beams(Sampling(beam_width=4), eos_ids=(0,)).advance(*rows([(1, -1.0), (2, -2.0)]))


@pytest.mark.parametrize("penalty", [-100.0, 100.0])
def test_the_strongest_penalties_stay_within_floating_point(penalty):
    beams = Beams(Sampling(max_tokens=5000, beam_width=1, length_penalty=penalty), eos_ids=(0,))
    for _ in range(4999):
        beams.advance(*rows([(1, -0.5), (0, -9.0)]))
    assert beams.running == 1
    beams.advance(*rows([(1, -0.5), (0, -9.0)]))
    assert not np.isnan(beams.best(1)[0].score)
