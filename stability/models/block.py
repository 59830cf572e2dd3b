"""One block: pre-normed branches, joined to the state by residual schemes; losses of parts beside their outputs.

Such a loss, e.g. a router's load balancing, is passed from a part to the training loss as a value: a module stores
nothing of a forward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from stability.models.condition import Modulated, Modulation


class WithLoss(NamedTuple):
    """The output of a mixer or feed-forward network with its own loss.

    Blocks and models pass it on in this form.

    Attributes:
        output: the output.
        loss_B: in nats, added to each sequence's share of the training loss, in float32 or wider. It may depend on this
            sequence alone, or microbatches would not add up to the batch. In a bfloat16 run, the output of a linear map
            must be widened first (`stability.models.passes.at_least_float32`).
    """

    output: Any
    loss_B: Tensor


def split_loss(found: Any, losses: list[Tensor]) -> Any:
    """Return a part's output; append its loss, if any, to ``losses``.

    Raises:
        ValueError: the loss is not (B,), or narrower than float32.
    """
    if not isinstance(found, WithLoss):
        return found
    if found.loss_B.ndim != 1:
        raise ValueError(
            f"an auxiliary loss has shape {tuple(found.loss_B.shape)}; expected (B,), a number for each sequence"
        )
    if torch.finfo(found.loss_B.dtype).bits < 32:
        dtype = str(found.loss_B.dtype).removeprefix("torch.")
        raise ValueError(f"an auxiliary loss is {dtype}; expected float32 or wider: at_least_float32 widens")
    losses.append(found.loss_B)
    return found.output


def attach_losses(output: Any, losses: Sequence[Tensor]) -> Any:
    """Return the output, with the sum of ``losses`` if not empty."""
    return WithLoss(output, sum_losses(losses)) if losses else output


def average_losses(losses: Sequence[Tensor]) -> list[Tensor]:
    """Return the mean of one part's losses over its evaluations, as a list.

    The list is empty without a loss.
    """
    return [sum_losses(losses) / len(losses)] if len(losses) > 1 else [*losses]


def sum_losses(losses: Sequence[Tensor]) -> Tensor:
    """Return the sum of one or more losses, (B)."""
    loss_B, *others = losses
    for other_B in others:
        loss_B = loss_B + other_B
    return loss_B


class Context(NamedTuple):
    """The embedded context of cross branches.

    Attributes:
        x_BJD: the context (B, J, D).
        mask_BJ: True for a valid entry; None: all.
    """

    x_BJD: Tensor
    mask_BJ: Tensor | None


class CrossBranch(nn.Module):
    """A cross mechanism with its own norm and residual connection.

    Args:
        mechanism: the cross mechanism.
        norm: norm of the source.
        residual: the residual connection.
        dropout: as in `Block`.
    """

    own_roles: ClassVar = {"mechanism": "cross", "norm": "norm", "residual": "residual"}

    def __init__(self, mechanism: nn.Module, norm: nn.Module, residual: nn.Module, dropout: float = 0.0):
        super().__init__()
        self.mechanism, self.norm, self.residual = mechanism, norm, residual
        self.dropout = nn.Dropout(dropout)

    def forward(self, state: Tensor, context: Context, mask_BN: Tensor | None) -> Tensor:
        """Return the state after attending to the context.

        Rows of the batch with a wholly padded context are unchanged, for any mechanism.

        Args:
            state: the residual state.
            context: the context.
            mask_BN: True for a valid position; None: all.
        """
        x_BJD, mask_BJ = context

        def branch(x_BND: Tensor) -> Tensor:
            return self.dropout(self.mechanism(self.norm(x_BND), x_BJD, mask_BN=mask_BN, context_mask_BJ=mask_BJ))

        if mask_BJ is None:
            return self.residual(state, branch)
        has_context_B = mask_BJ.any(-1)
        return torch.where(has_context_B.reshape(-1, *[1] * (state.ndim - 1)), self.residual(state, branch), state)


class Block(nn.Module):
    """Mixer branch, cross branch (if any), feed-forward branch.

    Args:
        mixer: the token mixer.
        ffn: the feed-forward network.
        norms: norms of mixer and feed-forward branch.
        residuals: connections of the same two, each called as ``residual(state, branch)``.
        cross: the cross branch, or None.
        modulation: effect of a condition on the same two (adaLN-zero); None without a condition.
        dropout: share of each branch's output dropped in training mode, before the condition's gate (as in nanoGPT and
            SEDD).
    """

    own_roles: ClassVar = {
        "mixer": "mixer",
        "ffn": "ffn",
        "modulation": "condition",
        "mixer_norm": "norm",
        "ffn_norm": "norm",
        "mixer_residual": "residual",
        "ffn_residual": "residual",
    }
    branch_scale: float = 1.0  # factor on both branches' outputs

    def __init__(
        self,
        mixer: nn.Module,
        ffn: nn.Module,
        norms: tuple[nn.Module, nn.Module],
        residuals: tuple[nn.Module, nn.Module],
        cross: CrossBranch | None = None,
        modulation: Modulation | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.mixer, self.ffn, self.cross, self.modulation = mixer, ffn, cross, modulation
        self.mixer_norm, self.ffn_norm = norms
        self.mixer_residual, self.ffn_residual = residuals
        self.mixer_inputs = frozenset(list(inspect.signature(mixer.forward).parameters)[1:]) - {"mask_BN"}
        self.ffn_reads_mask = "mask_BN" in inspect.signature(ffn.forward).parameters

    def forward(
        self,
        state: Tensor,
        mask_BN: Tensor | None,
        context: Context | None = None,
        inputs: dict[str, Any] | None = None,
        condition_BC: Tensor | None = None,
    ) -> Any:
        """Return the state after all branches.

        Args:
            state: the residual state.
            mask_BN: True for a valid position; None: all.
            context: the cross branch's context.
            inputs: further inputs of mixers, by name (``edges``); this mixer gets those in its `forward` signature.
            condition_BC: input of ``modulation``, required if and only if there is one.

        Returns:
            The state; as `WithLoss` if mixer or feed-forward network have their own losses. Each loss is the mean over
            its evaluations by the residual scheme.
        """
        own = {name: value for name, value in (inputs or {}).items() if name in self.mixer_inputs}
        of_padding = {"mask_BN": mask_BN} if self.ffn_reads_mask else {}
        of_mixer, of_ffn = (None, None) if self.modulation is None else self.modulation(condition_BC)
        mixer_losses: list[Tensor] = []
        ffn_losses: list[Tensor] = []
        mix = partial(self._branch, self.mixer_norm, self.mixer, {"mask_BN": mask_BN, **own}, of_mixer, mixer_losses)
        feed_forward = partial(self._branch, self.ffn_norm, self.ffn, of_padding, of_ffn, ffn_losses)

        state = self.mixer_residual(state, mix)
        if self.cross is not None and context is not None:
            state = self.cross(state, context, mask_BN)
        state = self.ffn_residual(state, feed_forward)
        return attach_losses(state, [*average_losses(mixer_losses), *average_losses(ffn_losses)])

    def _branch(
        self,
        norm: nn.Module,
        part: nn.Module,
        given: Mapping[str, Any],
        effect: Modulated | None,
        losses: list[Tensor],
        x_BND: Tensor,
    ) -> Tensor:
        """Return one evaluation of a branch, with the effect of a condition; append the part's own loss."""
        x_BND = norm(x_BND)
        if effect is not None:
            x_BND = effect.shift_and_scale(x_BND)
        y_BND = self.dropout(split_loss(part(x_BND, **given), losses))
        if effect is not None:
            y_BND = effect.gate * y_BND
        return y_BND if self.branch_scale == 1 else self.branch_scale * y_BND
