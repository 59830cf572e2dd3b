"""Slow, literal float64 forms that share no code with the mechanisms."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor


def rotated(u_NK: Tensor, base: float = 10_000.0) -> Tensor:
    """RoPE as a product of complex numbers: the halves of u are real and imaginary parts."""
    num_positions, width = u_NK.shape
    angles = [[position * base ** (-2 * k / width) for k in range(width // 2)] for position in range(num_positions)]
    angle_NJ = torch.tensor(angles, dtype=torch.float64)
    turned_NJ = torch.complex(*u_NK.chunk(2, 1)) * torch.polar(torch.ones_like(angle_NJ), angle_NJ)
    return torch.cat([turned_NJ.real, turned_NJ.imag], 1).to(u_NK.dtype)


def softmax_attention(module: torch.nn.Module, x_BND: Tensor, visible_BNN: Tensor) -> Tensor:
    """Explicit softmax over a dense set of visible pairs, from the weights of a module with ``qkv`` and ``out``."""
    heads, width = module.heads, x_BND.shape[-1]
    head_width = width // heads
    outputs = []
    for x_ND, visible_NN in zip(x_BND, visible_BNN, strict=True):
        q_ND, k_ND, v_ND = (
            x_ND @ module.qkv.weight[row : row + width].T + module.qkv.bias[row : row + width]
            for row in (0, width, 2 * width)
        )
        of_heads = []
        for start in range(0, width, head_width):
            part = slice(start, start + head_width)
            weight_NN = torch.exp(rotated(q_ND[:, part]) @ rotated(k_ND[:, part]).T / head_width**0.5) * visible_NN
            of_heads.append(weight_NN / weight_NN.sum(1, keepdim=True) @ v_ND[:, part])
        outputs.append(torch.cat(of_heads, 1) @ module.out.weight.T + module.out.bias)
    return torch.stack(outputs)


def consensus_edge_weight(module: torch.nn.Module, head: int, y_i: Tensor, y_j: Tensor) -> Tensor:
    """R_ij of one head by Algorithm 2, line by line; ``y_i, y_j``: the head's slices of the two embeddings."""
    return _edge(module, head, y_i, y_j)[0]


def edge_norm_bound(module: torch.nn.Module, head: int, y_i: Tensor, y_j: Tensor) -> float:
    """α + β of the same edge, which its R does not exceed."""
    return _edge(module, head, y_i, y_j)[1]


def _edge(module: torch.nn.Module, head: int, y_i: Tensor, y_j: Tensor) -> tuple[Tensor, float]:
    hidden, rank, head_width = module.config.edge_hidden, module.config.rank, len(y_i)
    pre = module.pair_weight[head, 0] @ y_i + module.pair_weight[head, 1] @ y_j + module.pair_bias[head]
    phi = 0.5 * pre * (1 + torch.erf(pre / 2**0.5))
    alpha = torch.log1p(torch.exp(module.scalar_weight[head, 0] @ phi[:hidden] + module.scalar_bias[head, 0]))
    if rank == 0:
        return alpha * torch.eye(head_width, dtype=y_i.dtype), float(alpha.detach())
    phi_beta, phi_lambda = (phi, phi) if module.config.edge_mlp == "shared" else phi[hidden:].split(hidden)
    beta = torch.log1p(torch.exp(module.scalar_weight[head, 1] @ phi_beta + module.scalar_bias[head, 1]))
    rows = (module.lambda_weight[head] @ phi_lambda + module.lambda_bias[head]).reshape(rank, head_width)
    rows = torch.stack([row / row.norm() if row.norm() > 0 else row for row in rows]) / rank**0.5
    return alpha * torch.eye(head_width, dtype=y_i.dtype) + beta * rows.T @ rows, float((alpha + beta).detach())


@cache
def rotation(position: int, head_width: int, base: float = 10_000.0) -> Tensor:
    """ρ(p) as a dense matrix (Eq. 42): u ⊙ cos θ + (P u) ⊙ sin θ."""
    half = head_width // 2
    angle = position * base ** (-2 * torch.arange(half, dtype=torch.float64) / head_width)
    cos, sin = torch.diag(angle.cos()), torch.diag(angle.sin())
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])


