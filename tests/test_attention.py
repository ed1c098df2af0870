"""Every attention backend against attention worked out in float64 over whole sequences, without a cache."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from planner.errors import InputError
from runtime.attention.base import BACKENDS, Setting, choose, reason_against
from runtime.attention.tiles import LANES
from runtime.batch import Batch
from runtime.step import Choices, Step

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""bfloat16 keeps 8 bits: scores and values of order 1 to 4 are off by 1/256 each."""


@dataclass(frozen=True)
class Case:
    """A step, what its layer holds before, and each sequence's full keys and values."""

    step: Step
    q: torch.Tensor
    kv: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def new(self, whole: list[torch.Tensor]) -> torch.Tensor:
        """Return the rows of `whole` that the step brings."""
        counts = np.diff(self.step.query_starts)
        return torch.cat([rows[len(rows) - int(count) :] for rows, count in zip(whole, counts, strict=True)])


def make_case(
    lengths: list[tuple[int, int]], heads: tuple[int, int, int], block_tokens: int, dtype: torch.dtype, seed: int
) -> Case:
    """Return a step over sequences of (cached, new) tokens, their blocks strewn over a pool filled with NaN."""
    (all_heads, kv_heads, head_dim), random = heads, np.random.default_rng(seed)
    lengths = sorted(lengths, key=lambda length: length[1] != 1)
    contexts = np.array([cached + new for cached, new in lengths], np.int64)
    counts = -(-contexts // block_tokens)
    pool = random.permutation(int(counts.sum()) + 3).astype(np.int32)
    tables = np.zeros((len(lengths), counts.max()), np.int32)
    kv = torch.full((2, len(pool), block_tokens, kv_heads, head_dim), torch.nan, dtype=dtype)
    noise = torch.Generator().manual_seed(seed)
    keys, values, slots, positions = [], [], [], []
    for s, (cached, new) in enumerate(lengths):
        tables[s, : counts[s]] = pool[counts[:s].sum() : counts[: s + 1].sum()]
        place = np.arange(cached + new)
        slot = tables[s, place // block_tokens].astype(np.int64) * block_tokens + place % block_tokens
        for part, whole in enumerate((keys, values)):
            rows = (1.5 * torch.randn(cached + new, kv_heads, head_dim, generator=noise)).to(dtype)
            kv[part].flatten(0, 1)[slot[:cached]] = rows[:cached]
            whole.append(rows)
        slots.append(slot[cached:])
        positions.append(place[cached:])
    starts = np.cumsum([0, *(new for _, new in lengths)])
    tokens = int(starts[-1])
    q = torch.randn(tokens, all_heads, head_dim, generator=noise).to(dtype)
    none: dict = {name: np.zeros(0) for name in ("temperature", "top_p", "top_k", "seed", "draw")}
    step = Step(
        0,
        np.zeros(tokens, np.int64),
        np.concatenate(positions),
        np.concatenate(slots),
        starts,
        contexts,
        tables,
        np.zeros(0, np.int64),
        Choices(**none),
    )
    return Case(step, q, kv, keys, values)


def run(name: str, case: Case) -> torch.Tensor:
    """Return what backend `name` makes of the case."""
    _, _, block_tokens, kv_heads, head_dim = case.kv.shape
    setting = Setting(CPU, case.q.dtype, case.q.shape[1], kv_heads, head_dim, block_tokens)
    return choose(setting, name)(case.q, case.new(case.keys), case.new(case.values), case.kv, Batch.of(case.step))


def expected(case: Case) -> torch.Tensor:
    """Return attention in float64, sequence by sequence, as written by Vaswani et al. (2017), section 3.2.1."""
    outputs = []
    starts = case.step.query_starts
    for s, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        q = case.q[starts[s] : starts[s + 1]].double()
        group = q.shape[1] // keys.shape[1]
        k, v = (part.double().repeat_interleave(group, 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        ahead = torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k))[:, None]
        weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


lengths = st.one_of(
    st.tuples(st.integers(0, 700), st.just(1)),
    st.tuples(st.sampled_from([0, 0, 1, 15, 16, 17, 90]), st.integers(2, 70)),
)
shapes = st.sampled_from([(9, 3, 64), (4, 4, 16), (8, 1, 32), (6, 1, 16), (5, 1, 48), (14, 2, 80)])
"""(heads, KV heads, head_dim): GQA, MHA, MQA, with tiles of one to four queries."""


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "varlen"])
@given(
    st.lists(lengths, min_size=1, max_size=6),
    shapes,
    st.sampled_from([1, 3, 16, 32]),
    st.sampled_from(list(TOLERANCE)),
    st.integers(0, 9),
)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_backend_equals_attention_without_a_cache(name, lengths, heads, block_tokens, dtype, seed):
    case = make_case(lengths, heads, block_tokens, dtype, seed)
    got = run(name, case)
    torch.testing.assert_close(got.double(), expected(case), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    written = case.kv.flatten(1, 2)[:, torch.from_numpy(case.step.slots)]
    assert torch.equal(written, torch.stack([case.new(case.keys), case.new(case.values)]))


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "varlen"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_sequence_gets_the_same_bits_whatever_runs_beside_it(name, dtype):
    lengths = [(0, 1), (40, 1), (255, 1), (256, 1), (700, 1), (0, 33), (20, 7)]
    together = make_case(lengths, (9, 3, 64), 16, dtype, 0)
    whole = run(name, together)
    starts = together.step.query_starts
    for s, (cached, new) in enumerate(lengths):
        alone = make_case([(cached, new)], (9, 3, 64), 16, dtype, 0)
        alone.keys[0], alone.values[0] = together.keys[s], together.values[s]
        place = np.arange(cached)
        slot = torch.from_numpy(alone.step.block_tables[0, place // 16].astype(np.int64) * 16 + place % 16)
        for part, rows in enumerate((alone.keys[0], alone.values[0])):
            alone.kv[part].flatten(0, 1)[slot] = rows[:cached]
        alone.q.copy_(together.q[starts[s] : starts[s + 1]])
        assert torch.equal(run(name, alone), whole[starts[s] : starts[s + 1]])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_number_of_threads_changes_no_bit(dtype):
    case = make_case([(cached, 1) for cached in (0, 3, 300, 900)], (9, 3, 64), 16, dtype, 0)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(run("paged_numba", case))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_scores_that_differ_by_hundreds_do_not_overflow():
    case = make_case([(600, 1)], (2, 1, 16), 16, torch.float32, 0)
    case.q.mul_(100)
    torch.testing.assert_close(run("paged_numba", case).double(), expected(case), atol=1e-4, rtol=1e-4)


def test_the_compiled_kernel_is_chosen_on_cpus_and_the_reference_for_other_types():
    setting = Setting(CPU, torch.float32, 9, 3, 64, 16)
    half = Setting(CPU, torch.float16, 9, 3, 64, 16)
    narrow = Setting(CPU, torch.float32, 9, 3, 20, 16)
    assert reason_against(setting, "paged_numba") is None
    assert type(choose(setting)).__name__ == "PagedNumba"
    assert type(choose(half)).__name__ == type(choose(narrow)).__name__ == "Sdpa"
    assert reason_against(narrow, "paged_numba") == f"it takes heads whose width is a multiple of {LANES}, not 20"
    with pytest.raises(InputError, match="paged_numba: it takes float32 and bfloat16, not float16; use another of"):
        choose(half, "paged_numba")
    with pytest.raises(InputError, match=r"expected auto or one of .*sdpa.*, got 'flash'"):
        choose(setting, "flash")


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("block_tokens", [16, 256])
@pytest.mark.parametrize("name", ["varlen", "sdpa"])
def test_a_backend_on_a_gpu_equals_attention_without_a_cache(name, block_tokens):
    lengths = [(0, 1), (40, 1), (700, 1), (0, 33), (20, 7), (300, 65)]
    case = make_case(lengths, (8, 2, 64), block_tokens, torch.bfloat16, 0)
    setting = Setting(torch.device("cuda"), torch.bfloat16, 8, 2, 64, block_tokens)
    new = (part.cuda() for part in (case.q, case.new(case.keys), case.new(case.values)))
    got = choose(setting, name)(*new, case.kv.cuda(), Batch.of(case.step, "cuda"))
    tolerance = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(got.double().cpu(), expected(case), atol=tolerance, rtol=tolerance)


def test_the_gpu_backend_says_why_it_does_not_serve_a_cpu():
    setting = Setting(CPU, torch.bfloat16, 8, 2, 64, 16)
    assert reason_against(setting, "varlen") == "it runs on CUDA devices, not on cpu"
