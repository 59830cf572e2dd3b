"""Sentence embeddings: sentences of a row are embedded alike or unlike.

The losses are those of sentence-transformers 6: values and gradients are equal. They are computed in float32 or wider,
of embeddings (B, S, D), the S sentences of B rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from stability.config import Settings
from stability.models.backbone import Pool
from stability.models.embedding import first_position, max_over_positions, mean_over_positions
from stability.models.passes import at_least_float32
from stability.objectives import AbstractObjective, Examples, refuse_unread
from stability.runs.words import ShareWords, Words

POOLS: dict[str, Pool] = {"mean": mean_over_positions, "cls": first_position, "max": max_over_positions}
KS = (1, 10)
MARGIN, UNIT_MARGIN = 5.0, 1.0  # sentence-transformers' default; of unit vectors, whose distances are at most 2


class SentencePairs(AbstractObjective):
    """A loss of the embeddings of two or three sentences (Reimers and Gurevych 2019, arXiv:1908.10084).

    An embedding is the pooled output of the final norm; the model has no head. The losses are those of
    sentence-transformers:

    - cosine: squared error of the cosine of two sentences to their score.
    - cosent: ranks pairs by score, over all pairs of a batch.
    - mnrl: the positive among all positives (and negatives) of the batch. Equal positives do not compete.
    - triplet: distance to the positive, less that to the negative, plus a margin.

    Data without scores have none of their own negatives, or one per row. For cosine and cosent a positive has the score
    1 and a negative 0. Without a negative of its own, a row gets the positive of the batch's next row (cosine, cosent,
    triplet); if that equals its own positive, it has no weight.
    """

    class Config(Settings):
        loss: Literal["cosine", "cosent", "mnrl", "triplet"] = Field(
            default="cosine",
            description="cosine and cosent: of scores; mnrl and triplet: of pairs that belong together",
        )
        pooling: Literal["mean", "cls", "max"] = Field(
            default="mean", description="a sentence's embedding: mean, first or maximum of its positions"
        )
        temperature: float = Field(
            default=0.05, gt=0, le=100, description="divisor of the cosines (loss=cosent and mnrl); 0.05: scale 20"
        )
        margin: float | None = Field(
            default=None,
            gt=0,
            description="margin of loss=triplet; null: 5, or 1 with normalise=true",
        )
        normalise: bool = Field(
            default=True, description="whether embeddings are divided by their length, also when read (stability.embed)"
        )

        @model_validator(mode="after")
        def _are_read(self) -> SentencePairs.Config:
            given = f"(objective.loss={self.loss} given)"
            is_scaled = self.loss in ("cosent", "mnrl")
            refuse_unread(self, ("temperature",), is_scaled, f"objective.loss=cosent or mnrl {given}")  # type: ignore
            refuse_unread(self, ("margin",), self.loss == "triplet", f"objective.loss=triplet {given}")  # type: ignore
            if self.normalise and self.margin is not None and self.margin > 2:
                raise ValueError(
                    f"objective.margin={self.margin:g}: distances of unit vectors are at most 2; give 2 or less, or "
                    "objective.normalise=false"
                )
            return self

    corpus_kind = "sentences"
    task = "sentence embeddings, from sentences that belong together"
    words = Words(
        example="row",
        nll="validation loss",
        unit="loss per row",
        held_out="sentences",
        share=ShareWords(
            "val_recall_10", "recall@10", "of the held-out first sentences whose partner is among the 10 nearest"
        ),
        baseline="equal embeddings",
        baseline_nll="loss of equal embeddings",
        baseline_source="equal embeddings of all sentences",
    )
    direction = "bidirectional"
    without_mirror = "read backwards, a sentence is another one"
    has_head = False
    compares_rows = True
    num_outputs = None

    def __init__(self, config: Config, sentences: Any):
        self.config = config
        self._vocab_size, self._sentences, self._scored = (
            sentences[key] for key in ("vocab_size", "sentences", "scored")
        )
        # one row past the vocabulary: padding here, the mask in a masked language model (init=ckpt:)
        self.num_inputs = self._vocab_size + 1
        recall = () if self._scored else tuple(f"val_recall_{k}" for k in KS)
        self.score_names = ("val_spearman", "val_pearson", *recall)

    @classmethod
    def any_format(cls, positions: int) -> dict[str, Any]:
        """Return pairs of a few tokens, without scores."""
        return {"vocab_size": 8, "sentences": 2, "scored": False}

    @classmethod
    def summary(cls, config: Config) -> str:
        scale = f", temperature {config.temperature:g}" if config.loss in ("cosent", "mnrl") else ""
        return f"sentence pairs, loss {config.loss}{scale}, pooling {config.pooling}"

    @classmethod
    def needs_whole_batch(cls, config: Config) -> str:
        """Return why a batch must not be split, as the end of a message; "": its parts add up."""
        if config.loss not in ("cosent", "mnrl"):
            return ""
        return f"objective.loss={config.loss} compares all rows of a batch with each other"

    def require(self) -> None:
        """Raise a one-line ``ValueError`` if the loss does not fit the data's rows."""
        if self._scored and self.config.loss in ("mnrl", "triplet"):
            raise ValueError(
                f"objective.loss={self.config.loss} takes pairs that belong together, and these data have scores; use "
                "objective.loss=cosine or cosent, or data without scores"
            )

    @property
    def pool(self) -> Pool:
        return POOLS[self.config.pooling]

    def examples(self, batch: Any, generator: torch.Generator) -> Examples:
        """Return sentences (B, S, N) with mask; targets, weights (B, S): score and weight of first and own sentence.

        Nothing is drawn.
        """
        tokens_BSN, mask_BSN, scores_B = batch.tokens_BSN, batch.mask_BSN, batch.scores_B
        scores_BS = scores_B[:, None].expand(tokens_BSN.shape[:2]).clone()
        weights_BS = torch.ones_like(scores_BS)
        if not self._scored and self._sentences == 2 and self.config.loss != "mnrl":
            negatives_B1N, hidden_B1N = (each[:, 1:].roll(-1, 0) for each in (tokens_BSN, mask_BSN))
            is_other_B1 = (negatives_B1N != tokens_BSN[:, 1:]).any(-1)
            tokens_BSN = torch.cat([tokens_BSN, negatives_B1N], 1)
            mask_BSN = torch.cat([mask_BSN, hidden_B1N], 1)
            scores_BS = torch.cat([scores_BS, torch.zeros_like(scores_BS[:, :1])], 1)
            weights_BS = torch.cat([weights_BS, is_other_B1.to(weights_BS.dtype)], 1)
        elif self._sentences == 3:
            scores_BS[:, 2] = 0.0
        return Examples(tokens_BSN, scores_BS, weights_BS, mask_BN=mask_BSN)

    def count(self, examples: Examples, dtype: torch.dtype) -> Tensor:
        """Return the number of pairs (cosine), of triplets, or of rows."""
        weights_BS = examples.weights_BN.to(dtype)
        if self.config.loss == "cosine":
            return weights_BS[:, 1:].sum()
        return weights_BS[:, -1 if self.config.loss == "triplet" else 0].sum()

    def loss_sum(self, logits_BNV: Tensor, examples: Examples) -> tuple[Tensor, Tensor]:
        x_BSD = at_least_float32(logits_BNV)
        count = self.count(examples, x_BSD.dtype)
        if self.config.loss == "cosine":
            terms_BP = cosine_terms(x_BSD[:, :1], x_BSD[:, 1:], examples.targets_BN[:, 1:].to(x_BSD.dtype))
            return (terms_BP * examples.weights_BN[:, 1:].to(x_BSD.dtype)).sum(), count
        if self.config.loss == "triplet":
            x_BSD = unit(x_BSD) if self.config.normalise else x_BSD
            terms_B = triplet_terms(x_BSD[:, 0], x_BSD[:, 1], x_BSD[:, 2], self.margin)
            return (terms_B * examples.weights_BN[:, 2].to(x_BSD.dtype)).sum(), count
        if self.config.loss == "mnrl":
            candidates_CD = x_BSD[:, 1:].transpose(0, 1).flatten(0, 1)
            terms_B = mnrl_terms(x_BSD[:, 0], candidates_CD, _equal_positives(examples), self.config.temperature)
            return terms_B.sum(), count
        cosines_BP = (unit(x_BSD[:, :1]) * unit(x_BSD[:, 1:])).sum(-1)
        is_counted_P = (examples.weights_BN[:, 1:] > 0).flatten()
        pairs = cosines_BP.flatten()[is_counted_P], examples.targets_BN[:, 1:].flatten()[is_counted_P]
        # one number per batch, weighted by its rows: validation averages over chunks
        return cosent(*pairs, self.config.temperature) * count, count

    @property
    def margin(self) -> float:
        """Margin of loss=triplet."""
        return self.config.margin or (UNIT_MARGIN if self.config.normalise else MARGIN)

    def loss(
        self, model: nn.Module, examples: Examples, params: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return `loss_sum` of the model on a batch.

        Args:
            model: the model.
            examples: the batch.
            params: parameters to use instead of the model's own.
        """
        return self.loss_sum(examples.logits(model, params), examples)

    def validate(self, model: nn.Module, examples: Examples) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return `loss`, and the scores of this batch alone, times the count."""
        x_BSD = examples.logits(model)
        total, count = self.loss_sum(x_BSD, examples)
        scores = self._scores([x_BSD], [examples])
        return total, count, {name: count * value for name, value in scores.items()}

    def validate_together(self, model: nn.Module, chunks: Sequence[Examples]) -> dict[str, float]:
        """Return the mean loss over chunks, and correlations and recalls of all held-out rows.

        Args:
            model: the model.
            chunks: the held-out examples.
        """
        embeddings = [examples.logits(model) for examples in chunks]
        sums = [self.loss_sum(x_BSD, examples) for x_BSD, examples in zip(embeddings, chunks, strict=True)]
        total, count = (sum(float(value) for value in column) for column in zip(*sums, strict=True))
        return {"val_nll": total / count, **self._scores(embeddings, chunks)}

    def _scores(self, embeddings: Sequence[Tensor], chunks: Sequence[Examples]) -> dict[str, float]:
        """Return the scores by name.

        Without scores of their own, the pairs are each row's two sentences (1), and its first one with the second one
        of the next row (0).
        """
        first, second = (torch.cat([unit(x.detach()[:, column].double()) for x in embeddings]) for column in (0, 1))
        cosines = (first * second).sum(-1)
        if self._scored:
            scores = torch.cat([examples.targets_BN[:, 1] for examples in chunks])
            return dict(zip(self.score_names, correlations(cosines.cpu().numpy(), scores.cpu().numpy()), strict=True))
        tokens = torch.cat([examples.inputs_BN[:, 1] for examples in chunks])
        is_other = (tokens != tokens.roll(-1, 0)).any(-1)
        others = (first * second.roll(-1, 0)).sum(-1)[is_other]
        scores = torch.cat([torch.ones_like(cosines), torch.zeros_like(others)])
        correlated = correlations(torch.cat([cosines, others]).cpu().numpy(), scores.cpu().numpy())
        is_equal = (tokens[:, None] == tokens[None]).all(-1).cpu().numpy()
        found = recalls((first @ second.T).cpu().numpy(), is_equal, KS)
        return dict(zip(self.score_names, (*correlated, *found), strict=True))

    def baseline_sum(self, log_frequencies_V: Tensor, examples: Examples) -> Tensor:
        """Return the loss of equal embeddings; for cosine, of the mean training score as every cosine.

        Args:
            log_frequencies_V: logs of (1 − ȳ)/2 and (1 + ȳ)/2.
            examples: the batch.
        """
        targets, weights = (each[:, 1:].double() for each in (examples.targets_BN, examples.weights_BN))
        if self.config.loss == "cosine":
            below, above = log_frequencies_V.exp().tolist()
            mean = above - below if self._scored else 0.5
            return ((targets - mean).square() * weights).sum()
        count = self.count(examples, torch.float64)
        if self.config.loss == "triplet":
            return self.margin * count
        if self.config.loss == "mnrl":
            return (~_equal_positives(examples)).sum(1).double().log().sum()
        counted = targets[weights > 0]
        return count * math.log1p(int((counted[:, None] > counted[None]).sum()))


def _equal_positives(examples: Examples) -> Tensor:
    """Return (B, C): candidates equal to the row's own positive, except itself; the order is that of the loss."""
    tokens_CN = examples.inputs_BN[:, 1:].transpose(0, 1).flatten(0, 1)
    own_BN = examples.inputs_BN[:, 1]
    is_equal_BC = (own_BN[:, None] == tokens_CN[None]).all(-1)
    is_itself_BC = torch.eye(*is_equal_BC.shape, dtype=torch.bool, device=is_equal_BC.device)
    return is_equal_BC & ~is_itself_BC


EXPORT = SentencePairs


def correlations(cosines_M: np.ndarray, scores_M: np.ndarray) -> tuple[float, float]:
    """Return Spearman's and Pearson's correlation; NaN where either is constant.

    Ties have their mean rank.
    """
    from scipy.stats import pearsonr, spearmanr  # takes seconds, which every command would pay

    if not (np.isfinite(cosines_M).all() and np.ptp(cosines_M) > 0 and np.ptp(scores_M) > 0):
        return float("nan"), float("nan")
    found: list[Any] = [spearmanr(cosines_M, scores_M), pearsonr(cosines_M, scores_M)]
    return float(found[0].statistic), float(found[1].statistic)


def recalls(cosines_MM: np.ndarray, is_equal_MM: np.ndarray, ks: tuple[int, ...]) -> list[float]:
    """Return the share of rows whose own column is among the k largest, for each k.

    Ties count against the row's own column, so equal embeddings of everything recall nothing.

    Args:
        cosines_MM: similarity of first sentence i and second sentence j.
        is_equal_MM: whether second sentences i and j are equal; such columns do not compete.
        ks: the k.
    """
    own_M = np.diag(cosines_MM)
    better_M = ((cosines_MM >= own_M[:, None]) & ~is_equal_MM).sum(1)
    return [float((better_M < k).mean()) if np.isfinite(own_M).all() else float("nan") for k in ks]


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
