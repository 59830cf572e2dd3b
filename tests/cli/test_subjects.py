"""What ``ckpt=FOLDER`` names: a study, a run, a checkpoint of a run, or none of them."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections import Counter

import pytest

from stability.cli.subjects import read_about
from stability.cli.words import Invocation
from stability.config.identity import run_id
from stability.config.parse import SPECS
from stability.plan.runs import RunPlan, read_spec
from stability.registry import add_plugin, require_plugins
from stability.runs.directory import FINISHED
from stability.runs.study import StudyFolder
from stability.training import checkpoint
from sweeps.trial import Trial, run_trial

KEPT = {"hessian": "rows", "probe": "rows", "generate": "samples"}
WORDS = {"hessian": [], "probe": ["what=spectra"], "generate": ["num=1"]}


def test_a_folder_is_a_study_a_run_or_a_checkpoint_of_one(lab, tmp_path):
    run = lab.train(lab.spec())
    study = StudyFolder.of(lab.pool, "one")
    study.write([run.run_id])
    first, last = run.checkpoints()

    whole, single = RunPlan.of(str(study.path), kept="rows"), RunPlan.of(str(run.path), kept="rows")
    assert whole.study is not None and whole.study.path == study.path
    assert (single.study, single.checkpoint) == (None, None)
    for subject in (whole, single):
        assert [(each.path, run_id(spec)) for each, spec in subject.runs.items()] == [(run.path, run.run_id)]
        assert subject.cache_dir == lab.cache
    shutil.copytree(first, run.path / "checkpoints" / "mine")
    for folder, phase in ((first, "earliest"), (last, "terminal"), (run.path / "checkpoints" / "mine", "mine")):
        subject = RunPlan.of(str(folder), kept="rows")
        assert (subject.study, subject.checkpoint, subject.phase) == (None, folder, phase)
        assert (subject.directory.path, subject.cache_dir) == (run.path, lab.cache)


def test_of_runs_without_a_verdict_or_a_checkpoint_only_one_that_is_alone_is_refused(lab):
    run = lab.train(lab.spec())
    study, unfinished = StudyFolder.of(lab.pool, "two"), lab.pool / "0123456789ab"
    study.write([run.run_id, unfinished.name])
    shutil.copytree(run.path, unfinished, ignore=lambda *_: ["checkpoints", "status.json"])
    both = RunPlan.of(str(study.path), kept="rows", without_checkpoint="no matter")
    assert [directory.run_id for directory in both.runs] == [run.run_id]
    assert both.notes == ("leaves out 1 of 2 runs, which have not reached their verdict",)
    with pytest.raises(ValueError, match=r"^0123456789ab is queued; run its sweep to the end first$"):
        RunPlan.of(str(unfinished), kept="rows")
    shutil.rmtree(run.path / "checkpoints")
    assert RunPlan.of(str(run.path), kept="rows").directory.path == run.path
    with pytest.raises(ValueError, match=rf"^{run.run_id} is \w+ and left no checkpoint: nothing to see$"):
        RunPlan.of(str(run.path), kept="rows", without_checkpoint="nothing to see")


def test_each_entry_refuses_a_checkpoint_outside_of_a_run_and_says_what_it_would_keep(lab, tmp_path, entered):
    stray = tmp_path / "stray" / "checkpoints" / "step_000001"
    shutil.copytree(lab.train(lab.spec()).checkpoints()[0], stray)
    for entry, kept in KEPT.items():
        out = entered(f"stability.{entry}", f"ckpt={stray}", *WORDS[entry])
        assert (out.returncode, out.stdout) == (2, "")
        assert f"its {kept} would be kept; copy the whole run" in out.stderr
        assert out.stderr.startswith(
            f"error: {stray} is not inside a run's folder (runs/<run_id>/checkpoints/…), where "
        )


SHORT = {
    "hessian": ["device=cpu", "state=[paper]", "warmup_batches=1", "warmup_steps=1", "recorded_steps=1", "batch=2"],
    "probe": ["what=spectra", "sequences=1", "device=cpu"],
    "generate": ["num=1", "device=cpu"],
}


@pytest.mark.parametrize("entry", SHORT)
def test_each_entry_reads_a_checkpoint_that_it_is_given_once_and_verifies_it(lab, entered, monkeypatch, entry):
    folder = lab.train(lab.spec()).checkpoints()[-1]
    hashed, sha256_of = Counter(), checkpoint.sha256_of

    def counted(path):
        hashed[path.name] += 1
        return sha256_of(path)

    monkeypatch.setattr(checkpoint, "sha256_of", counted)
    assert entered(f"stability.{entry}", f"ckpt={folder}", *SHORT[entry]).returncode == 0
    assert hashed == {checkpoint.MODEL: 1, checkpoint.TRAINER: 1}
    copy = folder.with_name("step_000099")
    for name in (checkpoint.TRAINER, checkpoint.MODEL, checkpoint.MANIFEST):
        shutil.copytree(folder, copy)
        before = sorted(copy.parents[1].rglob("*"))
        (copy / name).write_bytes((copy / name).read_bytes()[:-9])
        out = entered(f"stability.{entry}", f"ckpt={copy}", *SHORT[entry])
        wrong = (
            f"{copy / name} is missing, truncated or altered (its sha256 is not the manifest's); use another checkpoint"
        )
        if name == checkpoint.MANIFEST:
            with pytest.raises(ValueError) as cut:
                json.loads((copy / name).read_text())
            wrong = (
                f"{copy} has no readable {name} ({copy / name} is damaged ({cut.value}); move it away and run the sweep "
                "again); it is no checkpoint, run (runs/<run_id>) or study (runs/studies/<name>), or it was cut short"
            )
        assert (out.returncode, out.stderr) == (2, f"error: {wrong}\n")
        assert sorted(copy.parents[1].rglob("*")) == before, "it left something behind"
        shutil.rmtree(copy)


def test_a_name_that_no_file_system_takes_is_refused_by_its_key():
    with pytest.raises(ValueError, match=r"^ckpt=9+: File name too long; give a study's, a run's"):
        RunPlan.of("9" * 5000, kept="rows")


@pytest.mark.parametrize("entry", ["hessian", "probe", "generate"])
def test_the_nearest_study_is_named_where_a_folder_is_not_there(entry, tmp_path, monkeypatch):
    for name in ("quickstart", "text_mini"):
        StudyFolder.of(tmp_path / "runs", name).write([])
    studies, main = tmp_path / "runs" / "studies", importlib.import_module(f"stability.{entry}").main
    monkeypatch.chdir(tmp_path)
    typed = {"runs/studies/quickstar": studies / "quickstar", "runs/quickstar": tmp_path / "runs" / "quickstar"}
    for ckpt, folder in {**typed, "quickstar": tmp_path / "quickstar"}.items():
        with pytest.raises(ValueError) as caught:
            main([f"ckpt={ckpt}", *WORDS[entry]])
        assert str(caught.value) == (
            f"no checkpoint at {folder}, and no run or study; did you mean 'quickstart'? (studies in {studies}: "
            "quickstart, text_mini)"
        )
    with pytest.raises(ValueError, match=r"^no checkpoint at /nothing/there, and no run or study; give a folder like"):
        main(["ckpt=/nothing/there", *WORDS[entry]])


@pytest.fixture
def of_a_plugin(lab, tmp_path, monkeypatch):
    """A finished run that names a module of somebody's, which leaves a mark where it is imported."""
    run = lab.train(lab.spec())
    spec = json.loads(run.spec_file.read_text()) | {"plugins": ["somebodys"]}
    run.spec_file.write_text(json.dumps(spec))
    for folder in run.checkpoints():
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | {"spec": spec}))
    study = StudyFolder.of(lab.pool, "theirs")
    study.write([run.run_id], spec={"plugins": ["somebodys"]})
    (tmp_path / "somebodys.py").write_text(
        "from pathlib import Path\nfrom stability.norms.layernorm import EXPORT as Norm\n"
        "Path(__file__).with_suffix('.mark').touch()\nclass EXPORT(Norm): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "somebodys", None)
    del sys.modules["somebodys"]
    return run


@pytest.mark.parametrize("entry", ["hessian", "generate num=1", "probe what=qk"])
@pytest.mark.parametrize("place", ["study", "run", "checkpoint"])
def test_a_plugin_that_a_folder_names_is_imported_where_the_command_names_it_only(
    entered, tmp_path, of_a_plugin, entry, place
):
    mark, run = tmp_path / "somebodys.mark", of_a_plugin
    places = {"study": run.path.parent / "studies/theirs", "run": run.path, "checkpoint": run.checkpoints()[-1]}
    ckpt = f"ckpt={places[place]}"
    module, *words = entry.split()
    done = entered(f"stability.{module}", *words, ckpt)
    assert (done.returncode, mark.exists()) == (2, False)
    assert done.stderr == (
        f"error: {places[place]}: was trained with plugins=[somebodys]; add plugins=[somebodys] to import it\n"
    )
    read_about(SPECS[module], Invocation.of([*words, ckpt, "plugins=[somebodys]"]))
    assert mark.exists()


def test_what_reads_a_checkpoint_itself_imports_no_plugin_that_was_not_named(tmp_path, of_a_plugin):
    folder = of_a_plugin.checkpoints()[-1]
    told = f"^{folder}: was trained with plugins=\\[somebodys\\]; add plugins=\\[somebodys\\] to import it$"
    with pytest.raises(ValueError, match=told):
        checkpoint.load(folder)
    with pytest.raises(ValueError, match=told.replace(str(folder), str(of_a_plugin.path))):
        read_spec(of_a_plugin)
    assert not (tmp_path / "somebodys.mark").exists()
    add_plugin("somebodys")
    checkpoint.load(folder)
    assert read_spec(of_a_plugin).plugins == ("somebodys",)


def test_a_worker_imports_the_plugins_of_the_trial_that_it_is_handed(tmp_path, of_a_plugin):
    spec = json.loads(of_a_plugin.spec_file.read_text())
    trial = Trial(of_a_plugin.run_id, spec, str(of_a_plugin.path.parent), None, "cpu", None)
    assert list(run_trial(trial)) == []
    assert (tmp_path / "somebodys.mark").exists()
    assert trial.directory.status()["state"] in FINISHED


@pytest.mark.parametrize("names", [["../x"], ["\x1b]0;a\a"], [1, None]])
def test_names_that_are_no_modules_are_told_without_their_control_characters(names):
    with pytest.raises(ValueError, match=r"^here: was trained with plugins=\['") as caught:
        require_plugins(names, "here")
    assert str(caught.value).isprintable()


def test_a_study_whose_record_holds_no_spec_is_named_before_its_words_are_read(tmp_path):
    study = StudyFolder.of(tmp_path, "one")
    study.write([], spec=-1)
    with pytest.raises(ValueError, match=r"study\.json is damaged \(spec"):
        read_about(SPECS["hessian"], Invocation.of([f"ckpt={study.path}"]))


def test_a_run_id_with_a_typing_error_names_the_nearest_runs_beside_the_nearest_study(tmp_path, entered):
    pool = tmp_path / "runs"
    for name in ("0123456789ab", "0123456789ac", "fedcba987654", "studies/mine"):
        (pool / name).mkdir(parents=True)
        (pool / name / ("study.json" if "studies" in name else "spec.json")).write_text("{}")

    def said(typed):
        out = entered("stability.hessian", f"ckpt={typed}")
        assert out.returncode == 2 and len(out.stderr.splitlines()) == 1
        return out.stderr.partition("no run or study; ")[2]

    both, studies = "did you mean the run ", f"tudies in {pool}/studies: mine"
    assert said(pool / "0123456789bc") == f"{both}0123456789ac or 0123456789ab in {pool}? S{studies}\n"
    assert said(pool / "fedc") == f"{both}fedcba987654 in {pool}? S{studies}\n"
    assert said(pool / "studies" / "mina") == f"did you mean 'mine'? (s{studies})\n"
    assert said(pool / "studies" / "other") == f"s{studies}\n"
