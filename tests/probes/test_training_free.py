"""`stability.probe what=training_free`: rows against layers put into the trained model by hand, what lands on disk, and
what a mistake is told."""

from __future__ import annotations

import copy
import math

import pandas as pd
import pytest
import torch

from stability.mechanisms import build
from stability.probe import main
from stability.probes.checkpoints import corpus_of
from stability.probes.layers.measuring import read_held_out
from stability.probes.layers.training_free import Passed, _measure_layer
from stability.registry import Registry
from stability.runs.schema import PROBE_COLUMNS
from stability.runs.study import StudyFolder
from stability.training import checkpoint
from tests.conftest import Lab
from tests.reading import read_spec
from tests.within import assert_within

BLOCKS = {"key_block": 4, "query_block": 4, "theta": -0.2}
WORDS = [f"mechanism.sparge.{name}={value}" for name, value in BLOCKS.items()]
QUICK = ["sequences=3", "device=cpu"]
NAMES = ("training_free", "training_free_layers")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    runs = {
        "mlm": lab.train(lab.spec(mechanism={"name": "sa"})),
        "ar": lab.train(lab.spec(mechanism={"name": "sa"}, objective={"name": "ar"}, lr_peak=0.05)),
        "sc": lab.train(lab.spec(mechanism={"name": "sc"})),
    }
    study = StudyFolder.of(lab.pool, "three")
    study.write([directory.run_id for directory in runs.values()])
    return lab, runs, study


def measured(directory, *words):
    """The two tables that a measurement leaves of a run's terminal checkpoint; of a word given twice the last counts."""
    given_once = {word.partition("=")[0]: word for word in (*QUICK, *words)}
    assert main(["what=training_free", f"ckpt={directory.path}", *given_once.values()]) == 0
    return [pd.read_parquet(directory.probe_file("terminal", name)) for name in NAMES]


def loaded(lab, directory):
    spec, model = checkpoint.load(directory.checkpoints()[-1])
    return spec, model.double(), read_held_out(spec, lab.cache, 3).split(1)


def exchanged(spec, model, name, **settings):
    """A copy of the model whose attention is another one's, with its weights."""
    other = copy.deepcopy(model)
    direction = "causal" if spec.objective.name == "ar" else "bidirectional"
    for block in other.blocks:
        layer = build(name, width=spec.model.width, heads=spec.model.heads, direction=direction, **settings).double()
        layer.load_state_dict(block.mixer.state_dict())
        block.mixer = layer
    return other


def nll_of(model, example):
    """Nats per counted position, position by position."""
    with torch.no_grad():
        (logits_NV,) = example.logits(model)
    total = count = 0.0
    for logits_V, target, weight in zip(logits_NV, example.targets_BN[0], example.weights_BN[0], strict=True):
        total -= float(weight) * math.log(float(logits_V.exp()[target] / logits_V.exp().sum()))
        count += float(weight)
    return total / count


def given(model, example):
    """What each layer of the trained model is given, (1, N, D)."""
    x_BND, found = model.embedding(example.inputs_BN), []
    with torch.no_grad():
        for block in model.blocks:
            found.append(block.mixer_norm(x_BND))
            x_BND = x_BND + block.mixer(found[-1])
            x_BND = x_BND + block.ffn(block.ffn_norm(x_BND))
    return found


def test_a_layer_whose_output_is_zero_is_stood_in_for_without_error():
    """W_o and b_o of 0, as a zero initialisation has them: 0 of 0."""
    layer = build("sparge", width=8, heads=2, direction="causal", **BLOCKS)
    torch.nn.init.zeros_(layer.out.weight)
    torch.nn.init.zeros_(layer.out.bias)
    x_BND = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0))
    assert _measure_layer(layer, Passed(x_BND, None, torch.zeros_like(x_BND)))["error"] == 0


