"""Base class for `sparge` and `fasa`: sparse attention that replaces `sa` in trained models.

Both skip pairs with small weights.
"""

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
    """The computed (query, key) pairs of a sequence.

    Attributes:
        scored: pairs with a computed q·k.
        weighed: scored pairs with an added value.
    """

    scored: Bool[Tensor, "B H N N"]
    weighed: Bool[Tensor, "B H N N"]


class Variant(NamedTuple):
    """Settings of a mechanism at one budget.

    Attributes:
        budget: share in (0, 1] that the mechanism may keep.
        label: other distinguishing settings, for tables.
        config: the settings.
    """

    budget: float
    label: str
    config: Any


class AbstractTrainingFree(AbstractDotProductAttention):
    """Softmax attention with the parameters of `sa` that skips pairs with small weights.

    y_i = W_o Σ_j A_ij v_j + b_o over the weighed pairs in `pairs`, with A the softmax over scored pairs. It is never
    trained: its parameters have `sa`'s names, so that a checkpoint of `sa` loads strictly, and its settings include
    `sa`'s. It measures the effect of skipping on a model's output. All N² pairs per head are computed under a mask; a
    kernel would save time, this code does not.
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
        return num_positions**2  # masked pairs are computed too

    @classmethod
    def with_settings_of(cls, config: Any, trained: Any) -> Any:
        """Return settings that agree with those of the ``trained`` `sa`.

        Raises:
            ValueError: a setting of `sa` is chosen here with another value; one line.
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
        """Return the settings at each budget; at budget 1 nothing is skipped.

        Args:
            config: base settings.
            budgets: shares in (0, 1].
            shape: width, heads and direction.
            num_positions: sequence length N.
        """
        raise NotImplementedError

    def pairs(self, q_BHNK: Tensor, k_BHNK: Tensor, mask_BN: Tensor | None) -> Pairs:
        """Return the computed pairs among the visible ones.

        Args:
            q_BHNK: queries from `split`.
            k_BHNK: keys from `split`.
            mask_BN: True at valid positions; None without padding.
        """
        raise NotImplementedError

    def agreement(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Float[Tensor, "H C"] | None:
        """Return a sequence's statistics for `calibrate`; None if no calibration exists."""
        return None

    def calibrate(self, agreement_HC: Tensor) -> None:
        """Set up selection from the mean `agreement` over sequences; by default no effect."""

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None) -> Float[Tensor, "B N D"]:
        x_BND = without_padding(x_BND, mask_BN)
        q_BHNK, k_BHNK, v_BHNK = self.split(self.qkv(x_BND))
        return self.joined(self._weights(q_BHNK, k_BHNK, mask_BN) @ v_BHNK, x_BND)

    def weights(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Float[Tensor, "B H N N"]:
        q_BHNK, k_BHNK, _ = self.split(self.qkv(without_padding(x_BND, mask_BN)))
        return self._weights(q_BHNK, k_BHNK, mask_BN)

    def skipped(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> float:
        """Return the skipped share, in [0, 1), of the products computed by `sa`.

        Each pair visible to a valid query counts two products: q·k and weight · value. The cost of choosing is not
        counted.
        """
        q_BHNK, k_BHNK, _ = self.split(self.qkv(without_padding(x_BND, mask_BN)))
        pairs = self.pairs(q_BHNK, k_BHNK, mask_BN)
        asks_BN1 = self._valid(x_BND.shape[1], mask_BN, x_BND.device)[:, None, :, None]
        visible = (self._visible(x_BND.shape[1], mask_BN, x_BND.device) & asks_BN1).expand_as(pairs.scored)
        whole = 2 * int(visible.sum())
        computed = sum(int((part & asks_BN1).sum()) for part in pairs)
        return 1 - computed / whole if whole else 0.0

    def _weights(self, q_BHNK: Tensor, k_BHNK: Tensor, mask_BN: Tensor | None) -> Tensor:
        """Return the softmax over scored pairs; zero for unweighed pairs and in empty rows."""
        scored, weighed = self.pairs(q_BHNK, k_BHNK, mask_BN)
        # softmax and derivative of an empty row would be NaN: let the row see everything, then zero its output
        seen = scored | ~scored.any(-1, keepdim=True)
        return self.logits(q_BHNK, k_BHNK).masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~weighed, 0.0)

    def _visible(self, num_positions: int, mask_BN: Tensor | None, device: torch.device) -> Bool[Tensor, "B 1 N N"]:
        """Return the pairs computed by `sa`; B is 1 without padding."""
        return visible_pairs(
            num_positions, mask_BN, causal=self.causal, mask_diagonal=self.mask_diagonal, device=device
        )

    @staticmethod
    def _valid(num_positions: int, mask_BN: Tensor | None, device: torch.device) -> Bool[Tensor, "B N"]:
        """Return the padding mask; all-True (1, N) if None."""
        return torch.ones(1, num_positions, dtype=torch.bool, device=device) if mask_BN is None else mask_BN
