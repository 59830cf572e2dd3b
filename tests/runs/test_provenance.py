"""What a run's record says of the code that it stems from."""

import shlex
import subprocess

import pytest

from stability.runs import provenance


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with the module's own place in it, a config and a report, all of them committed."""
    module = tmp_path / "stability" / "runs" / "provenance.py"
    for file in (module, tmp_path / "conf" / "sweep.yaml", tmp_path / "reports" / "quickstart.pdf"):
        file.parent.mkdir(parents=True)
        file.write_text("committed\n")
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(provenance, "__file__", str(module))
    return tmp_path


def test_a_report_that_was_made_again_is_no_change_of_the_code(checkout):
    assert provenance.provenance("")["dirty"] is None
    (checkout / "reports" / "quickstart.pdf").write_text("of today\n")
    assert provenance.provenance("")["dirty"] is None


@pytest.mark.parametrize(
    "name", ["conf/sweep.yaml", "stability/runs/provenance.py", "stability/new.py", "reports/draw.py"]
)
def test_a_change_of_code_or_configuration_is_one(checkout, name):
    (checkout / name).write_text("of today\n")
    assert len(provenance.provenance("")["dirty"]) == 12


def test_the_recorded_command_can_be_typed_again(monkeypatch):
    words = ["-m", "stability.sweep", "mechanism=[sa,sc]", "data.path=my corpus.txt", "~ablate.sc"]
    monkeypatch.setattr(provenance.sys, "orig_argv", ["/usr/bin/python", *words])
    command = provenance.command_line()
    assert shlex.split(command) == ["python", *words]
    assert "mechanism=[sa,sc] 'data.path=my corpus.txt'" in command
