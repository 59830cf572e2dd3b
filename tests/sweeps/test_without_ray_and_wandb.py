"""``launcher=serial logger=files`` on a machine without Ray and W&B."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "wandb", "optuna"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Refuse())
"""
SCRIPT = """
from stability.cli.entry import run_entry
from tests.sweeps.real import make_sweep
from sweeps.launch import run
from pathlib import Path

spec, trials = make_sweep(Path(sys.argv[1]))
outcome = run(spec, trials)
assert outcome.num_trained == 4 and not outcome.failures, outcome
found = {name.partition(".")[0] for name in sys.modules} & {"ray", "wandb", "optuna"}
assert not found, found
from sweeps.launchers.ray import launcher
spec, trials = make_sweep(Path(sys.argv[1]), "launcher=ray", pool="other")
try:
    run(spec, trials)
except RuntimeError as error:
    print(error)
spec, trials = make_sweep(Path(sys.argv[1]), "logger=wandb", pool="other")
try:
    run(spec, trials)
except RuntimeError as error:
    print(error)
"""


def test_a_serial_sweep_with_files_needs_neither_and_the_others_say_what_they_need(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    sweep = subprocess.run(
        [sys.executable, "-c", REFUSE + SCRIPT, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert sweep.returncode == 0, sweep.stderr
    lines = sweep.stdout.splitlines()
    assert "ended 4 runs" in sweep.stdout
    assert "launcher=ray needs Ray (ray is not here): pip install 'ray[tune]', or choose launcher=serial" in lines
    assert lines[-1] == "logger=wandb needs Weights & Biases: pip install wandb, or choose logger=files"


ONE_RUN = """
from stability import sweep

assert sweep.main(sys.argv[1:]) == 0
assert not {"ray", "sweeps.launchers.ray.head", "sweeps.launchers.ray.launcher"} & set(sys.modules)
"""


def test_a_sweep_of_one_run_goes_without_ray_by_default(small_sweep, lab):
    words = [word for word in small_sweep if not word.startswith("launcher=")]
    words += ["mechanism=sa", "lr=1e-3", "seeds=1", "hessian=false", "report=false", "name=one"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    sweep = subprocess.run(
        [sys.executable, "-c", REFUSE + ONE_RUN, *words], env=environment, capture_output=True, text=True, timeout=120
    )
    assert sweep.returncode == 0, sweep.stderr
    assert "ended 1 run" in sweep.stdout
    record = json.loads((lab.pool / "studies/one/study.json").read_text())
    assert (record["launcher"], record["spec"]["launcher"]) == ("serial", "serial")
