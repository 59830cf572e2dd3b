"""`python -m stability.probe`: what lands on disk, that nothing is measured twice, and what a mistake is told."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import torch

from stability import hessian
from stability.config.base import validate
from stability.config.entries import ProbeSpec
from stability.probe import main
from stability.probes.checkpoints import corpus_of
from stability.probes.layers import measuring, observing
from stability.probes.layers.consensus import consensus_spectra
from stability.probes.layers.measuring import layer_inputs, list_missing_phases, measure, read_held_out
from stability.probes.layers.observing import mixers
from stability.runs.results import collect, write
from stability.runs.schema import PROBE_COLUMNS
from stability.runs.study import StudyFolder
from stability.training import checkpoint

SC = {"mechanism": {"name": "sc"}}
SMALL = ["sequences=2", "probes=2", "products=4", "device=cpu"]


def table(directory, name, phase="terminal"):
    return pd.read_parquet(directory.probe_file(phase, name))


def spec_of(**changes):
    return validate(ProbeSpec, {"what": "spectra", "ckpt": "x", "probes": 2, "products": 4, "device": "cpu", **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A pool with one run of sa, sc and mix each, and the study of them; a run that is not finished beside it."""
    from tests.conftest import Lab

    lab = Lab(tmp_path_factory.mktemp("lab"))
    runs = {name: lab.train(lab.spec(mechanism={"name": name})) for name in ("sa", "sc", "mix")}
    study = StudyFolder.of(lab.pool, "three")
    study.write([directory.run_id for directory in runs.values()])
    return lab, runs, study


def test_a_study_is_measured_collected_and_printed_and_skipped_the_second_time(trained, capsys):
    lab, runs, study = trained
    assert main(["what=spectra", f"ckpt={study.path}", *SMALL]) == 0
    said = capsys.readouterr().out
    assert (
        "Learned graphs of consensus layers, terminal checkpoint" in said
        and "Softmax attention as a filter, terminal checkpoint" in said
    )
    spectra, responses = (pd.read_parquet(study.results / f"{name}.parquet") for name in ("spectra", "filter"))
    assert list(spectra.columns) == PROBE_COLUMNS["spectra"] and list(responses.columns) == PROBE_COLUMNS["filter"]
    assert len(spectra) == 3 * 2 * 2 * 2, "runs, layers, heads, sequences"
    mix = spectra[spectra.run_id == runs["mix"].run_id]
    assert mix.groupby("layer").mixer.unique().map(list).to_dict() == {0: ["sa"], 1: ["sc"]}
    assert (
        spectra[spectra.mixer == "sc"].second_eigenvalue.isna().all()
        and spectra[spectra.mixer == "sa"].fiedler.isna().all()
    )
    sums = responses.groupby(["run_id", "layer", "head", "sequence", "probe"]).weight.sum()
    assert np.allclose(sums, 1)
    before = {path: path.stat().st_mtime_ns for path in lab.pool.glob("*/probes/*.parquet")}
    assert main(["what=spectra", f"ckpt={study.path}", *SMALL]) == 0
    assert "skips 3 of 3: measured already" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in lab.pool.glob("*/probes/*.parquet")}


def test_rows_are_those_of_the_layer_on_its_own_input(trained):
    lab, runs, study = trained
    directory = runs["sc"]
    list(measure(directory, spec_of(ckpt=str(directory.path), sequences=2), cache_dir=lab.cache))
    spec, model = checkpoint.load(directory.checkpoints()[-1])
    model = model.double()
    tokens = read_held_out(spec, lab.cache, 2)
    x = model.embedding(tokens.inputs_BN[1:2])
    x = x + model.blocks[0].mixer(model.blocks[0].mixer_norm(x))
    x = x + model.blocks[0].ffn(model.blocks[0].ffn_norm(x))
    x = model.blocks[1].mixer_norm(x).detach()
    expected = list(consensus_spectra(model.blocks[1].mixer, x, probes=2, products=4, seed=0))[1].numbers
    row = table(directory, "spectra").query("sequence == 1 and layer == 1 and head == 1").iloc[0]
    for column, value in expected.items():
        assert row[column] == pytest.approx(value, rel=1e-6), column


def test_held_out_sequences_are_of_the_validation_side_and_the_same_for_every_run(trained):
    lab, runs, _ = trained
    specs = [checkpoint.load(runs[name].checkpoints()[-1])[0] for name in ("sa", "sc")]
    first, second = (read_held_out(spec, lab.cache, 3) for spec in specs)
    assert torch.equal(first.inputs_BN, second.inputs_BN) and len(first.inputs_BN) == 3
    tokens = corpus_of(specs[0], lab.cache).val_tokens
    assert (
        first.targets_BN[0].tolist() == tokens[:16].tolist() and first.targets_BN[-1].tolist() == tokens[-16:].tolist()
    )
    spec, model = checkpoint.load(runs["sa"].checkpoints()[-1])
    assert [len(x) for x in layer_inputs(model, first)] == [3, 3] and len(mixers(model)) == 2


