"""`stability.probe what=lengths`: rows against a slow loop in float64, a scheme with a last position, and refusals."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch

from stability.build import build_objective
from stability.config.base import validate
from stability.config.entries import ProbeSpec
from stability.models.passes import generator_for
from stability.probe import main
from stability.probes.checkpoints import corpus_of
from stability.probes.layers.nll import measure_lengths
from stability.runs.schema import PROBE_COLUMNS
from stability.runs.study import StudyFolder
from stability.training import checkpoint
from stability.training.evaluate import VALIDATION_SEED
from tests.conftest import Lab
from tests.objectives.test_recall import recall_spec
from tests.within import assert_within

QUICK = ["what=lengths", "device=cpu", "lengths=[2,3]"]
PROBE = validate(ProbeSpec, {"what": "lengths", "lengths": [2, 3], "ckpt": "x", "device": "cpu"})
LONGEST = 6 * 16  # the least common multiple of the lengths, in positions
UNIT = 2.0**-23  # twice the rounding of float32: of the examples' weights, and of their sum
POSITIONS = ("rope", "hope", "learned", "none")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    parts = {name: {"position": {"name": name}, "objective": {"name": "ar"}} for name in POSITIONS}
    parts |= {"mlm": {}, "sedd": {"objective": {"name": "score_entropy"}}}
    runs = {name: lab.train(lab.spec(**own, lr_peak=0.03)) for name, own in parts.items()}
    study = StudyFolder.of(lab.pool, "positions")
    study.write([runs[name].run_id for name in POSITIONS])
    return lab, runs, study


def load(trained, name):
    """A run's spec, its model in float64, its data and its held-out examples of the longest length."""
    lab, runs, _ = trained
    spec, model = checkpoint.load(runs[name].checkpoints()[-1])
    corpus = corpus_of(spec, lab.cache)
    objective = build_objective(spec, corpus.format)
    tokens_BN = corpus.windows("val", 1, objective.tokens_needed(LONGEST))  # 8 sequences of 16: one of 96
    examples = objective.examples(tokens_BN, generator_for(VALIDATION_SEED, "validation", 0))
    return spec, model.double(), corpus, examples


@pytest.mark.parametrize("name", ["rope", "hope", "none", "mlm"])
def test_nlls_are_those_of_a_slow_loop_over_pieces(trained, name):
    """Each piece alone, each token alone: −log softmax of its logits by Python's own exp and log."""
    spec, model, corpus, examples = load(trained, name)
    (inputs, targets, weights) = (
        part.tolist() for part in (examples.inputs_BN, examples.targets_BN, examples.weights_BN)
    )

    def loop(positions):
        total = 0.0
        for start in range(0, LONGEST, positions):
            with torch.no_grad():
                (logits_NV,) = model(torch.tensor([inputs[0][start : start + positions]])).tolist()
            for at, logits_V in enumerate(logits_NV, start):
                nats = math.log(math.fsum(map(math.exp, logits_V))) - logits_V[targets[0][at]]
                total += weights[0][at] * nats
        return total / math.fsum(weights[0])

    rows = list(measure_lengths(spec, model, corpus, PROBE))
    assert [row["multiple"] for row in rows] == [2, 3] and {row["sequences"] for row in rows} == {1}
    trained_nll = loop(16)
    for row in rows:
        truth = loop(16 * row["multiple"])
        assert_within(abs(row["nll"] - trained_nll), UNIT * trained_nll)
        assert_within(abs(row["long_nll"] - truth), UNIT * truth)
        assert row["difference"] == row["long_nll"] - row["nll"] != 0 and math.isnan(row["limit"])


def test_pieces_of_a_noisy_text_keep_its_noise(trained):
    """Score entropy: every piece has the σ and the weights of its text, so the trained length alone sums to the same."""
    spec, model, corpus, _ = load(trained, "sedd")
    objective = build_objective(spec, corpus.format)
    examples = objective.examples(corpus.windows("val", 2, LONGEST), generator_for(0, "probe"))
    halves, (one, other) = examples.cut(LONGEST // 2), examples.sigma_B.tolist()
    assert halves.sigma_B.tolist() == [one, one, other, other] and one != other
    assert torch.equal(halves.inputs_BN.flatten(), examples.inputs_BN.flatten())
    assert halves.targets_BN.shape == (4, LONGEST // 2)
    assert all(math.isfinite(row["long_nll"]) for row in measure_lengths(spec, model, corpus, PROBE))


def test_a_table_of_positions_has_no_longer_text(trained, capsys):
    _, runs, _ = trained
    assert main([*QUICK, f"ckpt={runs['learned'].path}"]) == 0
    assert "cannot: 16 positions" in capsys.readouterr().out
    found = pd.read_parquet(runs["learned"].probe_file("terminal", "lengths"))
    assert found["limit"].tolist() == [16, 16] and found["difference"].isna().all() and found["nll"].notna().all()


def test_a_study_is_measured_and_judged_and_skipped_the_second_time(trained, capsys):
    _, runs, study = trained
    assert main([*QUICK, f"ckpt={study.path}"]) == 0
    printed = capsys.readouterr().out
    assert "ΔNLL of longer texts, terminal checkpoint" in printed and "No claim: one seed" in printed
    rows = pd.read_parquet(study.results / "lengths.parquet")
    assert list(rows.columns) == PROBE_COLUMNS["lengths"] and len(rows) == 2 * len(POSITIONS)
    assert main([*QUICK, f"ckpt={study.path}"]) == 0
    assert "skips 4 of 4: measured already" in capsys.readouterr().out


def test_a_run_of_recall_and_too_long_a_text_are_refused_in_a_line(trained, lab):
    with pytest.raises(ValueError, match="these runs have none of free length: objective=recall") as caught:
        main([*QUICK, f"ckpt={lab.train(recall_spec(lab, steps=4)).path}"])
    assert len(str(caught.value).splitlines()) == 1
    _, runs, _ = trained
    with pytest.raises(ValueError, match=r"does not fit; lengths=\[61, 64\] needs it, take smaller ones") as caught:
        main(["what=lengths", "device=cpu", "lengths=[61,64]", f"ckpt={runs['rope'].path}"])
    assert len(str(caught.value).splitlines()) == 1
    assert not runs["none"].probe_file("earliest", "lengths").exists()
