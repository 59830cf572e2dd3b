"""One block: pre-normed branches, joined to the state by residual schemes."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from stability.models.auxiliary import attach_losses, average_losses, split_loss
from stability.models.condition import UNMODULATED, Modulation


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
        of_mixer, of_ffn = UNMODULATED if self.modulation is None else self.modulation(condition_BC)
        mixer_losses: list[Tensor] = []
        ffn_losses: list[Tensor] = []

        def mix(x_BND: Tensor) -> Tensor:
            y_BND = self.mixer(of_mixer.shift_and_scale(self.mixer_norm(x_BND)), mask_BN=mask_BN, **own)
            return self._scale(of_mixer.apply_gate(self.dropout(split_loss(y_BND, mixer_losses))))

        def feed_forward(x_BND: Tensor) -> Tensor:
            y_BND = self.ffn(of_ffn.shift_and_scale(self.ffn_norm(x_BND)), **of_padding)
            return self._scale(of_ffn.apply_gate(self.dropout(split_loss(y_BND, ffn_losses))))

        state = self.mixer_residual(state, mix)
        if self.cross is not None and context is not None:
            state = self.cross(state, context, mask_BN)
        state = self.ffn_residual(state, feed_forward)
        return attach_losses(state, [*average_losses(mixer_losses), *average_losses(ffn_losses)])

    def _scale(self, y_BND: Tensor) -> Tensor:
        return y_BND if self.branch_scale == 1 else self.branch_scale * y_BND
