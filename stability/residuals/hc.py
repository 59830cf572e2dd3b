"""Dynamic hyper-connections (Zhu et al. 2024, arXiv:2409.19606)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stability.residuals._streams import (
    INITIAL_SCALE,
    AbstractStreams,
    Coefficients,
    StreamSettings,
    multiply_normed,
    spread,
)


class HyperConnections(AbstractStreams):
    """Dynamic hyper-connections with learned coefficients.

    [pre | mix] = S_a + a_a·tanh(Xn W_a) and post = S_b + a_b·tanh(Xn w_b), with Xn the RMSNorm of each stream. The
    mixing matrices are unbounded.

    Initially S_a = [e_j | I], S_b = 1, [W_a | w_b] = 0, a = 0.01. Each stream then equals the single stream of
    ``residual=identity``, and the head's input is exactly n times as large.
    """

    class Config(StreamSettings):
        """The settings of `StreamSettings`."""

    static = ("static_read", "static_post")
    own_fan_in: ClassVar = {"weight": 0}

    def __init__(self, config: Any, *, width: int, layer: int):
        super().__init__(config, width=width, layer=layer)
        eye = torch.eye(config.streams)
        self.static_read = nn.Parameter(torch.cat([eye[:, self.first_stream, None], eye], -1))
        self.static_post = nn.Parameter(torch.ones(config.streams))
        self.gain = nn.Parameter(torch.zeros(width))
        self.weight = nn.Parameter(torch.zeros(width, 2 + config.streams))
        self.scale = nn.Parameter(torch.full((2,), INITIAL_SCALE))

    def read(self, x_PSD: Tensor, dtype: torch.dtype, precision: str) -> tuple[Tensor, Tensor, Tensor]:
        from kernels.streams import read_hyper

        weight = ((1 + self.gain).unsqueeze(-1) * self.weight).to(dtype)
        static_SO = torch.cat([self.static_read, self.static_post.unsqueeze(-1)], -1).to(dtype)
        amplitude_O = spread(self.scale, [1 + self.config.streams, 1]).to(dtype)
        return read_hyper(x_PSD, weight, static_SO, amplitude_O, precision=precision)

    def coefficients(self, x_BNSD: Tensor) -> Coefficients:
        num = self.config.streams
        dynamic = multiply_normed(x_BNSD, self.gain, self.weight).tanh()
        static_SO = torch.cat([self.static_read, self.static_post.unsqueeze(-1)], -1)
        pre, mix_BNST, post = torch.addcmul(static_SO, spread(self.scale, [1 + num, 1]), dynamic).split([1, num, 1], -1)
        return Coefficients(pre.squeeze(-1), mix_BNST, post.squeeze(-1))


EXPORT = HyperConnections
