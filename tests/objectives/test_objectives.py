from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import optimize, stats

from stability.config.parts import validate_settings
from stability.objectives import Examples, weighted_cross_entropy
from stability.objectives._examples import mask_rates, random_mask
from stability.objectives.ar import Autoregressive
from stability.objectives.mlm import MaskedLanguageModel


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def mlm(**settings):
    return MaskedLanguageModel(validate_settings("objectives", "mlm", settings), vocab_size=10)


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
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(examples[:3], alone[:3], strict=True)), (
        "the masks are those of the sequence alone"
    )


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
    assert all(
        torch.equal(torch.cat(pieces), whole)
        for whole, pieces in zip(examples, zip(*parts, strict=True), strict=True)
        if whole is not None
    )
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
        slow.append(
            sum(math.log(logits[row, i].exp().sum()) - logits[row, i, tokens[row, i]].item() for i in masked)
            / len(masked)
        )
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
    rates = mask_rates(schedule, 20_000, generator(), 0.15).numpy()
    assert rates.min() >= 0.05
    assert rates.max() <= 0.95
    for cut in (0.1, 0.25, 0.5, 0.75, 0.9):
        assert (rates < cut).mean() == pytest.approx(CDFS[schedule](cut), abs=0.012)


MEANS = {"uniform": 0.5, "cosine": 2 / math.pi, "sqrt": 2 / 3, "betalinear30": 0.8 * 3 / 12 + 0.2 * 0.5}


@pytest.mark.parametrize("schedule", MEANS)
def test_the_share_of_masks_has_its_schedules_mean_and_quantiles(schedule):
    """Of the examples themselves, 4,000 sequences of 400 positions; clamping to [0.05, 0.95] moves the means by at most
    0.004."""
    tokens = torch.zeros(4000, 400, dtype=torch.long)
    share = (mlm(mask_rate=schedule).examples(tokens, generator(3)).inputs_BN == 10).double().mean(1).numpy()
    assert share.mean() == pytest.approx(MEANS[schedule], abs=0.008)
    for cut in (0.1, 0.3, 0.5, 0.7, 0.9):
        quantile = optimize.brentq(lambda rate, cut=cut: CDFS[schedule](rate) - cut, 1e-6, 1 - 1e-6)
        assert np.quantile(share, cut) == pytest.approx(min(max(quantile, 0.05), 0.95), abs=0.025)


def test_bert_predicts_15_percent_and_shows_of_them_80_masks_10_random_tokens_and_10_themselves():
    tokens = torch.randint(10, (2000, 200), generator=generator())
    examples = mlm(mask_rate="fixed", corruption="bert").examples(tokens, generator(1))
    predicted = examples.weights_BN > 0
    assert predicted.double().mean().item() == pytest.approx(0.15, abs=0.003)
    shown, own = examples.inputs_BN[predicted], tokens[predicted]
    assert (shown == 10).double().mean().item() == pytest.approx(0.8, abs=0.008)
    assert (shown == own).double().mean().item() == pytest.approx(0.1 + 0.1 / 10, abs=0.006)
    random = shown[(shown != 10) & (shown != own)]
    assert torch.bincount(random, minlength=10).double().div(len(random)).numpy() == pytest.approx(0.1, abs=0.02)
    assert torch.equal(examples.inputs_BN[~predicted], tokens[~predicted])
    assert torch.equal(examples.targets_BN, tokens)


def test_a_rate_that_nothing_reads_is_refused_and_the_default_is_not():
    with pytest.raises(
        ValueError,
        match=r"objective\.fixed_rate=0\.3 changes nothing here: it belongs to objective\.mask_rate=fixed \(.*=cosine given\)",
    ):
        mlm(mask_rate="cosine", fixed_rate=0.3)
    mlm(mask_rate="cosine", fixed_rate=0.15)
    mlm(mask_rate="fixed", fixed_rate=0.3)


def test_a_fixed_rate_is_that_of_every_sequence():
    tokens = torch.zeros(50, 4000, dtype=torch.long)
    for rate in (0.02, 0.4):
        share = (mlm(mask_rate="fixed", fixed_rate=rate).examples(tokens, generator()).inputs_BN == 10).double().mean(1)
        assert share.numpy() == pytest.approx(rate, abs=5 * math.sqrt(rate / 4000))


def test_clean_probabilities_are_the_softmax_over_the_vocabulary():
    logits = torch.randn(2, 4, 10, generator=generator())
    assert torch.equal(
        mlm().clean_probs(lambda tokens: logits.bfloat16(), torch.zeros(2, 4)), logits.bfloat16().float().softmax(-1)
    )
    with pytest.raises(ValueError, match="hides no tokens"):
        Autoregressive(validate_settings("objectives", "ar", {}), vocab_size=10).clean_probs(
            torch.nn.Identity(), torch.zeros(2, 4)
        )


def test_positions_that_count_become_sequences_of_one_with_their_noise():
    examples = Examples(
        torch.arange(6).reshape(2, 3),
        torch.arange(6).reshape(2, 3) + 10,
        torch.tensor([[0, 1, 0], [2, 0, 3]]),
        None,
        torch.tensor([0.5, 0.7]),
    )
    rows, index = examples.counted()
    assert index.tolist() == [1, 3, 5]
    assert [part.tolist() for part in rows[:3]] == [[[1], [3], [5]], [[11], [13], [15]], [[1], [2], [3]]]
    assert rows.sigma_B.tolist() == pytest.approx([0.5, 0.7, 0.7])
    assert [part.sigma_B.tolist() for part in examples.split(1)] == [pytest.approx([0.5]), pytest.approx([0.7])]


def test_next_token_targets_are_the_inputs_shifted_by_one():
    objective = Autoregressive(validate_settings("objectives", "ar", {}), vocab_size=10)
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
