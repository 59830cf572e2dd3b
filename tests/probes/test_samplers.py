"""Samplers against distributions that are known: three tokens whose joint law is written down, exact denoisers and
exact scores from it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy import stats

from stability.objectives.score_entropy import Geometric, LogLinear
from stability.probes.generation.samplers import (
    Draws,
    NonFinite,
    apply_temperature,
    categorical,
    reverse_diffusion,
    sample_left_to_right,
    step_probs,
    unmask,
    unmask_tracks,
)

V, N = 3, 2
MASK = V
# p(x_0, x_1): neither uniform nor a product
JOINT = torch.tensor([[0.30, 0.02, 0.08], [0.05, 0.15, 0.10], [0.01, 0.24, 0.05]], dtype=torch.float64)
MANY = 6000


def draws(num: int, seed: int = 0) -> Draws:
    return Draws([torch.Generator().manual_seed(1000 * seed + index) for index in range(num)])


class OneStream(Draws):
    """The same numbers for many sequences from one generator, which is faster."""

    def __init__(self, num: int, seed: int = 0):
        super().__init__([torch.Generator().manual_seed(seed)])
        self.num = num

    def uniforms(self, *shape: int):
        return super().uniforms(self.num, *shape)[0]


def clean_probs(tokens_BN):
    """p(x_i | the unmasked tokens), by summing the joint law: (B, 2, 3)."""
    rows = []
    for tokens in tokens_BN.tolist():
        agrees = torch.zeros(V, V, dtype=torch.float64)
        for x in itertools.product(range(V), repeat=N):
            if all(token in (MASK, value) for token, value in zip(tokens, x, strict=True)):
                agrees[x] = JOINT[x]
        rows.append(torch.stack([agrees.sum(1), agrees.sum(0)]) / agrees.sum())
    return torch.stack(rows)


def cached(function):
    """The same by lookup: there are only so many different sequences."""
    known = torch.cat([function(torch.tensor([x])) for x in itertools.product(range(V + 1), repeat=N)])
    return lambda tokens_BN: known[tokens_BN[:, 0] * (V + 1) + tokens_BN[:, 1]]


CLEAN = cached(clean_probs)


def absorbing_scores(tokens_BN, sigma):
    """Exact ratios p_σ(y at i)/p_σ(x) with one mask changed: p(x_i = y | the rest)/(e^σ − 1); nonsense where nothing is
    masked."""
    ratios = CLEAN(tokens_BN) / math.expm1(float(sigma))
    scores = torch.cat([ratios, torch.full((*tokens_BN.shape, 1), 7.0, dtype=torch.float64)], -1)
    return scores.scatter(-1, tokens_BN[..., None], 1.0)


def uniform_scores(tokens_BN, sigma):
    """Exact ratios of the joint law after each token has become any token with probability 1 − e^{−σ}."""
    kept = math.exp(-float(sigma))
    change = kept * torch.eye(V, dtype=torch.float64) + (1 - kept) / V
    noisy = change @ JOINT @ change
    x, y = tokens_BN[:, 0], tokens_BN[:, 1]
    return torch.stack([noisy[:, y].T, noisy[x]], 1) / noisy[x, y][:, None, None]


def p_value(tokens_BN, joint=JOINT):
    """χ² of the pairs' counts against the joint law (8 degrees of freedom)."""
    counts = torch.bincount(tokens_BN[:, 0] * V + tokens_BN[:, 1], minlength=V * V).double()
    return float(stats.chisquare(counts.numpy(), (joint.flatten() / joint.sum() * len(tokens_BN)).numpy()).pvalue)


def sampled(steps, tokens_BN):
    for _ in steps:
        pass
    return tokens_BN


def masks(num=MANY):
    return torch.full((num, N), MASK)


@pytest.mark.parametrize("order", ["top_prob", "random"])
def test_unmasking_recovers_a_known_joint_law(order):
    tokens = masks()
    assert p_value(sampled(unmask(CLEAN, tokens, MASK, OneStream(MANY), order=order, temperature=1.0), tokens)) > 0.01


def test_left_to_right_recovers_a_known_joint_law():
    tokens = torch.zeros(MANY, N, dtype=torch.int64)
    tokens[:, 0] = categorical(JOINT.sum(1).expand(MANY, V), OneStream(MANY, 1).uniforms())
    steps = sample_left_to_right(
        lambda before: JOINT[before[:, 0]] / JOINT[before[:, 0]].sum(1, keepdim=True),
        tokens,
        OneStream(MANY, 2),
        temperature=1.0,
    )
    assert p_value(sampled(steps, tokens)) > 0.01


