"""Products with packed weights against the same in float64, and what is packed at all."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from runtime.layers.linear import Dense, can_pack

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float64: 1e-12}
"""Of a sum whose terms have a variance of 1 / inputs each; a bfloat16 result is rounded once."""


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@given(
    st.sampled_from([1, 2, 7, 16, 17, 65, 300]),
    st.sampled_from([1, 3, 16, 100, 576]),
    st.sampled_from([1, 8, 33, 960]),
    st.booleans(),
    st.integers(0, 9),
)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_dense_layer_is_x_times_the_transposed_weight_plus_bias(dtype, tokens, inputs, outputs, with_bias, seed):
    noise = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise).to(dtype)

    x, weight, bias = normal(tokens, inputs), normal(outputs, inputs), normal(outputs)
    weight /= inputs**0.5
    exact = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    with torch.inference_mode():
        dense = Dense(weight, bias if with_bias else None)
        got, strided = dense(x), dense(torch.stack([x, x], 1)[:, 0])
    assert (dense.out_features, dense.in_features, got.dtype) == (outputs, inputs, dtype)
    torch.testing.assert_close(got.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(got, strided)


def test_a_packed_weight_is_the_only_copy_that_is_kept():
    weight = torch.randn(64, 64)
    dense = Dense(weight)
    before = dense(torch.ones(1, 64))
    weight.zero_()
    assert can_pack(weight)
    assert torch.equal(dense(torch.ones(1, 64)), before)


def test_types_that_cannot_be_packed_go_to_torch():
    assert not can_pack(torch.ones(2, 2, dtype=torch.float64))
    assert not can_pack(torch.ones(2, 2, dtype=torch.int64))
    assert not can_pack(torch.ones(0, 2))
    assert Dense(torch.ones(2, 3, dtype=torch.float64))(torch.ones(1, 3, dtype=torch.float64)).tolist() == [[3.0, 3.0]]