@pytest.mark.parametrize("change", [{"sequences": 1}, {"probes": 3}, {"products": 5}, {"seed": 1}])
def test_another_protocol_is_measured_anew_and_changes_the_numbers(trained, change):
    lab, runs, _ = trained
    directory, base = runs["sc"], spec_of(phase="earliest")
    list(measure(directory, base, cache_dir=lab.cache))
    old = table(directory, "filter", "earliest")
    assert list_missing_phases(directory, base) == []
    other = spec_of(phase="earliest", **change)
    assert list_missing_phases(directory, other) == ["earliest"]
    list(measure(directory, other, cache_dir=lab.cache))
    assert not table(directory, "filter", "earliest").equals(old)


def settings_by_probe():
    """What the descriptions say: the settings of each probe of a checkpoint, named in parentheses."""
    found = []
    for name, field in ProbeSpec.model_fields.items():
        for inside in re.findall(r"\(([^)]*)\)", field.description or ""):
            found += [(name, what) for what in re.split(r"[,;]\s*", inside) if what in measuring.TABLES]
    return found


NETWORK = {
    "seed",
    "nodes",
    "constraints",
    "rho",
    "averaging",
    "iterations",
    "reports_dir",
}  # of PDMM's own, which is printed, not stored


def test_a_setting_of_a_probe_is_part_of_its_protocol():
    assert {"sequences", "lengths", "bits", "budgets", "outlier_log_range", "products"} <= {
        name for name, _ in settings_by_probe()
    }
    for name, what in settings_by_probe():
        spec = ProbeSpec.model_construct(what=what, ckpt="x")
        assert (name in json.loads(measuring.protocol_of(spec))) == (what != "pdmm" or name not in NETWORK), (
            name,
            what,
        )


def test_singular_values_of_queries_and_keys_are_kept_for_every_phase(trained, capsys):
    _, runs, study = trained
    assert main(["what=qk", f"ckpt={study.path}", "phase=all"]) == 0
    said = capsys.readouterr().out
    assert "leaves out sc: no softmax attention, so no W_q and W_k" in said
    assert "σ(W_qᵀW_k), terminal checkpoint" in said and "σ(W_qᵀW_k), earliest checkpoint" in said
    rows = pd.read_parquet(study.results / "qk.parquet")
    _, model = checkpoint.load(runs["mix"].checkpoints()[0])
    weight = model.blocks[0].mixer.qkv.weight.detach().double()
    values = torch.linalg.svdvals(weight[8:16].T @ weight[24:32])
    kept = rows[(rows.run_id == runs["mix"].run_id) & (rows.phase == "earliest") & (rows["head"] == 1)]
    assert np.allclose(kept.singular_value, values[:8], rtol=1e-6) and set(kept.layer) == {0}


def test_consensus_alone_has_no_queries_and_keys_and_says_so(trained, capsys):
    _, runs, _ = trained
    assert main(["what=qk", f"ckpt={runs['sc'].path}"]) == 0
    assert capsys.readouterr().out == "leaves out sc: no softmax attention, so no W_q and W_k\n"
    assert main(["what=qk", f"ckpt={runs['sc'].checkpoints()[-1]}"]) == 0
    assert capsys.readouterr().out == "leaves out sc: no softmax attention, so no W_q and W_k\n"


