"""No control character reaches a terminal, a page, LaTeX, CSV or Markdown, whoever wrote it."""

from __future__ import annotations

import ast
import io
import shlex
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from analysis import page
from analysis.drawing import formats
from analysis.drawing.traces import to_html
from analysis.drawing.typeset import Cell, Table, literal
from analysis.report import _to_text
from stability import generate
from stability.printable import line_of, print_text, shell_text, visible
from stability.runs.directory import RunDirectory
from sweeps.view.board import board, print_line
from sweeps.view.study_view import StudyView
from tests.analysis.synthetic import write_study
from tests.sweeps import fakes

ROOT = Path(__file__).resolve().parents[1]
# ESC, BEL, NUL, DEL, C1's CSI, an override of direction, an isolate, a separator of lines
HOSTILE = "\x1b[2J\x1b]0;owned\x07 \x00 \x7f \x9b31m \u202egnp.exe \u2066x\u2069 \u2028"
CONTROLS = frozenset(
    map(chr, [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028])
)


def controls(text, keep="\n"):
    return {character for character in text if character in CONTROLS and character not in keep}


@pytest.mark.parametrize("character", sorted(CONTROLS))
def test_a_control_character_is_shown_as_its_escape(character):
    assert visible(f"a{character}b") == f"a{character.encode('unicode_escape').decode()}b"
    assert visible(character, keep=character) == character


@pytest.mark.parametrize("text", ["plain", "α_max ≥ 2", "no\u00a0break", "日本 é ß", "👩‍👩‍👧", "می‌خواهم", "a\\x1b"])
def test_what_can_be_shown_stays(text):
    assert visible(text) == text


TABLE = Table(HOSTILE, HOSTILE, ("x", HOSTILE), ((Cell("1"), Cell(HOSTILE, f"{HOSTILE}\n2", True)),), ((HOSTILE, 2),))


@pytest.mark.parametrize(
    "shown",
    [
        TABLE.text,
        TABLE.typst,
        lambda: formats.csv(TABLE),
        lambda: formats.markdown(TABLE),
        lambda: formats.latex(TABLE, "x"),
        lambda: page.to_html(TABLE, page.Numbers()),
        lambda: page._link(HOSTILE, HOSTILE),
        lambda: to_html(HOSTILE),
        lambda: literal(HOSTILE),
        lambda: _to_text(HOSTILE),
    ],
    ids=["text", "typst", "csv", "markdown", "latex", "html", "anchor", "figure", "literal", "paragraph"],
)
def test_no_form_of_a_table_or_text_has_control_characters(shown):
    text = shown()
    assert not controls(text) and "x1b" in text


def test_printing_shows_escapes_and_keeps_lines_and_tabs(capsys):
    print_text(f"a\tb\n{HOSTILE}")
    console = Console(file=io.StringIO(), width=200)
    print_line(console, f"a\n{HOSTILE}")
    for text in (capsys.readouterr().out, console.file.getvalue()):
        assert not controls(text, keep="\n\t") and r"\x1b[2J\x1b]0;owned\x07 \x00 \x7f \x9b31m \u202egnp.exe" in text


