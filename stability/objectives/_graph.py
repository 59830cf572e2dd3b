"""The two token graphs of discrete diffusion: corruption and score entropy (Lou et al. 2024)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


class Absorbing:
    """A corrupted token becomes the mask M = V for good: V + 1 states."""

    def __init__(self, vocab_size: int):
        self.vocab_size = self.mask_id = vocab_size
        self.num_states = vocab_size + 1

    def corrupt(self, tokens_BN: Tensor, sigma_B: Tensor, generator: torch.Generator) -> Tensor:
        """Replace each token by M with probability 1 − e^{−σ}.

        Args:
            tokens_BN: clean tokens.
            sigma_B: total noise per sequence.
            generator: source of randomness.
        """
        return tokens_BN.masked_fill(_draw_moved(tokens_BN, sigma_B, generator), self.mask_id)

    def counts(self, noisy_BN: Tensor) -> Tensor:
        """Return the masked positions, (B, N) bool; only they have a reverse step."""
        return noisy_BN == self.mask_id

    def log_score(self, logits_BNV: Tensor, noisy_BN: Tensor, sigma_B: Tensor) -> Tensor:
        """Return log s (B, N, V + 1): net − log(e^σ − 1) − log V, and 0 at y = x_t.

        An unmasked token has no reverse step: its values for other tokens are no ratios, and that for M is −∞.

        Args:
            logits_BNV: outputs of the network.
            noisy_BN: corrupted tokens x_t.
            sigma_B: total noise per sequence.
        """
        logs = logits_BNV - (log_expm1(sigma_B) + math.log(self.vocab_size))[:, None, None]
        return F.pad(logs, (0, 1), value=-math.inf).masked_fill(_mark_own(noisy_BN, self.num_states), 0.0)

    def unigram_logits(self, log_frequencies_V: Tensor, noisy_BN: Tensor, sigma_B: Tensor) -> Tensor:
        """Return log V + log p(y), the logits of the token frequencies.

        Then s_y = p(y)/(e^σ − 1), the ratio at any mask.

        Args:
            log_frequencies_V: log p.
            noisy_BN: corrupted tokens.
            sigma_B: total noise per sequence.
        """
        return (log_frequencies_V + math.log(self.vocab_size)).expand(*noisy_BN.shape, -1)

    def loss(self, logits_BNV: Tensor, noisy_BN: Tensor, clean_BN: Tensor, sigma_B: Tensor) -> Tensor:
        """Return the score entropy per position (B, N); only masked positions are meaningful.

        It is Σ_{y≠M} s_y − r·log s_{x0} + r(log r − 1) with r = 1/(e^σ − 1). s = r·exp(net)/V turns it into r·(mean_y
        exp(net_y) − net_{x0} + log V − 1), without differences of large numbers.

        Args:
            logits_BNV: outputs of the network.
            noisy_BN: corrupted tokens x_t.
            clean_BN: clean tokens x0.
            sigma_B: total noise per sequence.
        """
        chosen_BN = logits_BNV.gather(-1, clean_BN[..., None]).squeeze(-1)
        return self._loss(logits_BNV.logsumexp(-1), chosen_BN, sigma_B[:, None])

    def choose_omitted(self, noisy_R: Tensor) -> None:
        """Return None: sums over the vocabulary have no logit for M to omit."""

    def loss_of_sums(self, sums: Tensor, noisy_R: Tensor, clean_R: Tensor, sigma_R: Tensor) -> Tensor:
        """Return `loss` of single positions (R) from sums over the vocabulary.

        Args:
            sums: log-sum-exp of the logits, and the logit of x0.
            noisy_R: corrupted tokens.
            clean_R: clean tokens.
            sigma_R: total noise.
        """
        return self._loss(sums[0], sums[1], sigma_R)

    def _loss(self, log_sum: Tensor, at_clean: Tensor, sigma: Tensor) -> Tensor:
        log_vocab = math.log(self.vocab_size)
        return ((log_sum - log_vocab).exp() - at_clean + (log_vocab - 1)) * (-log_expm1(sigma)).exp()


class Uniform:
    """A corrupted token becomes any of the V uniformly, itself included: V states, no mask."""

    mask_id = None

    def __init__(self, vocab_size: int):
        self.vocab_size = self.num_states = vocab_size

    def corrupt(self, tokens_BN: Tensor, sigma_B: Tensor, generator: torch.Generator) -> Tensor:
        """Draw each token anew with probability 1 − e^{−σ}.

        Args:
            tokens_BN: clean tokens.
            sigma_B: total noise per sequence.
            generator: source of randomness.
        """
        moved_BN = _draw_moved(tokens_BN, sigma_B, generator)
        return torch.where(moved_BN, torch.randint(self.vocab_size, tokens_BN.shape, generator=generator), tokens_BN)

    def counts(self, noisy_BN: Tensor) -> Tensor:
        """Return True for every position (B, N), bool."""
        return torch.ones_like(noisy_BN, dtype=torch.bool)

    def log_score(self, logits_BNV: Tensor, noisy_BN: Tensor, sigma_B: Tensor) -> Tensor:
        """Return log s (B, N, V): the network's output, and 0 at y = x_t.

        Args:
            logits_BNV: outputs of the network.
            noisy_BN: corrupted tokens x_t.
            sigma_B: total noise; only the network uses it.
        """
        return logits_BNV.masked_fill(_mark_own(noisy_BN, self.num_states), 0.0)

    def unigram_logits(self, log_frequencies_V: Tensor, noisy_BN: Tensor, sigma_B: Tensor) -> Tensor:
        """Return log p_σ(y) − log p_σ(x_t), with p_σ the distribution of a corrupted token.

        p_σ = e^{−σ}p + (1 − e^{−σ})/V.

        Args:
            log_frequencies_V: log p.
            noisy_BN: corrupted tokens x_t.
            sigma_B: total noise per sequence.
        """
        kept_B1 = (-sigma_B).exp()[:, None]
        log_p_BV = (kept_B1 * log_frequencies_V.exp() + (1 - kept_B1) / self.vocab_size).log()
        return log_p_BV[:, None] - log_p_BV.gather(-1, noisy_BN)[..., None]

    def loss(self, logits_BNV: Tensor, noisy_BN: Tensor, clean_BN: Tensor, sigma_B: Tensor) -> Tensor:
        """Return the score entropy per position (B, N).

        It is (1/V) Σ_{y≠x} [s_y − q_y log s_y + q_y(log q_y − 1)] with q_y = p(y|x0)/p(x|x0), x = x_t. With a = (e^σ −
        1)/(V + e^σ − 1) the ratios are q_y = a if x = x0; else 1/a at y = x0 and 1 at the others.

        Args:
            logits_BNV: outputs of the network.
            noisy_BN: corrupted tokens x_t.
            clean_BN: clean tokens x0.
            sigma_B: total noise per sequence.
        """
        log_s = self.log_score(logits_BNV, noisy_BN, sigma_B)
        at_clean_BN = log_s.gather(-1, clean_BN[..., None]).squeeze(-1)
        return self._loss(log_s.exp().sum(-1) - 1, log_s.sum(-1), at_clean_BN, noisy_BN, clean_BN, sigma_B[:, None])

    def choose_omitted(self, noisy_R: Tensor) -> Tensor:
        """Return the columns to omit from sums over the vocabulary: y = x_t."""
        return noisy_R

    def loss_of_sums(self, sums: Tensor, noisy_R: Tensor, clean_R: Tensor, sigma_R: Tensor) -> Tensor:
        """Return `loss` of single positions (R) from sums over the vocabulary.

        Args:
            sums: log-sum-exp of the logits without x_t, the logit of x0, and the sum of the logits without x_t.
            noisy_R: corrupted tokens.
            clean_R: clean tokens.
            sigma_R: total noise.
        """
        return self._loss(sums[0].exp(), sums[2], sums[1], noisy_R, clean_R, sigma_R)

    def _loss(
        self, scores: Tensor, logs: Tensor, at_clean: Tensor, noisy: Tensor, clean: Tensor, sigma: Tensor
    ) -> Tensor:
        """Return the loss from Σ s_y, Σ log s_y (both over y ≠ x) and log s_{x0}."""
        log_a = -F.softplus(math.log(self.vocab_size) - log_expm1(sigma)).expand(noisy.shape)
        same, others = noisy == clean, self.vocab_size - 1
        a, inverse = log_a.exp(), (-log_a).exp()
        crossed = torch.where(same, a, 1.0) * logs + torch.where(same, 0.0, inverse - 1) * at_clean
        constant = torch.where(same, others * a * (log_a - 1), inverse * (-log_a - 1) - (others - 1))
        return (scores - crossed + constant) / self.vocab_size


Graph = Absorbing | Uniform


def log_expm1(sigma: Tensor) -> Tensor:
    """Return log(e^σ − 1) for σ > 0, exact to rounding at both ends."""
    # σ + log(1 − e^{−σ}): e^σ itself would overflow
    return sigma + (-torch.expm1(-sigma)).log()


def _draw_moved(tokens_BN: Tensor, sigma_B: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(tokens_BN.shape, generator=generator) < -torch.expm1(-sigma_B)[:, None]


def _mark_own(noisy_BN: Tensor, num_states: int) -> Tensor:
    """Return whether y = x_t, (B, N, S) bool."""
    return noisy_BN[..., None] == torch.arange(num_states, device=noisy_BN.device)
