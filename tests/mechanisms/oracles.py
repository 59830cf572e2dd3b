"""Slow, literal float64 forms that share no code with the mechanisms."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(u_NK: Tensor, base: float = 10_000.0) -> Tensor:
    """RoPE as a product of complex numbers: the halves of u are real and imaginary parts."""
    num_positions, width = u_NK.shape
    half = width // 2
    turned = torch.empty_like(u_NK)
    for position in range(num_positions):
        for k in range(half):
            angle = torch.tensor(position * base ** (-2 * k / width), dtype=torch.float64)
            number = torch.complex(u_NK[position, k], u_NK[position, half + k]) * torch.polar(torch.ones_like(angle), angle)
            turned[position, k], turned[position, half + k] = number.real, number.imag
    return turned


def softmax_attention(module: torch.nn.Module, x_BND: Tensor, visible_BNN: Tensor) -> Tensor:
    """Explicit softmax over a dense set of visible pairs, from the weights of a module with ``qkv`` and ``out``."""
    heads, width = module.heads, x_BND.shape[-1]
    head_width = width // heads
    outputs = []
    for x_ND, visible_NN in zip(x_BND, visible_BNN, strict=True):
        q_ND, k_ND, v_ND = (x_ND @ module.qkv.weight[row : row + width].T + module.qkv.bias[row : row + width] for row in (0, width, 2 * width))
        of_heads = []
        for start in range(0, width, head_width):
            part = slice(start, start + head_width)
            weight_NN = torch.exp(rotated(q_ND[:, part]) @ rotated(k_ND[:, part]).T / head_width**0.5) * visible_NN
            of_heads.append(weight_NN / weight_NN.sum(1, keepdim=True) @ v_ND[:, part])
        outputs.append(torch.cat(of_heads, 1) @ module.out.weight.T + module.out.bias)
    return torch.stack(outputs)


def consensus_edge_weight(module: torch.nn.Module, head: int, y_i: Tensor, y_j: Tensor) -> Tensor:
    """R_ij of one head by Algorithm 2, line by line; ``y_i, y_j``: the head's slices of the two embeddings."""
    hidden, rank, head_width = module.config.edge_hidden, module.config.rank, len(y_i)
    pre = module.pair_weight[head, 0] @ y_i + module.pair_weight[head, 1] @ y_j + module.pair_bias[head]
    phi = 0.5 * pre * (1 + torch.erf(pre / 2**0.5))
    phi_alpha, phi_beta, phi_lambda = (phi, phi, phi) if module.config.edge_mlp == "shared" else phi.split(hidden)
    alpha = torch.log1p(torch.exp(module.scalar_weight[head, 0] @ phi_alpha + module.scalar_bias[head, 0]))
    beta = torch.log1p(torch.exp(module.scalar_weight[head, 1] @ phi_beta + module.scalar_bias[head, 1]))
    rows = (module.lambda_weight[head] @ phi_lambda + module.lambda_bias[head]).reshape(rank, head_width)
    rows = torch.stack([row / row.norm() if row.norm() > 0 else row for row in rows]) / rank**0.5
    return alpha * torch.eye(head_width, dtype=y_i.dtype) + beta * rows.T @ rows


def consensus_from_edges(module: torch.nn.Module, x_BND: Tensor) -> Tensor:
    """The layer's output from its edge weights alone, with the dense block matrix g = (D_out + D_in − W − Wᵀ) ũ."""
    source_E, target_E, r_BHEKK = module.edge_weights(x_BND)
    batch, num_positions, width = x_BND.shape
    head_width = width // module.heads
    u_BND = x_BND @ module.source.weight.T + module.source.bias
    updated_BND = u_BND.clone()
    for b in range(batch):
        for head in range(module.heads):
            part = slice(head * head_width, (head + 1) * head_width)
            w = torch.zeros(num_positions, num_positions, head_width, head_width, dtype=x_BND.dtype)
            for edge, (i, j) in enumerate(zip(source_E.tolist(), target_E.tolist(), strict=True)):
                w[i, j] = r_BHEKK[b, head, edge]
            degree = torch.block_diag(*(w.sum(1) + w.sum(0)))
            dense = w.permute(0, 2, 1, 3).reshape(num_positions * head_width, -1)
            u_NK = u_BND[b, :, part]
            turned_NK = rotated(u_NK) if module.config.rope == "absolute" else u_NK
            g = (degree - dense - dense.T) @ turned_NK.reshape(-1)
            updated_BND[b, :, part] = u_NK - module.config.step_size * g.reshape(num_positions, head_width)
    return updated_BND @ module.out.weight.T + module.out.bias
