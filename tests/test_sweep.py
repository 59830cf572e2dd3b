"""The whole path on a page of text, in process: plan, train, measure, collect, report, and again."""

from __future__ import annotations

import json
import shutil

import pandas as pd
import pytest

from analysis.sections.front import describe_runs
from analysis.study.load import load
from stability import hessian, report, sweep
from stability.runs.results import collect
from stability.runs.schema import COLLECTED_CURVATURE_COLUMNS, CURVES_COLUMNS, RUNS_COLUMNS
from stability.runs.study import StudyFolder
from sweeps.view.study_view import StudyView


@pytest.fixture
def words(small_sweep):
    """A small sweep's command line: two mechanisms, two learning rates, one seed."""
    own = "mechanism=[sa,sc] lr=[1e-3,1e-2] seeds=1 name=small curvature.recorded_steps=3 curvature.warmup_steps=1"
    return [*small_sweep, *own.split(), "curvature.warmup_batches=2"]


def test_one_command_goes_from_words_to_a_pdf(lab, words, tmp_path, capsys):
    assert sweep.main(words) == 0
    out = capsys.readouterr().out
    assert "trains 4" in out
    assert "report: " in out
    assert (tmp_path / "reports" / "small.pdf").read_bytes().startswith(b"%PDF")
    results = collect(lab.pool / "studies" / "small")
    assert list(results.runs.columns) == RUNS_COLUMNS
    assert list(results.curvature.columns) == COLLECTED_CURVATURE_COLUMNS
    assert list(results.curves.columns) == CURVES_COLUMNS
    assert len(results.runs) == 4
    assert set(results.runs.mechanism) == {"sa", "sc"}
    assert results.runs.val_nll.notna().all()
    assert len(results.curvature) == 4 * 2 * 3
    assert len(results.curves) == 4 * 7
    stored = pd.read_parquet(lab.pool / "studies" / "small" / "results" / "runs.parquet")
    assert list(stored.run_id) == list(results.runs.run_id)


