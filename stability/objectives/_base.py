"""An objective says how data become inputs and targets, how a model reads them, and how logits become a loss."""

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
from stability.models.backbone import Pool
from stability.models.condition import ConditionShape
from stability.objectives._auxiliary import TrainingLoss, with_auxiliary
from stability.objectives._chunks import chunked_sum
from stability.runs.words import Words


class ObjectiveSettings(Settings):
    """The settings that every objective has.

    The names of objectives in `Since` are those that there were when a setting came: a record of the past, so that
    their runs' ids stay. A new objective is never added to them.
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
    """Raise a ``ValueError`` where one of ``names`` is set (to another value than its default, which every spec writes)
    and nothing reads it.

    ``owner``: the setting under which it is read, and what was given instead.
    """
    changed = [name for name in names if getattr(settings, name) != type(settings).model_fields[name].default]
    if changed and not is_read:
        raise ValueError(
            f"objective.{changed[0]}={getattr(settings, changed[0])} changes nothing here: it belongs to {owner}"
        )


class Examples(NamedTuple):
    """One batch as the model sees it. ``weights_BN``: the share of each position in the loss, 0 where it does not
    count.

    - ``inputs_BN``: tokens, or what else the model's embedding reads (named tuples of tensors, too), a row a sequence.
      Targets and weights have as many columns as the model gives logits: N, or fewer where its head reads something
      pooled; and an axis more where several things are predicted at a position.
    - ``context_BJ``: tokens that the model's cross mechanism reads, None for a model without one.
    - ``sigma_B``: the total noise that each sequence was corrupted with, which a time-conditioned model reads, None for
      any other.
    - ``mask_BN``: True where a position is no padding; None: there is none.
    """

    inputs_BN: Any
    targets_BN: Tensor
    weights_BN: Tensor
    context_BJ: Tensor | None = None
    sigma_B: Tensor | None = None
    mask_BN: Tensor | None = None

    def logits(self, model: nn.Module, params: Mapping[str, Tensor] | None = None, **options: Any) -> Any:
        """Return the model's logits (B, N, V) on this batch; ``params`` stand in for its own where they are given.
        ``options``: more for its `forward`."""
        given = {"context_BJ": self.context_BJ, "sigma_B": self.sigma_B, "mask_BN": self.mask_BN, **options}
        given = {name: value for name, value in given.items() if value is not None}
        if params is None:
            return model(self.inputs_BN, **given)
        return functional_call(model, dict(params), (self.inputs_BN,), given)

    def to(self, device: torch.device | str) -> Examples:
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def split(self, rows: int) -> list[Examples]:
        """Cut the batch into microbatches of ``rows`` rows, the last one shorter where they do not divide the batch;
        views."""
        return [
            self.each(lambda tensor, start=start: tensor[start : start + rows])
            for start in range(0, max(len(self.targets_BN), 1), rows)
        ]

    def each(self, change: Callable[[Tensor], Tensor]) -> Examples:
        parts: Any = (None if part is None else tree_map(change, part) for part in self)
        return Examples(*parts)

    def counted(self) -> tuple[Examples, Tensor]:
        """Return every position that counts as a sequence of length one (R, 1), in order, with its sequence's σ; and
        which of the B·N they are (R). Inputs that do not stand position by position beside the targets come whole,
        those of its sequence."""
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
    """A training objective says how examples become inputs and targets, and a model's outputs a loss. ``direction``:
    what it asks of the mechanism. ``num_inputs`` / ``num_outputs``: rows of the embedding, columns of the head.

    ``config``: its settings, those of `ObjectiveSettings` among them. ``mask_id``: the id that stands for a hidden
      token, one past the vocabulary; None where nothing is unmasked (ar, a uniform graph). ``condition``: the shape of
      what a model makes of the noise level σ (`Examples.sigma_B`) for its time-conditioned blocks; None: it reads none.

    ``corpus_kind``: the kind of prepared data that it reads (`AbstractCorpus.kind`); ``words``: what tables, captions
      and the board call things; ``score_names``: what is validated beside the NLL (`validate`). ``components``: names
      of the parts that the loss is a sum of, where it is one (`component_sums`).
    ``embeds_positions``: whether its embedding adds a vector of each position itself. ``embeds_tokens``: whether it is
      a table of tokens, of which the head predicts the first ones, in their order.
    ``without_mirror``: why its examples have no mirror image; None: `mirrored` returns one.

    ``samples``: the kind of what generation makes: a class as `stability.probes.generation.kinds.Kind` has it, or the
      name of one of ours (a file of that folder).
    ``Sampling``: what that kind can be told beside `stability.config.generation.GenerationSpec`.
    ``samplers``: names of the samplers that generation may take, its default first; () where nothing can be sampled. Of
      tokens, "ar" reads the logits of the next one, "top_prob" and "random" `clean_probs`, "analytic" and "euler"
      ``log_score`` and ``noise``. ``stepped``: those of them that take ``steps``; each of the others fills one position
      a step.
    """

    family: ClassVar[str] = "objectives"
    corpus_kind: ClassVar[str] = "tokens"
    words: ClassVar[Words] = Words()
    score_names: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    samples: ClassVar[str | type] = "tokens"
    Sampling: ClassVar[type[Settings]] = Settings
    samplers: tuple[str, ...] = ()
    stepped: ClassVar[tuple[str, ...]] = ()
    Config: ClassVar[type[ObjectiveSettings]]
    direction: ClassVar[str]
    embeds_positions: ClassVar[bool] = False
    embeds_tokens: ClassVar[bool] = True
    without_mirror: ClassVar[str | None] = "it does not define the mirror image of its examples"
    condition: ConditionShape | None = None
    config: Any
    num_inputs: int
    num_outputs: int
    mask_id: int | None = None

    def __init__(self, config: Any, vocab_size: Any):
        """Take the settings, and as ``vocab_size`` the corpus's `format`, which of another kind than tokens is not a
        number."""
        raise NotImplementedError

    @classmethod
    def any_format(cls, positions: int) -> Any:
        """Return a corpus's `format` for a model that is only looked at, where no data is read."""
        return 8

    def embedding(self, width: int, positions: int) -> nn.Module:
        """Return the module that makes (B, N, D) of `Examples.inputs_BN`. Its weights are drawn from the global random
        state."""
        return nn.Embedding(self.num_inputs, width)

    @property
    def pool(self) -> Pool | None:
        """The pooling before the model's head, as `Backbone` takes it; None: the head reads every position."""
        return None

    @classmethod
    def summary(cls, config: Any) -> str:
        """Return the objective with those of its settings that a reader of a table must know; "": its name says it
        all."""
        return ""

    @classmethod
    def num_context(cls, config: Any) -> int:
        """Return J, the context tokens of a sequence that a cross mechanism reads; 0 where the objective gives none."""
        return 0

    @classmethod
    def contexts_of(cls, config: Any) -> tuple[str, ...]:
        """Return the names of the contexts that enter once before the blocks, each through a cross mechanism of its
        own; those that stand position by position beside the model's, first."""
        return ()

    def context_embeddings(self, width: int) -> Sequence[tuple[nn.Module, bool]]:
        """Return for each of `contexts_of` what makes (B, J, D) of its track in `Examples.inputs_BN`, and whether it
        stands position by position beside them."""
        return ()

    @classmethod
    def reads(cls, config: Any, corpus: Any, pool: Path) -> Any:
        """Return what it reads of the prepared data, a corpus with a fingerprint of its own where that is more than
        they hold.
        ``pool``: the folder of the runs, with what else has been trained there and the cache.

        Errors: ``ValueError`` of one line where something that it needs is not there.
        """
        return corpus

    @classmethod
    def for_plan(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return its settings as a plan takes them, where nothing is trained: with a stand-in for what would have to be
        there first. ``values``: as they were composed, not validated yet."""
        return values

    @classmethod
    def reads_for_plan(cls, config: Any, corpus: Any, pool: Path) -> Any:
        """Return what `reads` does, or what has the same format where `for_plan` put in a stand-in."""
        return cls.reads(config, corpus, pool)

    def tokens_needed(self, positions: int) -> int:
        """Return how many tokens to draw per sequence, so that the model sees ``positions``."""
        return positions

    def require(self) -> None:
        """Raise a ``ValueError`` where the settings do not fit the data's format."""

    def augmented(self, batch: Any, generator: torch.Generator) -> Any:
        """Return what training makes of a batch before `examples` sees it, and validation does not; without any,
        nothing is drawn from ``generator``."""
        return batch

    def examples(self, tokens_BN: Any, generator: torch.Generator) -> Examples:
        """Corrupt (or shift) int64 tokens, or whatever the corpus's batches are; every random choice comes from
        ``generator``."""
        raise NotImplementedError

    def mirrored(self, examples: Examples) -> Examples:
        """Return the examples read backwards, under the mirror image of their masks and noise.

        Args:
            examples: what `examples` made of a batch.

        Raises:
            ValueError: the objective has no mirror image (`without_mirror`).
        """
        name = type(self).__module__.rsplit(".", 1)[-1]
        raise ValueError(f"objective={name} has no mirror image: {self.without_mirror}")

    def loss_sum(self, logits_BNV: Tensor, examples: Examples) -> tuple[Tensor, Tensor]:
        """Return (weighted sum of the loss in nats, the count that makes a mean of it), both scalars in float32 or
        wider.

        A sum over positions, in which each depends on its own row of the logits and on the examples there.
        """
        raise NotImplementedError

    def count(self, examples: Examples, dtype: torch.dtype) -> Tensor:
        """Return what a mean of the loss divides by: the sum of the weights."""
        return examples.weights_BN.to(dtype).sum()

    def loss(
        self, model: nn.Module, examples: Examples, params: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return `loss_sum` of the model on a batch; ``params`` stand in for its own. With ``loss_chunk`` the logits of
        the batch never exist at once."""
        if self.config.loss_chunk is None:
            return self.loss_sum(examples.logits(model, params), examples)
        read = partial(chunked_sum, self.loss_sum, examples, self.config.loss_chunk)
        total = examples.logits(model, params, readout=read)
        return total, self.count(examples, total.dtype)

    def training_loss(
        self, model: nn.Module, examples: Examples, params: Mapping[str, Tensor] | None = None
    ) -> TrainingLoss:
        """Return `loss` with the losses that parts of the model have of their own: what training minimises and α_max
        looks at, while validation has `loss` alone."""
        return with_auxiliary(self, model, examples, params)

    def validate(self, model: nn.Module, examples: Examples) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return `loss`, and by name the sums of what else is validated, each to be divided by the same count; a name
        is that of a column of ``metrics.jsonl``."""
        return *self.loss(model, examples), {}

    def component_sums(self, logits_BNV: Tensor, examples: Examples) -> Tensor:
        """Return the parts of `loss_sum`, one for each of `components`."""
        raise NotImplementedError

    def unigram_logits(self, log_frequencies_V: Tensor, examples: Examples) -> Tensor:
        """Return the logits (B, N, V) of the best model that reads nothing of its input but what a corrupted position
        itself says: tokens by their frequencies."""
        return log_frequencies_V.expand(*examples.targets_BN.shape, -1)

    def clean_probs(self, model: nn.Module, tokens_BN: Tensor) -> Tensor:
        """Return what the model holds each position's clean token to be, given a partly masked sequence (``mask_id``
        where a token is hidden): (B, N, V) with V the vocabulary without the mask, float32 or wider, rows sum to 1.
        Trained at masked positions only. Without gradients.

        Errors: ``ValueError`` where the objective masks nothing (``mask_id`` is None).
        """
        raise ValueError(
            f"{type(self).__name__} hides no tokens, so that there is nothing to unmask; train with objective=mlm or "
            "score_entropy (absorbing)"
        )


def flipped(examples: Examples) -> Examples:
    """Return the examples with inputs, targets, weights and context tokens in reversed order of positions; the noise
    of a sequence stays. Every position counts as one of the text: nothing is padding."""
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
    """Return the cross entropy in nats, summed with the examples' weights, and the sum of these weights."""
    logits = wide(logits_BNV)
    weights_BN = examples.weights_BN.to(logits.dtype)
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), examples.targets_BN.flatten(), reduction="none")
    return (nll * weights_BN.flatten()).sum(), weights_BN.sum()
