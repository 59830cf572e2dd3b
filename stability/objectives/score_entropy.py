"""Discrete diffusion by score entropy (Lou et al. 2024, arXiv:2310.16834).

Tokens are corrupted to a random noise level; the model learns the ratios of the reverse process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from stability.models.condition import ConditionShape
from stability.models.passes import at_least_float32
from stability.objectives import AbstractVocabularyObjective, VocabularySettings, refuse_unread
from stability.objectives._examples import Examples, draw_stratified, reverse
from stability.objectives._graph import Absorbing, Graph, Uniform
from stability.runs.words import Words

NoiseName = Literal["loglinear", "geometric"]
EARLIEST = 1e-3  # times are drawn from [EARLIEST, 1]: the loss's weight grows as 1/t


@dataclass(frozen=True)
class LogLinear:
    """The noise σ(t) = −log(1 − (1 − ε)t).

    A share (1 − ε)t of the tokens is corrupted at time t (Lou et al. 2024, appendix C.1).
    """

    epsilon: float

    def sigma(self, t: Tensor) -> Tensor:
        """Return the total noise σ, same shape; each token is corrupted with probability 1 − e^{−σ}."""
        return -torch.log1p(-(1 - self.epsilon) * t)

    def rate(self, t: Tensor) -> Tensor:
        """Return σ′ = dσ/dt, same shape."""
        return (1 - self.epsilon) / (1 - (1 - self.epsilon) * t)


@dataclass(frozen=True)
class Geometric:
    """The noise σ(t) = σ_min^{1−t} σ_max^t."""

    sigma_min: float
    sigma_max: float

    def sigma(self, t: Tensor) -> Tensor:
        """Return the total noise σ, same shape; each token is corrupted with probability 1 − e^{−σ}."""
        return self.sigma_min * (t * math.log(self.sigma_max / self.sigma_min)).exp()

    def rate(self, t: Tensor) -> Tensor:
        """Return σ′ = dσ/dt, same shape."""
        return self.sigma(t) * math.log(self.sigma_max / self.sigma_min)


Noise = LogLinear | Geometric


def times(num: int, generator: torch.Generator) -> Tensor:
    """Draw ``num`` times, each U(1e-3, 1), float32, one per sequence (`draw_stratified`)."""
    return EARLIEST + (1 - EARLIEST) * draw_stratified(num, generator)


class ScoreEntropy(AbstractVocabularyObjective):
    """The score-entropy loss of a model of score ratios, per token of the batch.

    It is σ′(t)·(score entropy of each position at noise σ(t)), summed over positions. t ~ U(1e-3, 1), one per sequence,
    stratified over the batch (less scatter than independent draws, same mean).

    In nats it is an upper bound on the NLL per token (in the mean over noise; without times below 1e-3 and the
    remaining noise at t = 1). The bound of a batch scatters: with N positions a sequence's relative deviation is about
    √(6/N) for an untrained model, 1.4 % over 256 sequences of 128. The deviation is equal for all models, since
    validation always uses the same times and masks. So the baseline, the bound of token frequencies, is computed on the
    same validation examples (`unigram_logits`): a run above it counts as plateaued.

    The network reads σ (adaLN-zero blocks). Loss and ratios are in float32 or wider for any precision of the network:
    bf16 scores would shift the loss.
    """

    class Config(VocabularySettings):
        graph: Literal["absorbing", "uniform"] = Field(
            default="absorbing", description="what a corrupted token becomes: the mask, or any token"
        )
        noise: NoiseName = Field(
            default="geometric",
            description="σ(t): geometric = σ_min^(1−t)·σ_max^t (the paper's), loglinear = −log(1 − (1−ε)t)",
        )
        epsilon: float = Field(
            default=1e-3, gt=0, lt=1, description="share of tokens still clean at t = 1 (noise=loglinear)"
        )
        sigma_min: float = Field(default=1e-4, gt=0, description="σ at t = 0 (noise=geometric)")
        sigma_max: float = Field(default=20.0, gt=0, description="σ at t = 1 (noise=geometric)")

        condition_width: int = Field(
            default=128, ge=1, le=2**20, description="width C of what the blocks are told about σ"
        )
        sinusoids: int = Field(
            default=256, ge=2, le=2**20, multiple_of=2, description="cosines and sines of σ that it is made from"
        )

        @model_validator(mode="after")
        def _noise_reads_it(self) -> ScoreEntropy.Config:
            given = f"(objective.noise={self.noise} given)"
            refuse_unread(self, ("epsilon",), self.noise == "loglinear", f"objective.noise=loglinear {given}")
            refuse_unread(
                self, ("sigma_min", "sigma_max"), self.noise == "geometric", f"objective.noise=geometric {given}"
            )
            return self

        @model_validator(mode="after")
        def _noise_grows(self) -> ScoreEntropy.Config:
            if self.sigma_min >= self.sigma_max:
                raise ValueError(
                    f"objective.sigma_min={self.sigma_min} must be below objective.sigma_max={self.sigma_max}; the "
                    "paper's are 1e-4 and 20"
                )
            return self

    direction = "bidirectional"
    without_mirror = None
    words = Words(unit="upper bound, nats per token")
    stepped = ("euler", "analytic")
    graph: Graph
    noise: Noise

    def __init__(self, config: Config, vocab_size: int):
        self.config = config
        self.graph = Absorbing(vocab_size) if config.graph == "absorbing" else Uniform(vocab_size)
        self.noise = (
            LogLinear(config.epsilon) if config.noise == "loglinear" else Geometric(config.sigma_min, config.sigma_max)
        )
        self.num_outputs, self.num_inputs = vocab_size, self.graph.num_states
        self.mask_id = self.graph.mask_id
        self.samplers = (*(() if self.mask_id is None else ("top_prob", "random")), "analytic", "euler")
        self.condition = ConditionShape(config.condition_width, config.sinusoids)

    @classmethod
    def summary(cls, config: Config) -> str:
        return f"score_entropy, {config.graph} graph, {config.noise} noise"

    def examples(self, tokens_BN: Tensor, generator: torch.Generator) -> Examples:
        """Corrupt tokens: inputs x_t, targets x_0, weights σ′(t) at counted positions, and σ(t)."""
        t_B = times(len(tokens_BN), generator)
        sigma_B = self.noise.sigma(t_B)
        noisy_BN = self.graph.corrupt(tokens_BN, sigma_B, generator)
        weights_BN = self.graph.counts(noisy_BN) * self.noise.rate(t_B)[:, None]
        return Examples(noisy_BN, tokens_BN, weights_BN, sigma_B=sigma_B)

    def mirrored(self, examples: Examples) -> Examples:
        """Return the windows read backwards, with the same corrupted tokens and noise."""
        return reverse(examples)

    def loss_sum(self, logits_BNV: Tensor, examples: Examples) -> tuple[Tensor, Tensor]:
        """Return (Σ σ′·score entropy in nats, the number of tokens)."""
        logits = at_least_float32(logits_BNV)
        assert examples.sigma_B is not None
        losses_BN = self.graph.loss(logits, examples.inputs_BN, examples.targets_BN, examples.sigma_B.to(logits.dtype))
        # Uncounted losses are replaced, not multiplied by zero: 0 · inf would be NaN.
        counted_BN = torch.where(examples.weights_BN > 0, losses_BN, 0.0)
        return (counted_BN * examples.weights_BN.to(logits.dtype)).sum(), self.count(examples, logits.dtype)

    def choose_omitted(self, rows: Examples) -> Tensor | None:
        return self.graph.choose_omitted(rows.inputs_BN.squeeze(1))

    def losses_of(self, sums: Tensor, rows: Examples) -> Tensor:
        assert rows.sigma_B is not None
        return self.graph.loss_of_sums(
            sums, rows.inputs_BN.squeeze(1), rows.targets_BN.squeeze(1), rows.sigma_B.to(sums.dtype)
        )

    def count(self, examples: Examples, dtype: torch.dtype) -> Tensor:
        """Return the number of tokens of the batch, corrupted or not."""
        return torch.tensor(examples.inputs_BN.numel(), dtype=dtype, device=examples.inputs_BN.device)

    def unigram_logits(self, log_frequencies_V: Tensor, examples: Examples) -> Tensor:
        """Return the outputs with score p_σ(y)/p_σ(x_t) for independent tokens of these frequencies."""
        assert examples.sigma_B is not None
        return self.graph.unigram_logits(
            log_frequencies_V, examples.inputs_BN, examples.sigma_B.to(log_frequencies_V.dtype)
        )

    @torch.no_grad()
    def log_score(self, model: nn.Module, tokens_BN: Tensor, sigma_B: Tensor) -> Tensor:
        """Return log s of every state y at every position, (B, N, S).

        It estimates log p_σ(x with y there)/p_σ(x), in float32 or wider; 0 at y = x_t. S = V + 1 on the absorbing graph
        (M = V last; for unmasked positions see `Absorbing.log_score`), V on the uniform one.

        Args:
            model: the model.
            tokens_BN: corrupted tokens x_t.
            sigma_B: total noise per sequence.
        """
        logits_BNV = at_least_float32(model(tokens_BN, sigma_B=sigma_B))
        return self.graph.log_score(logits_BNV, tokens_BN, sigma_B.to(logits_BNV.dtype))

    @torch.no_grad()
    def clean_probs(self, model: nn.Module, tokens_BN: Tensor) -> Tensor:
        """Return s_y / Σ_{y≠M} s_y.

        σ is implied by the sequence's share of masked positions: −log(1 − share), clamped to the trained range
        [σ(1e-3), σ(1)].
        """
        if self.mask_id is None:
            return super().clean_probs(model, tokens_BN)
        # the noise implied by each sequence's share of masks
        share_B = (tokens_BN == self.mask_id).float().mean(1)
        lowest, highest = self.noise.sigma(torch.tensor([EARLIEST, 1.0], device=tokens_BN.device))
        sigma_B = (-torch.log1p(-share_B)).clamp(lowest, highest)
        return at_least_float32(model(tokens_BN, sigma_B=sigma_B)).softmax(-1)


EXPORT = ScoreEntropy
