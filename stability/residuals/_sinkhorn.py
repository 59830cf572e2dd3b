"""Scale matrices to (nearly) doubly stochastic ones by Sinkhorn and Knopp's iterations, in logarithms."""

from __future__ import annotations

import torch
from torch import Tensor


def sinkhorn(logits_BNST: Tensor, iterations: int) -> Tensor:
    """Return exp(logits), its columns and then its rows divided by their sums, ``iterations`` times; (…, S, T) → (…, S,
    T).

    M −= logsumexp over s, then over t, which is a log-softmax over each. Rows sum to 1 to rounding after every
    iteration, columns only in the limit: after 20 of them, 1 % of 4 × 4 matrices of normal logits have a column off by
    more than 0.044 / 0.082 / 0.37 at standard deviation 4 / 8 / 16, and at 16 some by nearly 1. Logits of 10³ neither
    overflow nor underflow to a row of zeros.
    """
    # the tokens last: both reductions then run over them in vectors, six times as fast
    m_STP = logits_BNST.movedim((-2, -1), (0, 1)).contiguous()
    for _ in range(iterations):
        m_STP = torch.log_softmax(torch.log_softmax(m_STP, 0), 1)
    return m_STP.exp().movedim((0, 1), (-2, -1))
