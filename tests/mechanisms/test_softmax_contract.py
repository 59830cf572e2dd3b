"""What a softmax attention says of itself beside its weights, and probes read, is held by the contract."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stability.probes.layers.attention import discrepancies, qk_singular_values
from tests.mechanisms import checks, softmax_faults

MISDECLARED = (
    (softmax_faults.SplitsInAnotherOrder, "other projections"),
    (softmax_faults.LearnsAnotherGamma, "pass on something else"),
    (softmax_faults.LosesItsGamma, "pass on something else"),
    (softmax_faults.ShiftsItsLogits, "of another factor"),
    (softmax_faults.HidesItsTemperature, "of another factor"),
    (softmax_faults.HidesItsWindow, "other logits or pairs"),
    (softmax_faults.HidesItsDiagonal, "mask_diagonal=False: not so"),
    (softmax_faults.ExposesOtherValues, "other values"),
)


@pytest.mark.parametrize(("fault", "message"), MISDECLARED)
def test_what_a_softmax_says_of_itself_is_held_where_its_output_is_right(fault, message):
    checks.check_weights_reproduce_forward(checks.build_seeded(fault))
    with pytest.raises(AssertionError, match=message):
        checks.check_softmax_is_as_declared(checks.build_seeded(fault))


def test_a_gamma_that_is_learned_and_declared_is_what_the_discrepancy_is_taken_by():
    class Learned(softmax_faults.LearnsAnotherGamma):
        def __init__(self):
            super().__init__()
            self.gamma = nn.Parameter(torch.tensor(2.5))

        def mixed(self, a_BHNN, v_BHNK):
            return v_BHNK - self.gamma * (a_BHNN @ v_BHNK)

    module = checks.build_seeded(Learned)
    checks.check_softmax_is_as_declared(module)
    rows = list(discrepancies(module, checks.inputs()[:1]))
    with torch.no_grad():
        own_HNK = module.mixed(module.weights(checks.inputs()[:1]), module.values(checks.inputs()[:1]))[0]
    assert [row["gamma"] for row in rows] == [2.5, 2.5]
    assert [row["own_rms"] for row in rows] == pytest.approx(own_HNK.square().mean((1, 2)).sqrt().tolist())


def test_projections_of_another_order_that_are_declared_are_those_of_the_singular_values():
    class Declared(softmax_faults.SplitsInAnotherOrder):
        def projections(self):
            _, w_q_HKD, w_k_HKD = self.qkv.weight.unflatten(0, (3, self.heads, -1))
            return w_q_HKD, w_k_HKD

    module = checks.build_seeded(Declared)
    checks.check_softmax_is_as_declared(module)
    width = checks.WIDTH // checks.HEADS
    q_DD, k_DD = module.qkv.weight.detach()[checks.WIDTH :].chunk(2)
    for head, found_K in enumerate(qk_singular_values(module)):
        rows = slice(head * width, (head + 1) * width)
        expected_D = torch.linalg.svdvals(q_DD[rows].T @ k_DD[rows])
        torch.testing.assert_close(found_K, expected_D[:width])
