"""Stand-ins for `run_trial`: they write the files that the real one writes, without torch. Importable by name, so that Ray's workers find them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sweeps.trial import Trial


def make_trial(pool: Path, index: int = 0, *, mechanism: str = "sa", steps: int = 4, curvature: dict[str, Any] | None = None, **more: Any) -> Trial:
    parts = {key: {"name": name} for key, name in (("mechanism", mechanism), ("residual", "identity"), ("optimizer", "adamw"))}
    spec = {**parts, "norm": "layernorm", "lr_peak": 10.0 ** -(index % 4), "seed": index, "steps": steps, "threads": 1, **more}
    return Trial(run_id=f"{index:012x}", spec=spec, pool=str(pool), curvature=curvature, device="cpu", wandb=None)


def run_fake(trial: Trial, *, step_s: float = 0.0, verdict: str = "stable") -> Iterator[None]:
    """``spec["steps"]`` steps with the rows and states of a real run; closing it leaves ``saved.json`` with the step it stood at."""
    directory, steps = trial.directory, trial.spec["steps"]
    directory.path.mkdir(parents=True, exist_ok=True)
    saved = directory.path / "saved.json"
    step = json.loads(saved.read_text()) if saved.exists() else 0
    directory.set_status("running", step=step, num_steps=steps, phase="training")
    started = time.perf_counter()
    try:
        while step < steps:
            time.sleep(step_s)
            step += 1
            row = {"step": step, "loss": 5.0 / step, "grad_norm": 1.0, "update_norm": 0.1, "lr": trial.spec["lr_peak"], "val_nll": None}
            for path, values in ((directory.metrics_file, row), (directory.timing_file, {"step": step, "wall_s": time.perf_counter() - started, "tokens_per_s": 512.0})):
                with open(path, "a") as file:
                    file.write(json.dumps(values) + "\n")
            yield
    except GeneratorExit:
        saved.write_text(json.dumps(step))
        raise
    directory.set_status(verdict, step=step, num_steps=steps, result={"val_nll": 2.5 + trial.spec["seed"] / 100, "wall_s": 1.0})


def run_slowly(trial: Trial) -> Iterator[None]:
    yield from run_fake(trial, step_s=0.1)


def run_and_die(trial: Trial) -> Iterator[None]:
    """The trial of seed 1 is killed as the kernel kills for memory; the others run."""
    for count, _ in enumerate(run_fake(trial, step_s=0.02)):
        if trial.spec["seed"] == 1 and count == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield
