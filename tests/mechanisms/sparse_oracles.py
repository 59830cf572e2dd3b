"""Attention over literal sets of keys: slow float64 loops that share no code with the mechanisms, and what is asked of
every mechanism that computes on gathered keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from stability.mechanisms import build
from tests.mechanisms import checks
from tests.mechanisms.oracles import rotated
from tests.within import assert_within

Keys = Callable[[int, int], set[int]]  # of head h and query i
BATCH = 3


def made(name: str, direction: str = "bidirectional", heads: int = checks.HEADS, **settings) -> nn.Module:
    """A layer in float64 whose biases are not zero."""
    return checks.build_seeded(
        lambda: build(name, width=8 * heads, heads=heads, direction=direction, **settings)
    ).double()


def sequences(num_positions: int, width: int = checks.WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(num_positions)
    return torch.randn(BATCH, num_positions, width, dtype=torch.float64, generator=generator)


def holes(num_positions: int) -> Tensor:
    """True where a position is valid: one sequence padded here and there, one on both ends, one wholly."""
    mask_BN = torch.rand(BATCH, num_positions, generator=torch.Generator().manual_seed(5)) > 0.4
    mask_BN[1] = torch.arange(num_positions).sub(num_positions // 2).abs() <= num_positions // 4
    mask_BN[2] = False
    return mask_BN


def projected(linear: nn.Linear, x_ND: Tensor, part: int, head: int, width: int) -> Tensor:
    """What one head has of one of the matrices, each D rows high, of a linear map: (N, K)."""
    first = part * x_ND.shape[1] + head * width
    return x_ND @ linear.weight[first : first + width].T + linear.bias[first : first + width]


def attend(q_NK: Tensor, k_NK: Tensor, v_NK: Tensor, keys: Sequence[set[int]], softcap: float | None = None) -> Tensor:
    """softmax over each query's own set; nothing where that is empty. Positions are the row's numbers."""
    q_NK, k_NK, rows = rotated(q_NK), rotated(k_NK), []
    for i, of_query in enumerate(keys):
        row, total = torch.zeros_like(v_NK[0]), torch.zeros((), dtype=v_NK.dtype)
        for j in of_query:
            logit = (q_NK[i] * k_NK[j]).sum() / q_NK.shape[1] ** 0.5
            score = torch.exp(logit if softcap is None else softcap * torch.tanh(logit / softcap))
            row, total = row + score * v_NK[j], total + score
        rows.append(row / total if of_query else row)
    return torch.stack(rows)


def normed(x_NK: Tensor, norm: nn.Module | None) -> Tensor:
    """``qk_norm`` by its formula: over the root mean square, of a LayerNorm after the mean is taken off."""
    if norm is None:
        return x_NK
    if isinstance(norm, nn.LayerNorm):
        x_NK = x_NK - x_NK.mean(1, keepdim=True)
    found_NK = x_NK / (x_NK.square().mean(1, keepdim=True) + 1e-5).sqrt() * norm.weight
    return found_NK + norm.bias if isinstance(norm, nn.LayerNorm) else found_NK


def over_sets(layer: nn.Module, x_BND: Tensor, keys: Keys, mask_BN: Tensor | None = None) -> Tensor:
    """The output of a layer with ``qkv`` and ``out`` whose head h sees ``keys(h, i)`` at position i."""
    outputs, width = [], x_BND.shape[2] // layer.heads
    for b, x_ND in enumerate(x_BND):
        valid = set(range(len(x_ND))) if mask_BN is None else set(mask_BN[b].nonzero().flatten().tolist())
        of_heads = []
        for head in range(layer.heads):
            q_NK, k_NK, v_NK = (projected(layer.qkv, x_ND, part, head, width) for part in range(3))
            q_NK, k_NK = (normed(x, getattr(layer, name, None)) for x, name in ((q_NK, "q_norm"), (k_NK, "k_norm")))
            of_heads.append(
                attend(
                    q_NK, k_NK, v_NK, [keys(head, i) & valid for i in range(len(x_ND))], getattr(layer, "softcap", None)
                )
            )
        outputs.append(torch.cat(of_heads, 1) @ layer.out.weight.T + layer.out.bias)
    return torch.stack(outputs)


def assert_equal_where_valid(found_BND: Tensor, expected_BND: Tensor, mask_BN: Tensor | None = None) -> None:
    valid_BN = torch.ones(found_BND.shape[:2], dtype=torch.bool) if mask_BN is None else mask_BN
    assert found_BND.shape == expected_BND.shape and found_BND.isfinite().all()
    error = (found_BND - expected_BND)[valid_BN].abs().max()
    assert_within(error, 1e-10 * expected_BND.abs().max(), f"{error:.1e} off")


def assert_prefix_is_itself(layer: nn.Module) -> None:
    """A causal layer makes of a sequence's beginning what it makes of it alone, whatever its length."""
    x_BND = sequences(43)
    whole_BND = layer(x_BND)
    for length in (1, 2, 7, 8, 16, 17, 31):
        assert torch.allclose(layer(x_BND[:, :length]), whole_BND[:, :length], rtol=0, atol=1e-12), length


def assert_padding_behind_adds_nothing(layer: nn.Module) -> None:
    """What stands behind a sequence as padding changes nothing of it, however much it is."""
    x_BND = sequences(43)
    for length in (1, 5, 16, 21):
        mask_BN = (torch.arange(43) < length).expand(BATCH, 43)
        alone_BND = layer(x_BND[:, :length])
        assert torch.allclose(layer(x_BND, mask_BN=mask_BN)[:, :length], alone_BND, rtol=0, atol=1e-12), length