def test_a_run_and_a_single_checkpoint_print_their_own_tables(trained, capsys):
    _, runs, _ = trained
    folder = runs["mix"].checkpoints()[0]
    assert main(["what=spectra", f"ckpt={folder}", *SMALL]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Learned graphs of consensus layers, earliest checkpoint" in said
    assert "with mechanism.sc.rope=gradient the filter is the whole update" in said and "rope=none" not in said, (
        "the run's own setting, which it knows"
    )
    assert main(["what=spectra", f"ckpt={runs['mix'].path}", *SMALL]) == 0
    assert "Softmax attention as a filter, terminal checkpoint" in capsys.readouterr().out


def test_an_interrupted_measurement_leaves_nothing_and_goes_on(lab):
    directory, spec = lab.train(lab.spec(**SC)), spec_of()
    steps = measure(directory, spec, cache_dir=lab.cache)
    next(steps)
    steps.close()
    assert list_missing_phases(directory, spec) == ["terminal"]
    assert len(list(measure(directory, spec, cache_dir=lab.cache))) == 4, "two layers on two sequences"
    assert list_missing_phases(directory, spec) == []


def test_a_run_without_a_checkpoint_is_refused_alone_and_empty_in_a_study(lab, capsys):
    directory = lab.train(lab.spec(lr_peak=1e30, optimizer={"name": "sgd"}, **SC))
    with pytest.raises(ValueError, match="is diverged and left no checkpoint: there is nothing to probe"):
        main(["what=spectra", f"ckpt={directory.path}", *SMALL])
    good, study = lab.train(lab.spec(**SC)), StudyFolder.of(lab.pool, "both")
    study.write([directory.run_id, good.run_id])
    assert main(["what=spectra", f"ckpt={study.path}", *SMALL]) == 0
    assert len(table(directory, "spectra")) == 0
    assert set(pd.read_parquet(study.results / "spectra.parquet").run_id) == {good.run_id}


def test_connectivity_is_drawn_alone_or_kept_in_a_study(trained, tmp_path, capsys):
    _, _, study = trained
    assert main(["what=connectivity", f"reports_dir={tmp_path}"]) == 0
    assert (tmp_path / "connectivity.pdf").read_bytes().startswith(b"%PDF")
    assert "λ_1 of the window-path graph" in capsys.readouterr().out
    assert main(["what=connectivity", f"ckpt={study.path}"]) == 0
    write(collect(study.path), study.results)
    assert set(pd.read_parquet(study.results / "connectivity.parquet").graph) == {"window", "cycle", "complete"}


def test_results_forget_what_the_runs_lost(trained):
    lab, runs, study = trained
    main(["what=qk", f"ckpt={study.path}"])
    for path in lab.pool.glob("*/probes/*_qk.parquet"):
        path.unlink()
    write(collect(study.path), study.results)
    assert not (study.results / "qk.parquet").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["what=spectre", "ckpt=x"],
            "what='spectre': input should be 'spectra', 'qk', 'pdmm', 'streams', 'training_free', 'mirror', 'train_nll', 'lengths', 'quantization', 'connectivity' or 'coordinates'",
        ),
        (["what=spectra"], "what=spectra needs ckpt=FOLDER: a study, a run or a checkpoint"),
        (["ckpt=x"], "what: a value is missing; give what=…"),
        (["what=qk", "ckpt=/nothing/there"], "no checkpoint at /nothing/there"),
        (["what=qk", "ckpt=x", "sequnces=3"], "sequnces: unknown key; did you mean 'sequences'"),
        (["what=spectra", "ckpt=x", "probes=1"], "probes=1: input should be greater than or equal to 2"),
        (["what=connectivity", "ckpt=/nothing/there"], "no study at /nothing/there"),
    ],
)
def test_mistakes_are_told_in_a_line(argv, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")) as caught:
        main(argv)
    assert len(str(caught.value).splitlines()) <= 2


def test_a_run_with_neither_consensus_nor_attention_is_refused(trained, monkeypatch):
    monkeypatch.setitem(observing.OBSERVED, "spectra", ())
    with pytest.raises(ValueError, match="sa has neither consensus nor softmax-attention layers"):
        main(["what=spectra", f"ckpt={trained[1]['sa'].path}", *SMALL])


def test_an_unfinished_run_is_refused(lab):
    directory = lab.train(lab.spec(**SC), steps=6)
    with pytest.raises(ValueError, match="run its sweep to the end first"):
        main(["what=spectra", f"ckpt={directory.path}"])
    assert not directory.probe_file("terminal", "spectra").exists()


def test_runs_whose_checkpoints_are_gone_keep_what_was_measured_and_get_no_empty_tables(lab, capsys):
    first, second = (lab.train(lab.spec(**SC, seed=seed)) for seed in (11, 12))
    study = StudyFolder.of(lab.pool, "unpacked")
    study.write([first.run_id, second.run_id])
    assert main(["what=spectra", f"ckpt={first.path}", *SMALL]) == 0
    for directory in (first, second):
        shutil.rmtree(directory.path / "checkpoints")
    before = len(table(first, "spectra"))
    capsys.readouterr()
    assert main(["what=spectra", f"ckpt={study.path}", *SMALL]) == 0
    assert "leaves out 2 of 2 runs, whose checkpoints are gone; what was measured" in capsys.readouterr().out
    assert len(table(first, "spectra")) == before and not second.probe_file("terminal", "spectra").exists()
    with pytest.raises(ValueError, match="its checkpoints are gone"):
        hessian.main([f"ckpt={second.path}"])
    assert not second.curvature_file("terminal").exists()
    assert hessian.main([f"ckpt={study.path}"]) == 0 and not second.curvature_file("terminal").exists()
