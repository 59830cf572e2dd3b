"""Sample token sequences from noise, for masked, score-entropy and autoregressive models.

Each sampler updates ``tokens_BN`` in place and yields after every step. B sequences, N positions, V tokens in the
vocabulary (without the mask, id V).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

TIED = 1 - 1e-5  # relative; closer probabilities are equal in float32
LAST_TIME = 1e-3  # the smallest t in score-entropy training
Graph = Literal["absorbing", "uniform"]
Scheme = Literal["euler", "analytic"]


class NonFinite(ArithmeticError):
    """The model's probabilities are not finite: sampling is impossible."""


class Noise(Protocol):
    """Total noise σ(t) and its rate σ'(t), t from 0 to 1."""

    def sigma(self, t: Tensor) -> Tensor: ...

    def rate(self, t: Tensor) -> Tensor: ...


class Draws:
    """Uniform random numbers with one generator per sequence, so samples are independent of batching."""

    def __init__(self, generators: Sequence[torch.Generator], device: torch.device | str = "cpu"):
        self.generators, self.device = generators, device

    def uniforms(self, *shape: int) -> Tensor:
        """Draw uniform numbers (B, *shape), float64 in [0, 1)."""
        return torch.stack(
            [torch.rand(shape, generator=generator, dtype=torch.float64) for generator in self.generators]
        ).to(self.device)


def categorical(weights_V: Tensor, uniforms: Tensor) -> Tensor:
    """Draw indices in proportion to the weights (…, V), never one with weight 0.

    By inversion of the cumulative sum at ``uniforms`` (…).
    """
    cumulative = weights_V.double().cumsum(-1)
    if not bool((torch.isfinite(cumulative[..., -1]) & (cumulative[..., -1] > 0)).all()):
        raise NonFinite("the model's probabilities are not finite")
    targets = uniforms[..., None] * cumulative[..., -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1)


def apply_temperature(weights_V: Tensor, temperature: float) -> Tensor:
    """Return weights (…, V) to the power 1/temperature in float64, largest scaled to 1.

    At temperature 0 only the largest remains (the first among equals).
    """
    weights = weights_V.double()
    if temperature == 0:
        return torch.zeros_like(weights).scatter_(-1, weights.argmax(-1, keepdim=True), 1.0)
    largest = weights.amax(-1, keepdim=True)
    return (weights / largest.clamp(min=torch.finfo(torch.float64).tiny)) ** (1 / temperature)


def keep_likeliest(weights_V: Tensor, share: float) -> Tensor:
    """Return weights (…, V) with 0 for all but the likeliest tokens that together have ``share`` of the sum.

    The token that reaches the share stays (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751).
    """
    if share >= 1:
        return weights_V
    ordered, places = weights_V.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    kept = torch.where(before < share * ordered.sum(-1, keepdim=True), ordered, 0.0)
    return torch.zeros_like(weights_V).scatter(-1, places, kept)


def unmask(
    clean_probs: Callable[[Tensor], Tensor],
    tokens_BN: Tensor,
    mask_id: int,
    draws: Draws,
    *,
    order: Literal["top_prob", "random"],
    temperature: float,
) -> Iterator[None]:
    """Fill one masked position in every sequence per step; filled ones stay.

    Choices of ours, not specified in the paper: the token is drawn from the model's tempered distribution at the
    position; the position is chosen by the untempered distribution; ties in float32 (all positions of an all-mask
    sequence, for a model with relative positions only) go to the leftmost.

    Args:
        clean_probs: tokens (B, N) → token probabilities (B, N, V).
        tokens_BN: changed in place; the same number of masks in every sequence.
        mask_id: the mask's id.
        draws: random numbers.
        order: "top_prob", the position with the largest token probability (Kim et al. 2025, "Train for the worst, plan
            for the best"; the paper's D.4 and E.1); "random", any masked position.
        temperature: for the token; 1 is the model's own distribution.
    """
    counts_B = (tokens_BN == mask_id).sum(1)
    assert bool((counts_B == counts_B[0]).all()), "sequences with different numbers of masks"
    rows_B = torch.arange(len(tokens_BN), device=tokens_BN.device)
    for _ in range(int(counts_B[0])):
        masked_BN = tokens_BN == mask_id
        probs_BNV = clean_probs(tokens_BN)
        position_B = (
            _find_most_certain(probs_BNV.amax(-1), masked_BN)
            if order == "top_prob"
            else categorical(masked_BN, draws.uniforms())
        )
        tokens_BN[rows_B, position_B] = categorical(
            apply_temperature(probs_BNV[rows_B, position_B], temperature), draws.uniforms()
        )
        yield