@pytest.mark.parametrize(
    ("graph", "noise"),
    [("absorbing", LogLinear(1e-3)), ("absorbing", Geometric(1e-4, 20.0)), ("uniform", LogLinear(1e-3))],
)
@pytest.mark.parametrize(("scheme", "steps"), [("analytic", 200), ("euler", 250)])
def test_reverse_diffusion_with_exact_scores_recovers_a_known_joint_law(graph, noise, scheme, steps):
    """Two tokens that move in one step do so each by its own conditional: an error of the method that vanishes with the
    steps, and here is within chance."""
    tokens = masks(4000) if graph == "absorbing" else (OneStream(4000, 2).uniforms(N) * V).long()
    scores = absorbing_scores if graph == "absorbing" else uniform_scores
    steps = steps * (2 if isinstance(noise, Geometric) else 1)  # most of its noise goes within a third of the time
    found = sampled(
        reverse_diffusion(
            scores, noise, graph, tokens, OneStream(4000, 3), scheme=scheme, steps=steps, temperature=1.0
        ),
        tokens,
    )
    assert int(found.max()) < V, "a mask is left"
    assert p_value(found) > 0.01


@pytest.mark.parametrize("noise", [LogLinear(1e-3), Geometric(1e-4, 20.0)])
def test_few_analytic_steps_give_exactly_the_law_that_they_should(noise):
    """Each mask goes at step k with probability p_k = (share clean then − share clean before), independently; both at
    once with Σ p_k², then as a product of the marginals, else by the joint law."""
    num, steps = 20000, 6
    tokens = masks(num)
    sampled(
        reverse_diffusion(
            absorbing_scores,
            noise,
            "absorbing",
            tokens,
            OneStream(num, 5),
            scheme="analytic",
            steps=steps,
            temperature=1.0,
        ),
        tokens,
    )
    clean = (-noise.sigma(torch.linspace(1, 1e-3, steps + 1, dtype=torch.float64))).exp()
    share = (torch.cat([clean, torch.ones(1)]) - clean[0]).diff() / (1 - clean[0])
    together = float(share.square().sum())
    product = JOINT.sum(1, keepdim=True) * JOINT.sum(0, keepdim=True)
    assert together > 0.15 and p_value(tokens) < 1e-6, "six steps differ from the joint law visibly"
    assert p_value(tokens, (1 - together) * JOINT + together * product) > 0.01


def test_one_position_is_filled_each_step_the_most_certain_first_and_never_changed():
    law = torch.tensor([[0.4, 0.3, 0.3], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.34, 0.33, 0.33]])
    tokens = torch.full((5, 4), MASK)
    order, before, old = [], tokens != MASK, tokens[:0]
    for _ in unmask(
        lambda tokens_BN: law.expand(len(tokens_BN), 4, V), tokens, MASK, draws(5), order="top_prob", temperature=1.0
    ):
        filled = tokens != MASK
        order.append([index for index in range(4) if bool(filled[:, index].all())])
        assert int(filled.sum(1).max()) == int(filled.sum(1).min()) == len(order)
        assert torch.equal(tokens[before], old.flatten()), "a token was changed"
        before, old = filled.clone(), tokens[filled]
    assert order == [[1], [1, 2], [0, 1, 2], [0, 1, 2, 3]]


def test_random_order_fills_every_position_first_equally_often():
    first = torch.full((MANY, 4), MASK)
    next(
        unmask(
            lambda tokens_BN: torch.ones(len(tokens_BN), 4, V) / V,
            first,
            MASK,
            OneStream(MANY),
            order="random",
            temperature=1.0,
        )
    )
    assert stats.chisquare((first != MASK).sum(0).numpy()).pvalue > 0.01 and set((first != MASK).sum(1).tolist()) == {1}


def test_positions_that_float32_cannot_tell_apart_are_filled_from_the_left():
    near = torch.full((1, 4, V), 1 / 3) + torch.tensor([0.0, 3e-8, 6e-8, 3e-8])[None, :, None]
    tokens = torch.full((1, 4), MASK)
    next(unmask(lambda _: near, tokens, MASK, draws(1), order="top_prob", temperature=1.0))
    assert (tokens != MASK).tolist() == [[True, False, False, False]]


