"""The engine's bookkeeping, held to a model whose KV is the tokens themselves: every answer equals the plain loop's."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InputError
from runtime.beam import Beams
from runtime.draws import sequence_seed
from runtime.engine import Engine
from runtime.model_config import ModelConfig
from runtime.sampling import Sampling
from runtime.settings import EngineSettings
from runtime.swap_cost import SwapCost
from tests.token_executor import TokenExecutor, candidates, next_token

VOCABULARY = 50
CONFIG = ModelConfig("llama", 2, 8, 8, 2, 2, 4, VOCABULARY, 512, eos_ids=(3,))


def engine_of(kv_blocks=64, host_blocks=0, depth=1, **others) -> Engine:
    asked = EngineSettings(kv_blocks=kv_blocks, host_blocks=host_blocks, **{"block_tokens": 4, **others})
    return Engine(CONFIG, TokenExecutor(kv_blocks, host_blocks, asked.block_tokens, VOCABULARY, depth), asked)


def plain(prompt, sampling: Sampling, seed: int = 0):
    """Return what an engine without any bookkeeping answers."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens, VOCABULARY, seed))
        if tokens[-1] in CONFIG.eos_ids or len(tokens) == len(prompt) + sampling.max_tokens:
            return tuple(tokens[len(prompt) :])


def plain_answers(prompt, sampling: Sampling):
    if sampling.beam_width:
        return plain_beams(prompt, sampling)
    if sampling.greedy:
        return [plain(prompt, sampling)] * sampling.n
    seeds = [sequence_seed(sampling.seed, index) for index in range(sampling.n)]
    return [plain(prompt, sampling, seed) for seed in seeds]


def plain_beams(prompt, sampling: Sampling):
    beams, live = Beams(sampling, CONFIG.eos_ids), [list(prompt)]
    while not beams.done:
        rows = [candidates(tokens, VOCABULARY, beams.candidates) for tokens in live]
        ids, values = (np.array(each) for each in zip(*rows, strict=True))
        chosen = beams.advance(ids, values.astype(np.float32))
        live = [[*live[parent], token] for parent, token in chosen]
    return [tuple(beam.token_ids) for beam in beams.best(sampling.n)]


prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)
samplings = st.one_of(
    st.builds(Sampling, max_tokens=st.integers(1, 20)),
    st.builds(
        Sampling, max_tokens=st.integers(1, 12), temperature=st.just(1.0), n=st.integers(1, 4), seed=st.integers(0, 99)
    ),
    st.builds(Sampling, max_tokens=st.integers(1, 12), beam_width=st.integers(2, 4)),
)


