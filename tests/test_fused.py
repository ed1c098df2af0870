"""What is compiled for CPUs between two matrix products, against the same in float64."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from runtime.layers.fused import rms_norm, rotate, silu_and_multiply
from tests.test_attention import TOLERANCE

shapes = st.tuples(st.integers(1, 70), st.sampled_from([2, 6, 64, 576, 1536]))
CASES = given(shapes, st.integers(0, 9))


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers around 0 that are those of `dtype`."""
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """One rounding of the result is allowed, and in float32 that of a sum."""
    tolerance = 2**-8 if got.dtype == torch.bfloat16 else TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@CASES
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_rms_norm_divides_by_the_root_of_the_mean_square(dtype, shape, seed):
    x, weight = normal(shape, seed, dtype), normal(shape[1:], seed + 1, dtype)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    close(rms_norm(x, weight, 1e-5), exact)
    halves = torch.stack([x, -x], 1)[:, :1]  # rows that do not lie one behind the other, as those of a head do
    close(rms_norm(halves, weight, 1e-5)[:, 0], exact)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@CASES
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_silu_and_multiply_gates_the_second_half_by_the_first(dtype, shape, seed):
    x = normal((shape[0], 2 * shape[1]), seed, dtype)
    gate, up = x.double().chunk(2, -1)
    close(silu_and_multiply(x), gate * gate.sigmoid() * up)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_silu_is_right_far_from_zero(dtype):
    gate = torch.tensor([-1e4, -200.0, -87.5, -20.0, -0.0, 20.0, 87.5, 200.0, 1e4]).to(dtype)
    got = silu_and_multiply(torch.cat([gate, torch.ones_like(gate)])[None])
    close(got[0], gate.double() * gate.double().sigmoid())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@given(st.integers(1, 40), st.integers(0, 5), st.integers(0, 3), st.sampled_from([2, 16, 64, 80]), st.integers(0, 9))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_rotate_turns_pairs_of_the_first_heads_and_leaves_the_rest(dtype, tokens, heads, others, head_dim, seed):
    x = normal((tokens, heads + others, head_dim), seed, dtype)
    angles = normal((tokens, 1, head_dim // 2), seed + 1, torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    pairs = torch.complex(*x[:, :heads].double().chunk(2, -1)) * torch.complex(cos.double(), sin.double())
    rest = x[:, heads:].clone()
    got = rotate(x, heads, cos, sin)
    close(got[:, :heads], torch.cat([pairs.real, pairs.imag], -1))
    assert torch.equal(got[:, heads:], rest)


def test_types_without_compiled_code_go_to_torch():
    x = normal((5, 32), 0, torch.float64)
    gate, up = x.chunk(2, -1)
    close64 = {"atol": 1e-12, "rtol": 1e-12}
    torch.testing.assert_close(silu_and_multiply(x), gate * gate.sigmoid() * up, **close64)
    torch.testing.assert_close(
        rms_norm(x, x[0], 1e-5), x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * x[0], **close64
    )
    heads = x.view(5, 2, 16).clone()
    turned = rotate(heads.clone(), 1, torch.zeros(5, 1, 8).double(), torch.ones(5, 1, 8).double())
    torch.testing.assert_close(turned[:, 0], torch.cat([-heads[:, 0, 8:], heads[:, 0, :8]], -1), **close64)
