"""Measure a consensus layer's learned graph: spectrum of L̄ per head, filter, and energies.

Beside it attention as a low-pass filter: the action of its weights A on position differences, for 1 − 2ηλ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from stability.mechanisms import AbstractAttention, AbstractConsensus
from stability.probes.layers.laplacian import BlockLaplacian, Density, connectivity

HALVINGS = 60  # of the interval between two roots: beyond float64's resolution


def ropes_of(layers: Iterable[nn.Module]) -> frozenset[str]:
    """Return the rotations used by the consensus layers among ``layers``."""
    return frozenset(layer.rotation for layer in layers if isinstance(layer, AbstractConsensus))


@dataclass(frozen=True)
class HeadSpectrum:
    """One head on one sequence: numbers, density, and filter response at each node.

    The numbers' columns are `schema.PROBE_COLUMNS["spectra"]`.
    """

    numbers: dict[str, Any]
    density: Density
    response: np.ndarray


def consensus_spectra(
    layer: AbstractConsensus,
    x_BND: Tensor,
    *,
    probes: int,
    products: int,
    seed: int,
) -> Iterator[HeadSpectrum]:
    """Yield each head of a consensus layer on one sequence, in float64.

    The operator is L̄ = ½(D_out + D_in − W − Wᵀ) from the layer's own R_ij (`BlockLaplacian`), and the filter is I −
    2ηL̄. T iterations have the factors Π_t (1 − 2η_tλ); the largest η_t decides oscillation. Without RoPE the filter is
    the layer. With ``gradient`` the layer filters the rotated ũ and rotates back: u − 2η·ρᵀL̄ρu, with L̄'s spectrum.
    With ``absolute`` the layer is u − 2η·L̄ũ, from disagreements in ũ; constants are not preserved, so spectrum and
    gain describe L̄, not the layer. The energy uses the layer's own disagreements. The variance is of u, before and
    after the whole layer.

    Args:
        layer: the consensus layer.
        x_BND: its input (1, N, D).
        probes: random vectors for the density.
        products: matrix-vector products for each.
        seed: of the vectors.
    """
    with torch.no_grad():
        source_E, target_E, weight_BHEKK = layer.edge_weights(x_BND)
        before_HNK = _split_heads(layer.source(x_BND), layer.heads)
        # u′: the layer's output with W_o = I and b_o = 0
        identity = torch.eye(len(layer.out.weight), dtype=x_BND.dtype, device=x_BND.device)
        biases = {f"out.{key}": torch.zeros_like(value) for key, value in layer.out.named_parameters() if key == "bias"}
        after_HNK = _split_heads(functional_call(layer, {"out.weight": identity, **biases}, (x_BND,)), layer.heads)
        steps_T = step_sizes(layer)
    source_E, target_E = source_E.cpu().numpy(), target_E.cpu().numpy()
    unweighted = connectivity(source_E, target_E, x_BND.shape[1])
    for head, (before_NK, after_NK) in enumerate(zip(before_HNK, after_HNK, strict=True)):
        weight_EKK = weight_BHEKK[0, head].double().cpu()
        laplacian = BlockLaplacian(source_E, target_E, weight_EKK.numpy(), x_BND.shape[1])
        numbers = _numbers(laplacian, steps_T, unweighted) | _variances(before_NK, after_NK)
        energy = _energy_of(layer, laplacian, source_E, target_E, weight_EKK)
        numbers |= {"energy_before": energy(before_NK), "energy_after": energy(after_NK)}
        density = laplacian.density(probes, products, seed)
        response = filter_response(density.nodes, steps_T)
        if np.isnan(numbers["non_oscillating"]):
            numbers["non_oscillating"] = float(
                (density.weights * (2 * steps_T.max() * density.nodes <= 1)).sum() / probes
            )
        yield HeadSpectrum(numbers, density, response)


@torch.no_grad()
def step_sizes(layer: AbstractConsensus) -> np.ndarray:
    """Return each iteration's η, (T,)."""
    return np.array([float(eta) for eta in layer.step_sizes()])


def filter_response(eigenvalues: np.ndarray, steps_T: np.ndarray) -> np.ndarray:
    """Return Π_t (1 − 2η_tλ) at each λ (Eqs. 9 and 10)."""
    return np.prod(1 - 2 * steps_T[:, None] * np.asarray(eigenvalues)[None, :], axis=0)


def largest_factor(low: float, high: float, steps_T: np.ndarray) -> float:
    """Return max |Π_t (1 − 2η_tλ)| over low ≤ λ ≤ high.

    Args:
        low: smallest λ.
        high: largest λ.
        steps_T: η_t.
    """
    # between two roots log|product| is concave with slope Σ_t 1/(λ − root_t) from ∞ to −∞: bisection finds the critical
    # point; outside all roots the maximum is at an end of the interval
    roots_T = 1 / (2 * steps_T)
    points = [low, high]
    for left, right in itertools.pairwise(np.unique(roots_T)):
        for _ in range(HALVINGS):
            middle = 0.5 * (left + right)
            if not left < middle < right:
                break
            left, right = (middle, right) if (1 / (middle - roots_T)).sum() > 0 else (left, middle)
        if low < left < high:
            points.append(float(left))
    return float(np.abs(filter_response(np.array(points), steps_T)).max())


