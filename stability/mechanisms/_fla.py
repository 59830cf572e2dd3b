"""Define the setting ``impl`` of mechanisms of which flash-linear-attention has kernels (`kernels.recurrences`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from kernels import recurrences
from stability.config.identity import Since
from stability.mechanisms._decayed import decayed
from stability.mechanisms._delta_rule import delta_rule
from stability.mechanisms._recurrent import AbstractRecurrent

IMPL = (
    "how it is computed: reference, torch's own products, twice differentiable; fla, the Triton kernels of "
    "flash-linear-attention, on CUDA, for training alone, with queries, keys and values in bfloat16"
)
Impl = Annotated[Literal["reference", "fla"], Since("reference"), Field(description=IMPL)]


class AbstractWithKernels(AbstractRecurrent):
    """A recurrence of which there are kernels, beside a reference that gives the same: ``impl`` of its `Config` says
    which computes it. The kernels take chunks of their own size, ``chunk`` is the reference's."""

    @staticmethod
    def decayed_by(
        config: Any, q_BHNK: Tensor, k_BHNK: Tensor, v_BHNV: Tensor, log_decay: Tensor
    ) -> Float[Tensor, "B H N V"]:
        """Return what `decayed` says, as ``config`` has it computed."""
        if config.impl == "fla":
            return recurrences.decayed(q_BHNK, k_BHNK, v_BHNV, log_decay)
        return decayed(q_BHNK, k_BHNK, v_BHNV, log_decay, chunk=config.chunk)

    @staticmethod
    def by_delta_rule(
        config: Any, q_BHNK: Tensor, k_BHNK: Tensor, v_BHNV: Tensor, beta_BHN: Tensor, log_decay: Tensor | None
    ) -> Float[Tensor, "B H N V"]:
        """Return what `delta_rule` says, as ``config`` has it computed."""
        if config.impl == "fla":
            return recurrences.delta_rule(q_BHNK, k_BHNK, v_BHNV, beta_BHN, log_decay)
        return delta_rule(q_BHNK, k_BHNK, v_BHNV, beta_BHN, log_decay, chunk=config.chunk)
