from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import stability.mechanisms.sparsek as sparsek
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.mechanisms._sparse_top_k import Ranking, thresholds
from stability.mechanisms.sparsek import SparseKAttention
from tests.mechanisms.checks import HEADS, WIDTH, build_seeded, check_taylor_is_double_backward, inputs, padding
from tests.mechanisms.oracles import rotated
from tests.mechanisms.sight_checks import scattered_padding
from tests.mechanisms.test_sw import LargestTensor
from tests.sizes import with_slow

DIRECTIONS = ["bidirectional", "causal"]


def module(direction: str = "causal", **settings) -> torch.nn.Module:
    made = build_seeded(lambda: build("sparsek", width=WIDTH, heads=HEADS, direction=direction, **settings)).double()
    with torch.no_grad():
        made.scorer.weight.mul_(3)  # scores that differ by more than 1 are zero, free and full
    return made


def projected(scores: list[float], k: int) -> list[float]:
    """SparseK by bisection of τ: Σ clamp(u − τ, 0, 1) = k, or all ones where there are no more than k."""
    if len(scores) <= k:
        return [1.0] * len(scores)
    low, high = min(scores) - 2, max(scores)
    while (tau := (low + high) / 2) not in (low, high):
        if sum(min(max(u - tau, 0.0), 1.0) for u in scores) > k:
            low = tau
        else:
            high = tau
    return [min(max(u - low, 0.0), 1.0) for u in scores]


def attention(layer: torch.nn.Module, x_BND: Tensor, mask_BN: Tensor | None = None) -> Tensor:
    """The whole layer by loops over sequences, heads and queries, with sets of positions; zero where padding asks."""
    y_BND = torch.zeros_like(x_BND)
    k_kept, window, num_positions, head_width = layer.k, layer.window, x_BND.shape[1], WIDTH // HEADS
    for b, x_ND in enumerate(x_BND):
        q_ND, k_ND, v_ND = (
            x_ND @ layer.qkv.weight[row : row + WIDTH].T + layer.qkv.bias[row : row + WIDTH]
            for row in (0, WIDTH, 2 * WIDTH)
        )
        for head in range(HEADS):
            part = slice(head * head_width, (head + 1) * head_width)
            q_NK, k_NK, v_NK = rotated(q_ND[:, part]), rotated(k_ND[:, part]), v_ND[:, part]
            u = [float(x_N @ layer.scorer.weight[head]) for x_N in x_ND]
            for i in range(num_positions):
                if mask_BN is not None and not mask_BN[b, i]:
                    continue
                visible = [
                    j for j in range(i + 1 if layer.causal else num_positions) if mask_BN is None or mask_BN[b, j]
                ]
                m = dict(zip(visible, projected([u[j] for j in visible], k_kept), strict=True))
                kept = sorted(visible, key=lambda j: (-u[j], -j))[:k_kept]
                used = {j: m[j] for j in kept}
                if window is not None:
                    near = range(i - window, i + 1 + (0 if layer.causal else window))
                    used |= {j: 1.0 for j in visible if j in near}
                terms = {j: math.exp(float(q_NK[i] @ (soft * k_NK[j])) / head_width**0.5) for j, soft in used.items()}
                total = sum(terms.values())
                y_BND[b, i, part] = sum(terms[j] / total * used[j] * v_NK[j] for j in used)
    return y_BND @ layer.out.weight.T + layer.out.bias


@pytest.fixture(params=[4, 32])
def min_block(request, monkeypatch):
    """Blocks that the short sequences here cross, and the mechanism's own."""
    monkeypatch.setattr(sparsek, "MIN_BLOCK", request.param)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("settings", [{"k": 1, "window": 0}, {"k": 3, "window": None}, {"k": 5, "window": 2}])
@pytest.mark.parametrize("num_positions", with_slow([1, 5, 17], [4, 40]))
@torch.no_grad()
def test_equals_loops_over_the_projection_of_each_prefix(min_block, direction, settings, num_positions):
    x_BND, layer = inputs(num_positions=num_positions)[:2], module(direction, **settings)
    torch.testing.assert_close(layer(x_BND), attention(layer, x_BND), rtol=0, atol=1e-10)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mask_of", [padding, scattered_padding])
