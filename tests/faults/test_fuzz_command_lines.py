"""A sample of `tests.faults.fuzz_command_lines`, and what it found, line by line."""

from __future__ import annotations

import json

import pytest

from tests.faults.fuzz_command_lines import SECRET, Outcome, Sandbox, fault, is_named, storm
from tests.faults.random_words import Line, line_of

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
        (
            "sweep",
            "plugins=../../etc",
            "plugins=../../etc: must be a list of modules, e.g. plugins=[my_pkg.my_mechanism]",
        ),
        ("sweep", "plugins=[../../etc]", "plugins: '../../etc' is no module's name"),
        ("sweep", "plugins=os", "plugins=os: must be a list of modules"),
        ("sweep", "plugins=[no_such_module]", "plugins: no module 'no_such_module' to import"),
        ("sweep", "++mechanism.two_way.of.name=true", "mechanism.two_way.of.name=True: must be a mechanism's name"),
        ("sweep", "search.name=[sa]", "search=['sa']: unknown search; "),
        ("sweep", "model=nan", "model=nan: no such choice; "),
        ("sweep", "model=../study/quickstart", "model=../study/quickstart: no such choice; "),
        ("sweep", "model=[nano]", "model=[nano]: takes one name; "),
        (
            "sweep",
            "+model=nano",
            "+model=nano: model is chosen already, and nothing can be added to it; write model=nano",
        ),
        ("sweep", "lr=true", "lr=true: no such choice and no rate like 1e-3; choices: "),
        ("sweep", "cross=-1", "cross=-1: no such choice; choices: "),
        ("sweep", "norm=_target_=os.system", "norm=_target_=os.system: no such choice; "),
        (
            "sweep",
            "batch=a(b",
            "batch=a(b: this value cannot be read; give a number, a name or a list like [1,2], or in quotes if it",
        ),
        ("sweep", "batch=[1,2", "batch=[1,2: this value cannot be read"),
        ("sweep", "batch=1,2", "batch=1,2: takes one value; a list is written in brackets"),
        ("sweep", f"threads={'9' * 30}", f"threads={'9' * 30}: input should be "),
        ("sweep", "threads=99999999", "threads=99999999: input should be less than or equal to 4096"),
        ("sweep", f"steps={'9' * 30}", f"steps={'9' * 30}: input should be at most 2^53"),
        ("sweep", f"steps={'9' * 5000}", "a number of that many digits cannot be read"),
        (
            "sweep",
            "devices_per_trial=99",
            "devices_per_trial=99 share out the sequences of a step, of which there are batch=8",
        ),
        ("sweep", "norm.layernorm=3", "norm.layernorm=3: must hold settings of layernorm"),
        ("sweep", "mechanism.sa=3", "mechanism.sa=3: must hold settings of sa"),
        ("train_tokenizer", "mechanism.sa=3", "mechanism.sa=3: must hold settings of sa"),
        ("sweep", "ray=3", "ray=3: input should be a valid dictionary"),
        ("sweep", "hydra.run.dir=x", "hydra.run.dir=x: settings of Hydra itself are not read here"),
        ("sweep", "hydra/launcher=basic", "'hydra/launcher=basic' has no key that could be read"),
        ("sweep", "model@x=nano", "'model@x=nano' has no key that could be read"),
        ("sweep", "~stepz", "~stepz: there is nothing of that name to take away"),
        ("sweep", "~steps=7", "~steps=7: holds 200; write only ~ and the key to take it away"),
        ("sweep", "+steps=7", "+steps=7: there is such a key already; leave the + out"),
        ("hessian", "seed=abc", "error: seed='abc': input should be a valid integer"),
        ("status", "model=nano", "model: unknown key; choices: "),
        ("report", "study=quickstart", "study: unknown key; choices: "),
        ("report", f"runs_dir={'9' * 5000}", "error: runs_dir: File name too long: "),
        ("sweep", "batch=\x1b[31mred", "batch=\\x1b[31mred: this value cannot be read"),
        ("sweep", "batch=" + "x" * 5000, f"batch='{'x' * 79}…: input should be a valid integer"),
    ],
)
def test_what_the_fuzzer_found_names_the_word_in_our_words(sandbox, entry, word, message):
    line, outcome = run(sandbox, entry, word)
    assert fault(line, outcome) is None, outcome
    assert outcome.code == 2
    assert message in outcome.err


def test_a_place_that_the_machine_refuses_is_named_by_the_word_that_holds_it_and_by_no_number_in_it(sandbox):
    _, outcome = run(sandbox, "report", "name=9", f"runs_dir={'9' * 5000}")
    assert outcome.err.startswith("error: runs_dir: File name too long: ")


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
    assert f"{key}={value}: '${{' is not filled in here" in outcome.err


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (Outcome(2, "error: seeds='x': input should be a valid integer\n", "", "", [], 0.1), None),
        (
            Outcome(2, "error: Config group override must be a string or a list. Got float\n", "", "", [], 0.1),
            "a library's words: Config group override",
        ),
        (Outcome(2, "error: something is wrong\n", "", "", [], 0.1), "no word named"),
        (Outcome(2, "", "", "", [], 0.1), "0 lines of 0 characters"),
        (Outcome(2, "error: seeds=x\n1\n2\n3\n", "", "", [], 0.1), "4 lines of 21 characters"),
        (Outcome(1, "", "", "", [], 0.1), "exit code 1"),
        (Outcome(None, "", "", "Traceback\nKeyError: 'x'", [], 0.1), "raised KeyError: 'x'"),
        (Outcome(2, "error: seeds=x\n", "", "", ["work/runs"], 0.1), "wrote ['work/runs']"),
        (Outcome(2, "error: seeds=\x1b\n", "", "", [], 0.1), "control characters"),
        (Outcome(0, "", f"study {SECRET}", "", [], 0.1), "told the environment"),
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
def test_a_damaged_status_of_a_run_is_said_in_a_line(sandbox, tmp_path, status):
    run_folder, folder = tmp_path / "runs" / "0123456789ab", tmp_path / "runs" / "studies" / "one"
    for each in (run_folder, folder):
        each.mkdir(parents=True)
    (folder / "study.json").write_text(json.dumps({"run_ids": [run_folder.name]}))
    (run_folder / "status.json").write_text(status)
    parts = {name: {"name": name} for name in ("mechanism", "residual", "optimizer", "norm")}
    (run_folder / "spec.json").write_text(json.dumps(parts | {"lr_peak": 0.1, "seed": 0, "steps": 4}))
    _, outcome = run(sandbox, "hessian", f"ckpt={folder}")
    assert (outcome.code, outcome.raised) == (2, "")
    assert f"{run_folder}/status.json is damaged (" in outcome.err
