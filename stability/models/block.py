"""One block: two pre-normed branches, each joined to the residual state by a residual scheme."""

from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    """Mixer and feed-forward branch. ``residuals``: the two connections, one per branch, each called as ``residual(state, branch)``."""

    def __init__(self, mixer: nn.Module, ffn: nn.Module, norms: tuple[nn.Module, nn.Module], residuals: tuple[nn.Module, nn.Module]):
        super().__init__()
        self.mixer, self.ffn = mixer, ffn
        self.mixer_norm, self.ffn_norm = norms
        self.mixer_residual, self.ffn_residual = residuals

    def forward(self, state: Tensor, mask_BN: Tensor | None) -> Tensor:
        state = self.mixer_residual(state, lambda x_BND: self.mixer(self.mixer_norm(x_BND), mask_BN=mask_BN))
        return self.ffn_residual(state, lambda x_BND: self.ffn(self.ffn_norm(x_BND)))
