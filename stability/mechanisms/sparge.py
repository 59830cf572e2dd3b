"""`sparge`: SpargeAttn, block-sparse attention that skips negligible blocks, predicted from block means.

From Zhang et al. 2025, arXiv:2502.18137.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from stability.mechanisms._base import MixerShape, without_padding
from stability.mechanisms._training_free import AbstractTrainingFree, Pairs, Variant
from stability.mechanisms.sa import SoftmaxAttention


class Prediction(NamedTuple):
    """Predictions about blocks, before any pair is scored.

    Attributes:
        mass_BHNJ: P̂, the predicted weight of key block j in query i's row; 0 if not predicted.
        alike_q_BHN: self-similarity of a query's block.
        alike_k_BHJ: self-similarity of a key block.
        own_NJ: True if j is a causal query's own block.
    """

    mass_BHNJ: Tensor
    alike_q_BHN: Tensor
    alike_k_BHJ: Tensor
    own_NJ: Tensor


class SpargeAttention(AbstractTrainingFree):
    """Softmax attention that skips blocks in two stages (SpargeAttn, 3.2–3.4 and Algorithm 1).

    Stage 1: q̂ and k̂ are means over query and key blocks, and P̂ = softmax(q̂k̂ᵀ / √K) over key blocks. The key blocks
    with cumulated P̂, largest first, up to τ are kept, at least the largest. A mean does not represent a block with
    self-similarity below θ. Such a key block is left out of the softmax and always kept; for such a query block all key
    blocks are kept. Self-similarity is the mean cosine over a block's pairs, as in the authors' code; 3.3 has XXᵀ /
    |max XXᵀ|.

    Stage 2: key blocks are processed in order. If a block's largest logit is more than |λ| below the largest so far, in
    all rows of the query block, it adds nothing to the output, but still counts in the softmax's denominator (Algorithm
    1, lines 11 to 15).

    In the causal form the paper's mean over a whole query block would leak later queries into the choice for an earlier
    one. So q̂, its self-similarity and stage 2 are per query here: q̂ is the mean from the block's first query to the
    query itself. The query's own key block, whose end is not visible to it, is always kept.
    """

    class Config(SoftmaxAttention.Config):
        """Settings for skipping, in addition to those of the trained `sa`.

        The authors' kernel has blocks of 128 queries and 64 keys, for sequences of about ten thousand positions.
        """

        tau: float = Field(
            default=0.9, gt=0, le=1, description="τ, the predicted share of attention that is computed; 1: all blocks"
        )
        theta: float = Field(
            default=0.1, ge=-1, le=1, description="θ: blocks of less self-similarity than this are always computed"
        )
        skip: float = Field(
            default=-50.0,
            lt=0,
            description="λ: blocks whose logits lie this far below the largest so far add no values",
        )
        query_block: int = Field(default=16, ge=1, description="queries per block")
        key_block: int = Field(default=16, ge=1, description="keys per block")

    rows_sum_to_one = False  # blocks skipped by stage 2 stay in the denominator

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__(config, shape)
        self.tau, self.theta, self.skip = config.tau, config.theta, config.skip
        self.query_block, self.key_block = config.query_block, config.key_block

    @classmethod
    def cost(cls, config: Config, shape: MixerShape, num_positions: int) -> float:
        """Count the whole of `sa`, predicted blocks per query, and all q·k again for stage 2.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: N.
        """
        scored = -(-num_positions // config.key_block) + num_positions
        return super().cost(config, shape, num_positions) + num_positions * scored * shape.width

    @classmethod
    def state_size(cls, config: Config, shape: MixerShape, num_positions: int) -> int | None:
        """Count keys, values, and two sums of queries over an incomplete block.

        Stage 1 needs the sums of the queries and of the queries scaled to length 1.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: positions read so far.
        """
        of_keys = super().state_size(config, shape, num_positions)
        is_within = config.tau < 1 and num_positions % config.query_block > 0
        return None if of_keys is None else of_keys + 2 * shape.width * is_within

    @classmethod
    def variants(cls, config: Config, budgets: Sequence[float], shape: MixerShape, num_positions: int) -> list[Variant]:
        label = f"θ = {config.theta:g}, λ = {config.skip:g}"
        return [Variant(budget, label, config.model_copy(update={"tau": budget})) for budget in budgets]

    def pairs(self, q_BHNK: Tensor, k_BHNK: Tensor, mask_BN: Tensor | None) -> Pairs:
        num_positions = q_BHNK.shape[2]
        visible = self._visible(num_positions, mask_BN, q_BHNK.device)
        chosen_BHNJ = self._choose_blocks(self._predict(q_BHNK, k_BHNK, mask_BN))
        scored = self._repeat_per_key(chosen_BHNJ, num_positions) & visible
        late_BHNJ = self._behind(q_BHNK, k_BHNK, scored, mask_BN) < self.skip
        return Pairs(scored, scored & ~self._repeat_per_key(late_BHNJ, num_positions))

    def margin(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        """Return the smallest distance of any selecting quantity from its threshold.

        The distances are: cumulated P̂ from τ, the masses on both sides of the edge, self-similarity from θ, and stage
        2's logit gap from λ. A selection may need more than this to change, if no single distance decides it alone.
        """
        q_BHNK, k_BHNK, _ = self.split(self.qkv(without_padding(x_BND, mask_BN)))
        found = self._predict(q_BHNK, k_BHNK, mask_BN)
        scored, _ = self.pairs(q_BHNK, k_BHNK, mask_BN)
        behind = self._behind(q_BHNK, k_BHNK, scored, mask_BN)
        distances = [(behind - self.skip)[behind.isfinite()].abs()]
        if self.tau < 1 and found.own_NJ.shape[1] > 1:
            cumulated, edge, gap = self._edge(found.mass_BHNJ)
            asks = self._valid(x_BND.shape[1], mask_BN, x_BND.device)[:, None].expand_as(found.alike_q_BHN)
            distances += [(cumulated - self.tau).abs()[asks].flatten(), gap[asks][edge[asks] > 0]]
            alike = torch.cat([found.alike_q_BHN[asks], found.alike_k_BHJ.flatten()])
            distances.append((alike - self.theta).abs())
        return torch.cat(distances).min() if sum(map(len, distances)) else torch.tensor(math.inf)

    def _predict(self, q_BHNK: Tensor, k_BHNK: Tensor, mask_BN: Tensor | None) -> Prediction:
        """Return the compressed attention from query blocks to key blocks, and self-similarities."""
        num_positions = q_BHNK.shape[2]
        valid_BN = self._valid(num_positions, mask_BN, q_BHNK.device)
        mean_q_BHNK, unit_q_BHNK = (
            self._means_of_queries(part, valid_BN) for part in (q_BHNK, F.normalize(q_BHNK, dim=-1))
        )
        mean_k_BHJK, unit_k_BHJK = (
            _block_means(part, valid_BN, self.key_block) for part in (k_BHNK, F.normalize(k_BHNK, dim=-1))
        )
        alike_k_BHJ = unit_k_BHJK.square().sum(-1)
        exists_BJ = _cut(valid_BN[..., None], self.key_block, False).any(-2)[..., 0]
        block_J = torch.arange(exists_BJ.shape[1], device=q_BHNK.device)
        own_N1 = (torch.arange(num_positions, device=q_BHNK.device) // self.key_block)[:, None]
        is_predicted = exists_BJ[:, None, None] & (alike_k_BHJ >= self.theta)[:, :, None]
        if self.causal:
            is_predicted = is_predicted & (block_J < own_N1)
        logits_BHNJ = self.logits(mean_q_BHNK, mean_k_BHJK)
        # a row without predictions is NaN before the second fill
        mass_BHNJ = logits_BHNJ.masked_fill(~is_predicted, -math.inf).softmax(-1).masked_fill(~is_predicted, 0.0)
        own_NJ = (block_J == own_N1) if self.causal else torch.zeros_like(block_J == own_N1)
        return Prediction(mass_BHNJ, unit_q_BHNK.square().sum(-1), alike_k_BHJ, own_NJ)

    def _choose_blocks(self, found: Prediction) -> Tensor:
        """Return the key blocks each query scores by stage 1, (B, H, N, J).

        They may contain invisible pairs.
        """
        if self.tau >= 1:
            return torch.ones_like(found.mass_BHNJ, dtype=torch.bool)
        _, edge, _ = self._edge(found.mass_BHNJ)
        unlike = (found.alike_q_BHN < self.theta)[..., None] | (found.alike_k_BHJ < self.theta)[:, :, None]
        return (found.mass_BHNJ >= edge) | unlike | found.own_NJ

    def _edge(self, mass_BHNJ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return cumulated masses, the smallest kept mass, and its gap to the next.

        Masses are sorted, largest first. The gap is inf if no next mass exists.
        """
        largest_first = mass_BHNJ.sort(-1, descending=True).values
        cumulated = largest_first.cumsum(-1)
        taken = (cumulated <= self.tau * cumulated[..., -1:]).sum(-1, keepdim=True).clamp(min=1)
        edge = largest_first.gather(-1, taken - 1)
        beyond = F.pad(largest_first, (0, 1), value=-math.inf).gather(-1, taken)
        return cumulated, edge, edge - beyond

    def _behind(self, q_BHNK: Tensor, k_BHNK: Tensor, scored: Tensor, mask_BN: Tensor | None) -> Tensor:
        """Return each key block's largest logit minus the largest so far, (B, H, N, J).

        The value is the maximum over rows judged together, and −inf if nothing is scored.
        """
        num_positions = q_BHNK.shape[2]
        logits = self.logits(q_BHNK, k_BHNK).masked_fill(~scored, -math.inf)
        largest = _cut(logits.mT, self.key_block, -math.inf).amax(-2).mT
        behind = (largest - largest.cummax(-1).values).where(largest.isfinite(), -math.inf)
        if self.causal:
            return behind
        behind = behind.masked_fill(~self._valid(num_positions, mask_BN, q_BHNK.device)[:, None, :, None], -math.inf)
        of_blocks = _cut(behind, self.query_block, -math.inf).amax(-2)
        return of_blocks.repeat_interleave(min(self.query_block, num_positions), 2)[:, :, :num_positions]

    def _means_of_queries(self, x_BHNK: Tensor, valid_BN: Tensor) -> Tensor:
        """Return the mean over each query's block, only up to itself if causal."""
        if not self.causal:
            means = _block_means(x_BHNK, valid_BN, self.query_block)
            num_positions = x_BHNK.shape[2]
            return means.repeat_interleave(min(self.query_block, num_positions), 2)[:, :, :num_positions]
        cells, counts = _cells(x_BHNK, valid_BN, self.query_block)
        means = cells.cumsum(-2) / counts.cumsum(-2).clamp(min=1)
        return means.flatten(2, 3)[:, :, : x_BHNK.shape[2]]

    def _repeat_per_key(self, of_blocks_BHNJ: Tensor, num_positions: int) -> Tensor:
        """Repeat values per key block, once per key."""
        return of_blocks_BHNJ.repeat_interleave(min(self.key_block, num_positions), -1)[..., :num_positions]


def _cut(x: Tensor, block: int, filled: Any) -> Tensor:
    """Cut the second to last axis into blocks, (…, N, K) → (…, blocks, block, K), padded at the end."""
    block = min(block, x.shape[-2])
    padded = F.pad(x, (0, 0, 0, -x.shape[-2] % block), value=filled)
    return padded.unflatten(-2, (-1, block))


def _cells(x_BHNK: Tensor, valid_BN: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return x in blocks, zero at padding, (B, H, blocks, block, K), and 1 at valid positions."""
    valid_B1N1 = valid_BN[:, None, :, None]
    return _cut(x_BHNK.where(valid_B1N1, 0.0), block, 0.0), _cut(valid_B1N1.to(x_BHNK.dtype), block, 0.0)


def _block_means(x_BHNK: Tensor, valid_BN: Tensor, block: int) -> Tensor:
    """Return the means over each block's valid positions, (B, H, blocks, K); zero if none."""
    cells, counts = _cells(x_BHNK, valid_BN, block)
    return cells.sum(-2) / counts.sum(-2).clamp(min=1)


EXPORT = SpargeAttention
