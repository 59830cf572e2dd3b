"""`mamba`: a selective state space model with one decay per state entry.

From Gu and Dao 2023, arXiv:2312.00752.
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
from stability.mechanisms._recurrent import AbstractRecurrent, Pair, ShortConvolution, draw_steps, require_rising
from stability.models.passes import at_least_float32, in_float32


class Mamba(AbstractRecurrent):
    """Causal mixer by a selective scan, with input-dependent decay per feature.

    y = W_out (s ⊙ silu(z)) + b, with (u, z) = W_in x + b, u′ = silu(conv(u)), and s the selective scan over u′. Each of
    the F = ``expand``·D features in u′ has a state h with S entries:

        h_t = e^(Δ_t A) ⊙ h_{t−1} + Δ_t B_t u′_t        s_t = C_t·h_t + D u′_t

    Δ_t = softplus(W_Δ r_t + b_Δ) has one entry per feature; (r_t, B_t, C_t) = W_x u′_t is shared by all features; A =
    −e^(A_log), (F, S), is the same at all positions (section 3.2, algorithm 2). As in the released code B̄ = ΔB
    (Euler's); the paper's equation (4) has the zero-order hold. At padding Δ = 0: no decay and no input.

    Initially A = −1, …, −S for each feature, D = 1, and Δ at W_Δ r = 0 is log-uniform in ``dt_range`` (section 3.6).
    `model.mixer_bias` can drop the biases b, initially 0; the released block has none. Heads and rotation have no
    effect.
    """

    class Config(Settings):
        """Settings for state size, steps Δ and scan."""

        expand: int = Field(default=2, ge=1, description="features of the recurrence, in widths of the model")
        state: int = Field(default=16, ge=1, description="numbers of the state for each of those features")
        conv: int = Field(default=4, ge=1, description="positions that the short convolution reads, its own included")
        dt_rank: int | None = Field(
            default=None, ge=1, description="rank of the map that gives the steps Δ; null: width / 16, rounded up"
        )
        dt_range: Annotated[Pair, require_rising("mamba")] = Field(
            default=(0.001, 0.1), description="from where to where the steps Δ are drawn at first, log-uniformly"
        )
        chunk: int = Field(
            default=16, ge=1, description="positions that are gone through one by one, side by side in all chunks"
        )

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__()
        inner, rank = config.expand * shape.width, dt_rank(config, shape.width)
        self.chunk, self.parts = config.chunk, (rank, config.state, config.state)
        self.in_proj = nn.Linear(shape.width, 2 * inner)
        self.conv = ShortConvolution(inner, config.conv, bias=True)
        self.x_proj = nn.Linear(inner, sum(self.parts), bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        # the axis of length 1 makes matrix optimizers skip this table of rates
        self.A_log = nn.Parameter(torch.arange(1.0, config.state + 1).log().repeat(1, inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out = nn.Linear(inner, shape.width)
        with torch.no_grad():
            self.dt_proj.bias.copy_(draw_steps(inner, config.dt_range))

    @property
    def own_init(self) -> frozenset[str]:
        return frozenset({"dt_proj.bias"})

    @property
    def own_decay(self) -> dict[str, bool]:
        """No weight decay on A_log, D and b_Δ, as in the released code.

        It would pull all rates to A = −1 and all steps to ln 2.
        """
        return {"A_log": False, "D": False, "dt_proj.bias": False}

    @property
    def own_splits(self) -> dict[str, tuple[int, ...]]:
        """``in_proj`` is the matrices for u and z, ``x_proj`` those for r, B and C."""
        inner = self.out.in_features
        return {"in_proj": (inner, inner), "x_proj": self.parts, "dt_proj": (inner,)}

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Count the maps, the convolution and the scan.

        The scan has three products per feature and six per state entry: two exponents, decay from the previous position
        and from before the chunk, input and read. The very first decay is not counted. The last chunk counts in full.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: N.
        """
        inner, rank = config.expand * shape.width, dt_rank(config, shape.width)
        of_feature = 3 * shape.width + min(config.conv, num_positions) + 2 * rank + 2 * config.state + 3
        chunk = min(config.chunk, num_positions)
        scanned = -(-num_positions // chunk) * chunk
        return float(inner * (num_positions * of_feature + (6 * scanned - 1) * config.state))

    @classmethod
    def state_size(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        """Return the size of h plus the convolution's remaining inputs.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: positions read so far.
        """
        return config.expand * shape.width * (config.state + config.conv - 1)

    def forward(
        self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Bool[Tensor, "B N"] | None = None
    ) -> Float[Tensor, "B N D"]:
        """Return y; Δ, state and reads are in float32 or wider."""
        u_BNF, z_BNF = self.in_proj(without_padding(x_BND, mask_BN)).chunk(2, -1)
        with in_float32(x_BND.device):
            u_BNF = F.silu(self.conv(at_least_float32(u_BNF), mask_BN=mask_BN))
            r_BNR, b_BNS, c_BNS = self.x_proj(u_BNF).split(self.parts, -1)
            dt_BNF = without_padding(F.softplus(self.dt_proj(r_BNR)), mask_BN)
            s_BNF = selective_scan(u_BNF, dt_BNF, -self.A_log.exp(), b_BNS, c_BNS, chunk=self.chunk)
            s_BNF = s_BNF + self.D * u_BNF
        return self.out(s_BNF * F.silu(z_BNF))


def selective_scan(
    u_BNF: Float[Tensor, "B N F"],
    dt_BNF: Float[Tensor, "B N F"],
    a_1FS: Float[Tensor, "1 F S"],
    b_BNS: Float[Tensor, "B N S"],
    c_BNS: Float[Tensor, "B N S"],
    *,
    chunk: int,
) -> Float[Tensor, "B N F"]:
    """Return s_t = C_t·h_t with h_t = e^(Δ_t A) ⊙ h_{t−1} + Δ_t u_t B_tᵀ.

    h is (F, S) and starts at 0. The scan takes ``chunk`` + N / ``chunk`` sequential steps. Time and memory are linear
    in N.

    Args:
        u_BNF: input u.
        dt_BNF: steps Δ ≥ 0.
        a_1FS: A < 0.
        b_BNS: B.
        c_BNS: C.
        chunk: positions per chunk; does not change the result.
    """
    # All chunks advance in parallel, each from a zero state. Then the states at their starts, computed from chunk to
    # chunk, decay into them by e^(A Σ Δ), never above 1.
    num = u_BNF.shape[1]
    chunk = min(chunk, num)
    # the first positions of all chunks, then the second ones, …, zero-padded
    taken_CBMF, dt_CBMF, b_CBMS, c_CBMS = (
        F.pad(x, (0, 0, 0, -x.shape[1] % chunk)).unflatten(1, (-1, chunk)).permute(2, 0, 1, 3)
        for x in (dt_BNF * u_BNF, dt_BNF, b_BNS, c_BNS)
    )
    until_CBMF = dt_CBMF.cumsum(0)
    states_BMFS: list[Tensor] = []
    for taken_BMF, dt_BMF, b_BMS in zip(taken_CBMF.unbind(), dt_CBMF.unbind(), b_CBMS.unbind(), strict=True):
        added_BMFS = taken_BMF[..., None] * b_BMS[..., None, :]
        kept = (dt_BMF[..., None] * a_1FS).exp() * states_BMFS[-1] if states_BMFS else 0.0
        states_BMFS.append(kept + added_BMFS)
    before_BMFS = _carry_states((until_CBMF[-1][..., None] * a_1FS).exp(), states_BMFS[-1])
    read_BMF = []
    for state_BMFS, until_BMF, c_BMS in zip(states_BMFS, until_CBMF.unbind(), c_CBMS.unbind(), strict=True):
        state_BMFS = state_BMFS + (until_BMF[..., None] * a_1FS).exp() * before_BMFS
        read_BMF.append((state_BMFS @ c_BMS[..., None])[..., 0])
    return torch.stack(read_BMF, 2).flatten(1, 2)[:, :num]


def _carry_states(
    kept_BMFS: Float[Tensor, "B M F S"], added_BMFS: Float[Tensor, "B M F S"]
) -> Float[Tensor, "B M F S"]:
    """Return the state at each chunk's start: S ← kept ⊙ S + added, from zero."""
    states_BFS = [torch.zeros_like(added_BMFS[:, 0])]
    for kept_BFS, added_BFS in list(zip(kept_BMFS.unbind(1), added_BMFS.unbind(1), strict=True))[:-1]:
        states_BFS.append(kept_BFS * states_BFS[-1] + added_BFS)
    return torch.stack(states_BFS, 1)


def dt_rank(config: Any, width: int) -> int:
    """Return the rank of the map to the steps."""
    return config.dt_rank or -(-width // 16)


EXPORT = Mamba