def check_rows(of_model, of_layers, model, other, sequences):
    for sequence, example in enumerate(sequences):
        row = of_model[of_model.sequence == sequence].iloc[0]
        assert row.sa_nll == pytest.approx(nll_of(model, example), rel=1e-9)
        assert row.nll == pytest.approx(nll_of(other, example), rel=1e-9)
        shares = []
        for layer, x_BND in enumerate(given(model, example)):
            with torch.no_grad():
                y_BND, y_sa_BND = (each.blocks[layer].mixer(x_BND) for each in (other, model))
            found = of_layers[(of_layers.sequence == sequence) & (of_layers.layer == layer)].iloc[0]
            assert found.error == pytest.approx(float((y_BND - y_sa_BND).norm() / y_sa_BND.norm()), rel=1e-8, abs=1e-12)
            shares.append(other.blocks[layer].mixer.skipped(x_BND))
            assert found.skipped == pytest.approx(shares[-1], abs=1e-12)
        assert row.skipped == pytest.approx(sum(shares) / len(shares), abs=1e-12)


@pytest.mark.parametrize("task", ["mlm", "ar"])
def test_rows_of_sparge_are_those_of_a_model_with_its_layers(trained, task):
    lab, runs, _ = trained
    models, layers = measured(runs[task], "mechanism=[sparge]", "budgets=[0.3,0.8]", *WORDS)
    assert [list(models.columns), list(layers.columns)] == [PROBE_COLUMNS[name] for name in NAMES]
    assert (len(models), len(layers)) == (2 * 3, 2 * 3 * 2), "budgets, sequences, layers"
    spec, model, sequences = loaded(lab, runs[task])
    for budget in (0.3, 0.8):
        other = exchanged(spec, model, "sparge", tau=budget, **BLOCKS)
        check_rows(models[models.budget == budget], layers[layers.budget == budget], model, other, sequences)
    assert models.skipped.max() > 0.1 and layers.error.max() > 1e-3, "nothing is left out: the test shows nothing"


def test_rows_of_fasa_are_those_of_chunks_chosen_on_training_sequences(trained):
    lab, runs, _ = trained
    models, layers = measured(runs["ar"], "mechanism=[fasa]", "budgets=[0.25]", "calibration=2")
    assert sorted(set(models.label)) == ["1 of 4 chunks", "4 of 4 chunks"]
    spec, model, sequences = loaded(lab, runs["ar"])
    other = exchanged(spec, model, "fasa", tokens=4, chunks=1)
    objective = Registry("objectives").load("ar")(spec.objective.settings, corpus_of(spec, lab.cache).format)
    tokens_BN = corpus_of(spec, lab.cache).windows("train", 2, objective.tokens_needed(spec.model.positions))
    examples = objective.examples(tokens_BN, torch.Generator())  # it draws nothing
    for layer, inputs in enumerate(zip(*(given(model, each) for each in examples.split(1)), strict=True)):
        mixer = other.blocks[layer].mixer
        mixer.calibrate(sum(mixer.agreement(x_BND) for x_BND in inputs) / 2)
    one, all_of_them = (
        [table[table.label == label] for table in (models, layers)] for label in ("1 of 4 chunks", "4 of 4 chunks")
    )
    check_rows(*one, model, other, sequences)
    check_rows(*all_of_them, model, exchanged(spec, model, "fasa", tokens=4), sequences)


@pytest.mark.parametrize("task", ["mlm", "ar"])
def test_at_the_full_budget_nothing_is_lost(trained, task):
    models, layers = measured(trained[1][task], "mechanism=[sparge,fasa]", "budgets=[1]")
    assert set(models.mixer) == {"sparge", "fasa"}
    assert_within((models.nll - models.sa_nll).abs().max(), 1e-12)
    assert_within(layers.error.max(), 1e-12)
    assert models.skipped.max() == 0


