"""Measure what the learned graph of a consensus layer does to its signal: the spectrum of L̄ per head, the filter it
makes, energies before and after."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from stability.mechanisms import AbstractConsensus
from stability.probes.layers.laplacian import BlockLaplacian, Density, connectivity

HALVINGS = 60  # of the interval between two roots: beyond float64's resolution


def ropes_of(layers: Iterable[nn.Module]) -> frozenset[str]:
    """Return the rotations that the consensus layers among a model's layers use."""
    return frozenset(layer.rotation for layer in layers if isinstance(layer, AbstractConsensus))


@dataclass(frozen=True)
class HeadSpectrum:
    """One head on one sequence: its numbers by the columns of `schema.PROBE_COLUMNS["spectra"]`, its density, the
    filter's factor at each node."""

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
    """Yield each head of a consensus layer on one sequence x (1, N, D), float64.

    The operator is L̄ = ½(D_out + D_in − W − Wᵀ) from the layer's own R_ij (see `BlockLaplacian`), the filter that of
    this graph alone, I − 2ηL̄; with T iterations the factors Π_t (1 − 2η_tλ), and the largest η_t decides what
    oscillates. Without RoPE the layer is this filter. With ``gradient`` it is this filter of the rotated ũ, turned
    back: u − 2η·ρᵀL̄ρu, an operator with L̄'s spectrum. With ``absolute`` it is u − 2η·L̄ũ, the disagreements being
    those of ũ, so that constants do not stay: spectrum and gain are then those of L̄, not of the layer. The energy is
    that of the layer's own disagreements, and the variance, of u itself, what the layer as a whole did.
    """
    with torch.no_grad():
        source_E, target_E, weight_BHEKK = layer.edge_weights(x_BND)
        before_HNK = _by_head(layer.source(x_BND), layer.heads)
        after_HNK = _by_head(_updated(layer, x_BND), layer.heads)
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
    """Return η of each of the layer's iterations, (T,)."""
    return np.array([float(eta) for eta in layer.step_sizes()])


def filter_response(eigenvalues: np.ndarray, steps_T: np.ndarray) -> np.ndarray:
    """Return Π_t (1 − 2η_tλ) at each λ (Eqs. 9 and 10)."""
    return np.prod(1 - 2 * steps_T[:, None] * np.asarray(eigenvalues)[None, :], axis=0)


def largest_factor(low: float, high: float, steps_T: np.ndarray) -> float:
    """Return max |Π_t (1 − 2η_tλ)| over low ≤ λ ≤ high: no factor of an eigenvalue there is larger.

    The product's roots are 1/(2η_t). Between two neighbors the logarithm of its modulus is concave, and its slope Σ_t
    1/(λ − root_t) falls from ∞ to −∞: halving finds the one critical point. Outside of all roots the modulus is largest
    at an end of the interval.
    """
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
    """Return ½ Σ δᵀR_ijδ over directed edges as a function of u (N, K), with the layer's own δ: ũ_i − ũ_j, ρ(i − j)u_i
    − u_j, or u_i − u_j.

    The second is ρ(−j)(ũ_i − ũ_j): the energy of ũ on the edges ρ(j)R_ijρ(j)ᵀ.
    """
    if layer.rotation == "none":
        return lambda u_NK: laplacian.energy(u_NK.numpy())
    if layer.rotation == "relative":
        eye_NKK = torch.eye(laplacian.width, dtype=torch.float64).expand(laplacian.num_nodes, -1, -1)
        rho_EKK = layer.rope(eye_NKK, position_dim=0).mT[torch.from_numpy(target_E)]
        laplacian = BlockLaplacian(source_E, target_E, (rho_EKK @ weight_EKK @ rho_EKK.mT).numpy(), laplacian.num_nodes)
    return lambda u_NK: laplacian.energy(layer.rope(u_NK).numpy())


def _updated(layer: AbstractConsensus, x_BND: Tensor) -> Tensor:
    """Return u′: the layer's output with W_o = I and b_o = 0."""
    identity = torch.eye(len(layer.out.weight), dtype=x_BND.dtype, device=x_BND.device)
    biases = {f"out.{key}": torch.zeros_like(value) for key, value in layer.out.named_parameters() if key == "bias"}
    return functional_call(layer, {"out.weight": identity, **biases}, (x_BND,))


def _by_head(u_BND: Tensor, heads: int) -> Tensor:
    """Split (1, N, D) into heads, (H, N, K), on the CPU."""
    return u_BND[0].unflatten(-1, (heads, -1)).transpose(0, 1).double().cpu()


def _numbers(laplacian: BlockLaplacian, steps_T: np.ndarray, unweighted: float) -> dict[str, Any]:
    """Return eigenvalues, the bounds of the Fiedler value, and how much of the spectrum the filter leaves without a
    change of sign.

    All S_ij ⪰ μI and ⪯ MI give μ·L⊗I ⪯ L̄ ⪯ M·L⊗I for the unweighted L; all three vanish exactly on the constants, so
    by Courant and Fischer μ·λ_1(L) ≤ Fiedler ≤ M·λ_1(L). (The paper states no formula: end of section 4.)
    """
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
    """Return ‖u − ū‖² before and after: what is not the same at every position."""
    return {
        f"variance_{when}": float((u_NK - u_NK.mean(0)).square().sum())
        for when, u_NK in (("before", before_NK), ("after", after_NK))
    }