def test_a_sample_does_not_depend_on_the_batch_that_it_is_drawn_in():
    whole, half = masks(40), masks(15)
    sampled(unmask(CLEAN, whole, MASK, draws(40), order="top_prob", temperature=1.0), whole)
    sampled(unmask(CLEAN, half, MASK, draws(15), order="top_prob", temperature=1.0), half)
    assert torch.equal(whole[:15], half)


@pytest.mark.parametrize("scheme", ["analytic", "euler"])
@pytest.mark.parametrize("graph", ["absorbing", "uniform"])
def test_step_probabilities_sum_to_one_and_are_those_written_down(scheme, graph):
    tokens = torch.tensor([[MASK, 1]]) if graph == "absorbing" else torch.tensor([[2, 1]])
    sigma, dsigma = torch.tensor(0.9, dtype=torch.float64), torch.tensor(0.05, dtype=torch.float64)
    score = (absorbing_scores if graph == "absorbing" else uniform_scores)(tokens, sigma)
    probs = step_probs(scheme, graph, score, tokens, dsigma)
    assert torch.allclose(probs.sum(-1), torch.ones(1, N, dtype=torch.float64), atol=1e-12) and bool((probs >= 0).all())
    if graph == "absorbing":
        factor = math.expm1(0.05) if scheme == "analytic" else 0.05
        assert probs[0, 0, :V].tolist() == pytest.approx((factor * score[0, 0, :V]).tolist(), rel=1e-12)
        assert probs[0, 1].tolist() == [0, 1, 0, 0], "an unmasked token moved"
    else:
        expected = _uniform_by_matrices(score, tokens, 0.05, scheme)
        assert torch.allclose(probs, expected, atol=1e-12)


def _uniform_by_matrices(score, tokens, dsigma, scheme):
    """(e^{−Δσ·Q} s)_y · (e^{Δσ·Q})(y, x) with the dense matrix exponential; Euler: δ + Δσ·Q(y, x)·s_y."""
    rate = torch.full((V, V), 1 / V, dtype=torch.float64) - torch.eye(V, dtype=torch.float64)
    rows = []
    for s, x in zip(score[0], tokens[0].tolist(), strict=True):
        if scheme == "analytic":
            rows.append((torch.matrix_exp(-dsigma * rate) @ s) * torch.matrix_exp(dsigma * rate)[:, x])
        else:
            row = dsigma / V * s
            row[x] = 1 - (row.sum() - row[x])
            rows.append(row)
    return torch.stack(rows)[None]


