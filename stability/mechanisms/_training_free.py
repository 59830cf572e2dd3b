"""Attention that stands in for `sa` in a trained model and leaves out what hardly counts is the base that `sparge` and
`fasa` share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from stability.mechanisms._attention import AbstractDotProductAttention, require_groups, visible_pairs
from stability.mechanisms._base import BIDIRECTIONAL, CAUSAL, MixerShape, without_padding
from stability.mechanisms.sa import SoftmaxAttention


class Pairs(NamedTuple):
    """The pairs (query, key) of a sequence that are computed. ``scored``: those whose q·k is; ``weighed``: those among
    them whose value is added."""

    scored: Bool[Tensor, "B H N N"]
    weighed: Bool[Tensor, "B H N N"]


class Variant(NamedTuple):
    """The settings of a mechanism at one ``budget``, the share in (0, 1] of what it may keep; ``label``: what else is
    special about them, for tables."""

    budget: float
    label: str
    config: Any


class AbstractTrainingFree(AbstractDotProductAttention):
    """Softmax attention with the parameters of `sa`, which leaves out pairs that it takes to hardly count: y_i = W_o
    Σ_j A_ij v_j + b_o over the weighed pairs of `pairs`, A the softmax over the scored ones.

    It is never trained: the names of its parameters are those of `sa`, so that a checkpoint of `sa` loads strictly, and
    the settings of `sa` are among its own. What it shows is what leaving out does to a model's output: all N² pairs of
    a head are computed under a mask, and the time that is saved by a kernel is not saved here.
    """

    trainable = False
    used_for = "checkpoints that sa was trained to, by stability.probe what=training_free"
    piecewise_smooth = True
    directions = frozenset({BIDIRECTIONAL, CAUSAL})
    Config: type[SoftmaxAttention.Config]

    def __init__(self, config: SoftmaxAttention.Config, shape: MixerShape):
        super().__init__(config, shape)
        self.mask_diagonal = config.mask_diagonal
        if config.temperature == "learned":
            self.learn_temperature()

    @classmethod
    def kv_heads_of(cls, config: Any, heads: int) -> int:
        return SoftmaxAttention.kv_heads_of(config, heads)

    @classmethod
    def check_heads(cls, config: Any, heads: int) -> None:
        require_groups(cls.__module__.rsplit(".", 1)[-1], config.kv_heads, heads)

    @classmethod
    def num_pairs(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        return num_positions**2  # what is masked is computed all the same

    @classmethod
    def with_settings_of(cls, config: Any, trained: Any) -> Any:
        """Return settings that agree with those of the ``trained`` `sa`, which are not to be chosen anew.

        Errors: ``ValueError`` of one line where one of them is chosen, and not as it is there.
        """
        kept = {name: getattr(trained, name) for name in SoftmaxAttention.Config.model_fields}
        for name, value in kept.items():
            chosen = getattr(config, name)
            if chosen not in (value, cls.Config.model_fields[name].default):
                key = f"mechanism.{cls.__module__.rsplit('.', 1)[-1]}.{name}"
                raise ValueError(f"{key}={chosen} is not what sa was trained with, {value}; leave it out")
        return config.model_copy(update=kept)

    @classmethod
    def variants(cls, config: Any, budgets: Sequence[float], shape: MixerShape, num_positions: int) -> list[Variant]:
        """Return the settings at each budget, for sequences of ``num_positions``; at budget 1 nothing is left out."""
        raise NotImplementedError

    def pairs(self, q_BHNK: Tensor, k_BHNK: Tensor, mask_BN: Tensor | None) -> Pairs:
        """Return which of the visible pairs are computed, from queries and keys as `split` gives them."""
        raise NotImplementedError

    def agreement(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Float[Tensor, "H C"] | None:
        """Return what is counted of a sequence for `calibrate`; None where there is nothing to calibrate."""
        return None

    def calibrate(self, agreement_HC: Tensor) -> None:
        """Take the mean over sequences of what `agreement` counted; nothing where there is nothing to calibrate."""

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None) -> Float[Tensor, "B N D"]:
        x_BND = without_padding(x_BND, mask_BN)
        q_BHNK, k_BHNK, v_BHNK = self.split(self.qkv(x_BND))
        return self.joined(self._weights(q_BHNK, k_BHNK, mask_BN) @ v_BHNK, x_BND)

    def weights(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Float[Tensor, "B H N N"]:
        q_BHNK, k_BHNK, _ = self.split(self.qkv(without_padding(x_BND, mask_BN)))
        return self._weights(q_BHNK, k_BHNK, mask_BN)

    def skipped(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> float:
        """Return the share in [0, 1) of the products that `sa` computes, one q·k and one weight · value for each pair
        that a valid query sees, which are left out. What choosing costs is not counted."""
        q_BHNK, k_BHNK, _ = self.split(self.qkv(without_padding(x_BND, mask_BN)))
        pairs = self.pairs(q_BHNK, k_BHNK, mask_BN)
        asks_BN1 = self._valid(x_BND.shape[1], mask_BN, x_BND.device)[:, None, :, None]
        visible = (self._visible(x_BND.shape[1], mask_BN, x_BND.device) & asks_BN1).expand_as(pairs.scored)
        whole = 2 * int(visible.sum())
        computed = sum(int((part & asks_BN1).sum()) for part in pairs)
        return 1 - computed / whole if whole else 0.0

    def _weights(self, q_BHNK: Tensor, k_BHNK: Tensor, mask_BN: Tensor | None) -> Tensor:
        """Return the softmax over the scored pairs, zero where a pair is not weighed, and in rows without any."""
        scored, weighed = self.pairs(q_BHNK, k_BHNK, mask_BN)
        # the softmax of an empty row would be NaN, and so would its derivative: it sees everything, and is dropped
        seen = scored | ~scored.any(-1, keepdim=True)
        return self.logits(q_BHNK, k_BHNK).masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~weighed, 0.0)

    def _visible(self, num_positions: int, mask_BN: Tensor | None, device: torch.device) -> Bool[Tensor, "B 1 N N"]:
        """Return the pairs that `sa` computes; B is 1 without padding."""
        return visible_pairs(
            num_positions, mask_BN, causal=self.causal, mask_diagonal=self.mask_diagonal, device=device
        )

    @staticmethod
    def _valid(num_positions: int, mask_BN: Tensor | None, device: torch.device) -> Bool[Tensor, "B N"]:
        """Return the mask, or one of B = 1 that is True everywhere where there is none."""
        return torch.ones(1, num_positions, dtype=torch.bool, device=device) if mask_BN is None else mask_BN
