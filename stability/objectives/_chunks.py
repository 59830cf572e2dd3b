"""A loss over a large vocabulary in chunks: the batch's logits never exist at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stability.config.identity import Since
from stability.models.precision import at_least_float32

LossSum = Callable[[Tensor, Any], tuple[Tensor, ...]]


def sum_by_chunks(
    loss_sum: LossSum, examples: Any, chunk: int, hidden_BND: Tensor, weight_VD: Tensor, bias_V: Tensor | None
) -> Tensor:
    """Return Σ over positions of ``loss_sum(head(hidden), examples)``, chunk by chunk.

    Positions of weight zero are skipped. The backward pass recomputes each chunk's logits (a checkpoint), so peak
    memory is that of one chunk. This saves memory for first derivatives; a second one (double backward) retains the
    recomputed values and is equally exact. Nothing is recomputed without autograd, as in validation or taylor (its
    tensors carry their derivatives).

    Args:
        loss_sum: loss of logits and examples; the first result (a scalar or a vector of sums) is summed.
        examples: the batch.
        chunk: positions per chunk.
        hidden_BND: inputs of the head.
        weight_VD: weights of the head.
        bias_V: bias of the head, or None.
    """
    rows, index_R = examples.counted()
    hidden_RD = hidden_BND.flatten(0, 1).index_select(0, index_R)

    def part(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, piece: Any) -> Tensor:
        return loss_sum(nn.functional.linear(hidden_CD[:, None], weight_VD, bias_V), piece)[0]

    # type(), not isinstance: a subclass with its own derivatives (taylor's) records no graph
    recorded = torch.is_grad_enabled() and type(hidden_BND) in (Tensor, nn.Parameter)
    pieces = zip(hidden_RD.split(chunk), rows.split(chunk), strict=True)
    parts = [
        checkpoint(part, hidden_CD, weight_VD, bias_V, piece, use_reentrant=False, preserve_rng_state=False)
        if recorded
        else part(hidden_CD, weight_VD, bias_V, piece)
        for hidden_CD, piece in pieces
    ]
    return torch.stack(parts).sum(0)


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
