"""Recurrences with three implementations: torch, our kernels, flash-linear-attention's kernels.

They are in `kernels.recurrent` (ours) and `kernels.recurrences` (flash-linear-attention).
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from kernels import recurrences
from stability.config.impl import Use
from stability.mechanisms._decayed import gated_linear_attention
from stability.mechanisms._delta_rule import delta_rule
from stability.mechanisms._recurrent import AbstractRecurrent

WIDEST_KEYS = 256  # per head, limit of `kernels.recurrent`


class AbstractWithKernels(AbstractRecurrent):
    """A recurrence with kernels and an equivalent reference; ``impl`` in `Config` chooses.

    Kernels have their own chunk size; ``chunk`` applies to the reference.
    """

    kernels_second_order = True  # true for our own kernels

    @classmethod
    def no_kernel(cls, config: Any, use: Use) -> str | None:
        width = cls.width_of_keys(config, use)
        return f"keys of width {width}" if width > WIDEST_KEYS else None

    @classmethod
    def width_of_keys(cls, config: Any, use: Use) -> int:
        """Return the key width per head."""
        return use.head_width

    @staticmethod
    def run_linear_attention(
        config: Any, q_BHNK: Tensor, k_BHNK: Tensor, v_BHNV: Tensor, log_decay: Tensor
    ) -> Float[Tensor, "B H N V"]:
        """Compute `gated_linear_attention` by the implementation in ``config``.

        Args:
            config: settings with ``impl`` and ``chunk``.
            q_BHNK: queries.
            k_BHNK: keys.
            v_BHNV: values.
            log_decay: ln a ≤ 0.
        """
        if config.impl == "fla":
            return recurrences.gated_linear_attention(q_BHNK, k_BHNK, v_BHNV, log_decay)
        if config.impl == "triton":
            from kernels import recurrent

            return recurrent.gated_linear_attention(q_BHNK, k_BHNK, v_BHNV, log_decay)
        return gated_linear_attention(q_BHNK, k_BHNK, v_BHNV, log_decay, chunk=config.chunk)

    @staticmethod
    def run_delta_rule(
        config: Any, q_BHNK: Tensor, k_BHNK: Tensor, v_BHNV: Tensor, beta_BHN: Tensor, log_decay: Tensor | None
    ) -> Float[Tensor, "B H N V"]:
        """Compute `delta_rule` by the implementation in ``config``.

        Args:
            config: settings with ``impl`` and ``chunk``.
            q_BHNK: queries.
            k_BHNK: keys.
            v_BHNV: values.
            beta_BHN: write strengths β.
            log_decay: ln a ≤ 0; None without decay.
        """
        if config.impl == "fla":
            return recurrences.delta_rule(q_BHNK, k_BHNK, v_BHNV, beta_BHN, log_decay)
        if config.impl == "triton":
            from kernels import recurrent

            return recurrent.delta_rule(q_BHNK, k_BHNK, v_BHNV, beta_BHN, log_decay)
        return delta_rule(q_BHNK, k_BHNK, v_BHNV, beta_BHN, log_decay, chunk=config.chunk)
