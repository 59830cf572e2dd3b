"""The answer to a finished sweep's command: the same text as the long way's, sooner, and only while it is right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stability import registry, sweep
from stability.mechanisms.sa import SoftmaxAttention
from stability.runs import answers
from stability.runs.study import StudyFolder


@pytest.fixture
def words(small_sweep):
    """A sweep of two runs of two steps."""
    own = "mechanism=sa lr=[1e-3,1e-2] seeds=1 steps=2 name=small hessian=false report=false"
    return [*small_sweep, *own.split()]


def test_a_finished_sweep_is_answered_with_the_text_of_the_long_way(words, capsys):
    assert sweep.repeat(words) is None
    assert sweep.main(words) == 0
    capsys.readouterr()
    assert sweep.main(words) == 0
    long_way = capsys.readouterr().out
    assert "skips 2 finished runs, trains none" in long_way and "Best learning rates" in long_way
    assert sweep.repeat(words) == 0
    assert capsys.readouterr().out == long_way


def test_an_answer_imports_no_large_package(words, capsys, monkeypatch):
    # the new process has today's variables, not those that this one had at import
    monkeypatch.setattr(answers, "ENVIRONMENT", dict(os.environ))
    sweep.main(words)
    capsys.readouterr()
    sweep.main(words)
    long_way = capsys.readouterr().out
    code = (
        f"import sys, runpy\nsys.argv = {['sweep', *words]!r}\n"
        "try:\n    runpy.run_module('stability.sweep', run_name='__main__')\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "large = {'torch', 'numpy', 'pandas', 'pyarrow', 'pydantic', 'hydra', 'omegaconf', 'rich', 'ray'}\n"
        "assert not large & set(sys.modules), large & set(sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (found.returncode, found.stdout) == (0, long_way), found.stderr


def test_a_removed_run_is_trained_again_and_then_answered_again(lab, words, capsys):
    sweep.main(words)
    first = StudyFolder.of(lab.pool, "small").runs()[0].path
    shutil.rmtree(first)
    assert sweep.repeat(words) is None
    capsys.readouterr()
    assert sweep.main(words) == 0
    assert "skips 1 finished run, trains 1" in capsys.readouterr().out
    assert sweep.repeat(words) == 0
    assert "skips 2 finished runs, trains none" in capsys.readouterr().out


def test_a_run_of_another_spec_is_not_answered(lab, words):
    sweep.main(words)
    directory = StudyFolder.of(lab.pool, "small").runs()[0]
    spec = json.loads(directory.spec_file.read_text())
    directory.spec_file.write_text(json.dumps(spec | {"steps": 3}))
    assert sweep.repeat(words) is None
    assert sweep.main(words) == 1
    assert sweep.repeat(words) is None, "a sweep with a failed run has no answer"


def test_failed_runs_that_stay_have_no_answer(words, monkeypatch, capsys):
    def broken(self, x_BND, *, mask_BN=None):
        raise ArithmeticError("planted")

    monkeypatch.setattr(SoftmaxAttention, "forward", broken)
    assert sweep.main(words) == 1
    assert sweep.main([*words, "retry=none"]) == 1
    assert sweep.repeat([*words, "retry=none"]) is None


@pytest.mark.parametrize(
    "more",
    [
        ["search=pbt", "search.every_steps=1", "seeds=2"],
        ["generate.num=1"],
        ["plugins=[next_place]"],
    ],
)
def test_a_sweep_that_depends_on_more_has_no_answer(lab, words, more, monkeypatch):
    monkeypatch.setattr(registry, "_plugins", {})
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "own_kind")
    keys = {word.partition("=")[0] for word in more}
    assert sweep.main([*(word for word in words if word.partition("=")[0] not in keys), *more]) == 0
    assert not list((lab.pool / "cache").glob("answers/*"))
