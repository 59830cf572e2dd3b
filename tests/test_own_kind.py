"""An objective and a data source of one's own, with a kind of data and of samples that the package does not know, from
the command line to the report."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pypdf import PdfReader

from analysis.sections import accuracy
from analysis.study.load import load
from stability import generate, hessian, probe, report, sweep
from stability.config.base import validate
from stability.config.generation import GenerationSpec
from stability.runs.directory import read_jsonl
from stability.runs.results import collect
from stability.runs.study import StudyFolder
from tests.analysis.figures import write_figures
from tests.reading import read_spec

PLUGINS = Path(__file__).parent / "own_kind"
TINY = (
    "mechanism=sa", "lr=[1e-3,1e-2]", "seeds=1", "steps=12", "batch=8", "evaluation.every_steps=4",
    "evaluation.sequences=16", "model.layers=1", "model.width=16", "model.heads=2", "model.positions=16",
    "launcher=serial", "device=cpu",
)  # fmt: skip
PROTOCOL = ("warmup_batches=2", "warmup_steps=1", "recorded_steps=2", "device=cpu")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the plugins lie and the runs will."""
    for name in ("walks", "next_place"):
        shutil.copy(PLUGINS / f"{name}.py", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_kind_of_ones_own_goes_from_the_command_line_to_the_report(folder, capsys):
    words = ["plugins=[walks,next_place]", "data=walks", "objective=next_place", *TINY]
    assert sweep.main([*words, "name=ring", "hessian=false", "report=false", "dry_run=true"]) == 0
    said = capsys.readouterr().out
    assert "mixing/move" in said and "moves" in said and "ring of 8 places" in said

    assert sweep.main([*words, "name=ring", "hessian=false", "report=false"]) == 0
    study = StudyFolder.of("runs", "ring")
    assert study.read()["words"] | {"unit": "nats per move", "tokens": "places on a ring"} == study.read()["words"]
    runs = study.runs()
    # of 8 places each is as likely to an untrained model; one that knows the steps is left with two
    found = pd.DataFrame(read_jsonl(runs[1].metrics_file))
    assert abs(found.val_nll.iloc[0] - np.log(8)) < 0.3 and found.val_nll.iloc[-1] < found.val_nll.iloc[0] - 0.5

    assert hessian.main(["ckpt=runs/studies/ring", "phase=terminal", *PROTOCOL]) == 0
    recorded = pd.concat(pd.read_parquet(run.curvature_file("terminal")) for run in runs)
    assert len(recorded) == 2 * 2 * 2 and np.isfinite(recorded.alpha_max).all()

    oracle = f"oracle=ckpt:{runs[1].path}"
    assert generate.main(["ckpt=runs/studies/ring", "num=3", oracle, "start=5", "sampler=wander"]) == 0
    said = capsys.readouterr().out
    assert "5 → " in said and "walker step_000012" in said
    walks = [
        json.loads(line)["walk"] for line in (runs[0].path / "samples" / "terminal.jsonl").read_text().splitlines()
    ]
    assert len(walks) == 3 and all(len(walk) == 16 and walk[0] == 5 and max(walk) < 8 for walk in walks)

    one = [f"ckpt={runs[0].path}", "num=3", "overwrite=true"]
    assert generate.main([*one, "sampler=leap", "steps=4"]) == 0
    kept = json.loads((runs[0].path / "samples" / "terminal.json").read_text())
    assert (kept["sampler"], kept["steps"]) == ("leap", 4)
    for given, how in {("steps=4",): "auto is wander here, which", ("sampler=wander", "steps=4"): "wander"}.items():
        message = rf"steps=4 belongs to .*sampler=leap.*; sampler={how} fills one position a step"
        with pytest.raises(ValueError, match=message):
            generate.main([*one, *given])
    assert generate.main([*one, oracle, "start=5", "sampler=wander"]) == 0
    capsys.readouterr()

    said, printed = reported("ring", capsys)
    for text in (said, printed):
        assert "Nats per move at the end of training" in text
        assert "what the training walks' place frequencies reach" in text
        assert "Nats per move as the walker sees them; mean over 3 samples" in text and "moves per run" in text
        assert "token" not in text and "byte" not in text, "the words of another kind"
    assert "next_place, a step at a time" in printed and "places on a ring" in printed
    table = collect(study.path).runs
    assert table.val_nll.to_numpy() == pytest.approx((table.val_nll_even + table.val_nll_odd).to_numpy(), rel=1e-6)
    assert table.unigram_nll_even.iloc[0] == pytest.approx(np.log(8) / 2, abs=0.05)
    assert table.val_hits.between(1 / 8, 0.7).all()
    assert "nats of moves to even and to odd places; the total is their sum. Place fre" in printed
    assert re.search(r"Even sa .*Odd sa ", printed)
    assert "nll: nats per move of the oracle walker" in printed
    assert "12 steps of 8 walks" in printed and "Generative NLL in nats per move of the walker" in printed
    drawn = "".join(path.read_text() for path in write_figures(study.path, folder / "figures") if path.suffix == ".svg")
    assert "surprise at the next move (nats)" in drawn and "frequencies" in drawn


@pytest.mark.slow
def test_what_is_said_of_its_score_its_streams_and_its_layers_is_said_in_its_words(folder, capsys):
    """Its score is called as a classifier's is, and its residual and its probes are those of every kind."""
    words = ["plugins=[walks,next_place]", "data=walks", "objective=next_place", *TINY]
    assert sweep.main([*words, "residual=mhc", "name=ring", "hessian=false", "report=false"]) == 0
    assert " foresight " in capsys.readouterr().out
    study = StudyFolder.of("runs", "ring")
    [one, _] = study.runs()
    for what in ("streams", "spectra"):
        for place in (f"{one.path}", "runs/studies/ring"):  # of a run alone, then of all
            assert probe.main([f"what={what}", f"ckpt={place}", "device=cpu"]) == 0
            found = {"streams": "Of every move on held-out data (32 moves a run)", "spectra": "on held-out walks;"}
            said = " ".join(capsys.readouterr().out.split())
            assert found[what] in said and not words_of_others(said), place

    share = pd.DataFrame(read_jsonl(one.metrics_file)).val_accuracy.iloc[-1]
    for text in reported("ring", capsys):
        assert "Foresight against learning rate" in text and "Per cent of the held-out moves that are foreseen" in text
        assert f"{100 * share:.1f}" in text and "accuracy" not in text and not words_of_others(text)
    drawn = {name: each.caption for name, each in accuracy.figures(load(study.path)).items()}
    assert list(drawn) == ["accuracy"] and drawn["accuracy"].startswith(
        "Share of the held-out moves that are foreseen,"
    )
    assert "judged on the surprise at the next move, not on this" in drawn["accuracy"]


def words_of_others(text: str) -> list[str]:
    """Find the words of kinds of data that the package knows."""
    return re.findall(r"\b(?:tokens?|images?|text|class|patch|patches|residues?)\b", text, re.IGNORECASE)


def reported(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what the report of a study prints and what its PDF holds, each in one line."""
    assert report.main([f"name={name}", "tables=all", "pages=all"]) == 0
    pages = "".join(page.extract_text() for page in PdfReader(f"reports/{name}.pdf").pages)
    return [" ".join(text.replace("’", "'").split()) for text in (capsys.readouterr().out, pages)]


@pytest.mark.slow
def test_a_setting_of_its_samples_is_written_and_refused_like_one_of_ours(folder):
    own = ["plugins=[walks,next_place]", *TINY, "name=ring", "hessian=false", "report=false"]
    words = [*own, "data=walks", "objective=next_place"]
    spec = read_spec("sweep", [*words, "generate.num=2", "generate.start=5"])
    assert spec.generate.own.start == 5
    asked = spec.generate.model_dump(mode="json")
    assert asked["start"] == 5 and asked["contexts"] == "empty" and validate(GenerationSpec, asked) == spec.generate
    for given, message in {
        ("generate.start=5",): r"generate\.start=5 needs the number of samples",
        ("generate.num=2", "generate.start=-1"): r"generate\.start=-1: input should be greater than or equal to 0",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_spec("sweep", [*words, *given])
    with pytest.raises(ValueError, match=r"start=5 belongs to samples of walks \(objective=next_place\); objective=ar"):
        sweep.main([*own, "data=stdlib", "objective=ar", "generate.num=2", "generate.start=5"])
