"""The losses and poolings of sentence embeddings equal closed forms written as loops, and sentence-transformers'."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from torch import nn

from stability.config.parts import validate_settings
from stability.corpora.sentences.corpus import SentenceBatch
from stability.objectives import Examples
from stability.objectives.sentence_pairs import POOLS, SentencePairs, cosent, cosine_terms, mnrl_terms, triplet_terms
from tests.within import assert_within

ROWS, WIDTH = 7, 5
WITHOUT = "sentence-transformers is not installed (pip install --no-deps --target FOLDER, then PYTHONPATH=FOLDER)"
needs_library = pytest.mark.skipif(importlib.util.find_spec("sentence_transformers") is None, reason=WITHOUT)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def embeddings(num: int) -> list[torch.Tensor]:
    return [drawn(ROWS, WIDTH, seed=seed).requires_grad_() for seed in range(num)]


def scores() -> torch.Tensor:
    return torch.tensor([0.1, 0.9, 0.9, -0.3, 0.5, 0.0, 1.0], dtype=torch.float64)


def cosine(first: list[float], second: list[float]) -> float:
    dot = sum(a * b for a, b in zip(first, second, strict=True))
    return dot / math.sqrt(sum(a * a for a in first) * sum(b * b for b in second))


def nothing_hidden(num: int) -> torch.Tensor:
    return torch.zeros(ROWS, num, dtype=torch.bool)


def test_cosine_is_the_squared_error_of_each_cosine():
    first, second = embeddings(2)
    pairs = zip(first.tolist(), second.tolist(), scores().tolist(), strict=True)
    expected = [(cosine(a, b) - score) ** 2 for a, b, score in pairs]
    assert cosine_terms(first, second, scores()).tolist() == pytest.approx(expected, rel=1e-12)


def test_cosent_sums_over_all_ordered_pairs_and_no_others():
    cosines, total = drawn(ROWS).tanh(), 1.0
    for (c, y), (d, z) in [
        (x, w)
        for x in zip(cosines.tolist(), scores().tolist(), strict=True)
        for w in zip(cosines.tolist(), scores().tolist(), strict=True)
    ]:
        total += math.exp((d - c) / 0.05) if y > z else 0.0
    assert float(cosent(cosines, scores(), 0.05)) == pytest.approx(math.log(total), rel=1e-12)


def test_cosent_of_equal_scores_is_zero_with_a_gradient_of_zero():
    cosines = drawn(ROWS).requires_grad_()
    loss = cosent(cosines, torch.ones(ROWS), 0.05)
    (gradient,) = torch.autograd.grad(loss, cosines)
    assert loss == 0 and not gradient.count_nonzero()


def test_mnrl_is_the_cross_entropy_of_each_rows_own_candidate_among_all():
    first, second = embeddings(2)
    for row, found in enumerate(mnrl_terms(first, second, nothing_hidden(ROWS), 0.05).tolist()):
        logits = [20 * cosine(first[row].tolist(), each) for each in second.tolist()]
        assert found == pytest.approx(math.log(sum(map(math.exp, logits))) - logits[row], rel=1e-10)


def test_a_hidden_candidate_of_mnrl_does_not_compete():
    first, second = embeddings(2)
    hidden = nothing_hidden(ROWS)
    hidden[0, 3] = True
    others = [index for index in range(ROWS) if index != 3]
    expected = mnrl_terms(first[others], second[others], nothing_hidden(ROWS - 1)[: ROWS - 1], 0.05)[0]
    assert float(mnrl_terms(first, second, hidden, 0.05)[0].detach()) == pytest.approx(
        float(expected.detach()), rel=1e-12
    )


def test_triplet_is_the_hinge_of_two_distances():
    anchors, positives, negatives = (each.tolist() for each in embeddings(3))
    expected = [
        max(0.0, math.dist(a, p) - math.dist(a, n) + 0.5) for a, p, n in zip(anchors, positives, negatives, strict=True)
    ]
    assert 0 < sum(each == 0 for each in expected) < ROWS, "the hinge is never reached, or never left"
    found = triplet_terms(*embeddings(3), margin=0.5)
    assert_within(
        float((found - torch.tensor(expected)).abs().max()), 1e-5, "the distances have 1e-6 added to each difference"
    )


@pytest.mark.parametrize("name", POOLS)
def test_pooling_reads_valid_positions_alone(name):
    hidden, mask = drawn(3, 4, WIDTH), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    hidden[~mask] = torch.nan
    for row, all_of_it, valid in zip(POOLS[name](hidden, mask)[:, 0], hidden, mask, strict=True):
        own = all_of_it[valid]
        expected = {"mean": own.sum(0) / len(own), "cls": own[0], "max": own.max(0).values}[name]
        assert torch.allclose(row, expected, rtol=1e-14)
    assert torch.equal(POOLS["max"](hidden[:1], None), POOLS["max"](hidden[:1], mask[:1]))


class Given(nn.Module):
    """The stand-in of a sentence-transformers model: features are embeddings."""

    similarity_fn_name = "cosine"

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sentence_embedding": features["embedding"]}


def theirs(name: str, given: list[torch.Tensor], labels: torch.Tensor | None, **settings: object) -> torch.Tensor:
    from sentence_transformers.sentence_transformer import losses

    loss = getattr(losses, name)(Given(), **settings)
    return loss([{"embedding": each} for each in given], labels)


def ours(name: str, given: list[torch.Tensor]) -> torch.Tensor:
    if name == "CosineSimilarityLoss":
        return cosine_terms(*given, scores()).mean()
    if name == "CoSENTLoss":
        return cosent(torch.cosine_similarity(*given), scores(), 0.05)
    if name == "TripletLoss":
        return triplet_terms(*given, margin=5.0).mean()
    return mnrl_terms(given[0], torch.cat(given[1:]), nothing_hidden(ROWS * (len(given) - 1)), 0.05).mean()


@needs_library
@pytest.mark.parametrize(
    ("name", "num"),
    [
        ("CosineSimilarityLoss", 2),
        ("CoSENTLoss", 2),
        ("MultipleNegativesRankingLoss", 2),
        ("MultipleNegativesRankingLoss", 3),
        ("TripletLoss", 3),
    ],
)
def test_loss_and_gradients_are_those_of_sentence_transformers(name, num):
    mine, other = embeddings(num), embeddings(num)
    labels = scores() if name in ("CosineSimilarityLoss", "CoSENTLoss") else None
    found, expected = ours(name, mine), theirs(name, other, labels)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    gradients = torch.autograd.grad(found, mine), torch.autograd.grad(expected, other)
    for first, second in zip(*gradients, strict=True):
        assert second.abs().max() > 0
        torch.testing.assert_close(first, second.to(first.dtype), rtol=1e-6, atol=1e-6 * float(second.abs().max()))


@needs_library
@pytest.mark.parametrize("name", POOLS)
def test_pooling_is_that_of_sentence_transformers(name):
    from sentence_transformers.sentence_transformer.modules import Pooling

    hidden, mask = drawn(3, 6, WIDTH).float(), torch.arange(6) < torch.tensor([6, 2, 4])[:, None]
    features = {"token_embeddings": hidden, "attention_mask": mask.long()}
    expected = Pooling(WIDTH, pooling_mode=name)(features)["sentence_embedding"]
    torch.testing.assert_close(POOLS[name](hidden, mask)[:, 0], expected, rtol=1e-6, atol=1e-6)


def objective_of(rows_S: int, labels: torch.Tensor | None, **settings: object) -> tuple[SentencePairs, Examples]:
    """An objective and its examples: rows of different sentences, with these scores."""
    form = {"vocab_size": 99, "sentences": rows_S, "scored": labels is not None}
    own = SentencePairs(validate_settings("objectives", "sentence_pairs", settings), form)
    tokens_BSN = torch.arange(ROWS * rows_S).reshape(ROWS, rows_S, 1)
    scores_B = torch.ones(ROWS) if labels is None else labels.float()
    batch = SentenceBatch(tokens_BSN, torch.ones_like(tokens_BSN).bool(), scores_B)
    return own, own.examples(batch, torch.Generator())


def mean_loss(own: SentencePairs, examples: Examples, given: list[torch.Tensor]) -> torch.Tensor:
    total, count = own.loss_sum(torch.stack(given, 1), examples)
    return total / count


TRAINED = [
    # settings of the objective, scored, sentences of a row, their loss, its settings
    ({"loss": "cosine"}, True, 2, "CosineSimilarityLoss", {}),
    ({"loss": "cosent"}, True, 2, "CoSENTLoss", {}),
    ({"loss": "cosent", "temperature": 0.5}, True, 2, "CoSENTLoss", {"scale": 2.0}),
    ({"loss": "mnrl"}, False, 2, "MultipleNegativesRankingLoss", {}),
    ({"loss": "mnrl", "temperature": 0.5}, False, 3, "MultipleNegativesRankingLoss", {"scale": 2.0}),
    ({"loss": "triplet", "normalise": False}, False, 3, "TripletLoss", {}),
    ({"loss": "triplet", "normalise": False, "margin": 0.5}, False, 3, "TripletLoss", {"triplet_margin": 0.5}),
]


@needs_library
@pytest.mark.parametrize(("settings", "is_scored", "num", "name", "options"), TRAINED)
def test_the_loss_that_is_trained_and_its_gradients_are_those_of_sentence_transformers(
    settings, is_scored, num, name, options
):
    labels = scores().float().double() if is_scored else None
    own, examples = objective_of(num, labels, **settings)
    mine, other = embeddings(num), embeddings(num)
    found, expected = mean_loss(own, examples, mine), theirs(name, other, labels, **options)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    gradients = torch.autograd.grad(found, mine), torch.autograd.grad(expected, other)
    for first, second in zip(*gradients, strict=True):
        assert second.abs().max() > 0
        torch.testing.assert_close(first, second.to(first.dtype), rtol=1e-6, atol=1e-6 * float(second.abs().max()))


def loop_cosent(cosines: list[float], targets: list[float], temperature: float) -> float:
    rows = list(zip(cosines, targets, strict=True))
    return math.log1p(sum(math.exp((d - c) / temperature) for c, y in rows for d, z in rows if y > z))


@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_the_trained_cosent_lowers_the_cosines_of_smaller_scores(temperature):
    own, examples = objective_of(2, scores(), loss="cosent", temperature=temperature)
    first, second = (each.detach() for each in embeddings(2))
    cosines = [cosine(a, b) for a, b in zip(first.tolist(), second.tolist(), strict=True)]
    expected = loop_cosent(cosines, scores().tolist(), temperature)
    assert float(mean_loss(own, examples, [first, second])) == pytest.approx(expected, rel=1e-10)


def test_the_trained_cosent_of_pairs_has_the_next_rows_sentence_below_the_own_one():
    own, examples = objective_of(2, None, loss="cosent")
    first, second = (each.detach() for each in embeddings(2))
    both = [
        [cosine(first[row].tolist(), second[(row + shift) % ROWS].tolist()) for row in range(ROWS)] for shift in (0, 1)
    ]
    expected = loop_cosent(both[0] + both[1], [1.0] * ROWS + [0.0] * ROWS, 0.05)
    found = mean_loss(own, examples, [first, second, second.roll(-1, 0)])
    assert float(found) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(("normalise", "margin"), [(True, None), (True, 0.3), (False, None), (False, 0.5)])
def test_the_trained_triplet_is_the_hinge_of_near_less_far_with_and_without_unit_vectors(normalise, margin):
    own, examples = objective_of(3, None, loss="triplet", normalise=normalise, margin=margin)
    rows = [each.detach() for each in embeddings(3)]
    used = [each / each.norm(dim=-1, keepdim=True) if normalise else each for each in rows]
    least = margin or (1.0 if normalise else 5.0)
    terms = [
        max(0.0, math.dist(a, p) - math.dist(a, n) + least)
        for a, p, n in zip(*(each.tolist() for each in used), strict=True)
    ]
    assert_within(abs(float(mean_loss(own, examples, rows)) - sum(terms) / ROWS), 1e-5, "distances have 1e-6 added")
