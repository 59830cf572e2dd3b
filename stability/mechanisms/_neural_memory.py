"""Memories trained while they read, computed in matrix products over blocks.

Training is gradient descent on the recall error with momentum and forgetting (Behrouz et al. 2025, arXiv:2501.00663).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

# Positions per block in the linear memory; larger blocks have larger triangular systems.
LINEAR_BLOCK = 32


@dataclass(frozen=True)
class Gates:
    """Gates for a memory M and its momentum S per position, (B, H, N) each.

    S ← η S − θ ∇ and M ← (1 − α) M + p S.

    Attributes:
        log_kept: ln(1 − α) ≤ 0.
        log_carried: ln η ≤ 0; None without momentum (η = 0).
        rate: θ.
        added: p, 1 at valid positions, 0 at positions that leave the memory unchanged.
    """

    log_kept: Tensor
    log_carried: Tensor | None
    rate: Tensor
    added: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Gates:
        carried = None if self.log_carried is None else function(self.log_carried)
        return Gates(function(self.log_kept), carried, function(self.rate), function(self.added))


@dataclass(frozen=True)
class Unrolled:
    """The recurrence in `Gates` unrolled over blocks of L positions.

    Everything is linear in the state Z at a block's start: M alone (R = 1), or M and S (R = 2). ∇_j is the gradient at
    position j in the block. M_t = Σ_r read_tr Z_r − Σ_{j ≤ t} inside_tj ∇_j. At the block's end Z_r = Σ_s carry_rs Z_s
    − Σ_j write_jr ∇_j.

    Attributes:
        read: (B, H, G, L, R).
        inside: (B, H, G, L, L).
        carry: (B, H, G, R, R).
        write: (B, H, G, L, R).
    """

    read: Tensor
    inside: Tensor
    carry: Tensor
    write: Tensor

    def shift_to_chunk_starts(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Return ``read`` and ``inside`` for the memory before each position's chunk."""
        length = self.inside.shape[-1]
        before_L = torch.arange(length, device=self.inside.device) // chunk * chunk
        begin = torch.zeros_like(self.read[..., :1, :])
        begin = torch.cat([begin[..., :1] + 1, begin[..., 1:]], -1)  # before any update M is Z's M
        read = torch.cat([begin, self.read], -2).index_select(-2, before_L)
        return read, F.pad(self.inside, (0, 0, 1, 0)).index_select(-2, before_L)


def unroll(gates: Gates) -> Unrolled:
    """Return the unrolled recurrence for gates in blocks, (B, H, G, L)."""
    kept = _products(gates.log_kept)
    added = kept * gates.added[..., None, :]
    read_M, rate = gates.log_kept.cumsum(-1).exp(), gates.rate[..., None, :]
    if gates.log_carried is None:
        inside = added * rate
        read, write = read_M[..., None], inside[..., -1, :, None]
        return Unrolled(read, inside, read[..., -1:, :], write)
    surprise = _products(gates.log_carried) * rate  # S_t = of_S_t S − Σ_j surprise_tj ∇_j
    of_S = gates.log_carried.cumsum(-1).exp()
    inside = added @ surprise
    read = torch.stack([read_M, (added @ of_S[..., None])[..., 0]], -1)
    last_S = torch.stack([torch.zeros_like(of_S[..., -1]), of_S[..., -1]], -1)
    carry = torch.stack([read[..., -1, :], last_S], -2)
    return Unrolled(read, inside, carry, torch.stack([inside[..., -1, :], surprise[..., -1, :]], -1))


def _products(log_factor: Tensor) -> Float[Tensor, "*rows L L"]:
    """Return Π_{j < l ≤ t} of the factors at (t, j), 0 for j > t.

    Computed as exp of a difference, never above 1.
    """
    until = log_factor.cumsum(-1)
    length = until.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool, device=until.device).triu(1)
    return (until[..., :, None] - until[..., None, :]).masked_fill(later, -math.inf).exp()


def linear_memory(q_BHNK: Tensor, k_BHNK: Tensor, v_BHNV: Tensor, gates: Gates, chunk: int) -> Float[Tensor, "B H N V"]:
    """Return the recall M_t q_t of a matrix M, initially zero.

    ∇_t = 2 (M k_t − v_t) k_tᵀ, at M before the first position in t's chunk.

    Args:
        q_BHNK: queries.
        k_BHNK: keys.
        v_BHNV: values.
        gates: (B, H, N) each.
        chunk: positions with gradients at the same M.
    """
    # Chunks shorter than LINEAR_BLOCK are processed several at once. Errors e_t = 2 (M k_t − v_t) in later chunks
    # depend on earlier ones, Σ_j inside_tj (k_t·k_j) e_j: a triangular system, inverted for all blocks at once.
    num = k_BHNK.shape[2]
    length = linear_block(num, chunk)
    q, k, v = (split_into_blocks(part, length) for part in (q_BHNK, k_BHNK, v_BHNV))
    u = unroll(gates.map(lambda part: split_into_blocks(part[..., None], length)[..., 0]))
    read, inside = u.shift_to_chunk_starts(chunk)
    asked = torch.cat([_multiply_by_factors(k, read), _multiply_by_factors(q, u.read)], -2)
    told = u.inside * (q @ k.mT)
    solving = None if length == chunk else _inverse(2 * inside * (k @ k.mT))
    written = _multiply_by_factors(k, u.write).mT
    state = k.new_zeros(*k.shape[:2], u.read.shape[-1], k.shape[-1] * v.shape[-1])
    outputs = []
    for n, (asked_n, v_n, told_n, written_n, carry_n) in enumerate(
        zip(*(part.unbind(2) for part in (asked, v, told, written, u.carry)), strict=True)
    ):
        of_keys, of_queries = (asked_n @ state.view(*k.shape[:2], -1, v.shape[-1])).split(length, -2)
        error = 2 * (of_keys - v_n)
        if solving is not None:
            error = solving[:, :, n] @ error
        outputs.append(of_queries - told_n @ error)
        state = carry_n @ state - (written_n @ error).view_as(state)
    return torch.cat(outputs, 2)[:, :, :num]


