"""What score entropy hands to a sampler, and what its settings change."""

from __future__ import annotations

import math

import pytest
import torch

from stability.build import build_model, build_objective
from stability.corpora.cache import load
from stability.runs.directory import read_jsonl
from stability.training.evaluate import Validation

from .test_score_entropy import V, batch, random_logits, score_entropy


class Fixed(torch.nn.Module):
    """Logits that are given; keeps the noise levels that it was asked at."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.asked = logits, None

    def forward(self, tokens_BN, *, sigma_B):
        self.asked = sigma_B
        return self.logits


def test_log_scores_are_those_of_the_parameterisation():
    logits, sigma = random_logits(2, 3, V), torch.tensor([0.2, 4.0], dtype=torch.float64)
    tokens = torch.tensor([[V, 2, V], [0, V, V]])
    absorbing = score_entropy().log_score(Fixed(logits), tokens, sigma)
    uniform = score_entropy(graph="uniform").log_score(Fixed(logits), tokens.clamp(max=V - 1), sigma)
    assert absorbing.shape == (2, 3, V + 1)
    assert uniform.shape == (2, 3, V)
    for b in range(2):
        for i in range(3):
            x = int(tokens[b, i])
            shift = math.log(math.expm1(sigma[b])) + math.log(V)
            expected = [float(logits[b, i, y]) - shift for y in range(V)] + [-math.inf]
            expected[x] = 0.0
            assert absorbing[b, i].tolist() == pytest.approx(expected, rel=1e-12)
            expected = logits[b, i].tolist()
            expected[min(x, V - 1)] = 0.0
            assert uniform[b, i].tolist() == expected


def test_clean_probabilities_are_the_normalised_scores_at_the_noise_that_the_masked_share_implies():
    logits = random_logits(4, 8, V)
    tokens = torch.zeros(4, 8, dtype=torch.long)
    tokens[0, :2], tokens[1, :6], tokens[2] = V, V, V
    objective, model = score_entropy(noise="loglinear"), Fixed(logits)
    probs = objective.clean_probs(model, tokens)
    lowest, highest = objective.noise.sigma(torch.tensor([1e-3, 1.0])).tolist()
    assert model.asked.tolist() == pytest.approx([-math.log(0.75), -math.log(0.25), highest, lowest], rel=1e-5)
    scores = objective.log_score(model, tokens, model.asked.double()).exp()[..., :V]
    masked = tokens == V
    torch.testing.assert_close(probs[masked], (scores / scores.sum(-1, keepdim=True))[masked], rtol=1e-12, atol=0)


def test_a_graph_without_a_mask_has_nothing_to_unmask():
    objective = score_entropy(graph="uniform")
    assert objective.mask_id is None
    with pytest.raises(ValueError, match="nothing to unmask"):
        objective.clean_probs(Fixed(random_logits(1, 2, V)), torch.zeros(1, 2, dtype=torch.long))


def test_every_setting_changes_the_examples_or_the_model(lab):
    plain = batch(score_entropy())
    for changed in ({"graph": "uniform"}, {"noise": "loglinear"}, {"sigma_min": 1e-3}, {"sigma_max": 10.0}):
        other = batch(score_entropy(**changed))
        assert not all(torch.equal(*pair) for pair in zip(plain[:3], other[:3], strict=True)), changed
    log_linear = batch(score_entropy(noise="loglinear"))
    assert not torch.equal(log_linear.sigma_B, batch(score_entropy(noise="loglinear", epsilon=0.1)).sigma_B)
    shapes = [
        {
            name: tuple(p.shape)
            for name, p in build_model(lab.spec(objective={"name": "score_entropy", **settings}), V).named_parameters()
        }
        for settings in ({}, {"condition_width": 64}, {"sinusoids": 128})
    ]
    assert shapes[0] != shapes[1] != shapes[2] != shapes[0]


def test_a_geometric_schedule_that_falls_is_refused():
    with pytest.raises(ValueError, match=r"objective\.sigma_min=30\.0 must be below objective\.sigma_max=20\.0"):
        score_entropy(sigma_min=30.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"epsilon": 0.01},
            r"objective\.epsilon=0\.01 changes nothing here: it belongs to objective\.noise=loglinear \(objective\.noise=geometric given\)",
        ),
        (
            {"noise": "loglinear", "sigma_max": 10.0},
            r"objective\.sigma_max=10\.0 changes nothing here: it belongs to objective\.noise=geometric",
        ),
    ],
)
def test_what_the_noise_does_not_read_is_refused_and_its_default_is_not(settings, message):
    with pytest.raises(ValueError, match=message):
        score_entropy(**settings)
    score_entropy(noise="loglinear", sigma_min=1e-4, sigma_max=20.0)
    score_entropy(noise="geometric", epsilon=1e-3)


def test_validation_takes_the_same_times_and_masks_for_every_mechanism_and_seed(lab):
    drawn = []
    for changes in ({"mechanism": {"name": "sa"}}, {"mechanism": {"name": "sc"}, "seed": 3}):
        spec = lab.spec(objective={"name": "score_entropy"}, **changes)
        corpus = load(lab.cache, spec.data_fingerprint)
        objective = build_objective(spec, corpus.vocab_size)
        validation = Validation(spec, corpus, objective, torch.device("cpu"))
        drawn.append([tensor for examples in validation._chunks for tensor in examples if tensor is not None])
        assert validation.measure(build_model(spec, corpus.vocab_size))["val_nll"] == pytest.approx(
            math.log(corpus.vocab_size), rel=0.5
        )
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))


@pytest.mark.parametrize("graph", ["absorbing", "uniform"])
def test_a_run_trains_on_it_and_chunks_change_nothing_but_rounding(lab, graph):
    losses = []
    for chunk in (None, 9):
        directory = lab.train(
            lab.spec(objective={"name": "score_entropy", "graph": graph, "loss_chunk": chunk}, mechanism={"name": "sc"})
        )
        rows = list(read_jsonl(directory.path / "metrics.jsonl"))
        losses.append(
            [value for row in rows for value in (row["loss"], row["val_nll"], row["grad_norm"]) if value is not None]
        )
    assert len(losses[0]) == 28
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
