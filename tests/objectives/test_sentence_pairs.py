"""`objective=sentence_pairs`: its examples, scores, baseline and refusals, and a run that learns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from stability.build import build_objective
from stability.config.parts import validate_settings
from stability.config.training import WeightsSpec
from stability.corpora.sentences.corpus import SentenceBatch
from stability.objectives.sentence_pairs import SentencePairs, correlations, recalls
from stability.runs.directory import read_jsonl
from stability.training import checkpoint
from stability.training.weights import Weights
from tests.conftest import TINY
from tests.objectives.checks import examples_of, generator
from tests.objectives.subjects import subject
from tests.reading import read_spec

DATA = {"name": "synthetic_pairs", "num": 300}
PAIRS = {**DATA, "form": "pairs"}


def objective(scored=False, sentences=2, **settings):
    values = validate_settings("objectives", "sentence_pairs", settings)
    return SentencePairs(values, {"vocab_size": 8, "sentences": sentences, "scored": scored})


def batch(tokens, scores=None):
    tokens_BSN = torch.tensor(tokens)
    scores_B = torch.ones(len(tokens)) if scores is None else torch.tensor(scores)
    return SentenceBatch(tokens_BSN, tokens_BSN < 8, scores_B)


def test_a_row_without_a_negative_has_that_of_the_next_row_unless_it_equals_its_own_positive():
    rows = batch([[[1, 8], [2, 8]], [[3, 8], [4, 8]], [[5, 8], [4, 8]]])
    examples = objective(loss="triplet").examples(rows, generator())
    assert examples.inputs_BN[:, 2, 0].tolist() == [4, 4, 2]
    assert examples.weights_BN.tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 1]]
    assert examples.targets_BN.tolist() == [[1, 1, 0]] * 3
    assert objective(loss="mnrl").examples(rows, generator()).inputs_BN.shape == (3, 2, 2)


def test_equal_positives_do_not_compete_in_mnrl():
    own = objective(loss="mnrl")
    examples = own.examples(batch([[[1], [2]], [[3], [2]], [[5], [6]]]), generator())
    x = torch.tensor([[[1.0, 0], [0.6, 0.8]], [[0, 1.0], [0.6, 0.8]], [[0.8, 0.6], [1, 0]]], dtype=torch.float64)
    cosines = [[0.6, 1.0], [0.8, 0.0], [0.96, 0.8]]  # with the two different positives
    terms = [
        math.log(sum(math.exp(20 * c) for c in row)) - 20 * row[own_]
        for row, own_ in zip(cosines, (0, 0, 1), strict=True)
    ]
    # the third row has two candidates of its first kind
    terms[2] = math.log(2 * math.exp(20 * 0.96) + math.exp(20 * 0.8)) - 20 * 0.8
    assert float(own.loss_sum(x, examples)[0]) == pytest.approx(sum(terms), rel=1e-12)


def test_a_triplets_negatives_are_further_candidates_of_mnrl():
    own = objective(loss="mnrl", sentences=3)
    examples = own.examples(batch([[[1], [2], [3]], [[4], [5], [6]]]), generator())
    x = torch.randn(2, 3, 5, generator=generator(), dtype=torch.float64)
    unit = x / x.norm(dim=-1, keepdim=True)
    logits = 20 * unit[:, 0] @ torch.cat([unit[:, 1], unit[:, 2]]).T
    expected = (logits.logsumexp(1) - logits.diagonal()).sum()
    assert float(own.loss_sum(x, examples)[0]) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("loss", ["cosine", "cosent", "mnrl", "triplet"])
@pytest.mark.parametrize("scored", [False, True])
def test_the_baseline_is_the_loss_of_equal_embeddings(loss, scored):
    if scored and loss in ("mnrl", "triplet"):
        return
    own = objective(scored, loss=loss)
    draws = generator()
    tokens = torch.randint(8, (6, 2, 4), generator=draws).tolist()
    examples = own.examples(batch(tokens, torch.rand(6, generator=draws).tolist() if scored else None), draws)
    log_frequencies = torch.tensor([0.3, 0.7]).double().log()  # a mean score of 0.4
    count = own.count(examples, torch.float64)
    found = float(own.baseline_sum(log_frequencies, examples) / count)
    if loss == "cosine":
        targets = examples.targets_BN[:, 1:].double()
        assert found == pytest.approx(float((targets - (0.4 if scored else 0.5)).square().mean()), rel=1e-6)
        return
    equal = torch.ones(6, examples.inputs_BN.shape[1], 3, dtype=torch.float64)
    total, count = own.loss_sum(equal, examples)
    assert found == pytest.approx(float(total / count), rel=1e-6) and found > 0


def test_recall_counts_ties_and_smaller_ranks_against_a_row_but_no_equal_column():
    cosines = np.array([[0.9, 0.1, 0.5], [0.7, 0.7, 0.2], [0.4, 0.3, 0.1]])
    none = np.zeros((3, 3), dtype=bool) | np.eye(3, dtype=bool)
    assert recalls(cosines, none, (1, 2, 3)) == pytest.approx([1 / 3, 2 / 3, 1.0])
    equal = none.copy()
    equal[1, 0] = True  # the second row's tie is its own text
    assert recalls(cosines, equal, (1, 2)) == pytest.approx([2 / 3, 2 / 3])
    assert recalls(np.ones((4, 4)), np.eye(4, dtype=bool), (1, 3)) == [0.0, 0.0], "equal embeddings recall something"


def test_correlations_use_mean_ranks_and_are_nan_of_constants():
    first, second = np.array([0.1, 0.5, 0.5, 0.9, 0.2]), np.array([0.0, 0.0, 1.0, 1.0, 0.5])
    ranks = [np.array([1, 3.5, 3.5, 5, 2]), np.array([1.5, 1.5, 4.5, 4.5, 3])]
    assert correlations(first, second)[0] == pytest.approx(np.corrcoef(*ranks)[0, 1], rel=1e-12)
    assert np.isnan(correlations(np.ones(5), second)).all() and np.isnan(correlations(first, np.ones(5))).all()


def test_scores_of_all_chunks_are_those_of_their_embeddings_together(lab):
    whole = TINY["model"] | {"positions": 48}  # of equal sentences, cut ones included, rounding ranks the cosines
    evaluation = {"every_steps": 4, "sequences": 200}
    spec = lab.spec(objective={"name": "sentence_pairs"}, data=DATA, evaluation=evaluation, model=whole)
    replica = lab.replica(spec)
    held_out = replica.corpus.windows("val", 200, spec.model.positions)
    replica.model.double()  # in float32, rounding decides the ranks of nearly equal cosines
    with torch.no_grad():
        pooled = [replica.model(held_out.tokens_BSN[:, side], held_out.mask_BSN[:, side])[:, 0] for side in (0, 1)]
    cosines = torch.cosine_similarity(*(each.double() for each in pooled))
    measured = replica.validation.measure(replica.model)
    assert measured["val_spearman"] == pytest.approx(spearmanr(cosines, held_out.scores_B).statistic, rel=1e-9)
    assert measured["val_nll"] == pytest.approx(float((cosines - held_out.scores_B).square().mean()), rel=1e-5)
    assert set(measured) == {"val_nll", "val_spearman", "val_pearson"}


def test_sentences_of_a_group_do_not_see_each_other_and_padding_is_unread():
    own = subject("sentence_pairs", loss="triplet")
    examples = examples_of(own)
    alone = own.model(examples.inputs_BN[:, 1], examples.mask_BN[:, 1])
    together = examples.logits(own.model)
    assert torch.allclose(together[:, 1], alone[:, 0], rtol=1e-12)
    moved = examples._replace(inputs_BN=examples.inputs_BN.masked_fill(~examples.mask_BN, 0))
    assert torch.equal(moved.logits(own.model), together)


@pytest.mark.parametrize("loss", ["cosent", "mnrl"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_taylor_differentiates_losses_of_whole_batches(loss, pooling):
    from stability.curvature import directional

    own = subject("sentence_pairs", loss=loss, pooling=pooling)
    examples = examples_of(own)
    params = {name: value.detach() for name, value in own.model.named_parameters()}
    step = {
        name: torch.randn(value.shape, generator=generator(n), dtype=value.dtype)
        for n, (name, value) in enumerate(params.items())
    }

    def mean(values):
        total, count = own.objective.loss(own.model, examples, values)
        return total / count

    found, expected = (directional(mean, params, step, method) for method in ("taylor", "double_backward"))
    assert found.slope == pytest.approx(expected.slope, rel=1e-9)
    assert found.curvature == pytest.approx(expected.curvature, rel=1e-9) and expected.curvature != 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("objective.loss=mnrl microbatch=2", "microbatch=2 splits a batch, and objective.loss=mnrl compares all rows"),
        ("objective.loss=cosent curvature.microbatch=2", "curvature.microbatch=2 splits a batch"),
        ("devices_per_trial=2 launcher=ray", "ranks all of them together; use devices_per_trial=1"),
        ("model.tied=true", "model.tied=true is of a model's head, and objective=sentence_pairs has none"),
        ("model.head_bias=false", "model.head_bias=false is of a model's head"),
        ("model.logit_softcap=30", "is of a model's head"),
        ("objective.loss=triplet objective.margin=3", "distances of unit vectors are at most 2"),
        ("objective.temperature=0.1", "objective.temperature=0.1 changes nothing here"),
        ("objective=mlm", "objective=mlm reads tokens, and data=synthetic_pairs gives sentences"),
    ],
)
def test_what_does_not_fit_is_refused(words, message):
    given = ["objective=sentence_pairs", "data=synthetic_pairs"]
    listed = words.split()
    if listed[0].startswith("objective="):
        given = given[1:]
    with pytest.raises(ValueError, match=message) as refused:
        read_spec("sweep", [*given, *listed]).kinds()
    assert len(str(refused.value).splitlines()) <= 2


def test_losses_of_pairs_refuse_data_with_scores():
    for loss in ("mnrl", "triplet"):
        with pytest.raises(ValueError, match=f"objective.loss={loss} takes pairs that belong together"):
            objective(True, loss=loss).require()
    objective(True, loss="cosent").require()


@pytest.mark.parametrize("loss", ["cosine", "cosent", "mnrl", "triplet"])
def test_a_run_of_each_loss_is_trained_and_judged(lab, loss):
    spec = lab.spec(objective={"name": "sentence_pairs", "loss": loss}, data=PAIRS, lr_peak=3e-3)
    result = lab.train(spec).status()["result"]
    assert math.isfinite(result["val_nll"]) and result["unigram_nll"] > 0
    assert -1 <= result["val_spearman"] <= 1 and 0 <= result["val_recall_1"] <= result["val_recall_10"] <= 1
    assert lab.directory(spec).status()["state"] in ("stable", "plateaued", "spiked")


def test_a_masked_language_models_weights_start_an_encoder(lab):
    from stability.build import build_model, shapes
    from stability.training.weights import Fit

    first = lab.spec()
    spec = lab.spec(objective={"name": "sentence_pairs"}, data=DATA)
    form = {"vocab_size": 256, "sentences": 2, "scored": True}
    fit = Fit.of(shapes(first, 256), shapes(spec, form))
    assert not fit.fresh and set(fit.unread) == {"head.weight", "head.bias"}
    assert not [name for name, _ in build_model(spec, form).named_parameters() if name.startswith("head")]


def test_the_first_embeddings_are_a_masked_language_models_own_bit_for_bit(lab):
    first = lab.train(lab.spec(lr_peak=1e-2))
    _, model = checkpoint.load(first.checkpoints()[-1])
    weights = Weights.find(WeightsSpec(source=f"ckpt:{first.path}", partial=True), {}, lab.pool).keep(lab.cache)
    spec = lab.spec(objective={"name": "sentence_pairs"}, data=DATA, weights=weights.spec.model_dump(mode="json"))
    replica = lab.replica(spec)
    fresh, theirs = {name: value.clone() for name, value in replica.model.state_dict().items()}, model.state_dict()
    replica.model.load_state_dict(Weights.load_cached(spec.weights, lab.cache).state(fresh))
    own = replica.model.state_dict()
    assert theirs.keys() - own.keys() == {"head.weight", "head.bias"}
    assert all(torch.equal(own[name], theirs[name]) for name in own)
    rows = replica.corpus.batch("train", 8, spec.model.positions, generator())
    tokens_BN, mask_BN = rows.tokens_BSN[:, 0], rows.mask_BSN[:, 0]
    hidden = []
    model.get_submodule("final_norm").register_forward_hook(lambda module, given, made: hidden.append(made))
    with torch.no_grad():
        model(tokens_BN, mask_BN)
        found_BD = replica.model(tokens_BN, mask_BN)[:, 0]
    expected = [row[: int(length)].mean(0) for row, length in zip(hidden[0], mask_BN.sum(1), strict=True)]
    torch.testing.assert_close(found_BD, torch.stack(expected), rtol=1e-5, atol=1e-6)
    assert not torch.equal(fresh["embedding.weight"], own["embedding.weight"])
    measured = next(read_jsonl(lab.train(spec, steps=1).metrics_file))
    assert (measured["step"], measured["val_nll"]) == (0, replica.measure()["val_nll"])


def start_and_end(lab, steps, seed):
    """Spearman's correlation of synthetic pairs before and after a run of this many steps."""
    spec = lab.spec(
        objective={"name": "sentence_pairs"},
        data={"name": "synthetic_pairs"},
        model={"name": "nano", "layers": 1, "width": 64, "heads": 2, "positions": 32, "embedding_conv": 5},
        steps=steps,
        batch=32,
        lr_peak=3e-3,
        schedule={"name": "constant", "warmup_steps": 10},
        evaluation={"every_steps": steps, "sequences": 1000},
        seed=seed,
    )
    replica = lab.replica(spec)
    start = replica.measure()["val_spearman"]
    for step in range(steps):
        replica.train_step(step)
    return start, replica.measure()["val_spearman"]


def test_a_run_of_seconds_learns_words_that_its_random_start_cannot_compare(lab):
    start, end = start_and_end(lab, 60, seed=0)
    assert start < 0.2 and end > 0.5, (start, end)


@pytest.mark.slow
def test_a_run_of_two_minutes_ranks_synthetic_pairs(lab):
    ends = [start_and_end(lab, 600, seed) for seed in range(3)]
    gains = np.array([end - start for start, end in ends])
    assert min(end for _, end in ends) >= 0.9, ends
    assert gains.mean() - 4.303 * gains.std(ddof=1) / math.sqrt(3) > 0, f"the interval of the gain includes 0: {ends}"


def test_the_objective_of_a_run_is_built_from_its_data(lab):
    spec = lab.spec(objective={"name": "sentence_pairs"}, data=PAIRS)
    form = {"vocab_size": 256, "sentences": 2, "scored": False}
    assert build_objective(spec, form).score_names == ("val_spearman", "val_pearson", "val_recall_1", "val_recall_10")
