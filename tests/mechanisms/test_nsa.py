from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stability.curvature import directional
from stability.mechanisms import build
from stability.mechanisms.nsa import NativeSparseAttention
from tests.mechanisms import checks
from tests.mechanisms.oracles import rotated

WIDTH, HEADS = 16, 4
SMALL = {"block": 2, "stride": 1, "selected_block": 2, "selected": 4, "window": 3}
SETTINGS = [
    SMALL,
    {**SMALL, "kv_heads": 2},
    {**SMALL, "block": 4, "stride": 2, "selected_block": 4, "selected": 3, "kv_heads": 1},
    {**SMALL, "block": 2, "stride": 2, "selected_block": 4, "window": 20, "kv_heads": 2, "compression": "mean"},
]


def module(seed: int = 0, **settings: Any) -> NativeSparseAttention:
    def made() -> nn.Module:
        return build("nsa", width=WIDTH, heads=HEADS, direction="causal", **settings)

    layer: Any = checks.build_seeded(made, seed).double()
    with torch.no_grad():  # what starts at 0 would hide what is forgotten, and small scores are all alike
        for name, value in layer.named_parameters():
            if name.endswith(("bias", "place_GLK")):
                value.normal_(generator=torch.Generator().manual_seed(len(name)))
        layer.qkv.weight.mul_(3)
    return layer


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def mapped(layer: nn.Module, x: Tensor) -> Tensor:
    return layer.weight @ x + layer.bias


def softmax_of(q_K: Tensor, keys: list[Tensor]) -> Tensor:
    part = torch.stack([(q_K @ k_K / len(q_K) ** 0.5).exp() for k_K in keys])
    return part / part.sum()


