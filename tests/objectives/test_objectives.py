from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from stability.config import settings_of
from stability.objectives._base import weighted_cross_entropy
from stability.objectives._mask_rates import mask_rates, random_mask
from stability.objectives.ar import Autoregressive
from stability.objectives.mlm import MaskedLanguageModel


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def mlm(**settings):
    return MaskedLanguageModel(settings_of("objectives", "mlm", settings), vocab_size=10)


def test_masked_positions_hold_the_mask_token_and_the_others_their_own():
    tokens = torch.randint(10, (64, 20), generator=generator())
    examples = mlm().examples(tokens, generator(1))
    masked = examples.inputs_BN == 10
    assert torch.equal(examples.targets_BN, tokens)
    assert torch.equal(examples.inputs_BN[~masked], tokens[~masked])
    assert torch.equal(examples.weights_BN > 0, masked)
    assert masked.any(dim=1).all()


def test_context_is_what_stands_before_the_sequence_whole_and_out_of_the_loss():
    tokens = torch.randint(10, (6, 15), generator=generator())
    objective = mlm(context=5)
    assert objective.tokens_needed(10) == 15
    examples = objective.examples(tokens, generator(1))
    assert torch.equal(examples.context_BJ, tokens[:, :5])
    alone = mlm().examples(tokens[:, 5:], generator(1))
    assert alone.context_BJ is None
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(examples[:3], alone[:3], strict=True)), "the masks are those of the sequence alone"


def test_examples_hand_their_context_to_the_model_and_to_every_microbatch():
    class Echo(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(1.0))

        def forward(self, tokens_BN, *, context_BJ=None):
            return self.scale * (tokens_BN if context_BJ is None else context_BJ)

    examples = mlm(context=5).examples(torch.randint(10, (5, 15), generator=generator()), generator(1)).to("cpu")
    assert torch.equal(examples.logits(Echo()), examples.context_BJ)
    assert torch.equal(examples.logits(Echo(), {"scale": torch.tensor(2.0)}), 2 * examples.context_BJ)
    parts = examples.split(2)
    assert [len(part.inputs_BN) for part in parts] == [2, 2, 1]
    assert all(torch.equal(torch.cat(pieces), whole) for whole, pieces in zip(examples, zip(*parts, strict=True), strict=True))
    alone = mlm().examples(torch.randint(10, (5, 15), generator=generator()), generator(1))
    assert torch.equal(alone.logits(Echo()), alone.inputs_BN)
    assert [part.context_BJ for part in alone.split(2)] == [None] * 3


def test_loss_is_the_mean_over_sequences_of_the_mean_over_masked_positions():
    tokens = torch.randint(10, (5, 12), generator=generator())
    objective = mlm()
    examples = objective.examples(tokens, generator(1))
    logits = torch.randn(5, 12, 10, generator=generator(2), dtype=torch.float64)
    total, count = objective.loss_sum(logits, examples)
    slow = []
    for row in range(5):
        masked = [i for i in range(12) if examples.inputs_BN[row, i] == 10]
        slow.append(sum(math.log(logits[row, i].exp().sum()) - logits[row, i, tokens[row, i]].item() for i in masked) / len(masked))
    assert (total / count).item() == pytest.approx(sum(slow) / 5, rel=1e-6)


def test_a_sequence_whose_rate_draws_nothing_still_hides_one_token():
    assert random_mask(torch.full((1000,), 1e-9), 7, generator()).sum(dim=1).eq(1).all()


CDFS = {
    "uniform": lambda r: r,
    "cosine": lambda r: 2 / math.pi * math.asin(r),
    "sqrt": lambda r: r**2,
    "betalinear30": lambda r: 0.8 * stats.beta(3, 9).cdf(r) + 0.2 * r,
}


@pytest.mark.parametrize("schedule", CDFS)
def test_mask_rates_follow_their_distribution(schedule):
    rates = mask_rates(schedule, 20_000, generator()).numpy()
    assert rates.min() >= 0.05
    assert rates.max() <= 0.95
    for cut in (0.1, 0.25, 0.5, 0.75, 0.9):
        assert (rates < cut).mean() == pytest.approx(CDFS[schedule](cut), abs=0.012)


def test_next_token_targets_are_the_inputs_shifted_by_one():
    objective = Autoregressive(settings_of("objectives", "ar", {}), vocab_size=10)
    tokens = torch.randint(10, (3, objective.tokens_needed(8)), generator=generator())
    examples = objective.examples(tokens, generator())
    assert examples.inputs_BN.shape == (3, 8)
    assert torch.equal(examples.inputs_BN[:, 1:], examples.targets_BN[:, :-1])
    logits = torch.randn(3, 8, 10, generator=generator())
    total, count = objective.loss_sum(logits, examples)
    assert torch.allclose(total / count, F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


def test_bf16_logits_give_a_float32_loss():
    examples = mlm().examples(torch.zeros(2, 4, dtype=torch.long), generator())
    assert weighted_cross_entropy(torch.zeros(2, 4, 10, dtype=torch.bfloat16), examples)[0].dtype == torch.float32
