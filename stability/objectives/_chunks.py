"""A loss over a large vocabulary, a few positions at a time: the logits of a whole batch never exist at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LossSum = Callable[[Tensor, Any], tuple[Tensor, ...]]


def chunked_sum(
    loss_sum: LossSum, examples: Any, chunk: int, hidden_BND: Tensor, weight_VD: Tensor, bias_V: Tensor | None
) -> Tensor:
    """Return Σ over positions of ``loss_sum(head(hidden), examples)`` (a scalar, or a vector of several sums), the head
    applied to ``chunk`` positions after another.

    Positions of weight zero are left out: their logits are never computed. The backward pass computes each chunk's
    logits again (a checkpoint), so that peak memory is that of one chunk. A first derivative gains this way; a second
    one (double backward) keeps what it recomputed, and is as exact. Where no gradient is recorded by autograd
    (validation; taylor, whose tensors carry their derivatives with them) there is nothing to compute again.
    """
    rows, index_R = examples.counted()
    hidden_RD = hidden_BND.flatten(0, 1).index_select(0, index_R)

    def part(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, piece: Any) -> Tensor:
        return loss_sum(nn.functional.linear(hidden_CD[:, None], weight_VD, bias_V), piece)[0]

    # type() rather than isinstance: a subclass that carries derivatives itself, as taylor's does, records no graph
    recorded = torch.is_grad_enabled() and type(hidden_BND) in (Tensor, nn.Parameter)
    pieces = zip(hidden_RD.split(chunk), rows.split(chunk), strict=True)
    parts = [
        checkpoint(part, hidden_CD, weight_VD, bias_V, piece, use_reentrant=False, preserve_rng_state=False)
        if recorded
        else part(hidden_CD, weight_VD, bias_V, piece)
        for hidden_CD, piece in pieces
    ]
    return torch.stack(parts).sum(0)
