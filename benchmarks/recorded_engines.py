"""The engines whose logs lie in tests/data/distserve_runs, as the simulator sees them: rules, limits and constants.

OPT-13B on A100-80GB under DistServe's own engine (one prefill instance TP2, one decode instance of one or two pipeline
stages) and under vLLM 0.2.3 (TP1). Latencies are the published coefficients with what the engines add around the
profiled calls. No constant belongs to one run; `benchmarks.recorded_runs --choose` searches them again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from planner.cost.base import CostModel
from planner.cost.fit import fit, with_stages
from planner.simulator.cluster import Instance, Limits, LoopPulls, Run, System, simulate
from planner.sources.hf_config import read_model
from planner.sources.profiles import import_profile, read_profile
from planner.specs.base import Document, load_preset
from planner.specs.cluster import find_gpu
from planner.specs.model import ModelSpec
from planner.specs.profile import Profile
from planner.specs.slo import Slo
from planner.specs.workload import Requests, make_requests

PROFILES = Path(__file__).parents[1] / "tests" / "data" / "profiles"
_ANY = (Slo(ttft_s=1.0, tpot_s=1.0),)


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """What each request saw [s]."""

    ttft_s: np.ndarray
    tpot_s: np.ndarray


class Front(NamedTuple):
    """The way into the engine: HTTP and the tokenizer. It delays a request and keeps no GPU busy."""

    fixed_s: float = 2.2e-3
    per_token_s: float = 3.2e-6


class DistServe(NamedTuple):
    """What DistServe's engine adds to the published latencies."""

    prefill_factor: float = 0.946
    prefill_s: float = 4.6e-3
    decode_factor: float = 1.116
    per_request_s: float = 39e-6
    """Of each request in each decode step: its token is decoded and streamed before the next step."""
    migration_s: float = 4.5e-3
    migration_bytes_per_s: float = 173e9
    swap_bytes_per_s: float = 41e9
    """What is left of a copy to host memory behind the step that it runs beside."""
    look_again_s: float = 0.3e-3


class Vllm(NamedTuple):
    """What vLLM 0.2.3 adds to its published latencies, and the KV blocks that it found room for."""

    prefill_factor: float = 0.79
    prefill_s: float = 11.5e-3
    decode_factor: float = 1.0
    per_request_s: float = 0.38e-3
    kv_blocks: float = 3390


def distserve(pp: int, extra: DistServe) -> System:
    """Return that engine with `pp` decode stages."""
    blocks = {1: 4134, 2: 10188}[pp]  # distserve_a100_max_tokens.csv
    prefill = _law(_published(2), extra.prefill_factor, extra.prefill_s, 1.0, 0.0)
    decode = with_stages(
        _law(_published(1), 1.0, 0.0, extra.decode_factor, extra.per_request_s), _opt(), pp, 234e9, 1e-6
    )
    pulls = LoopPulls(extra.migration_s, extra.migration_bytes_per_s, look_again_s=extra.look_again_s)
    instances = (
        Instance("prefill", prefill, Limits(128, 8192, 163008 // 16)),
        Instance("decode", decode, Limits(1024, 65536, blocks, swap_bytes_per_s=extra.swap_bytes_per_s)),
    )
    return System(instances, _opt().kv_bytes_per_token, first_token_at="prefill", loop_pulls=pulls)


def vllm(extra: Vllm) -> System:
    """Return vLLM 0.2.3 on one GPU: prompts first, padded by at most its default of 256 tokens."""
    law = _law(_published_vllm(), extra.prefill_factor, extra.prefill_s, extra.decode_factor, extra.per_request_s)
    limits = Limits(1024, 65536, int(extra.kv_blocks))
    return System((Instance("aggregated", law, limits, max_padding=256),), _opt().kv_bytes_per_token)


def play(system: System, requests: Requests, front: Front, seed: int = 0) -> Times:
    """Return what the requests see. A seed other than 0 delays each by a random time of 1 ms on average."""
    delay_s = front.fixed_s + front.per_token_s * requests.prompt_tokens
    if seed:
        delay_s = delay_s + np.random.default_rng(seed).exponential(1e-3, len(requests))
    arrival_s = requests.arrival_s + delay_s
    order = np.argsort(arrival_s, kind="stable")
    run = simulate(
        system, make_requests(arrival_s[order], requests.prompt_tokens[order], requests.output_tokens[order]), _ANY
    )
    return _as_sent(run, order, requests)


def _as_sent(run: Run, order: np.ndarray, requests: Requests) -> Times:
    """Return the times in the order of `requests`, counted from when they were sent."""
    first_s, tpot_s = np.empty(len(order)), np.empty(len(order))
    first_s[order], tpot_s[order] = run.first_token_s, run.tpot_s
    return Times(first_s - requests.arrival_s, tpot_s)


def _law(published: CostModel, prefill: float, prefill_s: float, decode: float, per_request_s: float) -> CostModel:
    p = published.parameters.copy()
    p[1:4] *= prefill
    p[1] += prefill_s
    p[4:10] *= decode
    p[[5, 8]] += per_request_s
    return replace(published, parameters=p)


@cache
def _opt() -> ModelSpec:
    return read_model(_preset("models", "opt-13b"))


@cache
def _published(tp: int) -> CostModel:
    return _fitted(read_profile(_preset("profiles", "distserve-opt-13b-a100")), tp)


@cache
def _published_vllm() -> CostModel:
    path = PROFILES / "distserve_a100_vllm_fit.json"
    return _fitted(import_profile("distserve", path, model="facebook/opt-13b", engine="vllm"), 1)


def _fitted(profile: Profile, tp: int) -> CostModel:
    gpu = find_gpu("a100-80gb")
    assert gpu is not None
    return fit(profile, _opt(), gpu, tp)


def _preset(family: str, name: str) -> Document:
    document = load_preset(family, name)
    assert document is not None
    return document
