"""Grouped queries: `sa` with fewer heads of keys and values than of queries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stability.config.identity import run_id
from stability.config.parse import parse_run
from stability.config.parts import validate_settings
from stability.mechanisms import build
from stability.mechanisms._inner import load
from stability.mechanisms.sa import SoftmaxAttention
from stability.optimizers._groups import splits
from stability.probes.layers.attention import attention_statistics, discrepancies, qk_singular_values
from stability.probes.layers.consensus import low_pass
from tests.config.test_run_id import BASE
from tests.mechanisms import checks
from tests.mechanisms.oracles import rotated

WIDTH, HEADS = 16, 4
HEAD_WIDTH = WIDTH // HEADS
CASES = [(direction, kv_heads) for direction in ("bidirectional", "causal") for kv_heads in (1, 2)]


def grouped(direction: str = "causal", kv_heads: int | None = 2, heads: int = HEADS, **settings) -> SoftmaxAttention:
    def made() -> nn.Module:
        return build("sa", width=WIDTH, heads=heads, direction=direction, kv_heads=kv_heads, **settings)

    layer = checks.build_seeded(made).double()
    with torch.no_grad():
        layer.qkv.bias.normal_(generator=torch.Generator().manual_seed(5))
    return layer


def written_out(layer: SoftmaxAttention, kv_heads: int) -> SoftmaxAttention:
    """`sa` with keys and values of its own for each head, which are those of the head's group."""
    rows = list(range(WIDTH))
    for start in (WIDTH, WIDTH + kv_heads * HEAD_WIDTH):
        for head in range(HEADS):
            first = start + (head * kv_heads // HEADS) * HEAD_WIDTH
            rows += range(first, first + HEAD_WIDTH)
    whole = grouped("causal" if layer.causal else "bidirectional", None)
    given = layer.state_dict()
    whole.load_state_dict(given | {name: given[name][rows] for name in ("qkv.weight", "qkv.bias")})
    return whole


def by_loops(layer: SoftmaxAttention, x_ND: Tensor, valid_N: Tensor, kv_heads: int) -> dict[int, Tensor]:
    """Return each valid position's output: query head h reads the keys and values of group ⌊h·G/H⌋."""
    weight, bias, end = layer.qkv.weight, layer.qkv.bias, WIDTH + kv_heads * HEAD_WIDTH
    q_ND, k_NE, v_NE = (x_ND @ weight[a:b].T + bias[a:b] for a, b in ((0, WIDTH), (WIDTH, end), (end, len(weight))))
    of_heads: dict[int, list[Tensor]] = {i: [] for i in range(len(x_ND)) if valid_N[i]}
    for head in range(HEADS):
        group = head * kv_heads // HEADS
        q_NK = rotated(q_ND[:, head * HEAD_WIDTH : (head + 1) * HEAD_WIDTH])
        k_NK, v_NK = (part[:, group * HEAD_WIDTH : (group + 1) * HEAD_WIDTH] for part in (k_NE, v_NE))
        k_NK = rotated(k_NK)
        for i, found in of_heads.items():
            seen = [j for j in of_heads if j <= i or not layer.causal]
            part_J = torch.stack([(q_NK[i] @ k_NK[j] / HEAD_WIDTH**0.5).exp() for j in seen])
            found.append(part_J @ v_NK[seen] / part_J.sum())
    return {i: torch.cat(found) @ layer.out.weight.T + layer.out.bias for i, found in of_heads.items()}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("direction", "kv_heads"), CASES)
def test_equals_attention_by_loops_over_groups(direction, kv_heads, padded):
    layer, x_BND = grouped(direction, kv_heads), checks.inputs()
    mask_BN = checks.padding() if padded else torch.ones(x_BND.shape[:2], dtype=torch.bool)
    found_BND = layer(x_BND, mask_BN=mask_BN if padded else None)
    for found_ND, x_ND, valid_N in zip(found_BND, x_BND, mask_BN, strict=True):
        for i, expected_D in by_loops(layer, x_ND, valid_N, kv_heads).items():
            torch.testing.assert_close(found_ND[i], expected_D, rtol=0, atol=1e-11)