class Literal:
    """The paper's equations, one sequence, one position, one head after another, counted from 0."""

    def __init__(self, layer: NativeSparseAttention, settings: dict[str, Any], x_ND: Tensor, valid_N: Tensor):
        self.layer, self.x_ND = layer, x_ND
        self.valid = [j for j in range(len(x_ND)) if valid_N[j]]
        self.l, self.d, self.l2 = settings["block"], settings["stride"], settings["selected_block"]
        self.n, self.w, self.mean = settings["selected"], settings["window"], settings.get("compression") == "mean"
        self.groups = settings.get("kv_heads", HEADS)
        self.k = WIDTH // HEADS
        qkv_NE = torch.stack([mapped(layer.qkv, x_D) for x_D in x_ND])
        self.q = [qkv_NE[:, h * self.k : (h + 1) * self.k] for h in range(HEADS)]
        columns = qkv_NE[:, WIDTH:].split(self.k, 1)  # keys of all groups, of the three branches, then values
        keys_and_values = [columns[at : at + self.groups] for at in range(0, 6 * self.groups, self.groups)]
        self.keys, self.values = keys_and_values[:3], keys_and_values[3:]
        self.turned = [[rotated(k_NK) for k_NK in of_branch] for of_branch in self.keys]
        self.turned_q = [rotated(q_NK) for q_NK in self.q]
        self.found: dict[tuple[int, int], tuple[Tensor, dict[int, Tensor]]] = {}

    def phi(self, which: nn.Module, block_LK: Tensor, group: int) -> Tensor:
        if self.mean:
            return block_LK.sum(0) / len(block_LK)
        joined = torch.cat([x_K + e_K for x_K, e_K in zip(block_LK, which.place_GLK[group], strict=True)])
        return mapped(which.compressed, gelu(mapped(which.hidden, joined)))

    def complete(self, i: int) -> list[int]:
        """Eq. 7: the blocks that end at i or before, by number; whole ones only."""
        starts = range(0, len(self.x_ND), self.d)
        return [
            number
            for number, start in enumerate(starts)
            if start + self.l - 1 <= i and all(j in self.valid for j in range(start, start + self.l))
        ]

    def compression(self, i: int, head: int) -> tuple[Tensor, dict[int, Tensor]]:
        """Eqs. 7, 8: what a head takes from the compressed blocks, and the probability of each block."""
        if (i, head) not in self.found:
            self.found[i, head] = self._compression(i, head)
        return self.found[i, head]

    def _compression(self, i: int, head: int) -> tuple[Tensor, dict[int, Tensor]]:
        group, blocks = head * self.groups // HEADS, self.complete(i)
        if not blocks:
            return torch.zeros(self.k, dtype=torch.float64), {}
        k, v = (
            [self.phi(which, of_branch[0][group][b * self.d : b * self.d + self.l], group) for b in blocks]
            for which, of_branch in ((self.layer.compress_key, self.keys), (self.layer.compress_value, self.values))
        )
        p = softmax_of(self.q[head][i], k)
        return p @ torch.stack(v), dict(zip(blocks, p, strict=True))

    def scores(self, i: int, group: int) -> dict[int, float]:
        """Eqs. 9, 10: of each block up to the own one; its compressed blocks are those of the formula, counted from
        1."""
        found = {}
        for j in range(1, i // self.l2 + 2):
            found[j - 1] = 0.0
            for head in range(HEADS):
                if head * self.groups // HEADS == group:
                    p = self.compression(i, head)[1]
                    for m in range(self.l2 // self.d):
                        for n in range(self.l // self.d):
                            found[j - 1] += float(p.get(self.l2 // self.d * j - m - n - 1, 0.0))
        return found

    def selected(self, i: int, group: int) -> set[int]:
        """Eq. 11: the first block, the own one, the one before, and the best of the rest."""
        own = i // self.l2
        fixed = {0, own, max(own - 1, 0)}
        rest = {j: score for j, score in self.scores(i, group).items() if j not in fixed and score > 0}
        return fixed | set(sorted(rest, key=lambda j: -rest[j])[: max(0, self.n - len(fixed))])

    def attended(self, i: int, head: int, branch: int, seen: list[int]) -> Tensor:
        group = head * self.groups // HEADS
        q_K, k_NK = self.turned_q[head][i], self.turned[branch][group]
        return softmax_of(q_K, [k_NK[j] for j in seen]) @ self.values[branch][group][seen]

    def output(self, i: int) -> Tensor:
        """Eq. 5."""
        gate = 1 / (1 + (-mapped(self.layer.gate, self.x_ND[i])).exp())
        heads = []
        for head in range(HEADS):
            blocks = self.selected(i, head * self.groups // HEADS)
            branches = (
                self.compression(i, head)[0],
                self.attended(i, head, 1, [j for j in self.valid if j <= i and j // self.l2 in blocks]),
                self.attended(i, head, 2, [j for j in self.valid if i - self.w <= j <= i]),
            )
            heads.append(sum(gate[c * HEADS + head] * branch for c, branch in enumerate(branches)))
        return mapped(self.layer.out, torch.cat(heads))


def padded(num_positions: int) -> Tensor:
    """Padding right; left and in the middle; none."""
    mask_BN = torch.ones(3, num_positions, dtype=torch.bool)
    mask_BN[0, num_positions * 3 // 4 :] = False
    mask_BN[1, : num_positions // 4] = mask_BN[1, num_positions * 5 // 8] = False
    return mask_BN


@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
@pytest.mark.parametrize("with_padding", [False, True])
@pytest.mark.parametrize("num_positions", [1, 3, 9, 17, 26])
def test_equals_the_papers_equations_position_by_position(num_positions, with_padding, settings):
    layer, x_BND = module(**settings), checks.inputs(num_positions=num_positions)
    mask_BN = padded(num_positions) if with_padding and num_positions > 3 else None
    with torch.no_grad():
        found_BND = layer(x_BND, mask_BN=mask_BN)
        for b, x_ND in enumerate(x_BND):
            valid_N = torch.ones(num_positions, dtype=torch.bool) if mask_BN is None else mask_BN[b]
            literal = Literal(layer, settings, x_ND, valid_N)
            for i in literal.valid:
                torch.testing.assert_close(found_BND[b, i], literal.output(i), rtol=1e-10, atol=1e-12)
