"""SmolLM2 answers as transformers' `generate` does, token for token, at every layout, block and chunk size."""

from __future__ import annotations

import random

import pytest

from runtime.load import load_engine
from runtime.sampling import Sampling
from runtime.settings import EngineSettings
from tests.greedy_reference import NEW_TOKENS, beam_reference, reference

SETTINGS = {
    "blocks of 1": {"block_tokens": 1, "kv_blocks": 24_000},
    "blocks of 16": {},
    "blocks of 32": {"block_tokens": 32, "kv_blocks": 800},
    "chunks of 32": {"step_tokens": 32},
    "chunks of 256": {"step_tokens": 256},
    "no chunks": {"step_tokens": 0},
    "TP3": {"tp": 3},
    "PP2, 15 + 15 layers": {"pp": 2},
    "PP2, 10 + 20 layers": {"pp": 2, "stage_layers": (10, 20)},
    "TP3 x PP2": {"tp": 3, "pp": 2, "step_tokens": 256},
    "preempted by swap": {"kv_blocks": 500, "host_blocks": 1500, "preemption": "swap"},
    "preempted by recompute": {"kv_blocks": 500, "preemption": "recompute"},
    "preempted by swap, PP2": {"kv_blocks": 500, "host_blocks": 1500, "preemption": "swap", "pp": 2},
}


def answers_of(prompts, sampling, *, preempting=0.0, **asked):
    """Return the answers and how often a request was preempted; `preempting` is the chance of it at each step."""
    chance = random.Random(5)
    engine = load_engine("smollm2", EngineSettings(dtype="float32", **{"kv_blocks": 1600, **asked}))
    try:
        answers = {engine.add(prompt, sampling): [() for _ in range(sampling.n)] for prompt in prompts}
        while engine.unfinished:
            idle = [request for request in engine.scheduler.running if not request.in_flight]
            if idle and chance.random() < preempting:
                engine.scheduler.preempt(chance.choice(idle))
            for delta in engine.step():
                answers[delta.request_id][delta.index] += delta.token_ids
        engine.cache.check()
        assert engine.cache.counts().used == 0
    finally:
        engine.close()
    return list(answers.values()), engine.counters.preemptions


def test_prompts_of_text_and_noise_are_answered_as_transformers_does():
    """Eight of the sixty-four, preempted by force on the way; the slow tests have them all."""
    prompts, expected = reference()
    found, preemptions = answers_of(
        prompts[:8], Sampling(max_tokens=16, ignore_eos=True), preempting=0.3, block_tokens=4, step_tokens=40
    )
    assert preemptions > 2
    assert found == [[answer[:16]] for answer in expected[:8]]


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_answers_all_prompts_as_transformers_does(name):
    prompts, expected = reference()
    preempting = 0.2 if "preempted" in name else 0.0
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
    found, preemptions = answers_of(prompts, sampling, preempting=preempting, **SETTINGS[name])
    assert found == [[answer] for answer in expected]
    assert preemptions > 10 or not preempting


@pytest.mark.slow
def test_four_answers_that_share_a_prompt_are_each_that_of_transformers():
    prompts, expected = reference()
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True, n=4)
    found, _ = answers_of(prompts, sampling, preempting=0.1, kv_blocks=1000)
    assert found == [[answer] * 4 for answer in expected]


@pytest.mark.slow
def test_four_beams_are_those_of_transformers():
    prompts, expected = beam_reference()
    found, _ = answers_of(prompts, Sampling(max_tokens=NEW_TOKENS, beam_width=4, n=4), kv_blocks=1000)
    assert found == expected
