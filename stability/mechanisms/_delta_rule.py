"""Delta rule with decay, computed in chunks by matrix products.

S_t = (I − β_t k_t k_tᵀ) Diag(a_t) S_{t−1} + β_t k_t v_tᵀ and y_t = S_tᵀ q_t, in M chunks of C positions. V is the value
width per head here. Within a chunk, position i adds k_i u_iᵀ to the state, and the u solve a triangular system. This WY
form is from Yang et al. 2024, arXiv:2406.06484, section 3; with decay from Yang et al. 2025, arXiv:2412.06464, section
3.3; with decay per feature from Kimi Team 2025, arXiv:2510.26692, section 3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from stability.models.passes import at_least_float32, in_float32


def delta_rule(
    q_BHNK: Float[Tensor, "B H N K"],
    k_BHNK: Float[Tensor, "B H N K"],
    v_BHNV: Float[Tensor, "B H N V"],
    beta_BHN: Float[Tensor, "B H N"],
    log_decay: Float[Tensor, "B H N *"] | None = None,
    *,
    chunk: int,
) -> Float[Tensor, "B H N V"]:
    """Return y_t, each position's read after its own write, in float32 or wider.

    β = 0 and ln a = 0, as at padding, leave the state unchanged. Time and memory are linear in N.

    Args:
        q_BHNK: queries.
        k_BHNK: keys.
        v_BHNV: values.
        beta_BHN: write strengths β.
        log_decay: ln a ≤ 0, (…, K) per key feature or (…, 1) shared by all; None without decay.
        chunk: positions computed at once, a power of two; does not change the result.
    """
    num, size = q_BHNK.shape[2], chunk_size(chunk, q_BHNK.shape[2])
    with in_float32(q_BHNK.device):
        q, k, v, beta = (_split_into_chunks(x, size) for x in (q_BHNK, k_BHNK, v_BHNV, beta_BHN[..., None]))
        if log_decay is None:
            scores, overlaps = (torch.cat((q, k), -2) @ k.mT).split(size, -2)
            scores, first, last, kept = scores.tril(), k, k, torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
            q_first = q
        else:
            decay = _split_into_chunks(log_decay, size).exp()
            scores, overlaps, since, until = _compute_decayed_products(q, k, decay)
            first, last, q_first = k * since, k * until, q * since
            kept = since[..., -1, :, None] * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        # (I + strictly lower part of β_i k_i·k_j) U = β v; with the state S before the chunk it is U − W S
        wanted = beta * torch.cat((v, first), -1)
        solved = torch.linalg.solve_triangular(beta * overlaps, wanted, upper=False, unitriangular=True)
        u, w = solved.split((v.shape[-1], k.shape[-1]), -1)
        before = _carry_states(kept - last.mT @ w, last.mT @ u)
        y = q_first @ before + scores @ (u - w @ before)
        return y.flatten(2, 3)[:, :, :num]


def chunk_size(chunk: int, num_positions: int) -> int:
    """Return ``chunk``, or the power of two that covers a shorter sequence."""
    return min(chunk, 1 << (num_positions - 1).bit_length())


def products_per_chunk(size: int, key_width: int, value_width: int, *, decays: bool) -> float:
    """Return the multiply-adds of one chunk of one head.

    They include the matrix products and the triangular system.

    Args:
        size: positions per chunk.
        key_width: K.
        value_width: V.
        decays: whether the state decays.
    """
    both = key_width + value_width
    pairs = size * (size + 1) * key_width if decays else 2 * size * size * key_width
    system = size * (size - 1) / 2 * both
    state = size * key_width * both + key_width * key_width * value_width
    return pairs + system + state + 2 * size * key_width * value_width + size * size * value_width


def _split_into_chunks(x: Tensor, size: int) -> Float[Tensor, "B H M C *"]:
    """Return x (B, H, N, …) in chunks, padded with zeros: no writes, no decay."""
    return F.pad(at_least_float32(x), (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def _compute_decayed_products(q: Tensor, k: Tensor, decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return decayed products q·k and k·k, and decays from each chunk's start and to its end.

    Products, both (…, C, C): Σ_K q_i k_j Π_{j < l ≤ i} a_l for pairs j ≤ i in each chunk, 0 for others. The second has
    k for q. Decays, (…, C, K) or (…, C, 1): the product of a from the chunk's start through each position, and the
    product from after each position to the chunk's end.
    """
    # Blocks are merged into blocks twice as large: between two halves each decay is one from i back to the border times
    # one from there to j. Every factor is ≤ 1: nothing overflows, and no large logarithms are subtracted.
    rows = torch.stack((q, k), -2)  # (…, C, 2, K)
    products = (rows * k[..., None, :]).sum(-1)[..., None, :, None]  # (…, blocks, positions, 2, positions)
    since, until = decay[..., None, :], torch.ones_like(decay)[..., None, :]
    while (half := since.shape[-2]) < decay.shape[-2]:
        since_left, since_right = _halves(since, -3)
        until_left, until_right = _halves(until, -3)
        later = rows.unflatten(-3, (-1, 2, half)).select(-4, 1) * since_right[..., None, :]
        earlier = k.unflatten(-2, (-1, 2, half)).select(-3, 0) * until_left
        between = (later.flatten(-3, -2) @ earlier.mT).unflatten(-2, (half, 2))
        left, right = _halves(products, -4)
        products = torch.cat((F.pad(left, (0, half)), torch.cat((between, right), -1)), -3)
        since = torch.cat((since_left, since_right * since_left[..., -1:, :]), -2)
        until = torch.cat((until_left * since_right[..., -1:, :], until_right), -2)
    scores, overlaps = products.squeeze(-4).unbind(-2)
    return scores, overlaps, since.squeeze(-3), until.squeeze(-3)


def _halves(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Return every first and every second block of ``x`` along ``dim``."""
    return x.unflatten(dim, (-1, 2)).unbind(dim)


def _carry_states(carried_BHMKK: Tensor, written_BHMKV: Tensor) -> Float[Tensor, "B H M K V"]:
    """Return the state at each chunk's start: S ← P S + X, from zero."""
    state_BHKV = torch.zeros_like(written_BHMKV[:, :, 0])
    states = [state_BHKV]
    for carried_BHKK, written_BHKV in list(zip(carried_BHMKK.unbind(2), written_BHMKV.unbind(2), strict=True))[:-1]:
        state_BHKV = carried_BHKK @ state_BHKV + written_BHKV
        states.append(state_BHKV)
    return torch.stack(states, 2)