def test_a_study_from_elsewhere_cannot_write_to_the_terminal(tmp_path, capsys):
    """The reason of a failure, the host of a lock, the variant's name and the command are somebody else's words."""
    from stability import status
    from stability.runs.study import StudyFolder

    trials = [fakes.make_trial(tmp_path, seed, steps=8) for seed in range(3)]
    for trial in trials:
        trial.directory.write_spec(trial.spec)
    trials[0].directory.set_status("failed", step=2, reason=HOSTILE)
    trials[1].directory.set_status("running", step=2, num_steps=8, phase=HOSTILE)
    study = StudyFolder.of(tmp_path, "mine")
    names = {trial.run_id: f"[red]{HOSTILE}" for trial in trials}
    study.write([trial.run_id for trial in trials], command=f"python {HOSTILE}", variants=names)
    assert status.main(["mine", f"runs_dir={tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert not controls(text) and text.count(r"\x1b[2J") >= 3
    view = StudyView.of(study)
    view.progress.poll()
    console = Console(file=io.StringIO(), width=400)
    console.print(board(view.progress, [(HOSTILE, "")], 20, 200))
    assert not controls(console.file.getvalue()) and r"[red]\x1b[2J" in console.file.getvalue()


def test_samples_are_printed_as_escapes(tmp_path, monkeypatch, capsys):
    texts = ["\x1b]0;owned\x07nospace\n\x18", f"with space {HOSTILE}"]
    monkeypatch.setattr("stability.probes.generation.samples.lines_beside", lambda *_: [f"beside {HOSTILE}"])
    monkeypatch.setattr("stability.runs.samples.first_texts", lambda *_: texts)
    monkeypatch.setattr("stability.runs.samples.meta_file", lambda *_: tmp_path)
    generate._print_samples(RunDirectory(tmp_path, "a" * 12), "terminal", 2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and not controls("".join(lines))
    assert lines[1] == r"  | \x1b]0;owned\x07nospace\n\x18"


def test_entries_and_sweeps_print_by_one_function():
    """Ray's own two programs hand what they print to their parent."""
    own = {
        ROOT / "stability/printable.py",
        *(ROOT / f"sweeps/launchers/ray/{name}.py" for name in ("head", "address", "watch")),
    }
    files = {file for package in ("stability", "sweeps") for file in (ROOT / package).rglob("*.py")} - own
    bare = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sorted(files)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not bare


@pytest.mark.parametrize(
    "formula",
    [
        "=cmd|' /C calc'!A0",
        "+1+cmd|'x'!A0",
        "@SUM(A1)",
        "-2+3",
        "\t=1",
        "-x",
        "+",
        "=",
        "＝1",
        "--1",
        "-1*x",
        "+1 (A1)",
        "-1 !A1",
    ],
)
def test_a_cell_that_begins_like_a_formula_is_text_in_a_csv(formula):
    table = Table("t", "", ("a", formula), ((Cell("1"), Cell(formula, formula)),))
    read = pd.read_csv(io.StringIO(formats.csv(table)), dtype=str, keep_default_na=False)
    assert all(cell[0] in "'\\" for cell in (*read.columns[1:], *read.iloc[0, 1:]))


@pytest.mark.parametrize(
    "number",
    [
        "1e-3",
        "-1.2e-3",
        "+0.28",
        "−0.3",
        "-5 %",
        "--",
        "+0.07 to +0.50, n=3",
        "+0 to +1 points, range, against sa",
        "≥ 1.5",
        "",
        "x=1",
    ],
)
def test_a_number_stays_a_number_in_a_csv(number):
    assert formats.inert(number) == number


def test_a_studys_tables_hold_no_cell_that_is_marked_as_text(tmp_path):
    from analysis import assembly
    from analysis.study.load import load

    study = load(write_study(tmp_path, mechanisms=["sa", "sc"], lrs=[1e-3, 1e-2], seeds=2))
    tables = [piece for pieces in assembly.pieces(study) for piece in pieces if isinstance(piece, Table)]
    assert len(tables) > 3
    assert not [line for table in tables for line in formats.csv(table).splitlines() if ",'" in line or line[:1] == "'"]


@pytest.mark.parametrize(
    ("error", "first", "last"),
    [(OSError("a\nb\n"), "a", "b"), (OSError(), "OSError", "OSError"), (ValueError(" \n"), "ValueError", "ValueError")],
)
def test_an_error_without_text_is_named_by_its_class(error, first, last):
    assert (line_of(error), line_of(error, -1)) == (first, last)


@pytest.mark.parametrize(
    "word",
    [
        "data.path=my corpus.txt",
        "search.space.optimizer.adamw.beta2={low:0.9,high:0.99}",
        "~ablate.sc",
        "name=it's",
        "runs_dir=$HOME/läufe",
        "text=",
        "",
        "a&b",
        "data.path=a\\b",
    ],
)
def test_a_shell_reads_a_printed_word_as_it_was(word):
    assert shlex.split(shell_text("python", word)) == ["python", word]
    # bash's own reading of it, and of no plain word
    line = f"printf '%s\\n' {shell_text(word)}"
    shown = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert shown.stdout == f"{word}\n"


def test_a_plain_word_and_a_list_stay_as_they_are_typed():
    words = ["mechanism=[sa,sc]", "lr=[1e-4,1e-3]", "optimizer.sgd.momentum=0.9", "++x=läufe", "reports_dir=/a-b/c"]
    assert shell_text(*words) == " ".join(words)
