"""One block: pre-normed branches, each joined to the residual state by a residual scheme."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from stability.models.auxiliary import averaged, joined, parted
from stability.models.condition import UNMODULATED, Modulation


class Context(NamedTuple):
    """The embedded context (B, J, D) that cross branches read, and True where an entry is valid (None: everywhere)."""

    x_BJD: Tensor
    mask_BJ: Tensor | None


class CrossBranch(nn.Module):
    """A cross mechanism with its own norm of the source and its own residual connection. ``dropout``: as in `Block`."""

    own_roles: ClassVar = {"mechanism": "cross", "norm": "norm", "residual": "residual"}

    def __init__(self, mechanism: nn.Module, norm: nn.Module, residual: nn.Module, dropout: float = 0.0):
        super().__init__()
        self.mechanism, self.norm, self.residual = mechanism, norm, residual
        self.dropout = nn.Dropout(dropout)

    def forward(self, state: Tensor, context: Context, mask_BN: Tensor | None) -> Tensor:
        """Return the state with what it reads in the context; rows of the batch whose context is wholly padded keep
        their state, whatever the mechanism returns."""
        x_BJD, mask_BJ = context

        def branch(x_BND: Tensor) -> Tensor:
            return self.dropout(self.mechanism(self.norm(x_BND), x_BJD, mask_BN=mask_BN, context_mask_BJ=mask_BJ))

        if mask_BJ is None:
            return self.residual(state, branch)
        has_context_B = mask_BJ.any(-1)
        return torch.where(has_context_B.reshape(-1, *[1] * (state.ndim - 1)), self.residual(state, branch), state)


class Block(nn.Module):
    """Mixer branch, cross branch where there is one, feed-forward branch. ``residuals``: the connections of the first
    and the last, each called as ``residual(state, branch)``. ``modulation``: what a condition does to the first and the
    last (adaLN-zero), None in a model without one. ``dropout``: the share of each branch's output that is dropped in
    training mode, before the condition gates it (as nanoGPT and SEDD do)."""

    own_roles: ClassVar = {
        "mixer": "mixer",
        "ffn": "ffn",
        "modulation": "condition",
        "mixer_norm": "norm",
        "ffn_norm": "norm",
        "mixer_residual": "residual",
        "ffn_residual": "residual",
    }

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

    def forward(
        self,
        state: Tensor,
        mask_BN: Tensor | None,
        context: Context | None = None,
        inputs: dict[str, Any] | None = None,
        condition_BC: Tensor | None = None,
    ) -> Any:
        """Return the state after all branches, with the losses of mixer and feed-forward network where they have any of
        their own (`WithLoss`), of each the mean over its evaluations where the residual scheme takes several.
        ``inputs``: what mixers may take beside state and mask (``edges``); this block's gets those that its `forward`
        names. ``condition_BC``: what ``modulation`` reads, given exactly where there is one."""
        own = {name: value for name, value in (inputs or {}).items() if name in self.mixer_inputs}
        of_mixer, of_ffn = UNMODULATED if self.modulation is None else self.modulation(condition_BC)
        mixer_losses: list[Tensor] = []
        ffn_losses: list[Tensor] = []

        def mixed(x_BND: Tensor) -> Tensor:
            y_BND = self.mixer(of_mixer.moved(self.mixer_norm(x_BND)), mask_BN=mask_BN, **own)
            return of_mixer.gated(self.dropout(parted(y_BND, mixer_losses)))

        def fed_forward(x_BND: Tensor) -> Tensor:
            y_BND = self.ffn(of_ffn.moved(self.ffn_norm(x_BND)))
            return of_ffn.gated(self.dropout(parted(y_BND, ffn_losses)))

        state = self.mixer_residual(state, mixed)
        if self.cross is not None and context is not None:
            state = self.cross(state, context, mask_BN)
        state = self.ffn_residual(state, fed_forward)
        return joined(state, [*averaged(mixer_losses), *averaged(ffn_losses)])