def block_operator(
    weights: dict[tuple[int, int], Tensor], num_positions: int, head_width: int, rope: str = "none"
) -> Tensor:
    """The dense (N·K, N·K) matrix A of g = A u (Algorithm 1, line 8). With R_ij for (i, j) and rope="none" it is D_out
    + D_in − W − Wᵀ, with "gradient" ρᵀ(D_out + D_in − W − Wᵀ)ρ."""
    a = torch.zeros(num_positions, num_positions, head_width, head_width, dtype=torch.float64)
    for (i, j), r in weights.items():
        at_i, at_j = {"none": (0, 0), "absolute": (i, j), "relative": (i - j, 0), "gradient": (i, j)}[rope]
        of_i, of_j = r @ rotation(at_i, head_width), r @ rotation(at_j, head_width)
        back_i, back_j = (rotation(-end if rope == "gradient" else 0, head_width) for end in (i, j))
        a[i, i] += back_i @ of_i  # the out-edge of i: R_ij(ρu_i − ρu_j)
        a[i, j] -= back_i @ of_j
        a[j, i] -= back_j @ of_i  # the in-edge of j: −R_ij(ρu_i − ρu_j)
        a[j, j] += back_j @ of_j
    return a.permute(0, 2, 1, 3).reshape(num_positions * head_width, -1)


def step_sizes(module: torch.nn.Module) -> list[float]:
    if module.config.step in ("fixed", "bounded"):
        return [module.config.step_size] * module.config.iterations
    return [math.log1p(math.exp(value)) for value in module.step_before_softplus.tolist()]


def consensus_on(module: torch.nn.Module, x_BND: Tensor, edges: list[dict[tuple[int, int], float]]) -> Tensor:
    """The layer's output, by dense operators, on each sequence's edges {(i, j): gate}, R by Algorithm 2 times the
    gate."""
    head_width = x_BND.shape[-1] // module.heads
    u_BND = (x_BND @ module.source.weight.T + module.source.bias).clone()
    for b, gates in enumerate(edges):
        for head in range(module.heads):
            part = slice(head * head_width, (head + 1) * head_width)
            weights = _edge_weights(module, head, x_BND[b, :, part], gates)
            operator = block_operator(weights, x_BND.shape[1], head_width, module.config.rope)
            for step_size in step_sizes(module):
                u_BND[b, :, part] -= step_size * (operator @ u_BND[b, :, part].flatten()).unflatten(0, (-1, head_width))
    return u_BND @ module.out.weight.T + module.out.bias


def _edge_weights(
    module: torch.nn.Module, head: int, y_NK: Tensor, gates: dict[tuple[int, int], float]
) -> dict[tuple[int, int], Tensor]:
    weights = {(i, j): gate * consensus_edge_weight(module, head, y_NK[i], y_NK[j]) for (i, j), gate in gates.items()}
    if module.config.step != "bounded" or not weights:
        return weights
    degrees = [0.0] * len(y_NK)
    for (i, j), gate in gates.items():
        norm = float(gate) * edge_norm_bound(module, head, y_NK[i], y_NK[j])
        degrees[i] += norm
        degrees[j] += norm
    return {ends: r / (2 * max(degrees)) for ends, r in weights.items()}


def cross_consensus(
    module: torch.nn.Module,
    x_BND: Tensor,
    context_BJD: Tensor,
    edges: list[set[tuple[int, int]]],
    base: float = 10_000.0,
) -> Tensor:
    """Algorithm 6 as it stands: a loop over heads, source positions and their edges (i, j); ``edges``: each
    sequence's; ``base``: of the rotations."""
    head_width = x_BND.shape[-1] // module.heads
    outputs = []
    for x_ND, context_JD, of_row in zip(x_BND, context_BJD, edges, strict=True):
        u_ND = x_ND @ module.source.weight.T + module.source.bias
        v_JD = context_JD @ module.context.weight.T + module.context.bias
        updated_ND = u_ND.clone()
        for head in range(module.heads):
            part = slice(head * head_width, (head + 1) * head_width)
            for i in range(len(x_ND)):
                u = u_ND[i, part]
                of_i = [
                    (j, consensus_edge_weight(module, head, x_ND[i, part], context_JD[j, part]))
                    for j in range(len(context_JD))
                    if (i, j) in of_row
                ]
                if module.config.step == "bounded":
                    norms = [edge_norm_bound(module, head, x_ND[i, part], context_JD[j, part]) for j, _ in of_i]
                    of_i = [(j, r / sum(norms)) for j, r in of_i]
                for step_size in step_sizes(module):
                    g = torch.zeros_like(u)
                    for j, r in of_i:
                        by_i, by_j, back = {
                            "none": (0, 0, 0),
                            "absolute": (i, j, 0),
                            "relative": (i - j, 0, 0),
                            "gradient": (i, j, -i),
                        }[module.config.rope]
                        turn_i, turn_j, turn_back = (rotation(p, head_width, base) for p in (by_i, by_j, back))
                        g = g + turn_back @ r @ (turn_i @ u - turn_j @ v_JD[j, part])
                    u = u - step_size * g
                updated_ND[i, part] = u
        outputs.append(updated_ND @ module.out.weight.T + module.out.bias)
    return torch.stack(outputs)