def test_a_study_is_measured_collected_and_printed_and_skipped_the_second_time(trained, capsys):
    lab, runs, study = trained
    words = ["what=training_free", f"ckpt={study.path}", "mechanism=[sparge,fasa]", "budgets=[0.5,1]", *QUICK, *WORDS]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "leaves out sc: sparge and fasa stand in for sa alone" in said
    for title in ("NLL beyond that of sa, terminal", "Products skipped, terminal", "Relative error of the worst layer"):
        assert title in said
    tables = [pd.read_parquet(study.results / f"{name}.parquet") for name in NAMES]
    assert [len(table) for table in tables] == [2 * 3 * 2 * 3, 2 * 3 * 2 * 3 * 2], "runs, settings, budgets, sequences"
    assert main(words) == 0
    assert "skips 2 of 2: measured already" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        {"calibration": 1},
        {"budgets": "[0.25]"},
        {"mechanism.fasa.agreement_tokens": 1},
        {"sequences": 2},
        {"mechanism": "[sparge]"},
    ],
    ids=str,
)
def test_another_protocol_is_measured_anew(trained, change, capsys):
    base = {"mechanism": "[fasa]", "budgets": "[0.5]"}
    words, others = ([f"{key}={value}" for key, value in each.items()] for each in (base, base | change))
    measured(trained[1]["ar"], *words)
    before, _ = measured(trained[1]["ar"], *words)
    assert "measured already" in capsys.readouterr().out
    after, _ = measured(trained[1]["ar"], *others)
    assert "measured already" not in capsys.readouterr().out
    # two calibrations may choose the same chunks
    assert len(after) and (set(change) & {"calibration", "mechanism.fasa.agreement_tokens"} or not after.equals(before))


def test_a_looped_model_has_a_layer_for_each_pass(lab):
    size = {"name": "tiny", "layers": 2, "width": 16, "heads": 2, "positions": 16, "loops": 2}
    run = lab.train(lab.spec(mechanism={"name": "sa"}, model=size))
    models, layers = measured(run, "mechanism=[fasa]", "budgets=[0.5,1]")
    assert sorted(set(layers.layer)) == [0, 1, 2, 3]
    assert_within((models.nll - models.sa_nll)[models.budget == 1].abs().max(), 1e-12)


def test_the_settings_of_sa_are_the_runs_own(lab):
    run = lab.train(lab.spec(mechanism={"name": "sa", "mask_diagonal": True, "temperature": "learned"}))
    models, _ = measured(run, "mechanism=[sparge,fasa]", "budgets=[1]")
    assert_within((models.nll - models.sa_nll).abs().max(), 1e-12)
    with pytest.raises(ValueError, match=r"^mechanism.sparge.temperature=learned is not what sa was trained with"):
        usual = lab.train(lab.spec(mechanism={"name": "sa"}))
        measured(usual, "mechanism=[sparge]", "mechanism.sparge.temperature=learned")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"^what=training_free needs a mechanism that replaces sa: mechanism=\[fasa,sparge\]$"),
        (["mechanism=[sparge,sw]"], r"^mechanism=sw needs training; what=training_free takes fasa and sparge$"),
        (["mechanism=[sparge]", "budgets=[0]"], "^budgets.0=0: input should be greater than 0$"),
        (["mechanism=[sparge]", "budgets=[1.5]"], "^budgets.0=1.5: input should be less than or equal to 1$"),
        (
            ["mechanism=[fasa]", "mechanism.fasa.chunks=9"],
            "^mechanism.fasa.chunks=9: a head of width 8 has 4 frequency",
        ),
    ],
)
def test_mistakes_are_told_in_a_line(trained, words, message):
    with pytest.raises(ValueError, match=message) as caught:
        main(["what=training_free", f"ckpt={trained[1]['mlm'].path}", *QUICK, *words])
    assert len(str(caught.value).splitlines()) == 1


def test_a_run_of_another_mechanism_is_refused(trained):
    with pytest.raises(
        ValueError, match=r"^what=training_free replaces mechanism=sa, and these runs have another mechanism: sc$"
    ):
        main(["what=training_free", f"ckpt={trained[1]['sc'].path}", "mechanism=[sparge]", *QUICK])


def test_another_probe_takes_no_mechanism(trained):
    with pytest.raises(ValueError, match="^mechanism=… belongs to what=training_free, which takes fasa and sparge$"):
        main(["what=qk", f"ckpt={trained[1]['mlm'].path}", "mechanism=[sparge]"])


def test_the_yamls_hold_the_defaults_of_their_configs():
    """Of no sweep, so that tests/test_architecture.py does not see them."""
    names = Registry("mechanisms").names(cross=False, trainable=False)
    spec = read_spec("probe", ["what=training_free", "ckpt=x", f"mechanism=[{','.join(names)}]"])
    assert names == ("fasa", "sparge")
    assert [part.settings for part in spec.mechanism] == [Registry("mechanisms").load(name).Config() for name in names]
