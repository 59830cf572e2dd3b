"""Z-loss: a penalty on the logarithm of the softmax's denominator, log Z (PaLM, Chowdhery et al. 2022, section 5)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from stability.config.identity import Since
from stability.models.precision import at_least_float32

Z_LOSS = (
    "weight of the z-loss, the mean of log²Z over the positions that count, in training and α_max alone; PaLM: 1e-4; "
    "0: none"
)
ZLoss = Annotated[float, Since(0.0), Field(ge=0, description=Z_LOSS)]


def z_loss_sum(logits_BNV: Tensor, weights_BN: Tensor) -> Tensor:
    """Return the weighted sum of log²Z, in float32 or wider.

    Its gradient with respect to a position's logits is 2·log Z·softmax, times the weight.
    """
    log_z_BN = at_least_float32(logits_BNV).logsumexp(-1)
    return (log_z_BN.square() * weights_BN.to(log_z_BN.dtype)).sum()
