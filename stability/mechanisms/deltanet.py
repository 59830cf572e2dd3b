"""`deltanet`: linear attention whose state is written by the delta rule (Schlag et al. 2021, arXiv:2102.11174; Yang et
al. 2024, arXiv:2406.06484)."""

from __future__ import annotations

from stability.mechanisms._delta_net import AbstractDeltaNet, DeltaSettings


class DeltaNet(AbstractDeltaNet):
    """Linear attention by the delta rule, which forgets nothing but what it replaces:
    S_t = (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ, y = W_o norm(S_tᵀ q_t) + b_o (Yang et al. 2024, section 2.2, and
    section 3.3 for q, k, v, as fla/layers/delta_net.py has it).

    One step of gradient descent on ½‖Sᵀk_t − v_t‖² from S_{t−1}, with the rate β_t: what is kept under a key can be
    overwritten, where linear attention only adds. There is no gate at the output.
    """

    class Config(DeltaSettings):
        """Settings of the convolution, of the state and of how it is computed."""


EXPORT = DeltaNet
