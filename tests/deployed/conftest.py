"""Validation and benchmarks call their `main` in this process: importing torch anew takes longer than all they do."""

from __future__ import annotations

import contextlib
import importlib
import io
import subprocess

import pytest

from stability.deployed import benchmark, fresh, validation


@pytest.fixture(autouse=True)
def no_fresh_processes(monkeypatch, request):
    """But for a test that asks for ``fresh_processes``."""
    if "fresh_processes" in request.fixturenames:
        return

    def run(command, **options):
        _, flag, module, *words = command
        assert flag == "-m" and module in (validation.__name__, benchmark.__name__)
        printed, complaints = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complaints):
            code = importlib.import_module(module).main(words)
        return subprocess.CompletedProcess(command, code, printed.getvalue(), complaints.getvalue())

    monkeypatch.setattr(fresh, "subprocess", type("Here", (), {"run": staticmethod(run)}))


@pytest.fixture
def fresh_processes():
    """Let processes start as they do for a user."""
