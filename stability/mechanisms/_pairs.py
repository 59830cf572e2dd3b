"""The fast form of the window-path and the complete graph: unordered pairs {i, j = i + offset}, offset by offset, by
slices alone.

Both directed edges of a pair (T: 0 is i → j, 1 is j → i) share the disagreement u_i − u_j, and the update moves its
ends oppositely. Relative disagreements, ρ(i − j)u_i − u_j and ρ(j − i)u_j − u_i, are ũ_i − ũ_j turned back by j and by
i, the second with its sign changed: the update moves the ends by R_ij of the one plus R_ji of the other.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from stability.mechanisms._rotation import exact_cos_sin, turned, turned_back
from stability.models.position import Rope


class Pairs:
    """Pairs {i, i + offset} for offsets 1 … w of sequences of ``num_positions`` (Definition 3.1; w = N − 1: the
    complete graph). ``relative``: the rotation ρ of disagreements ρ(i − j)u_i − u_j; None: they are u_i − u_j."""

    def __init__(
        self, window: int, batch: int, num_positions: int, mask_BN: Tensor | None, relative: Rope | None = None
    ):
        self.offsets = range(1, min(window, num_positions - 1) + 1)
        self.lengths = [num_positions - offset for offset in self.offsets]
        self.shape = (batch, sum(self.lengths))
        self.mask_BN, self.relative = mask_BN, relative

    def sums(self, source_HXBN: Tensor, target_HXBN: Tensor) -> Tensor:
        """Return the source's part and the target's for both edges of each pair, (H, T, X, B·P)."""
        node_HTXBN = torch.stack([source_HXBN, target_HXBN], 1)
        return self._on_pairs(node_HTXBN, node_HTXBN.flip(1)).flatten(-2)

    def differences(self, u_HKBN: Tensor) -> Tensor:
        """Return the disagreement of each pair, (H, 1, K, B, P), or one for each direction, (H, T, K, B, P)."""
        if self.relative is None:
            return self._on_pairs(u_HKBN, -u_HKBN)[:, None]
        cos, sin = exact_cos_sin(u_HKBN, u_HKBN.shape[-1], self.relative)
        turned_HKBN = turned(u_HKBN, cos[:, None], sin[:, None])
        difference_HKBP = self._on_pairs(turned_HKBN, -turned_HKBN)
        cos, sin = (torch.stack([self._at_j(table), self._at_i(table)])[:, :, None] for table in (cos, sin))
        return turned_back(difference_HKBP[:, None], cos, sin, dim=2)

    def collect(self, flow_HKBP: Tensor) -> Tensor:
        """Return g, (…, N): each pair's flow added at i and taken off at j; nothing from a pair with a padded end."""
        flows = self._by_offset(flow_HKBP)
        return torch.stack([F.pad(flow, (0, offset)) - F.pad(flow, (offset, 0)) for offset, flow in flows]).sum(0)

    def degrees(self, weight_HBP: Tensor) -> Tensor:
        """Return the sum of each node's pairs, (H, B, N); nothing from a pair with a padded end."""
        weights = self._by_offset(weight_HBP)
        return torch.stack([F.pad(part, (0, offset)) + F.pad(part, (offset, 0)) for offset, part in weights]).sum(0)

    def _by_offset(self, of_pairs: Tensor) -> Iterable[tuple[int, Tensor]]:
        """Return each offset with its pairs' numbers, (…, B, N − offset); 0 from a pair with a padded end."""
        if self.mask_BN is not None:
            of_pairs = of_pairs * torch.cat(
                [self.mask_BN[:, :-offset] & self.mask_BN[:, offset:] for offset in self.offsets], -1
            )
        return zip(self.offsets, of_pairs.split(self.lengths, -1), strict=True)

    def directed(self, r_BHEKK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return sources and targets of the T·P directed edges, and R as it is."""
        num_positions = self.lengths[0] + 1
        left_P = torch.cat([torch.arange(num_positions - offset, device=r_BHEKK.device) for offset in self.offsets])
        right_P = torch.cat([torch.arange(offset, num_positions, device=r_BHEKK.device) for offset in self.offsets])
        return torch.cat([left_P, right_P]), torch.cat([right_P, left_P]), r_BHEKK

    def _at_i(self, at_nodes: Tensor) -> Tensor:
        return torch.cat([at_nodes[..., :-offset] for offset in self.offsets], -1)

    def _at_j(self, at_nodes: Tensor) -> Tensor:
        return torch.cat([at_nodes[..., offset:] for offset in self.offsets], -1)

    def _on_pairs(self, at_i: Tensor, at_j: Tensor) -> Tensor:
        """Return at_i + at_j for each pair: (…, N) → (…, P). Slices only; nothing is gathered."""
        return torch.cat([at_i[..., :-offset] + at_j[..., offset:] for offset in self.offsets], -1)