def _energy_of(
    layer: AbstractConsensus, laplacian: BlockLaplacian, source_E: np.ndarray, target_E: np.ndarray, weight_EKK: Tensor
) -> Callable[[Tensor], float]:
    """Return u (N, K) ↦ ½ Σ δᵀR_ijδ over directed edges.

    δ is the layer's own: ũ_i − ũ_j, ρ(i − j)u_i − u_j, or u_i − u_j. The second equals ρ(−j)(ũ_i − ũ_j): the energy of
    ũ on edges ρ(j)R_ijρ(j)ᵀ.
    """
    if layer.rotation == "none":
        return lambda u_NK: laplacian.energy(u_NK.numpy())
    if layer.rotation == "relative":
        eye_NKK = torch.eye(laplacian.width, dtype=torch.float64).expand(laplacian.num_nodes, -1, -1)
        rho_EKK = layer.rope(eye_NKK, position_dim=0).mT[torch.from_numpy(target_E)]
        laplacian = BlockLaplacian(source_E, target_E, (rho_EKK @ weight_EKK @ rho_EKK.mT).numpy(), laplacian.num_nodes)
    return lambda u_NK: laplacian.energy(layer.rope(u_NK).numpy())


def _split_heads(u_BND: Tensor, heads: int) -> Tensor:
    """Split (1, N, D) into heads, (H, N, K), on the CPU."""
    return u_BND[0].unflatten(-1, (heads, -1)).transpose(0, 1).double().cpu()


def _numbers(laplacian: BlockLaplacian, steps_T: np.ndarray, unweighted: float) -> dict[str, Any]:
    """Return eigenvalues, Fiedler bounds, and the share of non-oscillating eigenvalues."""
    # μI ⪯ S_ij ⪯ MI gives μ·L⊗I ⪯ L̄ ⪯ M·L⊗I for the unweighted L, all with the constants as null space; by Courant and
    # Fischer μ·λ_1(L) ≤ Fiedler ≤ M·λ_1(L) (no formula in the paper: end of section 4)
    largest, fiedler = laplacian.largest(), laplacian.fiedler()
    lightest, heaviest = laplacian.weight_bounds()
    eta = float(steps_T.max())
    limit = 1 / (2 * eta)
    below = laplacian.size if largest <= limit else laplacian.count_below(limit)
    return {
        "num_positions": laplacian.num_nodes,
        "head_width": laplacian.width,
        "components": laplacian.num_components,
        "step_size": eta,
        "step_limit": 1 / (2 * largest),
        "largest": largest,
        "fiedler": fiedler,
        "fiedler_low": max(lightest, 0.0) * unweighted,
        "fiedler_high": heaviest * unweighted,
        "graph_fiedler": unweighted,
        "non_oscillating": np.nan if below is None else below / laplacian.size,
        "gain": largest_factor(fiedler, largest, steps_T),
    }


def _variances(before_NK: Tensor, after_NK: Tensor) -> dict[str, float]:
    """Return ‖u − ū‖² before and after; ū is the mean over positions."""
    return {
        f"variance_{when}": float((u_NK - u_NK.mean(0)).square().sum())
        for when, u_NK in (("before", before_NK), ("after", after_NK))
    }


@dataclass(frozen=True)
class HeadFilter:
    """One head on one sequence: numbers by column, and N − 1 singular values of A.

    The singular values are those on zero-mean signals, in descending order.
    """

    numbers: dict[str, Any]
    singular_values: np.ndarray


def low_pass(layer: AbstractAttention, x_BND: Tensor) -> Iterator[HeadFilter]:
    """Yield each head's filter of an attention layer on one sequence.

    With P = I − 11ᵀ/N, ``gain`` is the largest singular value of PAP: the largest amplification of any difference
    between positions. ``second_eigenvalue`` is the largest modulus of PAP's eigenvalues: A's own without the 1 of A1 =
    1 (NaN if A's rows do not sum to 1). ``variance_*`` are ‖P·‖² of the values v, and of the layer's mixture: Av, or v
    − γAv for `attentionx`. For nearly hard attention A is far from normal, and its small eigenvalues are as uncertain
    as a root of rounding; the gain is accurate.

    Args:
        layer: the attention layer.
        x_BND: its input (1, N, D), without padding.
    """
    with torch.no_grad():
        a_BHNN, v_BHNK = layer.weights(x_BND).double(), layer.values(x_BND).double()
        mixed_BHNK = layer.mixed(a_BHNN, v_BHNK)  # all heads at once: a layer may have one coefficient per head
    for a_NN, v_NK, mixed_NK in zip(a_BHNN[0], v_BHNK[0], mixed_BHNK[0], strict=True):
        restricted_NN = _centre(_centre(a_NN).mT).mT
        values = torch.linalg.svdvals(restricted_NN).cpu().numpy()[:-1]
        before, after = (_centre(part).square().sum() for part in (v_NK, mixed_NK))
        numbers = {
            "num_positions": len(a_NN),
            "head_width": v_NK.shape[-1],
            "gain": float(values[0]),
            "second_eigenvalue": _second_eigenvalue(a_NN.cpu().numpy()) if layer.rows_sum_to_one else math.nan,
            "variance_before": float(before),
            "variance_after": float(after),
        }
        yield HeadFilter(numbers, values)


def _second_eigenvalue(a_NN: np.ndarray) -> float:
    """Return the modulus of A's second eigenvalue; NaN if LAPACK does not converge."""
    try:
        # from A itself: its entries are exact relative to their own size, PAP's only relative to the largest
        return float(np.sort(np.abs(np.linalg.eigvals(a_NN)))[-2])
    except np.linalg.LinAlgError:
        return math.nan


def _centre(x_NK: Tensor) -> Tensor:
    """Return P x: every column minus its mean."""
    return x_NK - x_NK.mean(0)
