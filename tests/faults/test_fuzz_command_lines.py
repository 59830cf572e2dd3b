"""A sample of `tests.faults.fuzz_command_lines`, its judge, and what no line in ``tests/golden/messages.jsonl`` shows."""

from __future__ import annotations

import json

import pytest

from tests.faults.fuzz_command_lines import SECRET, Line, Outcome, Sandbox, fault, is_named, line_of, storm

SAMPLE, ALL = 30, 2000


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    made = Sandbox(tmp_path_factory.mktemp("fuzz").resolve())
    with made.entered():
        yield made


def run(sandbox, entry, *words):
    line = line_of(entry, words)
    return line, sandbox.run(line)


def faults_of(num_lines, seed):
    return [
        (kind, line.entry, line.drawn, outcome.err, outcome.raised)
        for line, outcome, kind in storm(num_lines, seed)
        if kind
    ]


def test_random_command_lines_end_with_0_or_2_and_name_the_word_and_leave_nothing():
    assert faults_of(SAMPLE, seed=1) == []


@pytest.mark.slow
def test_two_thousand_random_command_lines_end_with_0_or_2_and_name_the_word_and_leave_nothing():
    assert faults_of(ALL, seed=0) == []


@pytest.mark.parametrize(
    ("entry", "word", "message"),
    [
        ("sweep", f"steps={'9' * 5000}", "a number of that many digits cannot be read"),
        ("sweep", "batch=" + "x" * 5000, f"batch='{'x' * 79}…: input should be a valid integer"),
        # the word that holds the place, and no number in it
        ("report", f"runs_dir={'9' * 5000}", "error: runs_dir: File name too long: "),
    ],
)
def test_a_word_of_five_thousand_characters_is_named_and_cut(sandbox, entry, word, message):
    line, outcome = run(sandbox, entry, word)
    assert fault(line, outcome) is None, outcome
    assert outcome.code == 2
    assert message in outcome.err


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:SECRET}",
        "a${oc.env:SECRET}b",
        "[${oc.env:SECRET}]",
        "${steps}",
        "\\${oc.env:SECRET}",
        "'${oc.env:SECRET}'",
    ],
)
@pytest.mark.parametrize(
    ("entry", "key"),
    [("sweep", "name"), ("sweep", "steps"), ("sweep", "data.path"), ("hessian", "ckpt"), ("report", "name")],
)
def test_nothing_is_filled_in_from_the_environment(sandbox, entry, key, value):
    _, outcome = run(sandbox, entry, f"{key}={value}")
    assert outcome.code == 2
    assert SECRET not in outcome.err + outcome.out
    assert f"{key}={value}: '${{' is not replaced here" in outcome.err


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (Outcome(2, "error: seeds='x': input should be a valid integer\n", "", "", []), None),
        (
            Outcome(2, "error: Config group override must be a string or a list. Got float\n", "", "", []),
            "a library's words: Config group override",
        ),
        (Outcome(2, "error: something is wrong\n", "", "", []), "no word named"),
        (Outcome(2, "", "", "", []), "0 lines of 0 characters"),
        (Outcome(2, "error: seeds=x\n1\n2\n3\n", "", "", []), "4 lines of 21 characters"),
        (Outcome(1, "", "", "", []), "exit code 1"),
        (Outcome(None, "", "", "Traceback\nKeyError: 'x'", []), "raised KeyError: 'x'"),
        (Outcome(2, "error: seeds=x\n", "", "", ["work/runs"]), "wrote ['work/runs']"),
        (Outcome(2, "error: seeds=\x1b\n", "", "", []), "control characters"),
        (Outcome(0, "", f"study {SECRET}", "", []), "told the environment"),
    ],
)
def test_the_judge_knows_each_kind_of_fault(outcome, kind):
    assert fault(Line("sweep", ("seeds=x",), ("seeds=x",)), outcome) == kind


def test_a_word_is_named_by_its_key_or_what_holds_it_and_not_by_another_key_that_contains_it():
    assert is_named("steps=x", "steps='x': no number")
    assert not is_named("steps=x", "atom_steps='x': no number")
    assert not is_named("steps=x", "schedule.steps: no number")
    assert is_named("++a.b.c=1", "a.b: unknown key")


def test_the_sandbox_sees_a_file_that_is_left_behind(sandbox):
    (sandbox.work / "left").touch()
    assert run(sandbox, "status")[1].written == ["a/b/c/work", "a/b/c/work/left"]
    (sandbox.work / "left").unlink()
    run(sandbox, "status")


DAMAGED = [
    "[]",
    "3",
    "null",
    '"x"',
    "{}",
    '{"run_ids": 3}',
    '{"run_ids": [1]}',
    '{"run_ids": [], "spec": []}',
    "[" * 100_000,
    "{",
    "\udcff",
]
READERS = [("report", "name"), ("hessian", "ckpt"), ("probe", "ckpt"), ("generate", "ckpt")]


@pytest.mark.parametrize(
    ("entry", "key", "record"),
    [*(("status", "name", record) for record in DAMAGED), *((*reader, "[]") for reader in READERS)],
)
def test_a_damaged_record_of_a_study_is_said_in_a_line(sandbox, tmp_path, entry, key, record):
    folder = tmp_path / "runs" / "studies" / "broken"
    folder.mkdir(parents=True)
    (folder / "study.json").write_text(record, errors="surrogateescape")
    _, outcome = run(sandbox, entry, f"{key}={folder}")
    assert (outcome.code, outcome.raised) == (2, "")
    assert f"error: {folder}/study.json is damaged (" in outcome.err
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize(
    "status", ["[]", "{}", '{"state": "nonsense", "step": 1}', '{"state": "running", "step": "x"}']
)
def test_a_damaged_status_of_a_run_is_said_in_a_line(sandbox, lab, tmp_path, status):
    run_folder, folder = tmp_path / "runs" / "0123456789ab", tmp_path / "runs" / "studies" / "one"
    for each in (run_folder, folder):
        each.mkdir(parents=True)
    (folder / "study.json").write_text(json.dumps({"run_ids": [run_folder.name]}))
    (run_folder / "status.json").write_text(status)
    (run_folder / "spec.json").write_text(lab.spec().model_dump_json())
    _, outcome = run(sandbox, "hessian", f"ckpt={folder}")
    assert (outcome.code, outcome.raised) == (2, "")
    assert f"{run_folder}/status.json is damaged (" in outcome.err
