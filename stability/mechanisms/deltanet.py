"""`deltanet`: linear attention with a delta-rule state.

From Schlag et al. 2021, arXiv:2102.11174, and Yang et al. 2024, arXiv:2406.06484.
"""

from __future__ import annotations

from stability.mechanisms._delta_net import AbstractDeltaNet, DeltaSettings


class DeltaNet(AbstractDeltaNet):
    """Linear attention by the delta rule without decay: S_t = (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ.

    y = W_o norm(S_tᵀ q_t) + b_o (Yang et al. 2024, section 2.2, and section 3.3 for q, k, v, as in
    fla/layers/delta_net.py). An update is one gradient step on ½‖Sᵀk_t − v_t‖² from S_{t−1} with rate β_t. So the
    content at a key can be overwritten, while linear attention only adds. There is no output gate.
    """

    class Config(DeltaSettings):
        """Settings for convolution, state and implementation."""


EXPORT = DeltaNet
