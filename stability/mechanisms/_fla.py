"""Define recurrences that torch's own products compute, or kernels of ours (`kernels.recurrent`), or those of
flash-linear-attention (`kernels.recurrences`)."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from kernels import recurrences
from stability.mechanisms._decayed import decayed
from stability.mechanisms._delta_rule import delta_rule
from stability.mechanisms._impl import Use
from stability.mechanisms._recurrent import AbstractRecurrent

WIDEST_KEYS = 256  # of a head, of which `kernels.recurrent` takes no more


class AbstractWithKernels(AbstractRecurrent):
    """A recurrence of which there are kernels, beside a reference that gives the same: ``impl`` of its `Config` says
    which computes it. The kernels take chunks of their own size, ``chunk`` is the reference's."""

    kernels_second_order = True  # of the kernels of ours

    @classmethod
    def no_kernel(cls, config: Any, use: Use) -> str | None:
        width = cls.width_of_keys(config, use)
        return f"keys of width {width}" if width > WIDEST_KEYS else None

    @classmethod
    def width_of_keys(cls, config: Any, use: Use) -> int:
        """Return how many features the keys of a head have."""
        return use.head_width

    @staticmethod
    def decayed_by(
        config: Any, q_BHNK: Tensor, k_BHNK: Tensor, v_BHNV: Tensor, log_decay: Tensor
    ) -> Float[Tensor, "B H N V"]:
        """Return what `decayed` says, as ``config`` has it computed."""
        if config.impl == "fla":
            return recurrences.decayed(q_BHNK, k_BHNK, v_BHNV, log_decay)
        if config.impl == "triton":
            from kernels import recurrent

            return recurrent.decayed(q_BHNK, k_BHNK, v_BHNV, log_decay)
        return decayed(q_BHNK, k_BHNK, v_BHNV, log_decay, chunk=config.chunk)

    @staticmethod
    def by_delta_rule(
        config: Any, q_BHNK: Tensor, k_BHNK: Tensor, v_BHNV: Tensor, beta_BHN: Tensor, log_decay: Tensor | None
    ) -> Float[Tensor, "B H N V"]:
        """Return what `delta_rule` says, as ``config`` has it computed."""
        if config.impl == "fla":
            return recurrences.delta_rule(q_BHNK, k_BHNK, v_BHNV, beta_BHN, log_decay)
        if config.impl == "triton":
            from kernels import recurrent

            return recurrent.delta_rule(q_BHNK, k_BHNK, v_BHNV, beta_BHN, log_decay)
        return delta_rule(q_BHNK, k_BHNK, v_BHNV, beta_BHN, log_decay, chunk=config.chunk)
