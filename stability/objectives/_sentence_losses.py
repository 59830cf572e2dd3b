"""Losses of sentence embeddings, as in sentence-transformers 6: values and gradients are equal.

Embeddings are (B, S, D): the S sentences of B rows. All losses are computed in float32 or wider.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

DISTANCE_EPSILON = 1e-6  # added to each difference, as in torch's pairwise_distance
NORM_FLOOR = 1e-12  # smallest norm that is divided by, as in torch's normalize


def unit(x: Tensor) -> Tensor:
    """Return vectors of length 1 along the last axis; zero stays zero."""
    return x * x.square().sum(-1, keepdim=True).clamp_min(NORM_FLOOR**2).rsqrt()


def cosine_terms(first_BD: Tensor, second_BD: Tensor, scores_B: Tensor) -> Tensor:
    """Return the squared error of each cosine (B).

    Args:
        first_BD: embeddings of the first sentences.
        second_BD: embeddings of the second sentences.
        scores_B: the scores that the cosines should have.
    """
    return ((unit(first_BD) * unit(second_BD)).sum(-1) - scores_B).square()


def cosent(cosines_P: Tensor, scores_P: Tensor, temperature: float) -> Tensor:
    """Return log(1 + Σ exp((c_j − c_i)/T)) over all pairs with y_i > y_j (Su 2022, kexue.fm/archives/8847).

    Args:
        cosines_P: cosine c of each pair.
        scores_P: score y of each pair.
        temperature: T.
    """
    scaled_P = cosines_P / temperature
    differences_PP = scaled_P[None, :] - scaled_P[:, None]
    is_ordered_PP = scores_P[:, None] > scores_P[None, :]
    terms = differences_PP.masked_fill(~is_ordered_PP, -torch.inf).flatten()
    return torch.cat([terms.new_zeros(1), terms]).logsumexp(0)


def mnrl_terms(anchors_BD: Tensor, candidates_CD: Tensor, is_hidden_BC: Tensor, temperature: float) -> Tensor:
    """Return the cross entropy of each anchor's own candidate among all (B) (Henderson et al. 2017, arXiv:1705.00652).

    Args:
        anchors_BD: embeddings of the first sentences.
        candidates_CD: embeddings of the candidates; number i is that of anchor i.
        is_hidden_BC: candidates that do not compete for an anchor.
        temperature: divisor of the cosines.
    """
    logits_BC = unit(anchors_BD) @ unit(candidates_CD).T / temperature
    logits_BC = logits_BC.masked_fill(is_hidden_BC, -torch.inf)
    own_B = torch.arange(len(anchors_BD), device=anchors_BD.device)
    return F.cross_entropy(logits_BC, own_B, reduction="none")


def triplet_terms(anchors_BD: Tensor, positives_BD: Tensor, negatives_BD: Tensor, margin: float) -> Tensor:
    """Return max(0, |a − p| − |a − n| + margin) of each row (B), with Euclidean distances.

    Args:
        anchors_BD: embeddings a.
        positives_BD: embeddings p.
        negatives_BD: embeddings n.
        margin: least difference of the two distances without a loss.
    """
    near_B, far_B = (
        (anchors_BD - other_BD + DISTANCE_EPSILON).square().sum(-1).sqrt() for other_BD in (positives_BD, negatives_BD)
    )
    return (near_B - far_B + margin).relu()
