from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stability.config.parts import validate_settings
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.mechanisms.nsa import NativeSparseAttention
from stability.models.position import Rope
from stability.optimizers._groups import splits
from stability.probes.layers.consensus import low_pass
from stability.registry import Registry
from tests.mechanisms import checks
from tests.mechanisms.oracles import rotated
from tests.mechanisms.test_sw import LargestTensor
from tests.sizes import with_slow

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
        return which.compressed.weight @ gelu(mapped(which.hidden, joined))

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
@pytest.mark.parametrize("num_positions", with_slow([1, 9, 26], [3, 17]))
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


@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
def test_heads_of_a_group_select_the_same_blocks_and_groups_need_not(settings):
    layer, x_BND = module(**settings), checks.inputs(num_positions=26)
    a_BMNN = layer.weights(x_BND)[:, HEADS : 2 * HEADS] > 0
    groups = settings.get("kv_heads", HEADS)
    of_groups = a_BMNN.unflatten(1, (groups, HEADS // groups))
    assert (of_groups == of_groups[:, :, :1]).all()
    assert groups == 1 or (of_groups[:, 0, 0] != of_groups[:, 1, 0]).any()
    blocks = a_BMNN.unflatten(-1, (-1, 2)).any(-1).sum(-1) if settings["selected_block"] == 2 else None
    assert blocks is None or (blocks.max() == 4 and (blocks[..., 6:] == 4).all())


@pytest.mark.parametrize("branch", [0, 1, 2])
@pytest.mark.parametrize("with_padding", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_branch_that_sees_everything_is_attention(branch, with_padding, kv_heads):
    """One gate open and the others shut: compressed blocks of one position, all blocks selected, a window over all."""
    sizes = {"block": 1, "stride": 1, "selected_block": 4, "selected": 9, "window": 30, "compression": "mean"}
    rope = None if branch == 0 else Rope()
    shape = MixerShape(WIDTH, HEADS, "causal", rope=rope)
    layer, plain = (
        Registry("mechanisms")
        .load(name)
        .build(validate_settings("mechanisms", name, {**own, "kv_heads": kv_heads}), shape)
        for name, own in (("nsa", sizes), ("sa", {}))
    )
    of_keys = kv_heads * WIDTH // HEADS
    parts = layer.qkv.weight.detach().split((WIDTH, *(of_keys,) * 6))
    with torch.no_grad():
        layer.qkv.bias.zero_()
        plain.qkv.bias.zero_()
        plain.qkv.weight.copy_(torch.cat([parts[0], parts[1 + branch], parts[4 + branch]]))
        layer.gate.weight.zero_()
        layer.gate.bias.fill_(-1e4)[branch * HEADS : (branch + 1) * HEADS] = 1e4
    plain.out.load_state_dict(layer.out.state_dict())
    x_BND, mask_BN = checks.inputs(num_positions=19), padded(19)
    given = {"mask_BN": mask_BN} if with_padding else {}
    valid_BN = mask_BN if with_padding else torch.ones_like(mask_BN)
    found_BND, expected_BND = (each.double()(x_BND, **given) for each in (layer, plain))
    torch.testing.assert_close(found_BND[valid_BN], expected_BND[valid_BN], rtol=0, atol=1e-12)


def test_before_the_first_complete_block_the_compression_gives_nothing():
    layer, x_BND = module(**{**SMALL, "block": 4, "stride": 2, "selected_block": 4}), checks.inputs()
    a_BMNN = layer.weights(x_BND)
    assert not a_BMNN[:, :HEADS, :3].any()
    torch.testing.assert_close(a_BMNN[:, :HEADS, 3, 3], torch.ones(3, HEADS, dtype=torch.float64))
    assert not a_BMNN[:, :HEADS, :, [0, 1, 2, 4, 6, 8]].any(), "a compressed value stands at its block's last position"
    with torch.no_grad():
        before_BND = layer(x_BND)
        for parameter in (*layer.compress_key.parameters(), *layer.compress_value.parameters()):
            parameter.add_(1.0)
        after_BND = layer(x_BND)
    assert torch.equal(before_BND[:, :3], after_BND[:, :3])
    assert (before_BND[:, 3:] != after_BND[:, 3:]).any(-1).all()


def small(heads: int = checks.HEADS, **changes: Any) -> nn.Module:
    """A layer of the contract's width with which 9 positions have more blocks than it selects."""
    return build("nsa", width=WIDTH, heads=heads, direction="causal", **{**SMALL, **changes})


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 1}, {"block": 1, "compression": "mean"}], ids=range(3))
def test_with_blocks_that_are_selected_the_contract_is_kept(changes):
    layer: Any = checks.build_seeded(lambda: small(**changes)).double()
    assert float(layer.margin(checks.inputs())) < math.inf, "all blocks are selected"
    for check in (
        checks.check_shape_and_dtype,
        checks.check_future_is_unseen,
        checks.check_past_is_seen,
        checks.check_padding_is_unread,
        checks.check_wholly_padded_is_finite,
        checks.check_second_derivatives,
        checks.check_degenerate_inputs,
        checks.check_weights_reproduce_forward,
    ):
        check(checks.build_seeded(lambda: small(**changes)))
    for check in (checks.check_deterministic, checks.check_save_load, checks.check_biases_may_go):
        check(lambda: small(**changes))


