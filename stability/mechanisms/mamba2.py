"""`mamba2`: a selective state space model with one decay per head, computed in matrix products.

From Dao and Gu 2024, arXiv:2405.21060.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor, nn

from stability.config import Settings
from stability.mechanisms._base import MixerShape, without_padding
from stability.mechanisms._decayed import gated_linear_attention
from stability.mechanisms._recurrent import (
    AbstractRecurrent,
    HeadNorm,
    Pair,
    ShortConvolution,
    draw_steps,
    require_rising,
)
from stability.models.passes import at_least_float32, in_float32


class Mamba2(AbstractRecurrent):
    """Causal mixer by a state space model with one input-dependent decay per head.

    y = W_out RMSNorm(s ⊙ silu(z)) + b, with (z, u, B, C) = W_in x + b, then a short convolution and silu on u, B and C.
    The ``expand``·D features in u are divided among the model's heads, K each. A head's state h is S × K:

        h_t = e^(Δ_t a) h_{t−1} + B_t (Δ_t u_t)ᵀ        s_t = h_tᵀ C_t + D u_t

    Δ_t = softplus(w_Δ·x_t + b_Δ), a = −e^(A_log) and D are one number per head; B_t and C_t, S entries, are shared by
    all heads (sections 2 and 7, equation (2); one group). The norm is over all features, after the gate, with ε = 10⁻⁵.
    At padding Δ = 0: no decay and no input.

    By state-space duality ``chunk`` positions are computed at once as attention with weights C_i·B_j e^(a Σ Δ); earlier
    positions enter by the state at the chunk's start (section 6).

    Initially −a is uniform in ``a_range``, Δ at w_Δ·x = 0 log-uniform in ``dt_range``, and D = 1, as in the released
    code. Its heads are 64 features wide, and w_Δ is a part of W_in. `model.mixer_bias` can drop the biases b, initially
    0; the released block has none.
    """

    class Config(Settings):
        """Settings for state size, initial rates and steps, and implementation."""

        expand: int = Field(default=2, ge=1, description="features of the recurrence, in widths of the model")
        state: int = Field(default=64, ge=1, description="numbers of the state for each of those features")
        conv: int = Field(default=4, ge=1, description="positions that the short convolution reads, its own included")
        a_range: Annotated[Pair, require_rising("mamba2")] = Field(
            default=(1.0, 16.0), description="from where to where the rates −A of the heads are drawn at first"
        )
        dt_range: Annotated[Pair, require_rising("mamba2")] = Field(
            default=(0.001, 0.1), description="from where to where the steps Δ are drawn at first, log-uniformly"
        )
        chunk: int = Field(default=64, ge=1, description="positions that are computed at once")

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__()
        inner = config.expand * shape.width
        self.chunk, self.parts = config.chunk, (inner, config.state, config.state)
        self.in_proj = nn.Linear(shape.width, inner + sum(self.parts))
        self.conv = ShortConvolution(sum(self.parts), config.conv, bias=True)
        self.dt_proj = nn.Linear(shape.width, shape.heads)
        self.A_log = nn.Parameter(torch.empty(shape.heads).uniform_(*config.a_range).log())
        self.D = nn.Parameter(torch.ones(shape.heads))
        self.norm = HeadNorm(inner)
        self.out = nn.Linear(inner, shape.width)
        with torch.no_grad():
            self.dt_proj.bias.copy_(draw_steps(shape.heads, config.dt_range))

    @property
    def own_init(self) -> frozenset[str]:
        return frozenset({"dt_proj.bias"})

    @property
    def own_decay(self) -> dict[str, bool]:
        """No weight decay on A_log, D and b_Δ, as in the released code.

        It would pull all rates to 1 and all steps to ln 2.
        """
        return {"A_log": False, "D": False, "dt_proj.bias": False}

    @property
    def own_splits(self) -> dict[str, tuple[int, ...]]:
        """``in_proj`` is the matrices for z, u, B and C."""
        return {"in_proj": (self.out.in_features, *self.parts), "dt_proj": (self.dt_proj.out_features,)}

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Count the maps, the convolution, pairs in a chunk, and state writes and reads.

        A pair counts C_i·B_j, its decay and its weighted values. The last chunk counts in full.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: N.
        """
        inner, state, heads = config.expand * shape.width, config.state, shape.heads
        taps = min(config.conv, num_positions)
        of_maps = shape.width * (3 * inner + 2 * state + heads) + (inner + 2 * state) * taps
        of_features = 3 * inner + heads  # Δu, Du, the gate; Δa
        of_norm = 3 * inner
        chunk = min(config.chunk, num_positions)
        num_chunks = -(-num_positions // chunk)
        of_pairs = chunk * (state + heads + inner)
        of_states = 2 * state * (heads + inner)
        scanned = num_chunks * chunk * (of_pairs + of_states) + (num_chunks - 1) * state * inner
        return float(num_positions * (of_maps + of_features + of_norm) + scanned)

    @classmethod
    def state_size(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        """Return the size of all heads' h plus the convolution's remaining inputs.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: positions read so far.
        """
        inner = config.expand * shape.width
        return inner * config.state + (config.conv - 1) * (inner + 2 * config.state)

    def forward(
        self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Bool[Tensor, "B N"] | None = None
    ) -> Float[Tensor, "B N D"]:
        """Return y; Δ, state, reads and norm are in float32 or wider."""
        x_BND = without_padding(x_BND, mask_BN)
        z_BNF, ubc = self.in_proj(x_BND).split((self.parts[0], sum(self.parts)), -1)
        with in_float32(x_BND.device):
            u_BNF, b_BNS, c_BNS = F.silu(self.conv(at_least_float32(ubc), mask_BN=mask_BN)).split(self.parts, -1)
            dt_BNH = without_padding(F.softplus(self.dt_proj(at_least_float32(x_BND))), mask_BN)
            dt_BHN1 = dt_BNH.transpose(1, 2)[..., None]
            u_BHNK = u_BNF.unflatten(-1, (len(self.D), -1)).transpose(1, 2)
            log_decay_BHN1 = dt_BHN1 * -self.A_log.exp()[:, None, None]
            s_BHNK = gated_linear_attention(
                c_BNS[:, None], b_BNS[:, None], dt_BHN1 * u_BHNK, log_decay_BHN1, chunk=self.chunk
            )
            s_BHNK = s_BHNK + self.D[:, None, None] * u_BHNK
            s_BNF = self.norm(s_BHNK.transpose(1, 2).flatten(2) * F.silu(at_least_float32(z_BNF)))
        return self.out(s_BNF)


EXPORT = Mamba2
