"""``init=ckpt:FOLDER`` from the command line to the report."""

from __future__ import annotations

import json

import pytest
from pypdf import PdfReader

from stability import sweep
from stability.config.identity import run_id
from stability.config.parse import parse_run
from stability.runs.directory import read_jsonl
from stability.runs.results import collect
from stability.runs.study import StudyFolder
from tests.reading import read_spec


@pytest.fixture
def words(small_sweep):
    return [*small_sweep, "hessian=false", "lr=[1e-3,1e-2]", "seeds=2"]


def test_a_sweep_from_weights_says_whose_they_are_from_its_plan_to_its_report(lab, words, tmp_path, capsys):
    source = lab.train(lab.spec())
    init = f"init=ckpt:{source.path}"
    assert sweep.main([*words, "mechanism=sa", init, "name=tuned", "dry_run=true"]) == 0
    said = f"init: every run starts from the weights of {source.run_id} at step 12 (sha256 "
    plan = capsys.readouterr().out
    assert plan.startswith(said) and "\n  all 29 tensors\n" in plan and "4 runs (0 of them finished)" in plan
    assert not (lab.cache / "weights").exists() and [path.name for path in lab.pool.glob("[0-9a-f]" * 12)] == [
        source.run_id
    ]

    assert sweep.main([*words, "mechanism=sa", init, "name=tuned", "tables=all"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(said) and "trains 4" in printed
    study = StudyFolder.of(lab.pool, "tuned")
    found = collect(study.path).runs
    assert len(found) == 4 and set(found.init_nll) == {source.status()["result"]["val_nll"]}
    (model,) = set(found.model)
    (weights,) = {json.dumps(json.loads(run.spec_file.read_text())["weights"]) for run in study.runs()}
    assert model == f"nano init={json.loads(weights)['sha256'][:12]}"
    for run in study.runs():
        assert run_id(parse_run(json.loads(run.spec_file.read_text()))) == run.run_id
        assert next(read_jsonl(run.metrics_file))["val_nll"] == source.status()["result"]["val_nll"]
    asked = study.read()["spec"]["init"]
    assert asked["label"] == f"{source.run_id} at step 12" and asked["source"] == f"ckpt:{source.checkpoints()[-1]}"

    told = f"tarts from the weights of {source.run_id} at step 12 (sha256 {asked['sha256'][:12]})"
    pages = "".join(page.extract_text() for page in PdfReader(tmp_path / "reports" / "tuned.pdf").pages)
    assert " ".join(pages.split()).count(told) == 2, "on the first page and in the appendix"

    assert sweep.main([*words, "mechanism=sa", init, "name=tuned", "tables=all"]) == 0
    assert "skips 4 finished runs, trains none" in capsys.readouterr().out
    assert sweep.main([*words, "mechanism=sa", "name=tuned", "dry_run=true"]) == 0
    assert "4 runs (0 of them finished)" in capsys.readouterr().out, "those from scratch are others"


def test_what_does_not_fit_is_refused_before_any_run(lab, words, entered):
    source = lab.train(lab.spec())
    before = sorted(path.name for path in lab.pool.iterdir())
    out = entered("stability.sweep", *words, "mechanism=[sa,sc]", f"init=ckpt:{source.path}", "name=tuned")
    assert (out.returncode, out.stdout) == (2, "")
    first, second = out.stderr.splitlines()
    assert first.startswith(
        f"error: init=ckpt:{source.checkpoints()[-1]} does not fit sc/identity/layernorm/adamw: miss"
    )
    assert "blocks.0.mixer.pair_weight" in first and "unexpected: blocks.0.mixer.qkv.bias" in first
    assert second.startswith("all tensors must match by name and shape; init.partial=true takes those that do")
    assert sorted(path.name for path in lab.pool.iterdir()) == before

    taken = (*words, "mechanism=[sa,sc]", f"init=ckpt:{source.path}", "init.partial=true", "dry_run=true", "name=tuned")
    out = entered("stability.sweep", *taken)
    assert out.returncode == 0 and "\n  all 29 tensors (sa/identity/layernorm/adamw)\n" in out.stdout
    assert "\n  25 of 41 tensors; initialised anew: blocks.0.mixer.pair_weight, " in out.stdout


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("init=runs/x", "init=runs/x: must be ckpt:FOLDER, a run's folder or a checkpoint's (init=ckpt:runs/"),
        ("init=ckpt:", "init=ckpt:: must be ckpt:FOLDER"),
        ("init.partial=true", "init.partial needs init, e.g. init=ckpt:FOLDER; add it"),
        ("init.sha256=abc", "init.sha256 needs init, e.g. init=ckpt:FOLDER; add it"),
    ],
)
def test_a_word_that_names_no_weights_is_refused(word, message):
    with pytest.raises(ValueError) as caught:
        read_spec("sweep", [word])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("place", ["/F/a(b),c = 'd' {e}/[x]", "runs/0123456789ab", "2024", "a b"])
def test_the_folder_arrives_as_it_was_written_and_names_the_study(place):
    spec = read_spec("sweep", [f"init=ckpt:{place}"])
    assert spec.init.place == place and not spec.init.partial
    assert read_spec("sweep", ["init=ckpt:runs/0123456789ab", "mechanism=sa"]).name.startswith("sa-0123456789ab-")
    assert read_spec("sweep", [f"init=ckpt:{place}", "init=null"]).init is None
