"""Linear attention with decay, chunk by chunk, against the state carried from position to position."""

from __future__ import annotations

import pytest
import torch

from stability.mechanisms._decayed import gated_linear_attention
from tests.mechanisms.fla_naive import fla_naive
from tests.within import assert_within


def drawn(num_positions, *, per_key, dtype=torch.float64, strength=1.0):
    generator = torch.Generator().manual_seed(num_positions)
    q, k, v = (torch.randn(2, 3, num_positions, width, dtype=dtype, generator=generator) for width in (4, 4, 6))
    width = 4 if per_key else 1
    log_decay = -strength * torch.rand(2, 3, num_positions, width, dtype=dtype, generator=generator)
    return q, k, v, log_decay


def by_positions(q, k, v, log_decay):
    """S ← Diag(a) S + k vᵀ, y = Sᵀ q, with factors a and no sums of logarithms."""
    y = torch.zeros_like(v)
    for b in range(v.shape[0]):
        for head in range(v.shape[1]):
            state_KV = torch.zeros(k.shape[3], v.shape[3], dtype=v.dtype)
            for t in range(v.shape[2]):
                decay = log_decay[b, head, t].exp()[:, None]
                state_KV = decay * state_KV + torch.outer(k[b, head, t], v[b, head, t])
                y[b, head, t] = q[b, head, t] @ state_KV
    return y


@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("num_positions", [1, 5, 8, 9, 27])
def test_equals_the_recurrence_whatever_the_chunk(num_positions, per_key):
    given = drawn(num_positions, per_key=per_key)
    expected = by_positions(*given)
    for chunk in (1, 4, 8, 64):
        torch.testing.assert_close(gated_linear_attention(*given, chunk=chunk), expected, rtol=1e-11, atol=1e-12)


def test_equals_the_public_recurrence():
    """Of flash-linear-attention, which scales queries by 1/√K and has heads after positions."""
    q, k, v, log_decay = drawn(29, per_key=True, dtype=torch.float32)
    public, _ = fla_naive("gla").naive_recurrent_gla(*(part.transpose(1, 2) for part in (q, k, v, log_decay)))
    found = gated_linear_attention(q / 2, k, v, log_decay, chunk=8)
    torch.testing.assert_close(found, public.transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("per_key", [False, True])
def test_strong_forgetting_stays_finite_and_exact_in_float32(per_key):
    """ln a sums to −96 and far more in a chunk, and e^96 is no float32: no factor may be undone, and
    no difference of two sums taken, which are rounded by 3e-5."""
    given = drawn(40, per_key=per_key, strength=25.0)
    assert given[-1][:, :, :16].sum(2).max() < -96
    found = gated_linear_attention(*(part.float() for part in given), chunk=16)
    expected = by_positions(*given)
    assert_within((found - expected).norm(), 1e-6 * expected.norm())
    leaves = [part.float().requires_grad_() for part in given]
    gradients = torch.autograd.grad(gated_linear_attention(*leaves, chunk=16).square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), leaves)
    assert all(tensor.isfinite().all() for tensor in (*gradients, *second))


@pytest.mark.parametrize("per_key", [False, True])
def test_heads_and_sequences_may_share_keys_and_decays(per_key):
    q, k, v, log_decay = drawn(13, per_key=per_key)
    q, k, log_decay = q[:, :1], k[:, :1], log_decay[:1, :1]
    whole = [part.expand(2, 3, -1, -1) for part in (q, k, log_decay)]
    expected = by_positions(whole[0], whole[1], v, whole[2])
    torch.testing.assert_close(gated_linear_attention(q, k, v, log_decay, chunk=4), expected, rtol=1e-11, atol=1e-12)


def test_the_state_is_kept_in_float32_under_autocast():
    given = drawn(20, per_key=True, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gated_linear_attention(*given, chunk=8)
    assert torch.equal(found, gated_linear_attention(*given, chunk=8))


@pytest.mark.parametrize("per_key", [False, True])
def test_what_comes_after_one_forgetting_of_everything_is_as_exact_as_without(per_key):
    """After ln a = −1e5 a sum of logarithms is rounded by 4e-3, and so would their differences be."""
    given = drawn(64, per_key=per_key)
    given[-1][:, :, 3] = -1e5
    for chunk in (8, 64):
        found = gated_linear_attention(*(part.float() for part in given), chunk=chunk)
        expected = by_positions(*given)
        assert_within((found - expected).norm(), 1e-6 * expected.norm())
