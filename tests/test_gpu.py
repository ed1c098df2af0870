"""The same equalities on a CUDA device: tokens in fp32, logits within a tolerance in bf16."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime.attention.base import BACKENDS, Setting, reason_against
from runtime.load import load_engine
from runtime.model_files import open_model
from runtime.sampling import Sampling
from runtime.settings import EngineSettings
from runtime.shard import Shard
from runtime.step import prompt_step
from runtime.worker import Worker
from tests.tiny_models import CONFIGS, greedy, saved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
TOKENS = 24


def prompts():
    rng = np.random.default_rng(1)
    return [rng.integers(0, 211, length).tolist() for length in (1, 2, 15, 16, 17, 60, 100, 200)]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_in_fp32_are_those_of_transformers(name, tmp_path):
    model, folder = saved(name, tmp_path)
    torch.backends.cuda.matmul.allow_tf32 = False
    engine = load_engine(folder, EngineSettings(dtype="float32", device="cuda", kv_blocks=200, step_tokens=64))
    found = engine.generate(prompts(), Sampling(max_tokens=TOKENS))
    assert [each[0].token_ids for each in found] == [greedy(model, prompt, TOKENS) for prompt in prompts()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_in_bf16_are_near_those_in_fp32(name, backend, tmp_path):
    """bf16 keeps 8 bits: over four layers of random weights the logits stay within a few hundredths of their spread."""
    model, folder = saved(name, tmp_path)
    settings = EngineSettings(dtype="bfloat16", device="cuda", attention=backend, block_tokens=256)
    device, files = torch.device("cuda", 0), open_model(folder, torch.bfloat16)
    config = files.config
    rank = Setting(device, torch.bfloat16, config.heads, config.kv_heads, config.head_dim, settings.block_tokens)
    if reason := reason_against(rank, backend):
        pytest.skip(f"{backend}: {reason}")
    worker = Worker(config, files.weights, Shard(range(4), 4), settings, device)
    worker.allocate(4, 0)
    for prompt in prompts():
        step = replace(prompt_step(len(prompt), settings.block_tokens), token_ids=np.array(prompt, np.int64))
        found = worker.forward(step)[0].float().cpu()
        expected = model(torch.tensor([prompt])).logits[0, -1]
        assert (found - expected).abs().mean() < 0.05 * expected.std()


def test_memory_for_kv_blocks_is_what_weights_and_workspace_leave(tmp_path):
    _, folder = saved("llama", tmp_path)
    half = load_engine(folder, EngineSettings(device="cuda", memory_fraction=0.5))
    total = torch.cuda.get_device_properties(0).total_memory
    taken = half.cache.device.total * 4 * 2 * 16 * 4 * 8 * 2  # layers, k and v, tokens, KV heads, head_dim, bytes
    assert 0.3 * total < taken < 0.5 * total
    half.close()
