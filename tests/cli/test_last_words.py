"""What a process that has loaded Triton says when it ends: nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import gc, sys
from stability.cli.entry import run_entry
from stability.startup import uncollected

def main(argv):
    with uncollected():
        import triton
    print("done")
    print("a warning", file=sys.stderr)
    return 3

run_entry(main, "status", "")
"""


def test_an_entry_that_has_loaded_triton_ends_with_its_own_words_alone():
    pytest.importorskip("triton")
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, cwd=ROOT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "done\n", "a warning\n")
