"""Score entropy against slow literal loops, closed forms, and the information that its integral over the noise must add
up to."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stability.build import build_model, build_objective
from stability.config.parts import validate_settings
from stability.objectives._graph import Absorbing, Uniform
from stability.objectives.score_entropy import Geometric, LogLinear, ScoreEntropy, times
from tests.within import assert_within

V = 7
EPSILON = 1e-3


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def score_entropy(vocab_size=V, **settings):
    return ScoreEntropy(validate_settings("objectives", "score_entropy", settings), vocab_size)


def batch(objective, sequences=5, positions=12, seed=0):
    return objective.examples(torch.randint(V, (sequences, positions), generator=generator(seed)), generator(seed + 1))


def random_logits(*shape, seed=2):
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


every_form = pytest.mark.parametrize(
    "settings",
    [{"graph": graph, "noise": noise} for graph in ("absorbing", "uniform") for noise in ("loglinear", "geometric")],
    ids=lambda s: "-".join(s.values()),
)


@every_form
def test_a_token_is_corrupted_with_the_probability_of_its_noise(settings):
    objective = score_entropy(**settings)
    sigma = torch.full((400,), 0.7)
    tokens = torch.randint(V, (400, 250), generator=generator())
    noisy = objective.graph.corrupt(tokens, sigma, generator(1))
    moved = 1 - math.exp(-0.7)
    changed = moved if settings["graph"] == "absorbing" else moved * (V - 1) / V
    assert (noisy != tokens).float().mean().item() == pytest.approx(changed, abs=5 * math.sqrt(0.25 / tokens.numel()))
    assert noisy.max() == (V if settings["graph"] == "absorbing" else V - 1)
    if settings["graph"] == "absorbing":
        assert torch.equal(noisy[noisy != V], tokens[noisy != V])


@every_form
def test_loss_equals_a_slow_literal_loop(settings):
    objective = score_entropy(**settings)
    examples = batch(objective)
    logits = random_logits(5, 12, V)
    total, count = objective.loss_sum(logits, examples)
    t_B = times(5, generator(1)).tolist()
    slow = 0.0
    for b in range(5):
        sigma = float(examples.sigma_B[b])
        rate = float(objective.noise.rate(torch.tensor(t_B[b])))
        for i in range(12):
            x, x0 = int(examples.inputs_BN[b, i]), int(examples.targets_BN[b, i])
            term = literal_absorbing if settings["graph"] == "absorbing" else literal_uniform
            slow += rate * term(logits[b, i].tolist(), x, x0, sigma)
    assert count == 60
    assert total.item() == pytest.approx(slow, rel=1e-10)


def literal_absorbing(net, x, x0, sigma):
    if x != V:
        return 0.0
    s = [math.exp(net[y] - math.log(math.expm1(sigma)) - math.log(V)) for y in range(V)]
    r = 1 / math.expm1(sigma)
    return sum(s) - r * math.log(s[x0]) + r * (math.log(r) - 1)


def literal_uniform(net, x, x0, sigma):
    def p(y):
        return math.exp(-sigma) * (y == x0) + (1 - math.exp(-sigma)) / V

    total = 0.0
    for y in range(V):
        if y != x:
            q = p(y) / p(x)
            total += (math.exp(net[y]) - q * net[y] + q * (math.log(q) - 1)) / V
    return total


@every_form
def test_the_loss_is_zero_at_the_true_ratios_and_positive_beside_them(settings):
    graph = score_entropy(**settings).graph
    sigma = torch.tensor([1e-3, 0.3, 2.0, 6.0], dtype=torch.float64)
    clean = torch.randint(V, (4, 9), generator=generator())
    if isinstance(graph, Absorbing):
        noisy = torch.full_like(clean, V)
        # s = r at x0, 0 elsewhere
        logits = torch.full((4, 9, V), -1e4, dtype=torch.float64).scatter(-1, clean[..., None], math.log(V))
    else:
        noisy = torch.randint(V, (4, 9), generator=generator(1))
        noisy[:, :3] = clean[:, :3]
        given = transition(Uniform(V), sigma)[torch.arange(4)[:, None], clean]
        logits = (given / given.gather(-1, noisy[..., None])).log()
    scale = 1 / sigma.clamp(max=1)[:, None]  # of the terms that cancel
    assert_within(graph.loss(logits, noisy, clean, sigma).abs(), 1e-12 * scale)
    for other in (logits + 0.1, logits - 0.1, logits.roll(1, -1)):
        assert (graph.loss(other, noisy, clean, sigma) > 0).all()


def transition(graph, sigma):
    """p_σ(y | x0) as dense matrices (…, V, S), by the matrix exponential of the graph's rates."""
    states = graph.num_states
    if isinstance(graph, Absorbing):
        rates = -torch.eye(states, dtype=torch.float64)
        rates[:, -1] += 1  # from any state to the mask; from the mask nowhere
    else:
        rates = torch.ones(states, states, dtype=torch.float64) / states - torch.eye(states, dtype=torch.float64)
    return torch.linalg.matrix_exp(sigma[..., None, None] * rates)[..., : graph.vocab_size, :]


