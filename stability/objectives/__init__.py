"""Training objectives, one file each: inputs and targets from data, loss from logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from stability.config import Settings
from stability.config.identity import Since
from stability.config.impl import Impl, KernelUser, Use
from stability.models.backbone import Pool
from stability.models.block import split_loss, sum_losses
from stability.models.condition import ConditionShape
from stability.models.passes import at_least_float32, autocast_dtype
from stability.objectives._examples import (
    Examples,
    LossSum,
    ZLoss,
    mask_rates,
    random_mask,
    reverse,
    sum_by_chunks,
    training_examples,
    weighted_cross_entropy,
    z_loss_sum,
)
from stability.runs.words import Words

__all__ = [
    "AbstractObjective",
    "AbstractVocabularyObjective",
    "Examples",
    "ObjectiveSettings",
    "TrainingLoss",
    "VocabularySettings",
    "ZLoss",
    "mask_rates",
    "random_mask",
    "refuse_unread",
    "reverse",
    "training_examples",
    "weighted_cross_entropy",
]


class ObjectiveSettings(Settings):
    """The settings common to all objectives.

    `Since` lists the objectives that existed when a setting was introduced, so that their runs' ids stay. Never add a
    new objective there.
    """

    loss_chunk: Annotated[int | None, Since(None, of=("mlm", "ar"))] = Field(
        default=None,
        ge=1,
        description=(
            "positions of a batch whose logits exist at once, computed again in the backward pass; null: all of "
            "them, kept"
        ),
    )


def refuse_unread(settings: ObjectiveSettings, names: Sequence[str], is_read: bool, owner: str) -> None:
    """Raise a ``ValueError`` if a setting is changed from its default but unused.

    Args:
        settings: the settings; every spec has the defaults.
        names: names of the settings to check.
        is_read: whether they are in use.
        owner: the setting that puts them in use, and its given value.
    """
    changed = [name for name in names if getattr(settings, name) != type(settings).model_fields[name].default]
    if changed and not is_read:
        raise ValueError(
            f"objective.{changed[0]}={getattr(settings, changed[0])} changes nothing here: it belongs to {owner}"
        )


class TrainingLoss(NamedTuple):
    """The minimised loss, ``total / count``.

    Attributes:
        total: sum of the loss in nats, auxiliary losses included.
        count: divisor of the mean.
        auxiliary: auxiliary losses alone, each sequence weighted by its part of ``count``; None without any.
    """

    total: Tensor
    count: Tensor
    auxiliary: Tensor | None

    def sums(self) -> tuple[Tensor, ...]:
        """Return the detached sums for the log: the total, then the auxiliary one if any."""
        found = (self.total,) if self.auxiliary is None else (self.total, self.auxiliary)
        return tuple(each.detach() for each in found)


class AbstractObjective(KernelUser):
    """Base of a training objective: examples from data, a loss from a model's outputs.

    Attributes:
        corpus_kind: required kind of prepared data (`AbstractCorpus.kind`).
        task: what is learned, in words for a sweep's first line; "": its name suffices.
        words: terms for tables, captions and the board.
        score_names: further validation scores besides the NLL (`validate`).
        components: names of the loss's components if it is a sum (`component_sums`).
        samples: kind of the generated samples: a class like `stability.probes.generation.kinds.Kind`, or the name of a
            file of that folder.
        Sampling: settings of that kind beside `stability.config.generation.GenerationSpec`.
        samplers: names of its samplers, default first; () if it cannot be sampled. For tokens, "ar" uses the logits of
            the next one, "top_prob" and "random" use `clean_probs`, "analytic" and "euler" use ``log_score`` and
            ``noise``.
        stepped: samplers with a setting ``steps``; all others fill one position per step.
        direction: direction required of the mechanism.
        embeds_positions: whether its embedding itself adds position vectors.
        embeds_tokens: whether its embedding is a token table; the head predicts the first rows, in order.
        without_mirror: reason why its examples have no mirror image; None: `mirrored` works.
        condition: shape of the model's embedding of σ (`Examples.sigma_B`) for time-conditioned blocks; None: no such
            embedding.
        config: its settings, those of `ObjectiveSettings` included.
        num_inputs: rows of the embedding.
        num_outputs: columns of the head; None: no head (``has_head``).
        has_head: whether the model has a head.
        compares_rows: whether scores and baseline compare held-out examples with each other: `validate_together` and
            `baseline_sum` replace sums over chunks.
        mask_id: id of a hidden token, one past the vocabulary; None if nothing is unmasked (ar, a uniform graph).
    """

    family: ClassVar[str] = "objectives"
    corpus_kind: ClassVar[str] = "tokens"
    task: ClassVar[str] = ""
    words: ClassVar[Words] = Words()
    score_names: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    samples: ClassVar[str | type] = "tokens"
    Sampling: ClassVar[type[Settings]] = Settings
    samplers: tuple[str, ...] = ()
    stepped: ClassVar[tuple[str, ...]] = ()
    Config: ClassVar[type[Settings]]
    has_head: ClassVar[bool] = True
    compares_rows: ClassVar[bool] = False
    direction: ClassVar[str]
    embeds_positions: ClassVar[bool] = False
    embeds_tokens: ClassVar[bool] = True
    without_mirror: ClassVar[str | None] = "it does not define the mirror image of its examples"
    condition: ConditionShape | None = None
    config: Any
    num_inputs: int
    num_outputs: int | None
    mask_id: int | None = None

    def __init__(self, config: Any, vocab_size: Any):
        """Set up the objective.

        Args:
            config: its settings.
            vocab_size: the corpus's `format`; a number only for tokens.
        """
        raise NotImplementedError

    @classmethod
    def any_format(cls, positions: int) -> Any:
        """Return a corpus's `format` for inspecting a model without data."""
        return 8

    def embedding(self, width: int, positions: int) -> nn.Module:
        """Return the module from `Examples.inputs_BN` to (B, N, D).

        Its weights are drawn from the global random state.
        """
        return nn.Embedding(self.num_inputs, width)

    @property
    def pool(self) -> Pool | None:
        """The pooling before the model's head (`Backbone`); None: the head reads every position."""
        return None

    @classmethod
    def summary(cls, config: Any) -> str:
        """Return the objective with the settings that a table's reader needs; "": its name suffices."""
        return ""

    @classmethod
    def num_context(cls, config: Any) -> int:
        """Return J, the context tokens per sequence for a cross mechanism; 0 if none."""
        return 0

    @classmethod
    def contexts_of(cls, config: Any) -> tuple[str, ...]:
        """Return the names of the contexts that enter once before the blocks.

        Each has a cross mechanism of its own. Contexts aligned with the positions are first.
        """
        return ()

    def context_embeddings(self, width: int) -> Sequence[tuple[nn.Module, bool]]:
        """Return each context's embedding to (B, J, D), and whether it is aligned.

        An aligned context has one entry per position. The order is that of `contexts_of`; the inputs are tracks of
        `Examples.inputs_BN`.
        """
        return ()

    @classmethod
    def reads(cls, config: Any, corpus: Any, pool: Path) -> Any:
        """Return the objective's view of the prepared data.

        It is a corpus with a fingerprint of its own if it contains more than they do.

        Args:
            config: the settings.
            corpus: the prepared data.
            pool: folder of the runs, of other trained models, and of the cache.

        Raises:
            ValueError: a required input is missing; one line.
        """
        return corpus

    @classmethod
    def for_plan(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the settings for a dry run, with placeholders for untrained models.

        Args:
            values: the composed settings, not validated yet.
        """
        return values

    @classmethod
    def reads_for_plan(cls, config: Any, corpus: Any, pool: Path) -> Any:
        """Return the result of `reads`, or similar data for a placeholder.

        The format is the same. Placeholders come from `for_plan`.

        Args:
            config: the settings.
            corpus: the prepared data.
            pool: folder of the runs.
        """
        return cls.reads(config, corpus, pool)

    @classmethod
    def needs_whole_batch(cls, config: Any) -> str:
        """Return why a batch must not be split, as the end of a message; "": its parts add up."""
        return ""

    def tokens_needed(self, positions: int) -> int:
        """Return the number of tokens to draw per sequence for a model of ``positions``."""
        return positions

    def require(self) -> None:
        """Raise a ``ValueError`` if the settings do not fit the data's format."""

    def augmented(self, batch: Any, generator: torch.Generator) -> Any:
        """Return a training batch after augmentation; validation skips this.

        Without augmentation nothing is drawn from ``generator``.
        """
        return batch

    def examples(self, tokens_BN: Any, generator: torch.Generator) -> Examples:
        """Corrupt (or shift) a batch of int64 tokens, or of the corpus's other data.

        All randomness comes from ``generator``.
        """
        raise NotImplementedError

    def mirrored(self, examples: Examples) -> Examples:
        """Return the examples read backwards, with mirrored masks and noise.

        Args:
            examples: result of `examples`.

        Raises:
            ValueError: the objective has no mirror image (`without_mirror`).
        """
        name = type(self).__module__.rsplit(".", 1)[-1]
        raise ValueError(f"objective={name} has no mirror image: {self.without_mirror}")

    def loss_sum(self, logits_BNV: Tensor, examples: Examples) -> tuple[Tensor, Tensor]:
        """Return (weighted sum of the loss in nats, divisor of the mean).

        Both are scalars in float32 or wider. The sum is over positions; each term depends only on its own row of the
        logits and the examples there.

        Args:
            logits_BNV: outputs of the model.
            examples: the batch.
        """
        raise NotImplementedError

    def count(self, examples: Examples, dtype: torch.dtype) -> Tensor:
        """Return the divisor of the mean loss: the sum of the weights."""
        return examples.weights_BN.to(dtype).sum()

    def loss(
        self, model: nn.Module, examples: Examples, params: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return `loss_sum` of the model on a batch.

        With ``loss_chunk`` the logits of the whole batch never exist at once.

        Args:
            model: the model.
            examples: the batch.
            params: parameters to use instead of the model's own.
        """
        return self._sum_loss(self.loss_sum, model, examples, params)

    def loss_with_own(
        self, model: nn.Module, examples: Examples, params: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return `loss`, and the sum of the objective's own auxiliary loss (z-loss) or None.

        Args:
            model: the model.
            examples: the batch.
            params: parameters to use instead of the model's own.
        """
        if not self.z_loss:
            return *self.loss(model, examples, params), None
        (total, own), count = self._sum_loss(self._with_own, model, examples, params)
        return total, count, own

    @property
    def z_loss(self) -> float:
        """Weight of the z-loss; 0 for an objective without the setting."""
        return getattr(self.config, "z_loss", 0.0)

    def _with_own(self, logits_BNV: Tensor, examples: Examples) -> tuple[Tensor, Tensor]:
        """Return `loss_sum` with two sums: the loss and the z-loss."""
        total, count = self.loss_sum(logits_BNV, examples)
        return torch.stack([total, self.z_loss * z_loss_sum(logits_BNV, examples.weights_BN)]), count

    def _sum_loss(
        self, loss_sum: LossSum, model: nn.Module, examples: Examples, params: Mapping[str, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of ``loss_sum``, chunk by chunk with ``loss_chunk``, and the count."""
        if self.config.loss_chunk is None:
            total, count = loss_sum(examples.logits(model, params), examples)
            return total, count
        read = partial(sum_by_chunks, loss_sum, examples, self.config.loss_chunk)
        total = examples.logits(model, params, readout=read)
        return total, self.count(examples, total.dtype)

    def training_loss(
        self, model: nn.Module, examples: Examples, params: Mapping[str, Tensor] | None = None
    ) -> TrainingLoss:
        """Return `loss` plus the objective's own and the model's auxiliary losses, as minimised and used by α_max.

        Validation uses `loss` alone. A sequence has the same weight in the auxiliary mean as in the mean loss, so
        microbatches add up to the batch. The model runs once, as in `loss`, and retains nothing of the pass. Only a
        `Backbone` has auxiliary losses (`WithLoss`).

        Args:
            model: the model.
            examples: the batch.
            params: parameters to use instead of the model's own.
        """
        losses: list[Tensor] = []

        def evaluate(inputs: Any, **given: Any) -> Any:
            asked = {"losses": True, **given}
            found = model(inputs, **asked) if params is None else functional_call(model, dict(params), (inputs,), asked)
            return split_loss(found, losses)

        if getattr(model, "gives_losses", False):
            total, count, own = self.loss_with_own(cast(nn.Module, evaluate), examples)
        else:
            total, count, own = self.loss_with_own(model, examples, params)
        if not losses:
            return TrainingLoss(total if own is None else total + own, count, own)
        loss_B = at_least_float32(sum_losses(losses))
        counts_B = torch.stack([self.count(part, loss_B.dtype) for part in examples.split(1)])
        auxiliary = (loss_B * counts_B).sum()
        auxiliary = auxiliary if own is None else auxiliary + own
        return TrainingLoss(total + auxiliary, count, auxiliary)

    def validate(self, model: nn.Module, examples: Examples) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return `loss`, and by name the sums of further scores over the same count.

        The names are columns of ``metrics.jsonl``.
        """
        return *self.loss(model, examples), {}

    def validate_together(self, model: nn.Module, chunks: Sequence[Examples]) -> dict[str, float]:
        """Return ``val_nll`` and the scores of all held-out examples, for ``compares_rows``.

        Args:
            model: the model.
            chunks: the held-out examples.
        """
        raise NotImplementedError

    def baseline_sum(self, log_frequencies_V: Tensor, examples: Examples) -> Tensor:
        """Return the loss's sum of the best model that reads no input, for ``compares_rows``.

        Args:
            log_frequencies_V: from the corpus.
            examples: the batch.
        """
        raise NotImplementedError

    def component_sums(self, logits_BNV: Tensor, examples: Examples) -> Tensor:
        """Return the terms of `loss_sum`, one per name in `components`."""
        raise NotImplementedError

    def unigram_logits(self, log_frequencies_V: Tensor, examples: Examples) -> Tensor:
        """Return the logits (B, N, V) of the token frequencies.

        It is the best model that reads only the corrupted position itself.
        """
        return log_frequencies_V.expand(*examples.targets_BN.shape, -1)

    def clean_probs(self, model: nn.Module, tokens_BN: Tensor) -> Tensor:
        """Return each position's probabilities of its clean token, given a partly masked sequence.

        ``mask_id`` marks hidden tokens. (B, N, V) with V the vocabulary without the mask, float32 or wider, rows sum to
        1, without gradients. Only masked positions are trained.

        Raises:
            ValueError: the objective masks nothing (``mask_id`` is None).
        """
        raise ValueError(
            f"{type(self).__name__} hides no tokens, so that there is nothing to unmask; train with objective=mlm or "
            "score_entropy (absorbing)"
        )


class VocabularySettings(ObjectiveSettings):
    """The settings common to all objectives over a vocabulary."""

    impl: Impl = "reference"


class AbstractVocabularyObjective(AbstractObjective):
    """Base of objectives with a loss of three numbers per position; by default cross entropy.

    The numbers: log-sum-exp of the logits, the target's logit, and the sum of the logits.

    With ``impl=triton`` the loss is computed from the head's inputs and weights, without logits; generation and
    accuracies still use logits. Under autocast the factors are rounded to bfloat16 as in the reference, the logits are
    not.
    """

    kernels_second_order = True

    @classmethod
    def no_kernel(cls, config: Any, use: Use) -> str | None:
        return None if config.loss_chunk is None else f"loss_chunk={config.loss_chunk}"

    def choose_omitted(self, rows: Examples) -> Tensor | None:
        """Return one column per position (R, 1) to omit from log-sum-exp and sum.

        None: all columns enter, and the sum is not computed.
        """
        return None

    def losses_of(self, sums: Tensor, rows: Examples) -> Tensor:
        """Return the unweighted losses (R) of single positions (R, 1).

        Args:
            sums: result of `kernels.loss.vocabulary_sums`.
            rows: the positions.
        """
        return sums[0] - sums[1]

    def loss(
        self, model: nn.Module, examples: Examples, params: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return `loss_sum` of the model on a batch.

        Args:
            model: the model.
            examples: the batch.
            params: parameters to use instead of the model's own.
        """
        if self.config.impl != "triton":
            return super().loss(model, examples, params)
        total, _ = examples.logits(model, params, readout=partial(self._sum_losses, examples))
        return total, self.count(examples, total.dtype)

    def loss_with_own(
        self, model: nn.Module, examples: Examples, params: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return `loss` and the z-loss, which the kernels' log-sum-exp gives as well.

        Args:
            model: the model.
            examples: the batch.
            params: parameters to use instead of the model's own.
        """
        if self.config.impl != "triton" or not self.z_loss:
            return super().loss_with_own(model, examples, params)
        total, own = examples.logits(model, params, readout=partial(self._sum_losses, examples))
        return total, self.count(examples, total.dtype), own

    def _sum_losses(
        self, examples: Examples, hidden_BND: Tensor, weight_VD: Tensor, bias_V: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weighted sums over all counted positions: the losses, and the z-loss or None."""
        from kernels.loss import vocabulary_sums  # needs triton, so imported on demand

        rows, index_R = examples.counted()
        hidden_RD = hidden_BND.flatten(0, 1).index_select(0, index_R)
        bias_V = None if bias_V is None else _autocast(bias_V)
        factors = _autocast(hidden_RD), _autocast(weight_VD), bias_V
        sums = vocabulary_sums(*factors, rows.targets_BN.squeeze(1), self.choose_omitted(rows))
        weights_R = rows.weights_BN.squeeze(1).to(sums.dtype)
        own = self.z_loss * (sums[0].square() * weights_R).sum() if self.z_loss else None
        return (self.losses_of(sums, rows) * weights_R).sum(), own


def _autocast(factor: Tensor) -> Tensor:
    """Return a factor in autocast's dtype."""
    dtype = autocast_dtype(factor.device)
    return factor if dtype is None or factor.dtype == torch.float64 else factor.to(dtype)
