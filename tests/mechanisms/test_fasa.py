"""`fasa` against a slow loop over queries, chunks and keys, its calibration by sets, and what it may never do."""

from __future__ import annotations

import math

import pytest
import torch

from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.mechanisms.fasa import FrequencyAwareAttention
from tests.mechanisms.oracles import rotated
from tests.mechanisms.test_sparge import HEADS, WIDTH, K, inputs, layer_of, masks

CHUNKS = K // 2
LENGTHS = (1, 4, 5, 9, 17)
# by head, the chunks that stand for it
DOMINANT = [[2], [0, 3]]


def fasa(direction, dominant=None, **settings):
    layer = layer_of("fasa", direction, **settings)
    if dominant is not None:
        layer.dominant_HC = torch.tensor([[chunk in chunks for chunk in range(CHUNKS)] for chunks in dominant])
    return layer


def head_of(layer, x_ND, head):
    with torch.no_grad():
        q, k, v = (
            x_ND @ layer.qkv.weight[start : start + K].T + layer.qkv.bias[start : start + K]
            for start in (part * WIDTH + head * K for part in range(3))
        )
    return rotated(q), rotated(k), v


def product(q_i, k_j, chunks):
    return sum(float(q_i[c] * k_j[c] + q_i[c + CHUNKS] * k_j[c + CHUNKS]) for c in chunks)


def top(scores, number):
    """The keys of the largest scores, a set."""
    return set(sorted(scores, key=lambda j: -scores[j])[:number])


def by_tokens(layer, x_ND, valid, causal, tokens, dominant):
    """The output (N, D) by loops over queries and their keys."""
    num, heads = len(x_ND), []
    for head in range(HEADS):
        q, k, v = head_of(layer, x_ND, head)
        y_NK = torch.zeros(num, K, dtype=torch.float64)
        for i in range(num):
            seen = [j for j in range(num) if valid[j] and (j <= i or not causal)]
            taken = top({j: product(q[i], k[j], dominant[head]) for j in seen}, tokens)
            weights = {j: math.exp(product(q[i], k[j], range(CHUNKS)) / math.sqrt(K)) for j in taken}
            for j in taken:
                y_NK[i] += weights[j] / sum(weights.values()) * v[j]
        heads.append(y_NK)
    return torch.cat(heads, 1) @ layer.out.weight.detach().T + layer.out.bias.detach()


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_outputs_are_those_of_loops_over_keys(direction, tokens):
    layer, causal = fasa(direction, DOMINANT, tokens=tokens, chunks=2), direction == "causal"
    for num_positions in LENGTHS:
        x_BND = inputs(num_positions)
        for valid in masks(num_positions):
            mask_BN = torch.tensor([valid])
            expected = by_tokens(layer, x_BND[0].where(mask_BN[0, :, None], 0.0), valid, causal, tokens, DOMINANT)
            found = layer(x_BND, mask_BN=mask_BN)[0]
            torch.testing.assert_close(found[mask_BN[0]], expected[mask_BN[0]], rtol=1e-10, atol=1e-12)
            keys = [
                sum(1 for j in range(num_positions) if valid[j] and (j <= i or not causal))
                for i in range(num_positions)
                if valid[i]
            ]
            share = 1 - sum(min(tokens, each) for each in keys) / sum(keys)
            assert layer.skipped(x_BND, mask_BN=mask_BN) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
def test_agreement_is_the_share_of_keys_that_both_rank_first(direction):
    layer, valid = fasa(direction, agreement_tokens=3), [i != 2 and i < 10 for i in range(12)]
    x_BND, mask_BN = inputs(12), torch.tensor([valid])
    found = layer.agreement(x_BND, mask_BN=mask_BN)
    for head in range(HEADS):
        q, k, _ = head_of(layer, x_BND[0].where(mask_BN[0, :, None], 0.0), head)
        for chunk in range(CHUNKS):
            shares = []
            for i in (i for i in range(12) if valid[i]):
                seen = [j for j in range(12) if valid[j] and (j <= i or direction == "bidirectional")]
                number = min(3, math.ceil(len(seen) / 2))
                whole, part = (
                    top({j: product(q[i], k[j], chunks) for j in seen}, number) for chunks in (range(CHUNKS), [chunk])
                )
                shares.append(len(whole & part) / number)
            assert float(found[head, chunk]) == pytest.approx(sum(shares) / len(shares), abs=1e-12)


def test_the_chunks_that_agree_best_are_dominant_each_head_its_own():
    layer = fasa("causal", chunks=2, tokens=3)
    layer.calibrate(torch.tensor([[0.1, 0.9, 0.3, 0.2], [0.5, 0.1, 0.2, 0.6]]))
    assert layer.dominant_HC.tolist() == [[False, True, True, False], [True, False, False, True]]


def test_a_chunk_that_makes_all_the_difference_is_found():
    """Where only one chunk of a head has weights, its agreement is 1 and no other's is."""
    layer = fasa("causal", chunks=1, tokens=3)
    with torch.no_grad():
        rows = torch.ones(3 * WIDTH, dtype=torch.bool)
        rows[[1, 1 + CHUNKS, K + 2, K + 2 + CHUNKS]] = False  # queries of chunk 1 in head 0, of chunk 2 in head 1
        rows[WIDTH:] = False
        layer.qkv.weight[rows] = 0.0
        layer.qkv.bias[rows] = 0.0
    layer.calibrate(layer.agreement(inputs(17, batch=2)))
    assert layer.dominant_HC.tolist() == [[False, True, False, False], [False, False, True, False]]


def test_without_a_calibration_it_says_so():
    with pytest.raises(
        ValueError, match=r"^fasa with 2 of 4 frequency chunks does not know which: calibrate it first$"
    ):
        fasa("causal", chunks=2, tokens=3)(inputs(9))


def test_another_k_of_the_agreement_counts_otherwise():
    found = [fasa("causal", agreement_tokens=number).agreement(inputs(17)) for number in (1, 8)]
    assert not torch.equal(*found)


def test_what_cannot_be_is_refused_in_a_line():
    with pytest.raises(ValueError, match=r"^mechanism.fasa.chunks=5: a head of width 8 has 4 frequency chunks$"):
        build("fasa", width=WIDTH, heads=HEADS, chunks=5)
    with pytest.raises(ValueError, match=r"^fasa selects by the frequencies of RoPE, .*: position=rope$"):
        FrequencyAwareAttention(FrequencyAwareAttention.Config(), MixerShape(WIDTH, HEADS, rope=None))