def unmask_tracks(
    clean_probs: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    tracks: Sequence[Tensor],
    draws: Draws,
    *,
    mask_id: int,
    first_id: int,
    order: Literal["top_prob", "random"],
    temperature: float,
) -> Iterator[None]:
    """Unmask several tracks at once, one place in one track per sequence and step.

    As `unmask`, until no mask remains. With top_prob the place is chosen over all tracks; ties in float32 go to the
    leftmost of the first track.

    Args:
        clean_probs: tracks → (B, N, V) for each, over content tokens from ``first_id`` on: special tokens are never
            drawn.
        tracks: tokens (B, N) of each, changed in place; sequences without masks stay unchanged.
        draws: random numbers.
        mask_id: the mask's id.
        first_id: id of the first content token.
        order: "top_prob" or "random", as in `unmask`.
        temperature: for the token.
    """
    rows_B, num_positions = torch.arange(len(tracks[0]), device=tracks[0].device), tracks[0].shape[1]
    while True:
        masked_BM = torch.cat([tokens_BN == mask_id for tokens_BN in tracks], 1)
        open_B = masked_BM.any(1)
        if not bool(open_B.any()):
            return
        probs = clean_probs(tracks)
        if order == "top_prob":
            place_B = _find_most_certain(
                torch.cat([each.amax(-1) for each in probs], 1).where(masked_BM, 0.0), masked_BM
            )
        else:
            place_B = categorical(masked_BM | ~open_B[:, None], draws.uniforms())
        uniforms_B = draws.uniforms()
        for number, (tokens_BN, probs_BNV) in enumerate(zip(tracks, probs, strict=True)):
            at = open_B & (place_B // num_positions == number)
            rows, positions = rows_B[at], place_B[at] % num_positions
            tokens_BN[rows, positions] = first_id + categorical(
                apply_temperature(probs_BNV[rows, positions], temperature), uniforms_B[at]
            )
        yield


def _find_most_certain(top_BN: Tensor, masked_BN: Tensor) -> Tensor:
    """Return the first masked position with maximal ``top_BN`` (the largest token probability); 0 if none."""
    if not bool(torch.isfinite(top_BN).all()):
        raise NonFinite("the model's probabilities are not finite")
    top_BN = top_BN.where(masked_BN, -1.0)
    tied_BN = masked_BN & (top_BN >= top_BN.amax(1, keepdim=True) * TIED)
    return tied_BN.int().argmax(1)  # the first True


def sample_left_to_right(
    next_probs: Callable[[Tensor], Tensor], tokens_BN: Tensor, draws: Draws, *, temperature: float
) -> Iterator[None]:
    """Fill positions 1 to N − 1 in order; position 0 is given.

    Args:
        next_probs: tokens (B, n) → next token's probabilities (B, V).
        tokens_BN: changed in place.
        draws: random numbers.
        temperature: for the token.
    """
    for position in range(1, tokens_BN.shape[1]):
        weights_BV = apply_temperature(next_probs(tokens_BN[:, :position]), temperature)
        tokens_BN[:, position] = categorical(weights_BV, draws.uniforms())
        yield


def step_probs(scheme: Scheme, graph: Graph, score_BNS: Tensor, tokens_BN: Tensor, dsigma: Tensor) -> Tensor:
    """Return each token's transition probabilities in one reverse step, (B, N, S), float64.

    Rows sum to 1. Analytic (Lou et al. 2024, Algorithm 2, "Tweedie τ-leaping"): (e^{−Δσ·Q} s)_y · (e^{Δσ·Q})(y, x); for
    the absorbing graph (e^{Δσ} − 1)·s_y at a masked position, with the rest on the mask, and other tokens unchanged.
    Euler: Δσ·Q(y, x)·s_y. Probabilities outside [0, 1], from too large a step, are clamped and renormalised.

    Args:
        scheme: "euler" or "analytic".
        graph: "absorbing" (S = V + 1, mask last) or "uniform" (S = V).
        score_BNS: p_t(y)/p_t(x) for the S states, 1 at y = x.
        tokens_BN: the current tokens x.
        dsigma: removed noise: σ(t) − σ(s) for analytic, (t − s)·σ'(t) for euler.
    """
    score, is_here_BNS = score_BNS.double(), torch.nn.functional.one_hot(tokens_BN, score_BNS.shape[-1]).bool()
    num_states, dsigma = score.shape[-1], dsigma.double()
    if graph == "absorbing":
        masked_BN1 = is_here_BNS[..., -1:]
        factor = torch.expm1(dsigma) if scheme == "analytic" else dsigma
        moves = torch.where(masked_BN1 & ~is_here_BNS, factor * score, 0.0)
        probs = torch.where(is_here_BNS, 1 - moves.sum(-1, keepdim=True), moves)
    elif scheme == "euler":
        moves = torch.where(is_here_BNS, 0.0, dsigma / num_states * score)
        probs = torch.where(is_here_BNS, 1 - moves.sum(-1, keepdim=True), moves)
    else:
        kept = torch.exp(-dsigma)
        staggered = score / kept + (kept - 1) / (num_states * kept) * score.sum(-1, keepdim=True)
        probs = staggered * ((1 - kept) / num_states + kept * is_here_BNS)
    probs = probs.clamp(min=0)
    return probs / probs.sum(-1, keepdim=True)


def reverse_diffusion(
    scores: Callable[[Tensor, Tensor], Tensor],
    noise: Noise,
    graph: Graph,
    tokens_BN: Tensor,
    draws: Draws,
    *,
    scheme: Scheme,
    steps: int,
    temperature: float,
) -> Iterator[None]:
    """Step from t = 1 to 1e-3, then remove all remaining noise and masks.

    Args:
        scores: (tokens_BN, σ) → (B, N, S) as in `step_probs`, σ a scalar.
        noise: σ(t) and σ'(t).
        graph: "absorbing" or "uniform".
        tokens_BN: noise; changed in place.
        draws: random numbers.
        scheme: "euler" or "analytic".
        steps: number of equal steps.
        temperature: for a changing token's new value, not for whether it changes.
    """
    times = torch.linspace(1.0, LAST_TIME, steps + 1, dtype=torch.float64, device=tokens_BN.device)
    for now, then in zip(times[:-1], times[1:], strict=True):
        sigma = noise.sigma(now)
        dsigma = sigma - noise.sigma(then) if scheme == "analytic" else (now - then) * noise.rate(now)
        probs_BNS = step_probs(scheme, graph, scores(tokens_BN, sigma), tokens_BN, dsigma)
        tokens_BN.copy_(_draw_next(probs_BNS, tokens_BN, draws, temperature))
        yield
    sigma = noise.sigma(times[-1])
    score_BNS = scores(tokens_BN, sigma).double()
    if graph == "absorbing":
        masked_BN = tokens_BN == score_BNS.shape[-1] - 1
        # scores at unmasked tokens have no meaning
        read_BNV = torch.where(masked_BN[..., None], score_BNS[..., :-1], 1.0)
        clean_BN = categorical(apply_temperature(read_BNV, temperature), draws.uniforms(tokens_BN.shape[1]))
        tokens_BN.copy_(torch.where(masked_BN, clean_BN, tokens_BN))
    else:
        tokens_BN.copy_(
            _draw_next(step_probs("analytic", graph, score_BNS, tokens_BN, sigma), tokens_BN, draws, temperature)
        )
    yield


def _draw_next(probs_BNS: Tensor, tokens_BN: Tensor, draws: Draws, temperature: float) -> Tensor:
    """Draw each next token: unchanged with its own probability, else from the tempered others."""
    stay_BN = probs_BNS.gather(-1, tokens_BN[..., None]).squeeze(-1)
    if not bool(torch.isfinite(stay_BN).all()):
        raise NonFinite("the model's scores are not finite")
    others_BNS = probs_BNS.scatter(-1, tokens_BN[..., None], 0.0)
    moves_BN = (draws.uniforms(tokens_BN.shape[1]) >= stay_BN) & (others_BNS.sum(-1) > 0)
    # any valid weights for unchanged tokens
    weights_BNS = torch.where(moves_BN[..., None], apply_temperature(others_BNS, temperature), probs_BNS)
    return torch.where(moves_BN, categorical(weights_BNS, draws.uniforms(tokens_BN.shape[1])), tokens_BN)