@torch.no_grad()
def test_equals_the_loops_over_what_is_valid(min_block, direction, mask_of):
    x_BND, layer, mask_BN = inputs(num_positions=21), module(direction, k=3, window=1), mask_of(21)
    expected = attention(layer, x_BND, mask_BN)
    torch.testing.assert_close(layer(x_BND, mask_BN=mask_BN)[mask_BN], expected[mask_BN], rtol=0, atol=1e-10)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("window", [None, 0, 3])
def test_no_more_positions_than_are_kept_is_softmax_attention(min_block, direction, window):
    layer = module(direction, k=40, window=window)
    whole = build("sa", width=WIDTH, heads=HEADS, direction=direction).double()
    whole.load_state_dict({name: value for name, value in layer.state_dict().items() if name != "scorer.weight"})
    for num_positions in (1, 17, 40):
        x_BND = inputs(num_positions=num_positions)
        torch.testing.assert_close(layer(x_BND), whole(x_BND), rtol=0, atol=1e-12)
    assert not torch.allclose(layer(inputs(num_positions=48)), whole(inputs(num_positions=48)), atol=1e-3)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_equal_scores_keep_the_later_positions(min_block, direction):
    """A token that recurs has the same score in the first layer: which one is kept must not hang on the block."""
    x_BND, layer = inputs(num_positions=12)[:1].repeat(1, 2, 1), module(direction, k=3, window=0)
    with torch.no_grad():
        torch.testing.assert_close(layer(x_BND), attention(layer, x_BND), rtol=0, atol=1e-10)


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 30.0])
def test_projection_of_every_prefix_is_that_of_bisection(scale):
    u_BHN = scale * torch.randn(1, 2, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    seen = torch.ones(30, 30, dtype=torch.bool).tril().expand(1, 2, 1, 30, 30)
    none = torch.zeros(1, 2, 1, 30, dtype=torch.bool)
    for k in (1, 4, 29, 30):
        soft = thresholds(u_BHN, Ranking.of(u_BHN), none, u_BHN[:, :, None], seen, k).soft(u_BHN[:, :, None, None])
        for head in range(2):
            for i in range(30):
                expected = torch.tensor(projected(u_BHN[0, head, : i + 1].tolist(), k), dtype=torch.float64)
                found = soft[0, head, 0, i, : i + 1].clamp(min=0)
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shared", [True, False])
def test_scores_far_above_the_next_count_in_full(shared):
    """With a gap of more than 1 after the k best none is free, and rounding says between which edges τ is looked for."""
    u_BHN = 3 * torch.randn(64, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    every, none = torch.ones(64, 2, 1, 5, dtype=torch.bool), torch.zeros(64, 2, 1, 5, dtype=torch.bool)
    own, members = (u_BHN[:, :, None, :0], every) if shared else (u_BHN[:, :, None], none)
    own_members = torch.ones(64, 2, 1, 1, own.shape[-1], dtype=torch.bool)
    tau = thresholds(u_BHN, Ranking.of(u_BHN), members, own, own_members, 3)
    found = tau.soft(u_BHN[:, :, None, None])[:, :, 0, 0].clamp(min=0)
    expected = [[projected(scores, 3) for scores in heads] for heads in u_BHN.tolist()]
    ordered = u_BHN.sort(-1, descending=True).values
    assert (ordered[..., 2] - ordered[..., 3] > 1).sum() > 30
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_scorer_learns_through_the_projection(min_block, direction):
    """Central differences of the loss, which know of no gradient, while the selection stays."""
    layer, x_BND = module(direction, k=4, window=1), inputs(num_positions=40)
    with torch.no_grad():
        assert layer.margin(x_BND) > 1e-5, "take another seed"

    def loss() -> Tensor:
        return layer(x_BND).tanh().square().sum()

    (gradient,) = torch.autograd.grad(loss(), layer.scorer.weight)
    direction_of = torch.randn(gradient.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        start, step, found = layer.scorer.weight.clone(), 1e-7, []
        for sign in (1, -1):
            layer.scorer.weight.copy_(start + sign * step * direction_of)
            found.append(float(loss()))
    expected = (found[0] - found[1]) / (2 * step)
    assert abs(expected) > 1e-2
    assert float((gradient * direction_of).sum()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_taylor_terms_are_those_of_double_backward_with_padding(min_block, direction):
    check_taylor_is_double_backward(module(direction, k=2, window=1), inputs(), padding())


def sets_of(u: list[float], k: int, causal: bool) -> list:
    """Which positions each row keeps, and which scores are free and full, by the loops' projection."""
    rows = []
    for i in range(len(u)):
        prefix = u[: i + 1] if causal else u
        m = projected(prefix, k)
        free, full = (
            {j for j, soft in enumerate(m) if low < soft < high} for low, high in ((1e-9, 1 - 1e-9), (1 - 1e-9, 2))
        )
        rows.append((set(sorted(range(len(m)), key=lambda j: (-prefix[j], -j))[:k]), free, full))
    return rows


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
@torch.no_grad()
def test_no_set_changes_within_the_margin_and_one_does_soon_beyond_it(monkeypatch, direction, spread):
    layer, k = module(direction, k=3), 3
    u = spread * torch.randn(HEADS, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    monkeypatch.setattr(layer, "scores", lambda x_BND: u[None])
    margin = float(layer.margin(inputs(num_positions=8)[:1]))
    assert 1e-6 < margin < math.inf
    shifted = {share: [] for share in (0.99, 10.0)}
    unshifted = [sets_of(u_N.tolist(), k, layer.causal) for u_N in u]
    for share, changes in shifted.items():
        for head in range(HEADS):
            for j in range(8):
                for sign in (-1, 1):
                    other = u[head].clone()
                    other[j] += sign * share * margin
                    changes.append(sets_of(other.tolist(), k, layer.causal) != unshifted[head])
    assert not any(shifted[0.99]) and any(shifted[10.0])


def test_nothing_can_change_where_no_more_are_seen_than_are_kept():
    assert float(module(k=12).margin(inputs(num_positions=12))) == math.inf
    tied_BND = inputs(num_positions=1).repeat(1, 2, 1)
    assert float(module(k=1).margin(tied_BND)) == 0


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("settings", [{"k": 4}, {"k": 50, "window": None}])
@pytest.mark.parametrize("num_positions", [1, 32, 100])
def test_cost_counts_the_products_that_are_computed(direction, settings, num_positions):
    config, shape = SparseKAttention.Config(**settings), MixerShape(WIDTH, HEADS, direction)
    layer = SparseKAttention(config, shape)
    with FlopCounterMode(display=False) as counter:
        layer(inputs(torch.float32, num_positions)[:1])
    assert SparseKAttention.cost(config, shape, num_positions) == counter.get_total_flops() / 2


def test_scores_stay_in_float32_where_products_are_rounded_to_bfloat16():
    layer, x_BND = module(k=4, window=1).float(), inputs(torch.float32, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        u_BHN, y_BND = layer.scores(x_BND), layer(x_BND)
    assert torch.equal(u_BHN, layer.scores(x_BND)) and u_BHN.dtype == torch.float32
    torch.testing.assert_close(y_BND.float(), layer(x_BND), rtol=0, atol=0.03)


def test_no_tensor_grows_with_the_square_of_the_length():
    for direction in DIRECTIONS:
        largest = []
        layer = module(direction, k=16, window=4)
        for num_positions in (512, 1024, 2048):
            x_BND = inputs(num_positions=num_positions)[:1].requires_grad_()
            with LargestTensor() as mode:
                layer(x_BND, mask_BN=torch.ones(x_BND.shape[:2], dtype=torch.bool)).sum().backward()
            largest.append(mode.elements)
        assert largest[1] <= 3 * largest[0] and largest[2] <= 3 * largest[1]
        assert largest[2] < 2048**2 / 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "mechanism.sparsek.k=0: input should be greater than or equal to 1"),
        ({"window": -1}, "mechanism.sparsek.window=-1: input should be greater than or equal to 0"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        build("sparsek", width=16, heads=2, **settings)
