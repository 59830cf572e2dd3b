"""Fast form for window and complete graphs: unordered pairs {i, j = i + offset}, by slices.

Both directed edges in a pair (T: 0 is i → j, 1 is j → i) share the disagreement u_i − u_j, and the update moves both
ends in opposite directions. Relative disagreements, ρ(i − j)u_i − u_j and ρ(j − i)u_j − u_i, are ũ_i − ũ_j rotated back
by j and by i, the second with opposite sign. The update then moves the ends by R_ij times the first plus R_ji times the
second.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from stability.mechanisms._rotation import exact_cos_sin, rotate, rotate_back
from stability.models.position import Rope


class Pairs:
    """Pairs {i, i + offset} for offsets 1 … w (Definition 3.1).

    w = N − 1 is the complete graph. ``relative``: rotation ρ for disagreements ρ(i − j)u_i − u_j; None for u_i − u_j.
    """

    def __init__(
        self, window: int, batch: int, num_positions: int, mask_BN: Tensor | None, relative: Rope | None = None
    ):
        self.offsets = range(1, min(window, num_positions - 1) + 1)
        self.lengths = [num_positions - offset for offset in self.offsets]
        self.shape = (batch, sum(self.lengths))
        self.mask_BN, self.relative = mask_BN, relative

    def sums(self, source_HXBN: Tensor, target_HXBN: Tensor) -> Tensor:
        """Return the sum of source part and target part for both edges per pair, (H, T, X, B·P)."""
        node_HTXBN = torch.stack([source_HXBN, target_HXBN], 1)
        return self._add_on_pairs(node_HTXBN, node_HTXBN.flip(1)).flatten(-2)

    def differences(self, u_HKBN: Tensor) -> Tensor:
        """Return the disagreement per pair, (H, 1, K, B, P), or per direction, (H, T, K, B, P)."""
        if self.relative is None:
            return self._add_on_pairs(u_HKBN, -u_HKBN)[:, None]
        cos, sin = exact_cos_sin(u_HKBN, u_HKBN.shape[-1], self.relative)
        turned_HKBN = rotate(u_HKBN, cos[:, None], sin[:, None])
        difference_HKBP = self._add_on_pairs(turned_HKBN, -turned_HKBN)
        cos, sin = (torch.stack([self._take_j(table), self._take_i(table)])[:, :, None] for table in (cos, sin))
        return rotate_back(difference_HKBP[:, None], cos, sin, dim=2)

    def collect(self, flow_HKBP: Tensor) -> Tensor:
        """Return g, (…, N): each pair's flow added at i, subtracted at j.

        Pairs with a padded end contribute nothing.
        """
        flows = self._split_by_offset(flow_HKBP)
        return torch.stack([F.pad(flow, (0, offset)) - F.pad(flow, (offset, 0)) for offset, flow in flows]).sum(0)

    def degrees(self, weight_HBP: Tensor) -> Tensor:
        """Return the sum over each node's pairs, (H, B, N).

        Pairs with a padded end contribute nothing.
        """
        weights = self._split_by_offset(weight_HBP)
        return torch.stack([F.pad(part, (0, offset)) + F.pad(part, (offset, 0)) for offset, part in weights]).sum(0)

    def _split_by_offset(self, of_pairs: Tensor) -> Iterable[tuple[int, Tensor]]:
        """Return each offset with its pairs' numbers, (…, B, N − offset); 0 at padded ends."""
        if self.mask_BN is not None:
            of_pairs = of_pairs * torch.cat(
                [self.mask_BN[:, :-offset] & self.mask_BN[:, offset:] for offset in self.offsets], -1
            )
        return zip(self.offsets, of_pairs.split(self.lengths, -1), strict=True)

    def list_directed(self, r_BHEKK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return sources and targets for the T·P directed edges, and R unchanged."""
        num_positions = self.lengths[0] + 1
        left_P = torch.cat([torch.arange(num_positions - offset, device=r_BHEKK.device) for offset in self.offsets])
        right_P = torch.cat([torch.arange(offset, num_positions, device=r_BHEKK.device) for offset in self.offsets])
        return torch.cat([left_P, right_P]), torch.cat([right_P, left_P]), r_BHEKK

    def _take_i(self, at_nodes: Tensor) -> Tensor:
        return torch.cat([at_nodes[..., :-offset] for offset in self.offsets], -1)

    def _take_j(self, at_nodes: Tensor) -> Tensor:
        return torch.cat([at_nodes[..., offset:] for offset in self.offsets], -1)

    def _add_on_pairs(self, at_i: Tensor, at_j: Tensor) -> Tensor:
        """Return at_i + at_j per pair: (…, N) → (…, P). Slices only, no gather."""
        return torch.cat([at_i[..., :-offset] + at_j[..., offset:] for offset in self.offsets], -1)
