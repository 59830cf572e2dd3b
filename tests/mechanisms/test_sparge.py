"""`sparge` against a slow loop over blocks in the order of the paper's Algorithm 1, and what it may never do."""

from __future__ import annotations

import math

import pytest
import torch

from stability.mechanisms import build
from tests.mechanisms.oracles import rotated

WIDTH, HEADS = 16, 2
K = WIDTH // HEADS
BASE = {"tau": 0.7, "theta": 0.2, "skip": -1.0, "query_block": 5, "key_block": 4}
CHANGES = [{}, {"tau": 0.4}, {"theta": 0.5}, {"theta": -1.0}, {"skip": -0.1}, {"query_block": 3}, {"key_block": 7}]
# inside, at and beyond the blocks
LENGTHS = (1, 4, 5, 9, 17, 23)


def layer_of(name, direction, sharp=3.0, seed=0, **settings):
    """A layer whose logits differ by some units, so that something is left out."""
    torch.manual_seed(seed)
    layer = build(name, width=WIDTH, heads=HEADS, direction=direction, **settings).double()
    with torch.no_grad():
        layer.qkv.weight[: 2 * WIDTH] *= sharp
        layer.qkv.bias += 0.3 * torch.randn(3 * WIDTH, dtype=torch.float64)
    return layer


def inputs(num_positions, batch=1, seed=1):
    """Sequences that change slowly, so that blocks are alike."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(batch, num_positions, WIDTH, dtype=torch.float64, generator=generator)
    return steps + 2 * torch.randn(batch, 1, WIDTH, dtype=torch.float64, generator=generator)


def alikeness(rows):
    """The mean cosine of all pairs of a block."""
    unit_LK = torch.stack([row / row.norm() for row in rows])
    return float((unit_LK @ unit_LK.T).mean())


def blocks_taken(q, k, asking, blocks, tau, theta):
    """Stage 1 for the queries ``asking``: the numbers of the key blocks that are scored. ``blocks``: by number the keys
    that stand for it."""
    queries = [q[i] for i in asking]
    mean = sum(queries) / len(queries)
    unlike = [number for number, keys in blocks.items() if alikeness([k[j] for j in keys]) < theta]
    if tau == 1 or alikeness(queries) < theta:
        return set(blocks)
    masses = {
        number: math.exp(float(mean @ (sum(k[j] for j in keys) / len(keys))) / math.sqrt(K))
        for number, keys in blocks.items()
        if number not in unlike
    }
    taken, cumulated = set(unlike), 0.0
    for number in sorted(masses, key=lambda each: -masses[each]):
        cumulated += masses[number] / sum(masses.values())
        if cumulated <= tau or len(taken) == len(unlike):
            taken.add(number)
    return taken


def by_blocks(layer, x_ND, valid, settings, causal):
    """The output (N, D), the pairs that are scored and those that are weighed, by loops over queries and blocks."""
    num, tau, theta, skip = len(x_ND), settings["tau"], settings["theta"], settings["skip"]
    b_q, b_k = settings["query_block"], settings["key_block"]
    heads, scored, weighed = [], 0, 0
    with torch.no_grad():
        for head in range(HEADS):
            q, k, v = (
                x_ND @ layer.qkv.weight[start : start + K].T + layer.qkv.bias[start : start + K]
                for start in (part * WIDTH + head * K for part in range(3))
            )
            q, k, y_NK = rotated(q), rotated(k), torch.zeros(num, K, dtype=torch.float64)
            groups = (
                [[i] for i in range(num)] if causal else [list(range(s, min(s + b_q, num))) for s in range(0, num, b_q)]
            )
            for group in groups:
                rows = [i for i in group if valid[i]]
                if not rows:
                    continue
                start = rows[0] // b_q * b_q
                asking = [i for i in range(start, rows[-1] + 1) if valid[i]] if causal else rows
                all_blocks = {
                    number: [j for j in range(number * b_k, min(number * b_k + b_k, num)) if valid[j]]
                    for number in range(-(-num // b_k))
                }
                own = rows[0] // b_k if causal else None
                known = {number: keys for number, keys in all_blocks.items() if keys and (own is None or number < own)}
                taken = blocks_taken(q, k, asking, known, tau, theta) if known else set()
                taken |= {own} if own is not None else set()
                largest = dict.fromkeys(rows, -math.inf)
                above, below = {i: torch.zeros(K, dtype=torch.float64) for i in rows}, dict.fromkeys(rows, 0.0)
                for number in sorted(taken):
                    seen = {i: [j for j in all_blocks[number] if not causal or j <= i] for i in rows}
                    logits = {i: {j: float(q[i] @ k[j]) / math.sqrt(K) for j in seen[i]} for i in rows}
                    new = {i: max([largest[i], *logits[i].values()]) for i in rows}
                    is_late = max(max(logits[i].values(), default=-math.inf) - new[i] for i in rows) < skip
                    for i in rows:
                        rescale = math.exp(largest[i] - new[i])
                        above[i], below[i] = above[i] * rescale, below[i] * rescale
                        for j, logit in logits[i].items():
                            scored, weighed = scored + 1, weighed + (not is_late)
                            below[i] += math.exp(logit - new[i])
                            if not is_late:
                                above[i] = above[i] + math.exp(logit - new[i]) * v[j]
                    largest = new
                for i in rows:
                    y_NK[i] = above[i] / below[i]
            heads.append(y_NK)
        return torch.cat(heads, 1) @ layer.out.weight.T + layer.out.bias, scored, weighed


def masks(num_positions):
    yield [True] * num_positions
    if num_positions > 4:
        yield [i < num_positions - 3 for i in range(num_positions)]
        yield [i >= 2 and i != num_positions // 2 for i in range(num_positions)]


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_outputs_and_shares_are_those_of_loops_over_blocks(direction, changes):
    settings = BASE | changes
    layer, causal = layer_of("sparge", direction, **settings), direction == "causal"
    shares = []
    for num_positions in LENGTHS:
        x_BND = inputs(num_positions)
        for valid in masks(num_positions):
            mask_BN = torch.tensor([valid])
            expected, scored, weighed = by_blocks(
                layer, x_BND[0].where(mask_BN[0, :, None], 0.0), valid, settings, causal
            )
            found = layer(x_BND, mask_BN=mask_BN)[0]
            torch.testing.assert_close(found[mask_BN[0]], expected[mask_BN[0]], rtol=1e-10, atol=1e-12)
            seen = sum(
                1
                for i in range(num_positions)
                for j in range(num_positions)
                if valid[i] and valid[j] and (j <= i or not causal)
            )
            shares.append(layer.skipped(x_BND, mask_BN=mask_BN))
            assert shares[-1] == pytest.approx(1 - (scored + weighed) / (2 * seen * HEADS), abs=1e-12)
    assert max(shares) > 0.05, "nothing is left out: the test shows nothing"


@pytest.mark.parametrize("field", [{"tau": 0.4}, {"theta": 0.9}, {"skip": -0.1}, {"query_block": 2}, {"key_block": 8}])
def test_every_setting_changes_the_output(field):
    base = {"tau": 0.7, "theta": -1.0, "skip": -1.0, "query_block": 5, "key_block": 4}
    x_BND = inputs(23, batch=4)
    one, other = (layer_of("sparge", "bidirectional", 1.0, **settings)(x_BND) for settings in (base, base | field))
    assert (one - other).abs().max() > 1e-4
