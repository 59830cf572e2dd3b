"""Write the files of trained and measured runs with synthetic numbers, without training.

The product's own writers are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stability.config.curvature import CurvatureSpec
from stability.config.run import RunSpec
from stability.probes.curvature.protocol import StoredSteps
from stability.runs.directory import RunDirectory, checkpoint_name
from stability.runs.log import RunLog

INIT_NLL = 5.6
TEXT = "".join(f"Line {number} of a text that says little, {number * number % 97} times.\n" for number in range(4000))


@dataclass(frozen=True)
class MadeUp:
    """The synthetic numbers of one run.

    Attributes:
        losses: every step's loss from the first on; a diverged run ends with None.
        val_nll: at the end, None for a diverged run.
        checkpoints: steps with a checkpoint.
        alpha_max: recorded steps by phase and optimizer state.
        phases: each phase's checkpoint step.
    """

    state: str
    losses: Sequence[float | None]
    val_nll: float | None
    unigram_nll: float
    reason: str = ""
    checkpoints: Sequence[int] = ()
    alpha_max: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    phases: Mapping[str, int] = field(default_factory=dict)


def write_run(directory: RunDirectory, run: RunSpec, made_up: MadeUp, curvature: CurvatureSpec) -> None:
    """Write a run's spec, logs, tables of α_max and verdict; its checkpoints are empty folders.

    Collecting and reporting read nothing inside checkpoints.

    Args:
        directory: the run's folder.
        run: its spec.
        made_up: its numbers.
        curvature: the α_max measurement's settings.
    """
    directory.write_spec(run.model_dump(mode="json"))
    _log(directory, run, made_up)
    for step in made_up.checkpoints:
        (directory.path / "checkpoints" / checkpoint_name(step)).mkdir(parents=True, exist_ok=True)
    for phase, by_state in made_up.alpha_max.items():
        told = {"run_id": directory.run_id, "phase": phase, "checkpoint_step": made_up.phases[phase]}
        rows = [
            told | _recorded(state, step, value, run.lr_peak, curvature)
            for state, values in by_state.items()
            for step, value in enumerate(values)
        ]
        StoredSteps(directory.curvature_file(phase), curvature).write(rows)
    steps = len(made_up.losses)
    result = {
        "val_nll": made_up.val_nll,
        "init_nll": INIT_NLL,
        "unigram_nll": made_up.unigram_nll,
        "num_params": 250_000,
        "num_tokens": 512 * steps,
        "wall_s": 0.05 * steps,
        "step_s": 0.05,
        "optimizer_state_bytes": 2_000_000,
        "state_bytes": None,
        "skipped_steps": 0,
        "restores": 0,
    }
    directory.set_status(made_up.state, step=steps, reason=made_up.reason, num_steps=run.steps, result=result)


def _log(directory: RunDirectory, run: RunSpec, made_up: MadeUp) -> None:
    """Write one row of metrics and timing per step, validated at intervals and last."""
    log = RunLog(directory, resume_after=-1)
    log.write_metrics({"step": 0, "val_nll": INIT_NLL})
    for step, loss in enumerate(made_up.losses, 1):
        row = {"step": step, "loss": loss, "grad_norm": 1 / 3 + step / 7, "update_norm": run.lr_peak / 3}
        if step == len(made_up.losses):
            validated = made_up.val_nll
        else:
            validated = loss if step % run.evaluation.every_steps == 0 else None
        log.write_metrics({**row, "lr": run.lr_peak, "val_nll": validated})
        log.write_timing({"step": step, "wall_s": 0.05 * step, "tokens_per_s": 512 / 0.05, "memory_mb": 400.0})
    log.close()


def _recorded(state: str, step: int, alpha_max: float, lr: float, curvature: CurvatureSpec) -> dict[str, object]:
    """Return one recorded step; each state's first has a check by differences."""
    return {
        "state": state,
        "step": step,
        "slope": -0.5,
        "curvature": 0.5 / alpha_max,
        "alpha_max": alpha_max,
        "lr": lr,
        "loss_before": 2.5,
        "loss_after": 2.4,
        "method": "taylor",
        "rel_error": 1e-6 if step == 0 else None,
        "gradient": curvature.gradient_of(state),
    }