@given(
    st.lists(st.tuples(prompts, samplings), min_size=1, max_size=8),
    st.sampled_from([1, 3, 4, 16]),
    st.sampled_from([0, 1, 7, 64]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(["recompute", "swap"]),
    st.booleans(),
    st.integers(0, 60),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_every_answer_is_that_of_the_plain_loop_and_no_block_leaks(
    asked, block_tokens, step_tokens, depth, preemption, prefix_caching, slack, chance
):
    """Few blocks, many preemptions, forks, beams, shared prefixes, steps in flight: the tokens must not change."""
    asked = [(prompt * (1 + (index % 2)), sampling) for index, (prompt, sampling) in enumerate(asked)]
    kv_blocks = slack + max(
        len(prompt) // block_tokens + s.width * (2 + (s.max_tokens + block_tokens) // block_tokens)
        for prompt, s in asked
    )
    engine = engine_of(
        kv_blocks,
        chance.choice([1, 10, 100]),
        depth,
        block_tokens=block_tokens,
        step_tokens=step_tokens,
        preemption=preemption,
        prefix_caching=prefix_caching,
        max_batch=chance.choice([4, 6, 256]),
    )
    ids = {engine.add(prompt, sampling): (prompt, sampling) for prompt, sampling in asked}
    answers = {request_id: [] for request_id in ids}
    while engine.unfinished:
        preempt_at_random(engine, chance)
        collect(engine.step(), answers)
        engine.cache.check()
    for request_id, (prompt, sampling) in ids.items():
        assert whole_answers(answers[request_id]) == plain_answers(prompt, sampling)
    assert engine.cache.counts().used == engine.cache.counts().swapped == 0
    assert engine.unfinished == 0


def collect(deltas, answers) -> None:
    for delta in deltas:
        assert not any(earlier.last for earlier in answers[delta.request_id]), "told after the end"
        answers[delta.request_id].append(delta)


def whole_answers(deltas):
    assert deltas[-1].last
    indices = sorted({delta.index for delta in deltas})
    return [tuple(t for delta in deltas if delta.index == index for t in delta.token_ids) for index in indices]


def preempt_at_random(engine: Engine, chance: random.Random) -> None:
    idle = [request for request in engine.scheduler.running if not request.in_flight]
    if idle and chance.random() < 0.2:
        engine.scheduler.preempt(chance.choice(idle))


def in_flight(engine: Engine):
    return [[(entry.first, entry.last) for entry in plan.entries] for plan in engine._under_way]


def test_the_chunks_of_a_long_prompt_follow_each_other_through_the_stages():
    """Three stages, chunks of 8: while the first chunk is in the last stage the third is in the first one."""
    engine = engine_of(depth=3, step_tokens=8)
    engine.add(range(20), Sampling(max_tokens=2))
    engine.step()  # ends the first step, and has started two more before
    assert in_flight(engine) == [[(8, 16)], [(16, 20)]]


def test_stages_share_the_decoding_requests_evenly():
    """Six requests over two stages run three at a time, so that neither stage waits for the other's tokens."""
    engine = engine_of(depth=2, kv_blocks=128)
    for _ in range(6):
        engine.add(range(5), Sampling(max_tokens=10))
    for _ in range(4):
        engine.step()
    assert [len(entries) for entries in in_flight(engine)] == [3]


@pytest.mark.parametrize(
    ("cost", "swapped"), [(SwapCost(1e-6, 1e-3), 1), (SwapCost(1e-2, 1e-3), 0), (SwapCost(float("nan"), 1e-3), 0)]
)
def test_a_request_is_swapped_where_that_is_known_to_take_less_time(cost, swapped):
    """Ten blocks of 4 tokens: out and in again 20 us or 200 ms, computed once more 40 ms."""
    engine = engine_of(host_blocks=20)
    engine.scheduler._preemption = cost
    engine.add(range(40), Sampling(max_tokens=5))
    engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    assert len(engine.scheduler.swapped) == swapped
    assert len(engine.scheduler.waiting) == 1 - swapped


def test_what_swapping_costs_is_measured_when_an_engine_starts():
    engine = engine_of(host_blocks=20, preemption="auto")
    assert engine.scheduler._preemption.recompute_s_per_token > 0
    assert engine.generate([range(9)], Sampling(max_tokens=5))[0][0].token_ids == plain(
        range(9), Sampling(max_tokens=5)
    )


def test_a_prompt_seen_before_is_not_run_again_but_for_its_last_token():
    engine = engine_of()
    prompt = list(range(40))
    assert engine.generate([prompt], Sampling(max_tokens=3)) == engine.generate([prompt], Sampling(max_tokens=3))
    assert engine.counters.cached_tokens == 36  # nine full blocks of the first 39 tokens
    assert engine.counters.run_tokens == (40 + 2) + (4 + 2)  # the last token of an answer has no KV


def test_answers_that_share_a_prompt_take_its_blocks_once():
    """40 tokens are ten blocks of 4, shared; each of four answers adds one block."""
    engine = engine_of()
    engine.add(range(40), Sampling(max_tokens=3, n=4, temperature=1.0, seed=1, ignore_eos=True))
    engine.step()
    assert engine.cache.counts().used == 10
    engine.step()
    assert engine.cache.counts().used == 10 + 4


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], Sampling(), "prompt: expected at least one token"),
        ([50], Sampling(), "prompt: expected token ids from 0 to 49"),
        ([-1], Sampling(), "prompt: expected token ids from 0 to 49"),
        ([1] * 510, Sampling(max_tokens=3), "prompt of 510 tokens and max_tokens 3 are more than the 512 positions"),
        ([1] * 100, Sampling(max_tokens=100, n=3), "can take 100 KV blocks, the instance has 64; lower one of them"),
        ([1], Sampling(n=5), "n or beam_width: expected up to max_batch 4"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_in_one_line(prompt, sampling, message):
    engine = engine_of(max_batch=4)
    with pytest.raises(InputError) as raised:
        engine.add(prompt, sampling)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert engine.unfinished == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_an_aborted_request_gives_back_its_blocks_and_the_others_go_on(depth):
    engine = engine_of(depth=depth)
    dropped = engine.add(range(30), Sampling(max_tokens=10, n=2))
    kept = engine.add(range(9), Sampling(max_tokens=10))
    answers = {kept: [delta for delta in engine.step() if delta.request_id == kept]}
    engine.abort(dropped)
    engine.abort(dropped)  # ends cross on the way: no error
    while engine.unfinished:
        collect(engine.step(), answers)  # fails on a delta of the dropped one
    assert whole_answers(answers[kept]) == [plain(range(9), Sampling(max_tokens=10))]
    assert engine.cache.counts().used == 0
