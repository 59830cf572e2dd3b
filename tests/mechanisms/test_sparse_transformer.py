"""Near heads and far heads see the paper's sets, computed on little more than those."""

from __future__ import annotations

import pytest
import torch

from stability.config.parts import validate_settings
from stability.mechanisms import build
from stability.probes.layers.attention import attention_statistics
from stability.registry import Registry
from tests.mechanisms import sparse_oracles
from tests.mechanisms.small import OTHER
from tests.mechanisms.sparse_oracles import holes, made, sequences
from tests.mechanisms.test_sw import LargestTensor
from tests.sizes import with_slow

DIRECTIONS = ("bidirectional", "causal")
SETTINGS = OTHER["sparse_transformer"]


def keys(direction, num_positions, near_heads, pattern="strided", stride=4, summary=1, **of_logits):
    """The paper's sets A⁽¹⁾ and A⁽²⁾, element by element."""

    def of(head, i):
        if pattern == "strided" and head < near_heads:
            last = i if direction == "causal" else min(num_positions - 1, i + stride)
            return set(range(max(0, i - stride), last + 1))
        found = set()
        for j in range(i + 1 if direction == "causal" else num_positions):
            if pattern == "strided":
                is_seen = (i - j) % stride == 0
            elif head < near_heads:
                is_seen = j // stride == i // stride
            else:
                is_seen = j % stride in range(stride - summary, stride)
            if is_seen:
                found.add(j)
        return found

    return of


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("num_positions", with_slow([1, 5, 17], [3, 4, 16, 40]))
def test_equals_a_loop_over_the_papers_sets(settings, direction, num_positions):
    layer, x_BND = made("sparse_transformer", direction, **settings), sequences(num_positions)
    sets = keys(direction, num_positions, 1, **settings)
    for mask_BN in (None, holes(num_positions)):
        expected_BND = sparse_oracles.over_sets(layer, x_BND, sets, mask_BN)
        sparse_oracles.assert_equal_where_valid(layer(x_BND, mask_BN=mask_BN), expected_BND, mask_BN)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_pairs_that_it_declares_are_the_papers(settings, direction):
    found_HNN = made("sparse_transformer", direction, **settings).visible(13, torch.device("cpu"))
    sets = keys(direction, 13, 1, **settings)
    for head in range(2):
        assert [set(row.nonzero().flatten().tolist()) for row in found_HNN[head]] == [sets(head, i) for i in range(13)]


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_of_three_heads_two_are_near(pattern):
    layer, x_BND = made("sparse_transformer", heads=3, pattern=pattern), sequences(11, 24)
    expected_BND = sparse_oracles.over_sets(layer, x_BND, keys("bidirectional", 11, 2, pattern))
    sparse_oracles.assert_equal_where_valid(layer(x_BND), expected_BND)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_neither_what_follows_nor_padding_behind_changes_a_sequence(settings):
    sparse_oracles.assert_prefix_is_itself(made("sparse_transformer", "causal", **settings))
    for direction in DIRECTIONS:
        sparse_oracles.assert_padding_behind_adds_nothing(made("sparse_transformer", direction, **settings))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_with_a_stride_of_the_root_nothing_grows_faster_than_n_to_the_three_halves(pattern, direction):
    largest = []
    for num_positions, stride in ((256, 16), (1024, 32)):
        layer = made("sparse_transformer", direction, pattern=pattern, stride=stride)
        x_BND = sequences(num_positions).requires_grad_()
        with LargestTensor() as mode:
            layer(x_BND, mask_BN=torch.ones(x_BND.shape[:2], dtype=torch.bool)).sum().backward()
        largest.append(mode.elements)
    assert largest[1] <= 8.1 * largest[0]
    assert largest[1] < 1024**2


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_entropies_are_those_of_each_heads_own_rows(pattern, direction):
    layer, x_BND, mask_BN = made("sparse_transformer", direction, pattern=pattern), sequences(11), holes(11)
    (found,) = attention_statistics(layer, lambda: layer(x_BND, mask_BN=mask_BN)).values()
    a_BHNN = layer.weights(x_BND, mask_BN=mask_BN)
    entropies = []
    for head in range(2):
        rows = [row for b in range(3) for i, row in enumerate(a_BHNN[b, head]) if mask_BN[b, i] and row.any()]
        entropies.append(sum(-float((row[row > 0] * row[row > 0].log()).sum()) for row in rows) / len(rows))
    assert found.entropy == pytest.approx(sum(entropies) / 2)
    assert found.lowest_head_entropy == pytest.approx(min(entropies))


def test_one_head_and_settings_that_cannot_be_are_refused(lab):
    message = "mechanism.sparse_transformer has two kinds of heads and needs at least 2; heads=1"
    for given in ({"name": "sparse_transformer"}, {"name": "two_way", "of": "sparse_transformer"}):
        with pytest.raises(ValueError) as caught:
            lab.spec(mechanism=given, model={"name": "x", "layers": 2, "width": 8, "heads": 1, "positions": 16})
        assert str(caught.value) == message.replace(
            "mechanism.", "mechanism.two_way." if "of" in given else "mechanism."
        )
    with pytest.raises(ValueError, match="summary=5 must be at most stride=4"):
        build("sparse_transformer", width=8, heads=2, pattern="fixed", summary=5)
    with pytest.raises(ValueError, match=r"stride=1: input should be greater than or equal to 2"):
        build("sparse_transformer", width=8, heads=2, stride=1)
    mechanism, config = Registry("mechanisms").load("sparse_transformer"), {"stride": 9}
    mechanism.check_positions(validate_settings("mechanisms", "sparse_transformer", config), 9)
    with pytest.raises(ValueError, match=r"sparse_transformer.stride=9 must be at most model.positions=8"):
        mechanism.check_positions(validate_settings("mechanisms", "sparse_transformer", config), 8)
