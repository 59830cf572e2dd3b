"""The ViT-small that the AttentionX paper trains, stated again from its public code (models/vit_small.py of
github.com/kentaroy47/vision-transformers-cifar10, after lucidrains' vit_for_small_dataset): plain torch, nothing of this
project's. For einops, reshapes stand."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class LSA(nn.Module):
    def __init__(self, dim, heads, dim_head, dropout):
        super().__init__()
        inner_dim = dim_head * heads
        self.heads, self.dim_head = heads, dim_head
        self.temperature = nn.Parameter(torch.log(torch.tensor(dim_head**-0.5)))
        self.to_qkv = nn.Linear(dim, inner_dim * 3, bias=False)
        self.to_out = nn.Linear(inner_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, self.heads, self.dim_head).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        dots = torch.matmul(q, k.transpose(-1, -2)) * self.temperature.exp()
        mask = torch.eye(dots.shape[-1], dtype=torch.bool)
        attn = dots.masked_fill(mask, -torch.finfo(dots.dtype).max).softmax(dim=-1)
        return self.dropout(self.to_out(torch.matmul(attn, v).transpose(1, 2).reshape(b, n, -1)))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden_dim, dropout):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim, hidden_dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        return self.net(x)


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(dim), fn

    def forward(self, x):
        return self.fn(self.norm(x))


class SPT(nn.Module):
    def __init__(self, dim, patch_size, channels):
        super().__init__()
        patch_dim = patch_size * patch_size * 5 * channels
        self.patch_size = patch_size
        self.norm, self.linear = nn.LayerNorm(patch_dim), nn.Linear(patch_dim, dim)

    def forward(self, x):
        shifts = ((1, -1, 0, 0), (-1, 1, 0, 0), (0, 0, 1, -1), (0, 0, -1, 1))
        x = torch.cat((x, *[F.pad(x, shift) for shift in shifts]), dim=1)
        b, c, height, width = x.shape
        p = self.patch_size
        # b c (h p1) (w p2) -> b (h w) (p1 p2 c)
        x = x.view(b, c, height // p, p, width // p, p).permute(0, 2, 4, 3, 5, 1).reshape(b, -1, p * p * c)
        return self.linear(self.norm(x))


class ViT(nn.Module):
    def __init__(
        self, image_size, patch_size, num_classes, dim, depth, heads, mlp_dim, channels=3, dim_head=64, dropout=0.0
    ):
        super().__init__()
        num_patches = (image_size[0] // patch_size) * (image_size[1] // patch_size)
        self.to_patch_embedding = SPT(dim, patch_size, channels)
        self.pos_embedding = nn.Parameter(torch.randn(1, num_patches + 1, dim))
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    PreNorm(dim, LSA(dim, heads, dim_head, dropout)),
                    PreNorm(dim, FeedForward(dim, mlp_dim, dropout)),
                ]
            )
            for _ in range(depth)
        )
        self.mlp_head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_classes))

    def forward(self, img):
        x = self.to_patch_embedding(img)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.dropout(x + self.pos_embedding[:, : x.shape[1]])
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.mlp_head(x[:, 0])


# this project's name of each of its modules and parameters
NAMES = (
    ("to_patch_embedding.norm", "embedding.norm"),
    ("to_patch_embedding.linear", "embedding.patches"),
    ("pos_embedding", "embedding.positions_ND"),
    ("cls_token", "embedding.class_D"),
    ("layers.", "blocks."),
    (".0.norm", ".mixer_norm"),
    (".1.norm", ".ffn_norm"),
    ("0.fn.temperature", "mixer.log_temperature"),
    ("0.fn.to_qkv", "mixer.qkv"),
    ("0.fn.to_out", "mixer.out"),
    ("1.fn.net.0", "ffn.hidden"),
    ("1.fn.net.3", "ffn.out"),
    ("mlp_head.0", "final_norm"),
    ("mlp_head.1", "head"),
)
