"""Batches of an objective: their examples, masks and sums over positions.

Mask rates follow facts 2 (Hayes et al. 2024), one per sequence. A loss over a large vocabulary is summed in chunks: the
batch's logits never exist at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from stability.config.identity import Since
from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from stability.models.passes import at_least_float32, generator_for

if TYPE_CHECKING:
    from stability.objectives import AbstractObjective

ScheduleName = Literal["uniform", "betalinear30", "cosine", "sqrt", "fixed"]
DrawnSchedule = Literal["uniform", "betalinear30", "cosine", "sqrt"]
LOWEST, HIGHEST = 0.05, 0.95
LossSum = Callable[[Tensor, Any], tuple[Tensor, ...]]


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


def weighted_cross_entropy(logits_BNV: Tensor, examples: Examples) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the cross entropy in nats, and the weights' sum."""
    logits = at_least_float32(logits_BNV)
    weights_BN = examples.weights_BN.to(logits.dtype)
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), examples.targets_BN.flatten(), reduction="none")
    return (nll * weights_BN.flatten()).sum(), weights_BN.sum()


def mask_rates(schedule: ScheduleName, num: int, generator: torch.Generator, fixed: float = 1.0) -> Tensor:
    """Draw ``num`` mask rates, float32, in [0.05, 0.95] except for fixed.

    uniform: u; cosine: sin(πu/2); sqrt: √u; betalinear30: with probability 0.8 from Beta(3, 9), else uniform; fixed:
    ``fixed`` for all, without any draw.

    Args:
        schedule: name of the schedule.
        num: number of sequences.
        generator: source of randomness.
        fixed: rate of the schedule fixed.
    """
    if schedule == "fixed":
        return torch.full((num,), fixed)
    u = draw_stratified(num, generator)
    if schedule == "cosine":
        u = torch.sin(u * (math.pi / 2))
    elif schedule == "sqrt":
        u = u.sqrt()
    elif schedule == "betalinear30":
        # Beta(3, 9) is the third smallest of 11 uniforms; torch's Beta sampler takes no generator
        beta = torch.rand(num, 11, generator=generator).sort(dim=1).values[:, 2]
        u = torch.where(torch.rand(num, generator=generator) < 0.8, beta, u)
    return u.clamp(LOWEST, HIGHEST)


def draw_stratified(num: int, generator: torch.Generator) -> Tensor:
    """Draw evenly spread uniform numbers with a common offset, in random order.

    Each is U(0, 1); together they cover the range, so that the rates of a small batch add no noise of their own to its
    gradient (Kingma et al. 2021, variational diffusion, I.1).
    """
    spread = (torch.rand(1, generator=generator) + torch.arange(num) / num) % 1
    return spread[torch.randperm(num, generator=generator)]


def random_mask(rates_B: Tensor, num_positions: int, generator: torch.Generator) -> Tensor:
    """Draw a mask (B, N), bool, at each sequence's rate; at least one position per sequence.

    Args:
        rates_B: mask rates.
        num_positions: N.
        generator: source of randomness.
    """
    return draw_mask(torch.ones(len(rates_B), num_positions, dtype=torch.bool), rates_B, generator)


def draw_mask(eligible_BN: Tensor, rates_B: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a mask (B, N), bool, among eligible positions at each sequence's rate.

    At least one position per sequence is masked if any is eligible.

    Args:
        eligible_BN: True at eligible positions.
        rates_B: mask rates.
        generator: source of randomness.
    """
    draws_BN = torch.rand(eligible_BN.shape, generator=generator).masked_fill(~eligible_BN, 2.0)
    return eligible_BN & ((draws_BN < rates_B[:, None]) | (draws_BN == draws_BN.min(dim=1, keepdim=True).values))


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


def training_examples(
    spec: RunSpec,
    corpus: AbstractCorpus,
    objective: AbstractObjective,
    purpose: str,
    index: int,
    *,
    seed: int,
    batch: int,
) -> Examples:
    """Draw one training batch with its augmentations and masks.

    The draw depends only on (seed, purpose, index).

    Args:
        spec: the run.
        corpus: source of the training windows.
        objective: turns windows into examples.
        purpose: stream of draws, "train" or "curvature".
        index: number of the batch in this stream.
        seed: seed of the stream.
        batch: number of windows.
    """
    generator = generator_for(seed, purpose, index)
    drawn = corpus.batch("train", batch, objective.tokens_needed(spec.model.positions), generator)
    return objective.examples(objective.augmented(drawn, generator), generator)
