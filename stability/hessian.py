"""``python -m stability.hessian ckpt=…``: α_max of a checkpoint, a run, or every run of a study."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stability.command_line import publish, read_spec, run_entry

HELP = """
python -m stability.hessian ckpt=FOLDER [key=value …]

Measure α_max by the paper's protocol. FOLDER: a checkpoint (…/checkpoints/step_000200), a run (runs/<run_id>) or a study (runs/studies/<name>).

  phase=terminal | earliest | all   which checkpoints of a run      state=[paper,checkpoint]   optimizer state to start from
  batch=512                         sequences per step              recorded_steps=25 warmup_steps=5 warmup_batches=5
  method=auto | taylor | double_backward | finite_difference        device=auto | cpu | cuda
  method=parity                     the paper's raw central difference, ε = 1e-4

What is measured already under the same protocol is not measured again.
"""


def main(argv: list[str]) -> int:
    spec = read_spec("hessian", argv, into="curvature")
    from stability.runs.directory import RunDirectory
    from stability.runs.study import StudyFolder

    folder = Path(spec.ckpt).resolve()
    if (folder / "study.json").exists():
        study = StudyFolder(folder)
        runs = study.runs()
        for number, directory in enumerate(runs, 1):
            _measure_run(directory, spec, f"{number}/{len(runs)} ")
        publish(study, None)
    elif (folder / "spec.json").exists():
        _measure_run(RunDirectory.at(folder), spec, "")
        _print_table(RunDirectory.at(folder))
    else:
        _measure_checkpoint(folder, spec)
    return 0


def _measure_run(directory, spec, prefix: str) -> None:
    from stability.probes.alpha_max import is_measured, measure

    if is_measured(directory, spec.curvature):
        print(f"{prefix}{directory.run_id}: measured already")
        return
    steps = measure(directory, spec.curvature, cache_dir=directory.path.parent / "cache", device=spec.device)
    _follow(steps, spec, f"{prefix}{directory.run_id}", phases=2 if spec.curvature.phase == "all" else 1)


def _measure_checkpoint(folder: Path, spec) -> None:
    """A single checkpoint: earliest and terminal keep their names, any other is a phase of its own."""
    from stability.probes.alpha_max import measure_checkpoint, phases
    from stability.runs.directory import RunDirectory
    from stability.training.checkpoint import verified_manifest

    verified_manifest(folder)
    directory = RunDirectory.at(folder.parent.parent)
    phase = {path: name for name, path in phases(directory, "all").items()}.get(folder, folder.name)
    steps = measure_checkpoint(folder, phase, spec.curvature, cache_dir=directory.path.parent / "cache", device=spec.device)
    _follow(steps, spec, f"{directory.run_id} {folder.name}", phases=1)
    _print_table(directory)


def _follow(steps: Iterator[None], spec, label: str, phases: int) -> None:
    from rich.progress import track

    per_state = spec.curvature.warmup_steps + spec.curvature.recorded_steps
    for _ in track(steps, description=label, total=phases * per_state * len(spec.curvature.state)):
        pass


def _print_table(directory) -> None:
    """Median α_max and share of stable steps of one run, a line a phase and state."""
    import pandas as pd

    for path in sorted((directory.path / "curvature").glob("*.parquet")):
        table = pd.read_parquet(path)
        for phase, state in table[["phase", "state"]].drop_duplicates().itertuples(index=False):
            rows = table[(table.phase == phase) & (table.state == state)]
            finite = rows.alpha_max[rows.alpha_max.abs() < float("inf")]
            median = f"{finite.median():.3g}" if len(finite) else "--"
            stable = 100 * (rows.alpha_max > rows.lr).mean()
            error = rows.rel_error.dropna()
            print(
                f"{phase:10} state={state:10} lr={rows.lr.iloc[0]:g}  median α_max {median:>9}  stable {stable:3.0f} % of {len(rows)} steps  "
                f"{', '.join(rows.method.unique())}, checked against differences: {error.iloc[0] if len(error) else float('nan'):.1e}"
            )
    print(f"rows: {directory.path / 'curvature'}")


if __name__ == "__main__":
    run_entry(main, HELP)
