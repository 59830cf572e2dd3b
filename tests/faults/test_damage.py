"""A damaged file of one run: that run is named, or goes on; every other run and the tables are as they were."""

from __future__ import annotations

import shutil

import pandas as pd
import pytest

from stability.runs.directory import RunDirectory, read_json, read_jsonl, write_json
from stability.runs.log import RunLog, find_last_logged_step
from stability.runs.parquet import read_metadata, read_table
from stability.runs.results import collect, read_probe
from stability.runs.schema import PROBE_COLUMNS
from stability.runs.up_to_date import Published
from stability.training import checkpoint
from sweeps.trial import run_trial
from tests.faults import damage
from tests.faults.damage import FILES, INTERRUPTED, STUDY, TABLE, WORDS, damaged_in_turn, damages

PROTOCOL = [word.removeprefix("curvature.") for word in WORDS if word.startswith(("curvature.w", "curvature.r"))]
PROTOCOL += ["state=[paper]", "parity_steps=0"]
SAMPLE = 8  # damages of a file in the default suite; all of them are slow


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    return damage.Pool(tmp_path_factory.mktemp("damage"))


@pytest.fixture
def whole(pool):
    yield pool
    pool.mend()


@pytest.mark.parametrize("name", [*FILES, STUDY])
def test_a_flipped_bit_or_a_cut_anywhere_in_a_file_ends_no_command_and_costs_no_other_run(pool, name):
    cases = list(damages(pool.file(name).read_bytes(), 1, name))
    ends, faults = damaged_in_turn(pool, name, iter(cases[:: len(cases) // SAMPLE]))
    assert not faults and sum(ends.values()) >= SAMPLE


@pytest.mark.slow  # tens of minutes: 60,000 damages, of which one in 32 is read by all commands
@pytest.mark.parametrize("name", [*FILES, STUDY])
def test_no_byte_of_a_file_matters_to_another_run(pool, name, monkeypatch):
    monkeypatch.setattr(pool, "every", 32)
    ends, faults = damaged_in_turn(pool, name, damages(pool.file(name).read_bytes(), 1, name))
    assert not faults, faults[:3]
    print(name, dict(ends))


def damaged_line(path, number):
    """Cut a line in its middle, keeping its end."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = lines[number - 1][: len(lines[number - 1]) // 2] + b"\n"
    path.write_bytes(b"".join(lines))


def command(pool, entered):
    return entered("stability.sweep", *WORDS, *damage.words_of_pool(pool))


@pytest.mark.parametrize("name", ["metrics.jsonl", "status.json", "spec.json", TABLE])
def test_the_same_command_goes_on_after_a_damaged_file_and_gives_what_it_would_have_given(whole, entered, name):
    """The run that the file is of goes on; one beside it, whose folder is gone, is trained."""
    first, _, third = (trial.directory for trial in whole.trials)
    expected = {run.run_id: run.metrics_file.read_bytes() for run in (first, third)}
    kept = shutil.copytree(third.path, whole.study.pool.parent / "kept")
    shutil.rmtree(third.path)
    if name == "metrics.jsonl":
        first.status_file.write_text(INTERRUPTED)
        damaged_line(first.metrics_file, 4)
    else:
        whole.file(name).write_bytes(whole.file(name).read_bytes()[:-7])
    try:
        outcome = command(whole, entered)
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
        assert "left out" not in outcome.stdout
        assert all(trial.directory.finished for trial in whole.trials)
        assert {run.run_id: run.metrics_file.read_bytes() for run in (first, third)} == expected
        read_table(whole.file(TABLE))
        assert command(whole, entered).returncode == 0
    finally:
        shutil.rmtree(third.path)
        kept.rename(third.path)


@pytest.mark.parametrize(
    "hurt",
    [
        "a line",
        "its last lines are gone",
        "it is gone",
        "zeros",
        "no UTF-8",
        "nested",
        "gradients",
        "activations",
        "edge",
    ],
)
def test_a_run_goes_on_from_its_last_checkpoint_before_the_damage_in_its_log(whole, capsys, hurt):
    run = whole.victim
    paths = {"metrics": run.metrics_file, **run.signal_files}
    expected = {name: path.read_bytes() for name, path in paths.items()}
    run.status_file.write_text(INTERRUPTED)
    lines = expected["metrics"].splitlines(keepends=True)
    content = {
        "a line": b"".join([*lines[:3], lines[3][:20] + b"\n", lines[4]]),
        "its last lines are gone": b"".join(lines[:4]),
        "zeros": bytes(len(expected["metrics"])),
        "no UTF-8": expected["metrics"].replace(b"loss", b"l\xffss"),
        "nested": b"".join([lines[0], b"[" * 100_000 + b"\n", *lines[2:]]),
    }
    if hurt == "it is gone":
        run.metrics_file.unlink()
    elif hurt in run.signal_files:
        paths[hurt].write_bytes(expected[hurt][:-30] + b"\n")
    else:
        run.metrics_file.write_bytes(content[hurt])
    list(run_trial(whole.trials[0]))
    assert run.finished, run.status()
    assert {name: path.read_bytes() for name, path in paths.items()} == expected
    assert f"{run.run_id}: " in (said := capsys.readouterr().out) and "goes on from before" in said


def test_a_log_is_whole_up_to_the_step_before_one_that_does_not_follow(tmp_path):
    run = RunDirectory(tmp_path, "abc")
    run.path.mkdir()
    assert find_last_logged_step(run) == (-1, "")
    run.metrics_file.write_text("".join(f'{{"step": {step}}}\n' for step in (0, 1, 2, 7, 4)))
    until, why = find_last_logged_step(run)
    assert until == 2 and why == f"{run.metrics_file}, line 4, is damaged: step 7 after step 2"
    RunLog(run, resume_after=until).close()
    assert [row["step"] for row in read_jsonl(run.metrics_file)] == [0, 1, 2]


@pytest.mark.parametrize("line", ["3", "[]", "null", "{}", '{"step": "x"}', '{"step": 1.5}', "[" * 100_000])
def test_a_row_that_is_none_is_named_with_its_file_and_line(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match=f"{path}, line 2, is damaged: "):
        list(read_jsonl(path))


@pytest.mark.parametrize("content", [bytes(100), b'{"step": 0}\n' + bytes(10)])
def test_a_log_of_zeros_is_named(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match="metrics.jsonl, line . is damaged: it holds zeros|zeros"):
        list(read_jsonl(tmp_path / "metrics.jsonl"))


@pytest.mark.parametrize(
    "content",
    ["{", "\0" * 9, "[" * 100_000, '{"state": "failed"}', '{"state": "stable", "step": 1e3}']
    + ['{"state": "stable", "step": 4, "result": null}', '{"state": "stable", "step": 4, "num_steps": "x"}']
    + ['{"state": "stable", "step": 4, "result": {"val_nll": "x"}}', '{"state": "none", "step": 4}'],
)
def test_a_run_with_a_damaged_status_has_failed_for_that_reason(tmp_path, content):
    run = RunDirectory(tmp_path, "abc")
    run.path.mkdir()
    run.status_file.write_text(content)
    status = run.status()
    assert status["state"] == "failed" and f"{run.status_file} is damaged" in status["reason"]
    run.fail("a reason", "an account", 4)
    assert read_json(run.status_file)["reason"] == "a reason"


def test_a_failure_is_reported_though_status_and_log_are_damaged(tmp_path):
    run = RunDirectory(tmp_path, "abc")
    run.path.mkdir()
    run.status_file.write_bytes(b"\xff")
    run.metrics_file.write_text('{"step": 1}\n{"step": 2}\n{"st\n[]\n3\n{"loss": 1}\n')
    run.fail("ValueError: planted", "an account", 4)
    status = run.status()
    assert (status["state"], status["step"], status["reason"]) == ("failed", 2, "ValueError: planted")


def test_runs_that_are_gone_or_have_no_spec_are_left_out_and_named(whole, entered):
    """By `hessian`, and by the tables that it prints as a report does."""
    second = whole.trials[1].directory
    record = whole.study.read()
    more = {key: value for key, value in record.items() if key not in ("name", "run_ids")}
    whole.study.write([*record["run_ids"], "0" * 12], **more)
    spec = second.spec_file.read_bytes()
    second.spec_file.unlink()
    try:
        outcome = entered("stability.hessian", f"ckpt={whole.study.path}", "batch=2", "microbatch=2", *PROTOCOL)
    finally:
        second.spec_file.write_bytes(spec)
    assert outcome.returncode == 0, outcome.stderr
    for words in ("leaves out run", "left out: run"):
        lines = [line for line in outcome.stdout.splitlines() if line.startswith(words)]
        assert [line.removeprefix(words).split()[0] for line in lines] == [f"{second.run_id}:", f"{'0' * 12}:"]
    assert "skips 2 of 2: measured already" in outcome.stdout and "none none" not in outcome.stdout


def test_a_table_that_is_damaged_or_none_of_ours_is_left_out_of_the_tables_and_named(whole):
    first, second = (trial.directory for trial in whole.trials[:2])
    stray = first.curvature_file("mine")
    shutil.copy(whole.study.pool.parent / "text.txt", first.curvature_file("text"))
    from stability.runs import parquet

    parquet.write_parquet(parquet.join_tables([], ["a"]), stray, {})
    content = second.curvature_file("terminal").read_bytes()
    second.curvature_file("terminal").write_bytes(content[:-7])
    first.metrics_file.write_text('{"step": 0}\n{}\n')
    try:
        found = collect(whole.study.path)
        named = sorted(found.left_out)
        assert len(named) == 4
        for path in (stray, first.curvature_file("text"), second.curvature_file("terminal"), first.metrics_file):
            assert sum(str(path) in line for line in named) == 1
        assert found.runs["run_id"].nunique() == 3
        assert set(found.curves["run_id"].tolist()) == {trial.run_id for trial in whole.trials}
        rows = zip(found.curves["run_id"], found.curves["step"], strict=True)
        assert [step for run_id, step in rows if run_id == first.run_id] == [0], "what is before the damage"
        assert second.run_id not in set(found.curvature["run_id"])
    finally:
        second.curvature_file("terminal").write_bytes(content)


@pytest.mark.parametrize(
    ("name", "line", "why"),
    [
        ("metrics.jsonl", b"garbage{{", "Expecting value"),
        ("metrics.jsonl", b'{"step": 5, "loss": "x"}', "'x'"),
        ("gradients.jsonl", b"garbage{{", "Expecting value"),
        ("activations.jsonl", b"garbage{{", "Expecting value"),
    ],
)
def test_a_finished_runs_rows_before_a_damaged_line_are_in_its_tables(whole, name, line, why):
    run, path = whole.victim, whole.file(name)
    content = path.read_bytes()
    before = collect(whole.study.path)
    path.write_bytes(content + line + b"\n" + content)
    found = collect(whole.study.path)
    pd.testing.assert_frame_equal(found.curves, before.curves)
    for log in run.signal_files:
        pd.testing.assert_frame_equal(found.probes[log], before.probes[log])
    [said], num = found.left_out, content.count(b"\n")
    assert said.startswith(f"{path}, line {num + 1}, is damaged: ") and why in said
    assert said.endswith(
        f"; {num} rows before that line are used; to train the run anew, move {run.path} away and run the sweep again"
    )


def test_a_finished_run_whose_folder_is_moved_away_for_its_damaged_log_is_trained_anew(whole, entered):
    """The remedy that the line of its damage names."""
    run, expected = whole.victim, whole.file("metrics.jsonl").read_bytes()
    damaged_line(run.metrics_file, 3)
    away = run.path.rename(whole.study.pool.parent / "away")
    try:
        outcome = command(whole, entered)
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
        assert run.metrics_file.read_bytes() == expected and "left out" not in outcome.stdout
    finally:
        shutil.rmtree(run.path)
        away.rename(run.path)


@pytest.mark.parametrize(
    "change",
    [{"sha256": []}, {"sha256": None}, {"vocab_size": None}, {"vocab_size": -1}, {"vocab_size": "x"}, {"spec": 3}]
    + [{"step": "x"}],
)
def test_a_manifest_with_another_value_is_named(whole, change):
    folder = whole.victim.checkpoints()[0]
    path = whole.file(damage.MANIFEST)
    write_json(path, read_json(path) | change)
    with pytest.raises(ValueError, match=f"{folder} has no readable manifest.json"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    "change",
    [{"spec": -1}, {"spec": {"curvature": {"measure": None, "phase": "all"}}}, {"spec": {"generate": {}}}]
    + [{"words": {"share": {"column": "x"}}}, {"ablations": [{}]}, {"run_ids": [1]}, {"variants": {"a": 1}}],
)
def test_a_record_with_another_value_is_named(whole, change):
    write_json(whole.study.file, read_json(whole.study.file) | change)
    with pytest.raises(ValueError, match=f"{whole.study.file} is damaged"):
        whole.look()


@pytest.mark.parametrize(
    "change", [{"mechanism": 3}, {"mechanism": {}}, {"lr_peak": "x"}, {"model": None}, {"seed": "x"}]
)
def test_a_spec_with_another_value_is_left_out_and_named(whole, change):
    path = whole.victim.spec_file
    write_json(path, read_json(path) | change)
    whole.look()
    (line,) = collect(whole.study.path).left_out
    assert f"{path} is damaged" in line
    assert whole.rows_of_others() == whole.tables


@pytest.mark.parametrize("content", ["{", "{}", '{"state": "nonsense", "step": 1}'])
def test_a_damaged_status_is_named_beside_the_tables_in_which_its_run_counts_as_failed(whole, content):
    path = whole.victim.status_file
    path.write_text(content)
    found = collect(whole.study.path)
    (line,) = found.left_out
    assert line.startswith(f"{path} is damaged (") and line.endswith("; its run counts as failed")
    assert dict(zip(found.runs["run_id"], found.runs["status"], strict=True))[whole.victim.run_id] == "failed"
    assert read_probe(whole.victim, next(iter(PROBE_COLUMNS))).empty, "no table of it is damaged"
    whole.victim.fail("ValueError: planted", "an account", 4)
    assert collect(whole.study.path).left_out == (), "a run that failed by itself"


@pytest.mark.parametrize("content", ["{}", '{"inputs": "a", "outputs": "b", "summary": 3}', "[", "[]"])
def test_a_damaged_record_of_what_was_published_makes_it_again(whole, content):
    published = Published(whole.study, None, (), [])
    (whole.study.path / "published.json").write_text(content)
    assert published.summary() is None


@pytest.mark.parametrize("cut", [7, 500, 3000])
def test_every_reader_of_a_table_names_the_file_that_is_damaged(whole, cut):
    path = whole.file(TABLE)
    path.write_bytes(path.read_bytes()[:-cut])
    for reader in (read_table, read_metadata):
        with pytest.raises(ValueError, match=f"{path} is damaged"):
            reader(path)


def test_backups_beside_checkpoints_are_none(whole):
    run = whole.victim
    folder = run.checkpoints()[-1]
    copies = [folder.with_name(f"{folder.name}{suffix}") for suffix in ("_backup", " (copy)", ".bak", "x")]
    for path in copies:
        shutil.copytree(folder, path)
    (folder.parent / "step_000099").touch()
    try:
        assert [path.name for path in run.checkpoints()] == ["step_000002", "step_000004"]
        assert collect(whole.study.path).left_out == ()
        assert whole.sweep() == 0
    finally:
        for path in copies:
            shutil.rmtree(path)
        (folder.parent / "step_000099").unlink()


def test_another_runs_spec_in_a_folder_fails_that_run_alone(whole):
    first = whole.victim
    write_json(first.spec_file, read_json(first.spec_file) | {"seed": 7})
    assert whole.sweep() == 1
    assert "is the spec of another run" in first.status()["reason"]
    assert whole.rows_of_others() == whole.tables


def test_a_damaged_spec_is_written_again(whole):
    content = whole.victim.spec_file.read_bytes()
    whole.victim.spec_file.write_bytes(content[:100])
    assert whole.sweep() == 0
    assert read_json(whole.victim.spec_file) == whole.trials[0].spec


def test_a_study_whose_record_is_damaged_is_named_and_its_runs_stay(whole, entered):
    whole.study.file.write_bytes(whole.study.file.read_bytes()[:-30])
    for entry, word in (("status", "name"), ("report", "name"), ("hessian", "ckpt")):
        outcome = entered(f"stability.{entry}", f"{word}={whole.study.path}")
        assert outcome.returncode == 2 and outcome.stderr.startswith(f"error: {whole.study.file} is damaged")
    outcome = entered("stability.status", "clean=unlisted", "yes=true", f"runs_dir={whole.study.pool}")
    assert outcome.returncode == 2 and all(trial.directory.finished for trial in whole.trials)


def test_without_a_study_nothing_is_unlisted(whole, entered):
    studies = whole.study.path.parent
    studies.rename(aside := studies.with_name("elsewhere"))
    try:
        for _ in range(2):  # no folder of studies, then an empty one
            outcome = entered("stability.status", "clean=unlisted", "yes=true", f"runs_dir={whole.study.pool}")
            assert outcome.returncode == 2 and "3 runs and no study" in outcome.stderr
            assert all(trial.directory.finished for trial in whole.trials)
            studies.mkdir(exist_ok=True)
    finally:
        studies.rmdir()
        aside.rename(studies)


def test_a_full_disk_names_the_run_and_what_goes_on(whole, monkeypatch, entered):
    def full(self, *args, **named):
        raise OSError(28, "No space left on device")

    whole.victim.status_file.unlink()
    monkeypatch.setattr(RunDirectory, "set_status", full)
    outcome = command(whole, entered)
    assert outcome.returncode == 2
    assert str(whole.victim.path) in outcome.stderr and "No space left on device" in outcome.stderr
    assert outcome.stderr.splitlines()[-1] == "free some room there; the same command goes on from here"
    assert len(outcome.stderr.splitlines()) == 2
