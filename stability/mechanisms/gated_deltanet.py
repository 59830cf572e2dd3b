"""`gated_deltanet`: the delta rule with a forget gate per head (Yang et al. 2025, arXiv:2412.06464)."""

from __future__ import annotations

from typing import Annotated, Any

import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from stability.config.identity import Since
from stability.mechanisms._base import MixerShape
from stability.mechanisms._delta_net import (
    AbstractDeltaNet,
    DeltaSettings,
    draw_rates,
    draw_step_biases,
    log_of_decay,
)
from stability.models.passes import at_least_float32

SLOWEST = 0.01


class GatedDeltaNet(AbstractDeltaNet):
    """Delta rule with decay, S_t = a_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ.

    This is Yang et al. 2025, Eq. 10, with one a_t per head: a_t = exp(−e^A_log · softplus(w_a·x_t + dt_bias)), as in
    Mamba2. The output is y = W_o (silu(W_g x) ⊙ norm(S_tᵀ q_t)) + b_o (section 3.4).

    Initially e^A_log is U(0.01, ``fastest``) and softplus(dt_bias) log-uniform in [0.001, 0.1], as in the released
    layers (fla/layers/gated_deltanet.py; 0.01 instead of 0, as in transformers' qwen3_next, since ln 0 is −∞). Their
    ``fastest`` is 16: then an untrained middle head forgets half in 9 positions.
    """

    class Config(DeltaSettings):
        """Settings for convolution, state and implementation; the paper's expand_v is 2."""

        fastest: Annotated[float, Since(16.0)] = Field(
            default=16.0,
            gt=SLOWEST,
            description="how fast a head forgets at most when training begins, over its step; 16 as released",
        )

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__(config, shape)
        self.decay = nn.Linear(shape.width, shape.heads, bias=False)
        self.A_log = draw_rates(shape.heads, SLOWEST, config.fastest)
        self.dt_bias = draw_step_biases(shape.heads)
        self.gate = nn.Linear(shape.width, self.rows[2], bias=False)

    @property
    def own_decay(self) -> dict[str, bool]:
        """No weight decay on the parameters of the state's decay rate."""
        return {"A_log": False, "dt_bias": False}

    @classmethod
    def gate_weights(cls, config: Any, shape: MixerShape) -> tuple[int, int]:
        return shape.width * shape.heads, shape.width * shape.width * config.expand_v

    def log_decay(self, x_BND: Tensor) -> Float[Tensor, "B N H 1"]:
        return log_of_decay(self.A_log, self.decay(x_BND) + at_least_float32(self.dt_bias))[..., None]

    def apply_gate(self, y_BNHV: Tensor, x_BND: Tensor) -> Float[Tensor, "B N H V"]:
        return y_BNHV * F.silu(at_least_float32(self.gate(x_BND))).unflatten(2, (self.heads, -1))


EXPORT = GatedDeltaNet