def test_lines_tell_schemes_apart_and_fewer_held_out_examples_than_asked_for_are_told_once(lab, words, capsys):
    assert (
        sweep.main(
            [
                *words,
                "mechanism=sa",
                "lr=1e-3",
                "residual=[identity,hc]",
                "steps=2",
                "hessian=false",
                "report=false",
                "evaluation.sequences=5000",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "start  sa identity lr=0.001 seed=0" in out and "start  sa hc lr=0.001 seed=0" in out
    (line,) = [line for line in out.splitlines() if line.startswith("validation: ")]
    num = int(line.split()[3].replace(",", ""))
    assert " held-out examples, fewer than evaluation.sequences=5000; 1 % of the documents is held out: about " in line
    assert 2 <= num < 5000
    view = StudyView.of(StudyFolder.of(lab.pool, "small"))
    assert {row.trial.label for row in view.progress.rows} == {"sa identity lr=0.001 seed=0", "sa hc lr=0.001 seed=0"}


def test_plan_and_sweep_say_the_objective_and_what_of_the_data_was_left_out(lab, words, tmp_path, capsys):
    folder = tmp_path / "mine"
    folder.mkdir()
    texts = [*(f"a window of {number} steps is stable\n" * 4 for number in range(200)), None, None, None]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "one.jsonl").write_text("\n".join(lines[:100]))
    (folder / "two.ndjson").write_text("\n".join(lines[100:]))
    (folder / "README.md").write_text("none of it")
    words = [*words, f"data.path={folder}", "mechanism=sa", "lr=1e-3", "steps=2", "hessian=false", "report=false"]
    words.append("tables=all")
    for more in (["dry_run=true"], []):
        assert sweep.main([*words, *more]) == 0
        out = capsys.readouterr().out
        (line,) = [line for line in out.splitlines() if line.startswith("objective: ")]
        assert line.startswith("objective: mlm (a masked language model, ")
        assert f"{line}\ndata: " in out
        (line,) = [line for line in out.splitlines() if line.startswith("data: ")]
        assert line.startswith("data: text of mine (2 files; left out: README.md): 200 documents, ")
        assert ", 3 null texts left out; tokens: bytes; fingerprint " in line
    assert "Data: text of mine (2 files); bytes." in describe_runs(load(lab.pool / "studies" / "small"))


def test_the_same_command_again_trains_nothing_and_an_extended_one_only_what_is_new(lab, words, tmp_path, capsys):
    words = [*words, "mechanism=sa", "tables=all"]  # drawn twice: half the panels
    sweep.main(words)
    pdf, tables = (
        tmp_path / "reports" / "small.pdf",
        capsys.readouterr().out.partition("Validation NLL")[2].partition("report: ")[0],
    )
    drawn = pdf.stat().st_mtime_ns
    study = StudyFolder(lab.pool / "studies" / "small")
    record = study.read()
    stamps = {directory.run_id: directory.metrics_file.stat().st_mtime_ns for directory in study.runs()}
    sweep.main(words)
    out = capsys.readouterr().out
    assert "skips 2 finished runs, trains none" in out
    assert tables and tables in out and "nothing has changed since it was made" in out
    assert pdf.stat().st_mtime_ns == drawn
    assert study.read() == record, "what ran stays on record, its wall time with it"
    sweep.main([*words, "seeds=2"])
    assert "skips 2 finished runs, trains 2" in capsys.readouterr().out
    assert pdf.stat().st_mtime_ns > drawn
    assert all(
        directory.metrics_file.stat().st_mtime_ns == stamps[directory.run_id]
        for directory in study.runs()
        if directory.run_id in stamps
    )


def test_a_dry_run_prints_runs_parameters_tokens_time_and_memory_and_leaves_no_run(lab, words, capsys):
    assert sweep.main([*words, "dry_run=true"]) == 0
    out = capsys.readouterr().out
    assert "4 runs (0 of them finished)" in out
    assert "sa/identity/layernorm/adamw" in out
    assert f"{4 * 6 * 4 * 16:,} tokens" in out
    assert "MB" in out
    assert not (lab.pool / "studies").exists()
    assert [path.name for path in lab.pool.iterdir()] == ["cache"]


def test_a_crashed_run_does_not_stop_the_others_and_keeps_its_traceback(lab, words, monkeypatch, capsys):
    from stability.mechanisms.sc import SelfConsensus

    def broken(self, x_BND, *, mask_BN=None):
        raise ArithmeticError("planted")

    monkeypatch.setattr(SelfConsensus, "forward", broken)
    words = [*words, "report=false"]
    assert sweep.main(words) == 1
    out = capsys.readouterr().out
    assert "ArithmeticError: planted" in out
    assert "traceback: " in out
    runs = collect(lab.pool / "studies" / "small").runs.set_index("mechanism")
    assert set(runs.loc["sc", "status"]) == {"failed"}
    assert "failed" not in set(runs.loc["sa", "status"])
    failed = next(
        directory
        for directory in StudyFolder(lab.pool / "studies" / "small").runs()
        if directory.status()["state"] == "failed"
    )
    assert "planted" in failed.traceback_file.read_text()
    monkeypatch.undo()
    assert sweep.main(words) == 0, "the same command tries failed runs again"


def test_where_no_run_took_a_step_the_failures_and_the_users_line_are_the_last_that_is_printed(
    lab, words, tmp_path, monkeypatch, capsys
):
    from stability.mechanisms.sc import SelfConsensus

    def broken(self, x_BND, *, mask_BN=None):
        return self.headz

    monkeypatch.setattr(SelfConsensus, "forward", broken)
    assert sweep.main([*words, "mechanism=sc", "lr=1e-3"]) == 1
    *_, failed, place, traceback, again = capsys.readouterr().out.splitlines()
    assert "AttributeError" in failed and "headz" in failed and failed.startswith("failed sc lr=0.001")
    assert place.startswith("  at ") and place.endswith(", in broken: return self.headz") and __file__ in place
    assert traceback.startswith("  traceback: ") and again == "the same command tries the failed runs again"
    assert not (tmp_path / "reports").exists() or not list((tmp_path / "reports").iterdir())


def test_a_crash_in_alpha_max_keeps_what_training_gave(lab, words, monkeypatch):
    from stability.probes.curvature import descent

    def broken(*_args, **_kwargs):
        raise ArithmeticError("planted")

    monkeypatch.setattr(descent, "GradientWithGraph", broken)
    assert sweep.main(words) == 1
    runs = collect(lab.pool / "studies" / "small").runs
    assert set(runs.status) == {"failed"}
    assert runs.val_nll.notna().all()


def test_hessian_measures_what_a_sweep_left_out(lab, words, capsys):
    sweep.main([*words, "hessian=false", "report=false"])
    study = lab.pool / "studies" / "small"
    assert len(collect(study).curvature) == 0
    protocol = ["recorded_steps=2", "warmup_steps=1", "warmup_batches=2", "phase=all", "state=[checkpoint]"]
    capsys.readouterr()
    assert hessian.main([f"ckpt={study}", *protocol]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "α_max at the best learning rates" in lines and f"rows: {study / 'results' / 'curvature.parquet'}" in lines
    assert len(lines) <= 25 and "every table and rate: the same command with tables=all" in lines
    assert hessian.main([f"ckpt={study}", *protocol, "tables=all"]) == 0
    out = capsys.readouterr().out
    assert "Median α_max and % stable steps" in out and len(out.splitlines()) > 60
    rows = collect(study).curvature
    assert set(rows.phase) == {"earliest", "terminal"}
    assert len(rows) == 4 * 2 * 2
    run = lab.pool / rows.run_id[0]
    capsys.readouterr()
    hessian.main([f"ckpt={run}", *protocol])
    assert "measured already" in capsys.readouterr().out
    hessian.main(
        [f"ckpt={run / 'checkpoints' / 'step_000003'}", "recorded_steps=4", "warmup_steps=1", "warmup_batches=2"]
    )
    assert "earliest   state=paper" in capsys.readouterr().out


def test_report_is_made_again_from_a_name_or_a_folder(lab, words, tmp_path):
    sweep.main([*words, "mechanism=sa", "lr=1e-3", "hessian=false", "report=false"])  # drawn four times: a run
    assert report.main(["name=small", f"runs_dir={lab.pool}", f"reports_dir={tmp_path / 'one'}"]) == 0
    assert report.main([f"name={lab.pool / 'studies' / 'small'}", f"reports_dir={tmp_path / 'two'}"]) == 0
    assert (tmp_path / "one" / "small.pdf").exists()
    assert (tmp_path / "two" / "small.pdf").exists()
    copied = shutil.copytree(lab.pool / "studies" / "small", lab.pool / "studies" / "copied")
    assert (
        report.main(
            [
                f"name=[small,{copied}]",
                "together=both",
                "format=[pdf,files]",
                f"runs_dir={lab.pool}",
                f"reports_dir={tmp_path / 'three'}",
            ]
        )
        == 0
    )
    assert {path.name for path in (tmp_path / "three").iterdir()} == {"both.pdf", "both", "small", "copied"}
    assert (tmp_path / "three" / "both" / "tables" / "together-the-studies-side-by-side.csv").exists()
    words = ["name=small", f"runs_dir={lab.pool}", f"reports_dir={tmp_path / 'four'}"]
    assert report.main([*words, "format=[html,files]"]) == 0
    assert {path.name for path in (tmp_path / "four").iterdir()} == {"small.html", "small"}


def test_a_run_keeps_its_provenance(lab, words):
    sweep.main([*words, "hessian=false", "report=false"])
    directory = StudyFolder(lab.pool / "studies" / "small").runs()[0]
    provenance = json.loads(directory.provenance_file.read_text())
    assert provenance["versions"]["torch"]
    assert provenance["hardware"]["cores"]
    assert provenance["data"]["fingerprint"] == json.loads(directory.spec_file.read_text())["data_fingerprint"]
    assert (provenance["device"], provenance["threads"]) == ("cpu", 1)
