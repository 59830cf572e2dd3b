"""An entry ends in its own words on every terminal: of any encoding and width, and where the reader has left."""

from __future__ import annotations

import io
import os
import pty
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path
from types import SimpleNamespace

import pytest

from analysis import report
from stability.cli import publish
from stability.printable import print_note, print_text, replace_unencodable
from stability.runs import up_to_date
from stability.runs.study import StudyFolder
from tests.sweeps import fakes

ROOT = Path(__file__).resolve().parents[2]
# rich and print, α and –, from an entry; torch is not imported
SPEAKS = r"""
import sys
from rich.console import Console
from stability.cli.entry import run_entry

def main(argv):
    print("\u03b1 1\u20133 \u2713")
    Console().print("\u03b1 1\u20133 \u2713")
    if argv:
        raise ValueError("\u03b1 1\u20133 \u2713")
    return 0

run_entry(main, "status", "help: \u03b1 1\u20133")
"""
PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def run(*argv, **how):
    return subprocess.run([sys.executable, *argv], stderr=subprocess.PIPE, cwd=ROOT, **how)


@pytest.mark.parametrize("settings", [{"PYTHONIOENCODING": "latin-1"}, {"PYTHONIOENCODING": "ascii:strict"}, PLAIN])
def test_a_terminal_of_any_encoding_gets_signs_for_what_it_lacks(settings):
    for words, code in (((), 0), (("wrong",), 2), (("-h",), 0)):
        out = run("-c", SPEAKS, *words, stdout=subprocess.PIPE, env={**os.environ, **settings})
        assert (out.returncode, b"Traceback" in out.stderr) == (code, False), out.stderr
        assert b"1?3" in out.stdout


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("words", [("-h",), (), ("wrong",)])
def test_a_reader_that_has_left_ends_an_entry_as_sigpipe_does(words):
    out = run("-c", SPEAKS, *words, stdout=closed_pipe())
    assert (out.returncode, out.stderr) == (141, b"" if words != ("wrong",) else out.stderr)
    assert b"Traceback" not in out.stderr and b"ignored" not in out.stderr


def test_an_error_that_nobody_reads_is_no_traceback():
    nowhere = closed_pipe()
    assert (
        subprocess.run([sys.executable, "-c", SPEAKS, "wrong"], stdout=nowhere, stderr=nowhere, cwd=ROOT).returncode
        == 141
    )


def test_status_whose_reader_has_left_says_nothing(tmp_path):
    trial = fakes.make_trial(tmp_path)
    trial.directory.write_spec(trial.spec)
    StudyFolder.of(tmp_path, "mine").write([trial.run_id])
    for words in (["mine"], []):
        out = run("-m", "stability.status", *words, f"runs_dir={tmp_path}", stdout=closed_pipe())
        assert (out.returncode, out.stderr) == (141, b"")


def test_a_sweep_trains_on_where_its_reader_has_left():
    code = (
        "from sweeps.view.board import SweepConsole, print_line\n"
        "import sys\nconsole = SweepConsole()\n"
        "for number in range(3): print_line(console, 'line')\nprint('end', file=sys.stderr)"
    )
    out = run("-c", code, stdout=closed_pipe())
    assert (out.returncode, out.stderr) == (0, b"end\n")


def test_a_stream_without_letters_gets_question_marks_from_workers_too(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    print_text("α 1–3", flush=True)
    replace_unencodable()
    print("β 1–3", flush=True)
    assert stream.buffer.getvalue() == b"? 1?3\n? 1?3\n"


def test_the_pdf_is_written_before_anything_is_printed(tmp_path, monkeypatch):
    """Where printing fails, as it did on a terminal of another encoding, the study has its PDF and its record."""
    done = []
    monkeypatch.setattr(publish, "_collect", lambda study: [])
    monkeypatch.setattr(publish, "_load", lambda *_: "known")
    monkeypatch.setattr(report, "summary", lambda *_: "text")
    monkeypatch.setattr(report, "build_together", lambda *_: done.append("pdf"))
    published = SimpleNamespace(record=lambda text: done.append("record"))
    monkeypatch.setattr(up_to_date, "Published", lambda *_: published)

    def gone(text):
        raise BrokenPipeError

    monkeypatch.setattr(publish, "print_text", gone)
    with pytest.raises(BrokenPipeError):
        publish.publish(StudyFolder.of(tmp_path, "mine"), str(tmp_path / "reports"))
    assert done == ["pdf", "record"]


NOTE = "validation: on all 197 held-out examples, fewer than evaluation.sequences=256"


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_note_ends_its_lines_between_words_on_a_terminal(width, monkeypatch, capsys):
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: SimpleNamespace(columns=width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    print_note(NOTE)
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines) == NOTE and all(len(line) <= max(width, len("evaluation.sequences=256")) for line in lines)


def test_a_note_is_one_line_in_a_log(capsys):
    print_note(NOTE)
    assert capsys.readouterr().out == f"{NOTE}\n"


@pytest.mark.parametrize("width", [20, 40, 80])
def test_status_on_a_narrow_terminal_is_no_traceback(width, tmp_path):
    trials = [fakes.make_trial(tmp_path, seed) for seed in range(2)]
    for trial in trials:
        trial.directory.write_spec(trial.spec)
    trials[0].directory.set_status("running", step=1, num_steps=8, phase="training")
    trials[1].directory.set_status("failed", step=2, reason="ValueError: " + "long " * 40)
    StudyFolder.of(tmp_path, "mine").write([trial.run_id for trial in trials])
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    out = run("-m", "stability.status", "mine", f"runs_dir={tmp_path}", stdout=theirs, env={**env, "TERM": "xterm"})
    os.close(theirs)
    assert (out.returncode, out.stderr) == (0, b"") and b"mine: 2 runs" in os.read(ours, 1 << 16)


@pytest.mark.parametrize(
    "entry",
    [
        "sweep",
        "hessian",
        "report",
        "probe",
        "generate",
        "status",
        "train_tokenizer",
        "dashboard",
        "transfer",
        "deploy",
        "infer",
        "embed",
        "describe",
        "web",
    ],
)
def test_without_the_environment_one_line_says_how_to_enter_it(entry):
    """``-S``: a Python that has none of the packages."""
    out = run("-S", "-m", f"stability.{entry}", "-h", stdout=subprocess.PIPE)
    said = (
        f"error: {sys.executable} has no module hydra: run `source .venv/bin/activate` first, or install the packages"
    )
    assert (out.returncode, out.stdout) == (2, b"") and out.stderr.decode().splitlines() == [
        f"{said}: pip install -e ."
    ]


def test_who_imports_the_package_gets_pythons_own_error():
    out = run("-S", "-c", "import stability; import stability.cli.compose", stdout=subprocess.PIPE)
    assert out.returncode == 1 and b"ModuleNotFoundError" in out.stderr and b"activate" not in out.stderr


@pytest.mark.parametrize(("words", "code"), [((), 0), (("wrong",), 2), (("-h",), 0)])
def test_an_entry_without_standard_output_is_no_traceback(words, code):
    """As a shell's ``>&-`` starts it."""
    out = run("-c", f"import sys; sys.stdout = None\n{SPEAKS}", *words)
    assert (out.returncode, b"Traceback" in out.stderr) == (code, False), out.stderr