def test_the_margin_is_that_of_the_scores_of_the_papers_equations():
    layer, x_BND, mask_BN = module(**SMALL), checks.inputs(num_positions=17), padded(17)
    for given in (None, mask_BN):
        gaps = [math.inf]
        for b, x_ND in enumerate(x_BND):
            valid_N = torch.ones(17, dtype=torch.bool) if given is None else mask_BN[b]
            literal = Literal(layer, SMALL, x_ND, valid_N)
            for i in literal.valid:
                for group in range(HEADS):
                    chosen, scores = literal.selected(i, group), literal.scores(i, group)
                    free = [scores[j] for j in chosen if j not in (0, i // 2, i // 2 - 1)]
                    others = [score for j, score in scores.items() if j not in chosen and score > 0]
                    gaps += [min(free) - max(others)] if free and others else []
        with torch.no_grad():
            assert float(layer.margin(x_BND, mask_BN=given)) == pytest.approx(min(gaps), rel=1e-9)
    assert float(module(**{**SMALL, "selected": 9}).margin(x_BND)) == math.inf


def test_what_padding_would_select_is_not_in_the_margin():
    layer, x_BND = module(seed=1, **SMALL), checks.inputs(num_positions=40)
    with torch.no_grad():
        alone, padded_behind = (
            layer.margin(x_BND[:, :14]),
            layer.margin(x_BND, mask_BN=(torch.arange(40) < 14).expand(3, -1)),
        )
    assert float(padded_behind) == pytest.approx(float(alone), rel=1e-9)


@pytest.mark.parametrize("mask_BN", [None, padded(17)], ids=["whole", "padded"])
@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
def test_taylor_terms_are_those_of_double_backward(settings, mask_BN):
    checks.check_taylor_is_double_backward(module(**settings), checks.inputs(num_positions=17), mask_BN)


def test_no_tensor_has_a_number_for_each_pair_of_positions():
    sizes = {"block": 16, "stride": 8}
    layer = checks.build_seeded(lambda: build("nsa", width=WIDTH, heads=2, direction="causal", **sizes))
    x_BND = checks.inputs(torch.float32, 2048)[:1].requires_grad_()
    with LargestTensor() as mode:
        layer(x_BND, mask_BN=torch.ones(1, 2048, dtype=torch.bool)).sum().backward()
    assert mode.elements < 2048**2


def test_each_branch_drops_a_share_of_its_weights_in_training():
    shape = MixerShape(WIDTH, HEADS, "causal", dropout=0.4)
    config = validate_settings("mechanisms", "nsa", {**SMALL, "kv_heads": 2})
    torch.manual_seed(0)
    layer, x_BND = NativeSparseAttention(config, shape).double(), checks.inputs()[:1]
    for branch in range(3):
        with torch.no_grad():
            layer.gate.weight.zero_()
            layer.gate.bias.fill_(-1e4)[branch * HEADS : (branch + 1) * HEADS] = 1e4
            whole_ND = layer.eval()(x_BND)[0]
            draws_BND = layer.train()(x_BND.expand(4000, -1, -1))
        assert (draws_BND[:2000] != whole_ND).any(-1)[:, 4:].float().mean() > 0.5
        error_ND = draws_BND.std(0) / 4000**0.5
        assert ((draws_BND.mean(0) - whole_ND).abs() <= 5 * error_ND + 1e-12).all()


def test_probes_of_what_attention_passes_look_at_three_maps_of_each_head():
    layer, x_BND = module(**SMALL), checks.inputs(num_positions=12)[:1]
    found = list(low_pass(layer, x_BND))
    assert len(found) == 3 * HEADS and all(math.isfinite(head.numbers["gain"]) for head in found)
    a_NN = layer.weights(x_BND)[0, HEADS + 1].detach()
    centred = torch.eye(12, dtype=torch.float64) - 1 / 12
    gain = float(torch.linalg.matrix_norm(centred @ a_NN @ centred, 2))
    assert found[HEADS + 1].numbers["gain"] == pytest.approx(gain)


def test_matrices_of_queries_keys_and_values_stand_by_themselves_and_places_are_not_decayed():
    layer = module(**SMALL, kv_heads=2)
    assert splits(layer)[id(layer.qkv.weight)] == (16, *(8,) * 6)
    assert layer.compress_key.own_decay == {"place_GLK": False}
    assert tuple(layer.compress_key.get_parameter("place_GLK").shape) == (2, 2, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stride": 3}, "mechanism.nsa.block=8 must be a multiple of mechanism.nsa.stride=3"),
        ({"selected_block": 18}, "mechanism.nsa.selected_block=18 must be a multiple of mechanism.nsa.stride=4"),
        ({"selected_block": 4}, "mechanism.nsa.selected_block=4 must be mechanism.nsa.block=8 or more"),
        ({"selected": 2}, "mechanism.nsa.selected=2: input should be greater than or equal to 3"),
        ({"kv_heads": 3}, "mechanism.nsa.kv_heads=3 does not divide heads=4; choices: 1, 2, 4, null"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_one_line(settings, message):
    with pytest.raises(ValueError) as caught:
        build("nsa", width=WIDTH, heads=HEADS, direction="causal", **settings)
    assert str(caught.value) == message


def test_a_block_longer_than_the_sequence_is_refused_as_its_weights_would_grow_with_it():
    config = NativeSparseAttention.Config(block=32, selected_block=32)
    NativeSparseAttention.check_positions(config, 32)
    with pytest.raises(ValueError, match="^mechanism.nsa.block=32 must fit in model.positions=31$"):
        NativeSparseAttention.check_positions(config, 31)
    NativeSparseAttention.check_positions(NativeSparseAttention.Config(), 6)  # the default stands in short models


def test_of_equal_scores_the_earlier_blocks_are_selected_however_long_the_sequence_is():
    """Text that recurs has equal scores where no layer before has told positions apart."""
    layer = module(**SMALL)
    for length in (16, 17, 40, 90, 200):
        position_N = torch.arange(length)
        p_NC = (position_N[1:] <= position_N[:, None]).double()  # a block of two positions ends at 1, 2, …
        chosen, is_chosen = layer._selection(p_NC.expand(1, HEADS, 1, -1, -1))
        assert torch.equal(chosen[is_chosen], torch.ones_like(chosen[is_chosen])), "the first block that may be chosen"
        assert is_chosen[0, 0, :, 0].tolist() == [i // 2 > 2 for i in range(length)]


def test_a_block_without_a_score_is_not_selected_though_there_is_room_for_it():
    """Positions 5 and 7 are valid, and no compressed block that holds them is."""
    settings = {"block": 2, "stride": 2, "selected_block": 4, "selected": 4, "window": 3}
    layer, x_BND, valid_N = module(**settings), checks.inputs(num_positions=16), torch.ones(16, dtype=torch.bool)
    valid_N[[4, 6]] = False
    with torch.no_grad():
        found_BND = layer(x_BND, mask_BN=valid_N.expand(3, -1))
        assert not layer.weights(x_BND, mask_BN=valid_N.expand(3, -1))[:, HEADS : 2 * HEADS, 12:, 4:8].any()
        for b, x_ND in enumerate(x_BND):
            literal = Literal(layer, settings, x_ND, valid_N)
            for i in range(12, 16):
                torch.testing.assert_close(found_BND[b, i], literal.output(i), rtol=1e-10, atol=1e-12)
