"""`kda`: Kimi Delta Attention, the delta rule with a forget gate per key feature.

From Kimi Team 2025, arXiv:2510.26692.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from stability.mechanisms._base import MixerShape
from stability.mechanisms._delta_net import (
    AbstractDeltaNet,
    DeltaSettings,
    draw_rates,
    draw_step_biases,
    log_of_decay,
)
from stability.models.passes import at_least_float32


class KimiDeltaAttention(AbstractDeltaNet):
    """Delta rule with one decay per key feature, S_t = (I − β_t k_t k_tᵀ) Diag(a_t) S_{t−1} + β_t k_t v_tᵀ.

    The state decays first, then the key's content is replaced (Kimi Team 2025, Eq. 1). a_t = exp(−e^A_log ·
    softplus(W_a↑ W_a↓ x_t + dt_bias)), with one A_log per head. The output is y = W_o (σ(W_g↑ W_g↓ x + b_g) ⊙ norm(S_tᵀ
    q_t)) + b_o (section 4, neural parameterization). Both pairs of maps have rank K, the head width.

    Initially e^A_log is U(1, 16) and softplus(dt_bias) log-uniform in [0.001, 0.1], as released (fla/layers/kda.py,
    fla/models/kda/modeling_kda.py).
    """

    class Config(DeltaSettings):
        """Settings for convolution, state and implementation."""

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__(config, shape)
        rank = shape.head_width
        self.decay_down = nn.Linear(shape.width, rank, bias=False)
        self.decay_up = nn.Linear(rank, shape.width, bias=False)
        self.A_log = draw_rates(shape.heads, 1.0)
        self.dt_bias = draw_step_biases(shape.width)
        self.gate_down = nn.Linear(shape.width, rank, bias=False)
        self.gate_up = nn.Linear(rank, self.rows[2])

    @property
    def own_decay(self) -> dict[str, bool]:
        """No weight decay on the decay rate's parameters and the gate's bias, if any.

        The gate has a bias with ``model.mixer_bias=all``.
        """
        of_gate = {} if self.gate_up.bias is None else {"gate_up.bias": False}
        return {"A_log": False, "dt_bias": False, **of_gate}

    @classmethod
    def gate_weights(cls, config: Any, shape: MixerShape) -> tuple[int, int]:
        rank, values = shape.head_width, shape.width * config.expand_v
        return rank * 2 * shape.width, rank * (shape.width + values)

    def log_decay(self, x_BND: Tensor) -> Float[Tensor, "B N H K"]:
        steps_BND = self.decay_up(self.decay_down(x_BND)) + at_least_float32(self.dt_bias)
        return log_of_decay(self.A_log[:, None], steps_BND.unflatten(2, (self.heads, -1)))

    def apply_gate(self, y_BNHV: Tensor, x_BND: Tensor) -> Float[Tensor, "B N H V"]:
        gate_BND = at_least_float32(self.gate_up(self.gate_down(x_BND))).sigmoid()
        return y_BNHV * gate_BND.unflatten(2, (self.heads, -1))


EXPORT = KimiDeltaAttention
