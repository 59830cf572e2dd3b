"""SEDD's network, stated again from its public code (github.com/louaaron/Score-Entropy-Discrete-Diffusion,
model/transformer.py and model/rotary.py): plain torch, nothing of this project's.

Left out are casts to float32 and bfloat16, and flash attention, for which a softmax stands.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


def modulate(x, shift, scale):
    return x * (1 + scale) + shift


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotary(length, dim):
    inv_freq = 1.0 / (10_000 ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim))
    freqs = torch.einsum("i,j->ij", torch.arange(length, dtype=torch.float64), inv_freq)
    emb = torch.cat((freqs, freqs), dim=-1)
    return emb.cos()[None, :, None], emb.sin()[None, :, None]


class LayerNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones([dim]))
        self.dim = dim

    def forward(self, x):
        return F.layer_norm(x, [self.dim]) * self.weight[None, None, :]


class TimestepEmbedder(nn.Module):
    def __init__(self, hidden_size, frequency_embedding_size=256):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(frequency_embedding_size, hidden_size, bias=True),
            nn.SiLU(),
            nn.Linear(hidden_size, hidden_size, bias=True),
        )
        self.frequency_embedding_size = frequency_embedding_size

    def forward(self, t):
        half = self.frequency_embedding_size // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(start=0, end=half, dtype=t.dtype) / half)
        args = t[:, None] * freqs[None]
        return self.mlp(torch.cat([torch.cos(args), torch.sin(args)], dim=-1))


class DDiTBlock(nn.Module):
    def __init__(self, dim, n_heads, cond_dim, mlp_ratio=4, dropout=0.0):
        super().__init__()
        self.n_heads, self.dropout = n_heads, dropout
        self.norm1 = LayerNorm(dim)
        self.attn_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attn_out = nn.Linear(dim, dim, bias=False)
        self.norm2 = LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, mlp_ratio * dim, bias=True),
            nn.GELU(approximate="tanh"),
            nn.Linear(mlp_ratio * dim, dim, bias=True),
        )
        self.adaLN_modulation = nn.Linear(cond_dim, 6 * dim, bias=True)
        self.adaLN_modulation.weight.data.zero_()
        self.adaLN_modulation.bias.data.zero_()

    def forward(self, x, cos, sin, c):
        chunks = self.adaLN_modulation(c)[:, None].chunk(6, dim=2)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = chunks
        batch, length, dim = x.shape
        qkv = self.attn_qkv(modulate(self.norm1(x), shift_msa, scale_msa))
        q, k, v = qkv.view(batch, length, 3, self.n_heads, dim // self.n_heads).unbind(2)
        q, k = (part * cos + rotate_half(part) * sin for part in (q, k))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(dim // self.n_heads)
        mixed = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).reshape(batch, length, dim)
        x = x + gate_msa * F.dropout(self.attn_out(mixed), self.dropout, self.training)
        fed = self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))
        return x + gate_mlp * F.dropout(fed, self.dropout, self.training)


class EmbeddingLayer(nn.Module):
    def __init__(self, dim, vocab_dim):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty((vocab_dim, dim)))
        torch.nn.init.kaiming_uniform_(self.embedding, a=math.sqrt(5))

    def forward(self, x):
        return self.embedding[x]


class DDitFinalLayer(nn.Module):
    def __init__(self, hidden_size, out_channels, cond_dim):
        super().__init__()
        self.norm_final = LayerNorm(hidden_size)
        self.linear = nn.Linear(hidden_size, out_channels)
        self.linear.weight.data.zero_()
        self.linear.bias.data.zero_()
        self.adaLN_modulation = nn.Linear(cond_dim, 2 * hidden_size, bias=True)
        self.adaLN_modulation.weight.data.zero_()
        self.adaLN_modulation.bias.data.zero_()

    def forward(self, x, c):
        shift, scale = self.adaLN_modulation(c)[:, None].chunk(2, dim=2)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class SEDD(nn.Module):
    """Of the absorbing graph, with ``scale_by_sigma``, as configs/model/small.yaml and medium.yaml have it."""

    def __init__(self, tokens, hidden_size=768, n_blocks=12, n_heads=12, cond_dim=128, dropout=0.0):
        super().__init__()
        vocab_size = tokens + 1
        self.head_dim = hidden_size // n_heads
        self.vocab_embed = EmbeddingLayer(hidden_size, vocab_size)
        self.sigma_map = TimestepEmbedder(cond_dim)
        self.blocks = nn.ModuleList(
            [DDiTBlock(hidden_size, n_heads, cond_dim, dropout=dropout) for _ in range(n_blocks)]
        )
        self.output_layer = DDitFinalLayer(hidden_size, vocab_size, cond_dim)

    def network(self, indices, sigma):
        x = self.vocab_embed(indices)
        c = F.silu(self.sigma_map(sigma))
        cos, sin = rotary(indices.shape[1], self.head_dim)
        for block in self.blocks:
            x = block(x, cos, sin, c)
        return self.output_layer(x, c)

    def forward(self, indices, sigma):
        x = self.network(indices, sigma)
        esigm1_log = torch.where(sigma < 0.5, torch.expm1(sigma), sigma.exp() - 1).log()[:, None, None]
        x = x - esigm1_log - np.log(x.shape[-1] - 1)
        return torch.scatter(x, -1, indices[..., None], torch.zeros_like(x[..., :1]))


# this project's name of each of its modules and parameters
NAMES = (
    ("vocab_embed.embedding", "embedding.weight"),
    ("sigma_map.mlp.0", "noise_level.hidden"),
    ("sigma_map.mlp.2", "noise_level.condition"),
    ("norm1", "mixer_norm"),
    ("norm2", "ffn_norm"),
    ("attn_qkv", "mixer.qkv"),
    ("attn_out", "mixer.out"),
    (".mlp.0", ".ffn.hidden"),
    (".mlp.2", ".ffn.out"),
    ("output_layer.norm_final", "final_norm"),
    ("output_layer.linear", "head"),
    ("output_layer.adaLN_modulation", "final_modulation.chunks"),
    ("adaLN_modulation", "modulation.chunks"),
)
