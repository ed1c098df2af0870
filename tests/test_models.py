"""Every architecture, at every layout, answers as transformers does."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.load import load_engine
from runtime.sampling import Sampling
from runtime.settings import EngineSettings
from tests.tiny_models import CONFIGS, beams, greedy, saved

TOKENS = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Each model with its folder and its answers to eight prompts, made when first asked for."""
    made = {}

    def of(name):
        if name not in made:
            model, folder = saved(name, tmp_path_factory.mktemp("model"))
            rng = np.random.default_rng(1)
            prompts = [rng.integers(0, 211, length).tolist() for length in (1, 2, 15, 16, 17, 60, 100, 200)]
            made[name] = model, folder, prompts, [greedy(model, prompt, TOKENS) for prompt in prompts]
        return made[name]

    return of


def answers_of(folder, prompts, **settings):
    asked = EngineSettings(dtype="float32", **{"kv_blocks": 200, **settings})
    engine = load_engine(folder, asked)
    try:
        found = engine.generate(prompts, Sampling(max_tokens=TOKENS))
        engine.cache.check()
        assert engine.cache.counts().used == 0
    finally:
        engine.close()
    return [each[0].token_ids for each in found]


@pytest.mark.parametrize("name", CONFIGS)
def test_an_architecture_answers_as_transformers_does_whole_or_in_chunks(models, name):
    _, folder, prompts, expected = models(name)
    assert answers_of(folder, prompts, step_tokens=0) == expected
    assert answers_of(folder, prompts, step_tokens=16, block_tokens=4, kv_blocks=130) == expected


def test_ranks_side_by_side_and_in_stages_answer_as_one(models):
    """TP2 x PP2 of a model with as many KV heads as ranks and more."""
    _, folder, prompts, expected = models("llama")
    assert answers_of(folder, prompts, tp=2, pp=2, stage_layers=(1, 3), step_tokens=32) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 2), (2, 3)])
def test_every_architecture_answers_as_transformers_does_at_every_layout(models, name, tp, pp):
    _, folder, prompts, expected = models(name)
    assert answers_of(folder, prompts, tp=tp, pp=pp, step_tokens=50) == expected


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_beam_search_answers_as_transformers_does(models, name):
    model, folder, prompts, _ = models(name)
    engine = load_engine(folder, EngineSettings(dtype="float32", kv_blocks=400, block_tokens=4))
    found = engine.generate(prompts[:6], Sampling(max_tokens=TOKENS, beam_width=4, n=2))
    assert [[answer.token_ids for answer in each] for each in found] == [
        beams(model, prompt, TOKENS, 4, 2) for prompt in prompts[:6]
    ]
    assert engine.cache.counts().used == 0
