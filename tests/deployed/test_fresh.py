"""A module's `main` in a fresh process: its numbers, its refusal in its own words, and a crash."""

from __future__ import annotations

import pytest

from stability.deployed.fresh import call_fresh

MODULE = """
import os
import sys
from stability.deployed.fresh import print_numbers

def measure():
    if sys.argv[1] == "refuse":
        raise ValueError("the folder is damaged\\nand more")
    if sys.argv[1] == "crash":
        raise KeyError("weights")
    if sys.argv[1] == "killed":
        os._exit(9)
    sys.stdout.write("a library talks\\n")
    return {"nll": 0.5, "pid": os.getpid()}

sys.exit(print_numbers(measure))
"""


@pytest.fixture
def module(tmp_path, monkeypatch, fresh_processes):
    (tmp_path / "measured_anew.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "measured_anew"


def test_each_call_has_a_process_of_its_own(module):
    one, two = (call_fresh(module, ["measure"]) for _ in range(2))
    assert one["nll"] == two["nll"] == 0.5 and one["pid"] != two["pid"]


def test_a_refusal_keeps_its_own_line_and_a_crash_is_named(module):
    with pytest.raises(ValueError, match="^the folder is damaged$"):
        call_fresh(module, ["refuse"])
    with pytest.raises(
        RuntimeError, match="^a fresh process of measured_anew ended with exit code 1: KeyError: 'weights'$"
    ):
        call_fresh(module, ["crash"])
    with pytest.raises(RuntimeError, match="exit code 9: no message$"):
        call_fresh(module, ["killed"])
