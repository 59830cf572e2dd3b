from __future__ import annotations

import pytest
import torch

from stability.models.position import rope
from tests.mechanisms.oracles import rotated

U_NK = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_rope_multiplies_complex_numbers_made_of_the_two_halves():
    torch.testing.assert_close(rope(U_NK), rotated(U_NK), rtol=0, atol=1e-12)
    torch.testing.assert_close(rope(U_NK, base=100.0), rotated(U_NK, base=100.0), rtol=0, atol=1e-12)


def test_rope_is_the_papers_cosine_sine_and_permutation_form():
    k = torch.arange(3, dtype=torch.float64).repeat(2)
    angle_NK = torch.arange(7, dtype=torch.float64)[:, None] * 10_000.0 ** (-2 * k / 6)
    p_KK = torch.zeros(6, 6, dtype=torch.float64)
    p_KK[:3, 3:], p_KK[3:, :3] = -torch.eye(3), torch.eye(3)
    torch.testing.assert_close(rope(U_NK), U_NK * angle_NK.cos() + (U_NK @ p_KK.T) * angle_NK.sin(), rtol=0, atol=1e-12)


def test_turning_back_is_the_inverse_and_the_transpose():
    torch.testing.assert_close(rope(rope(U_NK), back=True), U_NK, rtol=0, atol=1e-14)
    other_NK = U_NK.flip(0)
    torch.testing.assert_close((rope(U_NK, back=True) * other_NK).sum(), (U_NK * rope(other_NK)).sum())


def test_axes_may_stand_anywhere():
    u_KBN = U_NK.T[:, None]
    torch.testing.assert_close(rope(u_KBN, position_dim=-1, width_dim=0)[:, 0].T, rope(U_NK), rtol=0, atol=1e-14)


def test_scores_depend_on_relative_position_alone():
    q_NK, k_NK = U_NK[:1].expand(7, 6), U_NK[1:2].expand(7, 6)
    score_NN = rope(q_NK) @ rope(k_NK).T
    for offset in range(-6, 7):
        diagonal = score_NN.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-12)


def test_half_precision_turns_by_float32_angles_and_keeps_its_dtype():
    u_NK = torch.randn(2048, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    turned = rope(u_NK)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned.float(), rope(u_NK.float()), rtol=1e-2, atol=1e-2)


def test_odd_head_width_is_refused():
    with pytest.raises(ValueError, match="must be even, got 5"):
        rope(torch.zeros(3, 5))


def test_rope_made_under_inference_mode_serves_training_later():
    with torch.inference_mode():
        rope(torch.zeros(5, 4))
    u_NK = torch.zeros(5, 4, requires_grad=True)
    rope(u_NK).sum().backward()
    assert u_NK.grad is not None