def linear_block(num_positions: int, chunk: int) -> int:
    """Return the positions per block in `linear_memory`: whole chunks."""
    return chunk * min(max(LINEAR_BLOCK // chunk, 1), -(-num_positions // chunk))


def _inverse(strictly_lower: Tensor) -> Tensor:
    """Return (1 + A)⁻¹ for strictly lower triangular A."""
    one = torch.eye(strictly_lower.shape[-1], dtype=strictly_lower.dtype, device=strictly_lower.device)
    return torch.linalg.solve_triangular(strictly_lower + one, one, upper=False, unitriangular=True)


def split_into_blocks(x: Tensor, length: int) -> Float[Tensor, "B H G L K"]:
    """Return (B, H, N, K) in blocks, zero-padded at the end."""
    num_blocks = -(-x.shape[2] // length)
    return F.pad(x, (0, 0, 0, num_blocks * length - x.shape[2])).unflatten(2, (num_blocks, length))


def _multiply_by_factors(x: Tensor, factor: Tensor) -> Float[Tensor, "*rows L RK"]:
    """Return x (…, L, K) times each factor (…, L, R), concatenated.

    One product then reads, or writes, both M and S.
    """
    return (factor[..., None] * x[..., None, :]).flatten(-2)


def silu(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x σ(x) and its derivative."""
    s = x.sigmoid()
    return x * s, s + x * s * (1 - s)


def tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return tanh x and its derivative."""
    y = x.tanh()
    return y, 1 - y * y


ACTIVATIONS = {"silu": silu, "tanh": tanh}


def mlp_memory(
    q_BHNK: Tensor,
    k_BHNK: Tensor,
    v_BHNV: Tensor,
    first_HFK: Tensor,
    gates: Gates,
    chunk: int,
    activation: str = "tanh",
) -> Float[Tensor, "B H N V"]:
    """Return the recall M_t(q_t) of a two-layer network M(x) = W₂ φ(W₁ x) / √F.

    ∇_t is the gradient of ‖M(k_t) − v_t‖² at M before the first position in t's chunk. W₂ is initially zero.

    Args:
        q_BHNK: queries.
        k_BHNK: keys.
        v_BHNV: values.
        first_HFK: initial W₁.
        gates: (B, H, N) each.
        chunk: positions with gradients at the same M.
        activation: φ, a key in `ACTIVATIONS`.
    """
    # with h = W₁k, z = φ(h)/√F and e = 2 (W₂z − v) the gradients are g kᵀ, g = (W₂ᵀe) ⊙ φ′(h)/√F, and e zᵀ
    (batch, heads, num, _), hidden, phi = k_BHNK.shape, first_HFK.shape[1], ACTIVATIONS[activation]
    scale = 1 / math.sqrt(hidden)
    q, k, v = (split_into_blocks(part, chunk) for part in (q_BHNK, k_BHNK, v_BHNV))
    u = unroll(gates.map(lambda part: split_into_blocks(part[..., None], chunk)[..., 0]))
    asked, told, written = _multiply_by_factors(q, u.read), u.inside * (q @ k.mT), _multiply_by_factors(k, u.write).mT
    of_first = first_HFK.mT.expand(batch, -1, -1, -1)[:, :, None]
    first = torch.cat([of_first, of_first.new_zeros(batch, heads, u.read.shape[-1] - 1, *of_first.shape[3:])], 2)
    second = v.new_zeros(batch, heads, u.read.shape[-1], hidden, v.shape[-1])
    outputs = []
    in_turn = (k, v, asked, told, written, u.read, u.inside, u.write, u.carry)
    for k_n, v_n, asked_n, told_n, written_n, read_n, inside_n, write_n, carry_n in zip(
        *(part.unbind(2) for part in in_turn), strict=True
    ):
        z, slope = (scale * part for part in phi(k_n @ first[:, :, 0]))
        error = 2 * (z @ second[:, :, 0] - v_n)
        gradient = (error @ second[:, :, 0].mT) * slope
        z_q = scale * phi(asked_n @ first.flatten(2, 3) - told_n @ gradient)[0]
        recalled = _multiply_by_factors(z_q, read_n) @ second.flatten(2, 3)
        outputs.append(recalled - (inside_n * (z_q @ z.mT)) @ error)
        first = _carry(carry_n, first) - (written_n @ gradient).view_as(first)
        second = _carry(carry_n, second) - (_multiply_by_factors(z, write_n).mT @ error).view_as(second)
    return torch.cat(outputs, 2)[:, :, :num]


def _carry(carry_BHRR: Tensor, state: Tensor) -> Tensor:
    """Return M and S, (B, H, R, I, O), after a block without gradients."""
    return (carry_BHRR @ state.flatten(3)).view_as(state)
