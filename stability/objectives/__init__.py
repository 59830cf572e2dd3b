"""Training objectives, one file each: inputs and targets from data, loss from logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from stability.config import Settings
from stability.config.identity import Since
from stability.config.impl import KernelUser
from stability.models.auxiliary import TrainingLoss, with_auxiliary
from stability.models.backbone import Pool
from stability.models.condition import ConditionShape
from stability.objectives._chunks import LossSum, sum_by_chunks, z_loss_sum
from stability.objectives._mask_rates import mask_rates, random_mask
from stability.runs.words import Words

__all__ = [
    "AbstractObjective",
    "Examples",
    "ObjectiveSettings",
    "mask_rates",
    "random_mask",
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


class Examples(NamedTuple):
    """One batch as the model sees it.

    Targets and weights have one column per position of the logits: N, or fewer with a pooled head. They have a further
    axis if several things are predicted at a position.

    Attributes:
        inputs_BN: tokens or another input of the model's embedding (also named tuples of tensors), one row per
            sequence.
        targets_BN: target tokens.
        weights_BN: share of each position in the loss, 0 if it does not count.
        context_BJ: tokens for the model's cross mechanism; None without one.
        sigma_B: total noise of each sequence, for a time-conditioned model; else None.
        mask_BN: False at padding; None: no padding.
    """

    inputs_BN: Any
    targets_BN: Tensor
    weights_BN: Tensor
    context_BJ: Tensor | None = None
    sigma_B: Tensor | None = None
    mask_BN: Tensor | None = None

    def logits(self, model: nn.Module, params: Mapping[str, Tensor] | None = None, **options: Any) -> Any:
        """Return the model's logits (B, N, V) on this batch.

        Args:
            model: the model.
            params: parameters to use instead of the model's own.
            **options: further arguments of its `forward`.
        """
        given = {"context_BJ": self.context_BJ, "sigma_B": self.sigma_B, "mask_BN": self.mask_BN, **options}
        given = {name: value for name, value in given.items() if value is not None}
        if params is None:
            return model(self.inputs_BN, **given)
        return functional_call(model, dict(params), (self.inputs_BN,), given)

    def to(self, device: torch.device | str) -> Examples:
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def split(self, rows: int) -> list[Examples]:
        """Cut the batch into microbatches of ``rows`` rows, as views; the last may be shorter."""
        return [
            self.map_tensors(lambda tensor, start=start: tensor[start : start + rows])
            for start in range(0, max(len(self.targets_BN), 1), rows)
        ]

    def cut(self, positions: int) -> Examples:
        """Cut each sequence into consecutive ones of ``positions``, a divisor of its length; there is no context."""
        assert self.context_BJ is None
        num = self.targets_BN.shape[1] // positions
        pieces = self._replace(sigma_B=None).map_tensors(lambda x_BN: x_BN.reshape(-1, positions, *x_BN.shape[2:]))
        return pieces._replace(sigma_B=None if self.sigma_B is None else self.sigma_B.repeat_interleave(num))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Examples:
        """Return the batch with ``change`` of each of its tensors."""
        parts: Any = (None if part is None else tree_map(change, part) for part in self)
        return Examples(*parts)

    each = map_tensors  # the name that plugins know

    def counted(self) -> tuple[Examples, Tensor]:
        """Return all counted positions as sequences of length one (R, 1).

        The second result is their indices in B·N (R). Each has the σ of its sequence. Inputs without one entry per
        target are returned whole, those of the sequence.
        """
        counts_BN = self.weights_BN if self.weights_BN.ndim == 2 else self.weights_BN.any(-1)
        index_R = counts_BN.flatten().nonzero().squeeze(-1)
        targets_R1, weights_R1 = (tensor.flatten(0, 1)[index_R, None] for tensor in (self.targets_BN, self.weights_BN))
        row_R = index_R // self.targets_BN.shape[1]
        is_beside = isinstance(self.inputs_BN, Tensor) and self.inputs_BN.shape == self.targets_BN.shape
        inputs = (
            self.inputs_BN.flatten()[index_R, None]
            if is_beside
            else tree_map(lambda tensor: tensor[row_R], self.inputs_BN)
        )
        sigma_R = None if self.sigma_B is None else self.sigma_B[row_R]
        return Examples(inputs, targets_R1, weights_R1, sigma_B=sigma_R), index_R


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
        """Return `loss` plus auxiliary losses, as minimised in training and used by α_max.

        Validation uses `loss` alone.

        Args:
            model: the model.
            examples: the batch.
            params: parameters to use instead of the model's own.
        """
        return with_auxiliary(self, model, examples, params)

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


def reverse(examples: Examples) -> Examples:
    """Return the examples with inputs, targets, weights and context in reversed order.

    The noise of a sequence stays. The examples must have no padding.
    """
    assert examples.mask_BN is None
    parts = {
        name: None if part is None else part.flip(1)
        for name, part in zip(Examples._fields, examples, strict=True)
        if name != "sigma_B"
    }
    return examples._replace(**parts)


def wide(x: Tensor) -> Tensor:
    """Return ``x`` in float32 or wider."""
    return x if x.dtype == torch.float64 else x.float()


def weighted_cross_entropy(logits_BNV: Tensor, examples: Examples) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the cross entropy in nats, and the weights' sum."""
    logits = wide(logits_BNV)
    weights_BN = examples.weights_BN.to(logits.dtype)
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), examples.targets_BN.flatten(), reduction="none")
    return (nll * weights_BN.flatten()).sum(), weights_BN.sum()