def test_an_analytic_step_is_the_exact_posterior_of_one_masked_token():
    """One position alone: from σ to σ − Δσ the chance to be unmasked is (e^{Δσ} − 1)/(e^σ − 1), whatever the step."""
    for dsigma in (0.01, 0.5, 0.9):
        probs = step_probs(
            "analytic",
            "absorbing",
            absorbing_scores(torch.tensor([[MASK, 1]]), 0.9),
            torch.tensor([[MASK, 1]]),
            torch.tensor(dsigma),
        )
        still = math.exp(-(0.9 - dsigma))  # share that is clean at the lower noise
        assert float(probs[0, 0, :V].sum()) == pytest.approx((still - math.exp(-0.9)) / (1 - math.exp(-0.9)), rel=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_the_logarithms(temperature):
    logits = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    weights = apply_temperature(logits.softmax(-1), temperature)
    assert torch.allclose(weights / weights.sum(), (logits / temperature).softmax(-1), atol=1e-12)


def test_temperature_zero_takes_the_likeliest_token_and_the_first_of_equals():
    assert apply_temperature(torch.tensor([[0.2, 0.4, 0.4], [0.1, 0.1, 0.8]]), 0).tolist() == [[0, 1, 0], [0, 0, 1]]
    tokens = masks(3)
    sampled(unmask(CLEAN, tokens, MASK, draws(3), order="top_prob", temperature=0), tokens)
    assert tokens.tolist() == [[0, 0]] * 3 or tokens.tolist() == [[2, 1]] * 3


def test_what_has_no_weight_is_never_drawn_at_either_end_of_the_uniforms():
    weights = torch.tensor([0.0, 0.2, 0.0, 0.8, 0.0]).expand(2, 5)
    assert categorical(weights, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 3]


def test_a_model_without_finite_probabilities_is_told_of():
    tokens = masks(2)
    for order in ("top_prob", "random"):
        with pytest.raises(NonFinite, match="not finite"):
            next(
                unmask(lambda _: torch.full((2, N, V), math.nan), tokens, MASK, draws(2), order=order, temperature=1.0)
            )
    with pytest.raises(NonFinite, match="not finite"):
        steps = reverse_diffusion(
            lambda *_: torch.full((2, N, V + 1), math.nan),
            LogLinear(1e-3),
            "absorbing",
            tokens,
            draws(2),
            scheme="euler",
            steps=2,
            temperature=1.0,
        )
        next(steps)


HIDDEN, FIRST = 1, 5  # of tracks: a special token, and the first content token


def track_laws(tracks):
    """The joint law as two tracks of one position each: each track's is that of its column given what is known of the
    other."""
    pairs = torch.stack([torch.where(tokens_B1 == HIDDEN, MASK, tokens_B1 - FIRST)[:, 0] for tokens_B1 in tracks], 1)
    probs_B2V = CLEAN(pairs)
    return [probs_B2V[:, :1], probs_B2V[:, 1:]]


@pytest.mark.parametrize("order", ["top_prob", "random"])
def test_unmasking_two_tracks_recovers_their_joint_law(order):
    tracks = [torch.full((MANY, 1), HIDDEN) for _ in range(2)]
    sampled(
        unmask_tracks(
            track_laws, tracks, OneStream(MANY), mask_id=HIDDEN, first_id=FIRST, order=order, temperature=1.0
        ),
        tracks[0],
    )
    assert p_value(torch.cat(tracks, 1) - FIRST) > 0.01


def test_a_place_of_one_track_is_filled_each_step_the_most_certain_first_and_never_changed():
    """Vocabularies of 3 and 2; the second sequence has fewer masks, and what is no mask stays what it is."""
    laws = [torch.tensor([[0.4, 0.3, 0.3], [0.1, 0.7, 0.2]]), torch.tensor([[0.35, 0.65], [0.1, 0.9]])]
    tracks = [torch.tensor([[HIDDEN, HIDDEN], [3, HIDDEN]]), torch.tensor([[HIDDEN, HIDDEN], [4, HIDDEN]])]
    order = []
    for _ in unmask_tracks(
        lambda each: [law.expand(2, *law.shape) for law in laws],
        tracks,
        draws(2),
        mask_id=HIDDEN,
        first_id=FIRST,
        order="top_prob",
        temperature=0,
    ):
        order.append(
            [[(row, at) for row in range(2) for at in range(2) if int(tokens[row, at]) == HIDDEN] for tokens in tracks]
        )
    assert order == [
        [[(0, 0), (0, 1), (1, 1)], [(0, 0)]],
        [[(0, 0)], [(0, 0)]],
        [[(0, 0)], []],
        [[], []],
    ]
    assert [tokens.tolist() for tokens in tracks] == [[[5, 6], [3, 6]], [[6, 6], [4, 6]]]


def test_random_order_fills_every_place_of_every_track_first_equally_often():
    tracks = [torch.full((MANY, 2), HIDDEN) for _ in range(2)]
    flat = lambda each: [torch.ones(MANY, 2, V) / V for _ in each]  # noqa: E731
    next(unmask_tracks(flat, tracks, OneStream(MANY), mask_id=HIDDEN, first_id=FIRST, order="random", temperature=1.0))
    filled_BM = torch.cat(tracks, 1) != HIDDEN
    assert stats.chisquare(filled_BM.sum(0).numpy()).pvalue > 0.01 and set(filled_BM.sum(1).tolist()) == {1}


@pytest.mark.parametrize("order", ["top_prob", "random"])
def test_what_is_not_finite_is_told_of_at_masked_places_only(order):
    """What padding holds is nobody's probability."""
    nan = torch.tensor([[[0.5, 0.5], [math.nan, math.nan]]])
    one = [torch.tensor([[HIDDEN, 0]])]
    sampled(
        unmask_tracks(lambda _: [nan], one, draws(1), mask_id=HIDDEN, first_id=FIRST, order=order, temperature=1.0),
        one[0],
    )
    assert int(one[0][0, 0]) >= FIRST and int(one[0][0, 1]) == 0
    with pytest.raises(NonFinite, match="not finite"):
        next(
            unmask_tracks(
                lambda _: [nan],
                [torch.tensor([[0, HIDDEN]])],
                draws(1),
                mask_id=HIDDEN,
                first_id=FIRST,
                order=order,
                temperature=1.0,
            )
        )
