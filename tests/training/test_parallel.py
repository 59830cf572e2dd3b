"""One run over two processes is the run of one, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stability.runs.directory import RunDirectory
from stability.training import checkpoint
from stability.training.run import train

ROOT = Path(__file__).resolve().parents[2]
# 2, 2 and 1 sequences, of which ever other numbers are masked
SHARED = {"batch": 5, "microbatch": 2, "objective": {"name": "mlm", "mask_rate": "sqrt"}}


def run(lab, spec, folder, devices, steps=None):
    directory = RunDirectory(folder, lab.directory(spec).run_id)
    generator = train(spec, directory, cache_dir=lab.cache, device="cpu", devices=devices)
    for number, _ in enumerate(generator, 1):
        if number == steps:
            generator.close()
            break
    return directory


def parameters(directory):
    return [(folder / checkpoint.MODEL).read_bytes() for folder in directory.checkpoints()]


def test_two_processes_give_the_bits_of_one_and_a_run_goes_on_with_another_number(lab, tmp_path):
    spec = lab.spec(**SHARED)
    alone, shared = run(lab, spec, tmp_path / "alone", 1), run(lab, spec, tmp_path / "shared", 2, steps=5)
    folder = shared.checkpoints()[-1]
    assert folder.name == "step_000005" and checkpoint.load(folder)[0] == spec
    run(lab, spec, tmp_path / "shared", 1)
    assert shared.metrics_file.read_bytes() == alone.metrics_file.read_bytes()
    assert parameters(shared) == parameters(alone) != []


def test_a_helper_whose_input_ends_takes_the_runs_folder_with_it(tmp_path):
    folder = tmp_path / "helpers"
    folder.mkdir()
    (folder / "1.log").touch()
    code = (
        "import sys; from stability.training.devices.processes import instructions; next(instructions({'store': "
        "sys.argv[1]}))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder / "store")], cwd=ROOT, input=b"").returncode == 0
    assert not folder.exists()


@pytest.mark.slow
def test_the_death_of_a_helper_ends_the_run_with_a_word(lab, tmp_path):
    spec = lab.spec(**SHARED)
    directory = RunDirectory(tmp_path, lab.directory(spec).run_id)
    generator = train(spec, directory, cache_dir=lab.cache, device="cpu", devices=2)
    next(generator)
    (child,) = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "stability.training.devices.helper"], capture_output=True, text=True
    ).stdout.split()
    os.kill(int(child), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the process of device 1 died with code -9"):
        list(generator)