@pytest.mark.parametrize("settings", [{}, {"mask_diagonal": True}, {"temperature": "learned"}])
@pytest.mark.parametrize(("direction", "kv_heads"), CASES)
def test_equals_attention_whose_keys_and_values_are_written_out(direction, kv_heads, settings):
    x_BND, layer = checks.inputs(), grouped(direction, kv_heads)
    given, whole = layer.state_dict(), written_out(layer, kv_heads).state_dict()
    if "temperature" in settings:
        given, whole = ({**state, "log_temperature": torch.full((1,), 0.3)} for state in (given, whole))
    found, expected = grouped(direction, kv_heads, **settings), grouped(direction, None, **settings)
    found.load_state_dict(given)
    expected.load_state_dict(whole)
    torch.testing.assert_close(found(x_BND), expected(x_BND), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("direction", "kv_heads"), CASES)
def test_probes_see_the_same_as_where_keys_and_values_are_written_out(direction, kv_heads):
    x_BND, layer = checks.inputs()[:1], grouped(direction, kv_heads)
    whole = written_out(layer, kv_heads)
    torch.testing.assert_close(qk_singular_values(layer), qk_singular_values(whole), rtol=0, atol=1e-12)
    found, expected = (nn.ModuleDict({"mixer": each}) for each in (layer, whole))
    statistics = [attention_statistics(each, lambda each=each: each["mixer"](x_BND)) for each in (found, expected)]
    assert statistics[0]["mixer"].logit_max == pytest.approx(statistics[1]["mixer"].logit_max)
    assert statistics[0]["mixer"].lowest_head_entropy == pytest.approx(statistics[1]["mixer"].lowest_head_entropy)
    for measure in (discrepancies, lambda *given: (head.numbers for head in low_pass(*given))):
        rows = [list(measure(each, x_BND)) for each in (layer, whole)]
        assert len(rows[0]) == HEADS
        for row, as_written in zip(*rows, strict=True):
            assert row == pytest.approx(as_written)


@pytest.mark.parametrize(("kv_heads", "numbers"), [(None, 3 * 16), (4, 3 * 16), (2, 16 + 2 * 8), (1, 16 + 2 * 4)])
def test_keys_and_values_have_fewer_parameters_which_stand_as_matrices_of_their_own(kv_heads, numbers):
    layer = grouped(kv_heads=kv_heads)
    assert tuple(layer.qkv.weight.shape) == (numbers, WIDTH)
    rows = (numbers - WIDTH) // 2
    assert splits(layer)[id(layer.qkv.weight)] == (WIDTH, rows, rows)
    layer.start_local(2.0)
    queries_and_keys, values = layer.qkv.bias.split((WIDTH + rows, rows))
    assert (queries_and_keys == 2).all() and not (values == 2).any()


def test_as_many_heads_of_keys_as_of_queries_is_plain_attention():
    plain, all_heads = grouped(kv_heads=None), grouped(kv_heads=HEADS)
    assert torch.equal(plain(checks.inputs()), all_heads(checks.inputs()))


def test_heads_that_cannot_be_grouped_are_refused_in_one_line():
    message = "mechanism.sa.kv_heads=3 does not divide heads=4; choices: 1, 2, 4, null"
    with pytest.raises(ValueError) as caught:
        build("sa", width=WIDTH, heads=HEADS, kv_heads=3)
    assert str(caught.value) == message
    inside = message.replace("mechanism.sa", "mechanism.two_way.sa")
    with pytest.raises(ValueError) as caught:
        load("two_way").check_heads(validate_settings("mechanisms", "two_way", {"sa": {"kv_heads": 3}}), HEADS)
    assert str(caught.value) == inside
    with pytest.raises(ValueError) as caught:
        load("mix").check_heads(validate_settings("mechanisms", "mix", {"sa": {"kv_heads": 3}}), HEADS)
    assert str(caught.value) == message.replace("mechanism.sa", "mechanism.mix.sa")


@pytest.mark.parametrize("given", [{"name": "sa", "kv_heads": 3}, {"name": "mix", "sa": {"kv_heads": 3}}])
def test_a_run_with_heads_that_cannot_be_grouped_is_refused_when_parsed(given):
    with pytest.raises(ValueError, match="kv_heads=3 does not divide heads=4; choices: 1, 2, 4, null"):
        parse_run(BASE | {"mechanism": given})


def test_the_heads_of_keys_are_part_of_an_id_where_they_are_told():
    ids = [
        run_id(parse_run(BASE | {"mechanism": {"name": "sa", **given}}))
        for given in ({}, {"kv_heads": None}, {"kv_heads": 2}, {"kv_heads": 4})
    ]
    assert ids[0] == ids[1] and len(set(ids)) == 3