@pytest.mark.parametrize("graph", [Absorbing(3), Uniform(3)], ids=["absorbing", "uniform"])
def test_with_the_scores_of_a_known_source_the_loss_adds_up_to_the_information_that_noise_destroys(graph):
    """∫ E[loss] dσ = I(x0; x_σ at the start) − I(x0; x_σ at the end), by enumeration of x0 and x_σ of one token and
    Gauss–Legendre quadrature."""
    source = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    start, end = 0.05, 3.0
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(40))
    sigma, weights = start + (end - start) * (nodes + 1) / 2, weights * (end - start) / 2
    given = transition(graph, sigma)
    marginal = torch.einsum("x,qxs->qs", source, given)
    total = 0.0
    for clean in range(3):
        for noisy in range(graph.num_states):
            x = torch.full((40, 1), noisy)
            if not graph.counts(x).any():
                continue
            logits = (marginal[:, :3] / marginal[:, noisy, None]).log()
            if isinstance(graph, Absorbing):
                logits = logits + (torch.expm1(sigma).log() + math.log(3))[:, None]
            loss = graph.loss(logits[:, None], x, torch.full((40, 1), clean), sigma).squeeze(1)
            total += float((weights * source[clean] * given[:, clean, noisy] * loss).sum())
    ends = torch.tensor([start, end], dtype=torch.float64)
    assert total == pytest.approx(information(graph, source, ends)[0] - information(graph, source, ends)[1], abs=1e-10)


def information(graph, source, sigma):
    given = transition(graph, sigma)
    marginal = torch.einsum("x,qxs->qs", source, given)
    terms = source[:, None] * given * (given / marginal[:, None]).log()
    return torch.where(given > 0, terms, 0.0).sum((1, 2)).tolist()


def test_a_fresh_model_is_a_zero_network_and_costs_one_minus_epsilon_log_v_per_token(lab):
    objective_of = {"name": "score_entropy", "noise": "loglinear"}
    spec = lab.spec(objective=objective_of)
    objective, model = build_objective(spec, V), build_model(spec, V)
    tokens = torch.randint(V, (512, 16), generator=generator())
    per_token = []
    for seed in range(8):
        examples = objective.examples(tokens, generator(seed))
        logits = examples.logits(model)
        assert not logits.any()
        t_B = times(512, generator(seed))
        total, count = objective.loss_sum(logits, examples)
        masked_B = (examples.inputs_BN == V).sum(1)
        assert total.item() == pytest.approx(float((masked_B / t_B).sum()) * math.log(V), rel=1e-4)
        per_token.append((total / count).item())
    error = math.sqrt(6 / (8 * 512 * 16)) * math.log(V)  # the variance of masked/(N·t) is (ln(1/1e-3) − 1)/N
    assert np.mean(per_token) == pytest.approx((1 - EPSILON) * math.log(V), abs=3 * error)
    assert error < 0.03


def test_a_zero_network_costs_exactly_one_minus_epsilon_log_v_in_the_mean_over_noise():
    """Averaged over x_t in closed form: a position is masked with probability 1 − e^{−σ}."""
    graph, t = Absorbing(V), torch.linspace(1e-3, 1, 500, dtype=torch.float64)
    mask, clean = torch.full((500, 1), V), torch.zeros(500, 1, dtype=torch.long)
    for noise, expected in (
        (LogLinear(EPSILON), lambda t: 0 * t + (1 - EPSILON) * math.log(V)),
        (
            Geometric(1e-4, 20.0),
            lambda t: Geometric(1e-4, 20.0).rate(t) * (-Geometric(1e-4, 20.0).sigma(t)).exp() * math.log(V),
        ),
    ):
        sigma = noise.sigma(t)
        loss = (
            noise.rate(t)
            * -torch.expm1(-sigma)
            * graph.loss(torch.zeros(500, 1, V, dtype=torch.float64), mask, clean, sigma).squeeze(1)
        )
        torch.testing.assert_close(loss, expected(t), rtol=1e-10, atol=0)


@every_form
def test_loss_is_in_float32_even_of_bf16_logits(settings):
    objective = score_entropy(**settings)
    examples, logits = batch(objective), random_logits(5, 12, V)
    exact = objective.loss_sum(logits, examples)[0].item()
    low = objective.loss_sum(logits.bfloat16(), examples)[0]
    assert low.dtype == torch.float32
    assert low.item() == objective.loss_sum(logits.bfloat16().float(), examples)[0].item()
    assert objective.loss_sum(logits.float(), examples)[0].item() == pytest.approx(exact, rel=1e-5)


def test_what_stands_at_unmasked_positions_changes_nothing():
    objective = score_entropy()
    examples, logits = batch(objective), random_logits(5, 12, V)
    poisoned = torch.where((examples.inputs_BN == V)[..., None], logits, math.nan)
    assert objective.loss_sum(poisoned, examples)[0] == objective.loss_sum(logits, examples)[0]


def test_one_noise_level_per_sequence_decides_weights_and_masks_and_goes_to_the_model():
    objective = score_entropy(noise="loglinear")
    examples = batch(objective, sequences=64, positions=200)
    t = times(64, generator(1))
    torch.testing.assert_close(examples.sigma_B, objective.noise.sigma(t))
    masked = examples.inputs_BN == V
    assert torch.equal(examples.weights_BN, masked * objective.noise.rate(t)[:, None])
    assert torch.equal(examples.inputs_BN[~masked], examples.targets_BN[~masked])
    assert np.corrcoef(masked.float().mean(1), t)[0, 1] > 0.98
