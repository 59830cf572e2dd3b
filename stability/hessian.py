"""``python -m stability.hessian ckpt=… | hf=…``: measure α_max.

It measures a checkpoint, a run, every run of a study, or a Hugging Face model on the user's text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from stability.cli.entry import run_entry
from stability.cli.publish import print_report_command, publish, publish_alpha
from stability.cli.subjects import Work, follow, read_about, select_pending, take_steps
from stability.cli.words import Invocation
from stability.config.entries import HessianSpec
from stability.plan.runs import RunPlan, has_lost_checkpoints
from stability.printable import print_note, print_notes, print_text
from stability.runs.directory import RunDirectory, read_json

if TYPE_CHECKING:
    import pandas as pd

HELP = """
python -m stability.hessian ckpt=FOLDER [key=value …]
python -m stability.hessian hf=NAME_OR_PATH data=text data.path=FILE_OR_FOLDER lr=2e-5 [key=value …]

Measure α_max by the paper's protocol.
ckpt: a checkpoint (…/checkpoints/step_000200), a run (runs/<run_id>) or a study (runs/studies/<name>: prints α_max at
      its best learning rates; with tables=all every table).
hf:   any causal language model of transformers: which learning rate does its curvature bear on this text? Nothing is
      written to it.
What is measured already under the same protocol is not measured again.
"""


def main(argv: list[str]) -> int:
    """Measure α_max for ``ckpt`` or ``hf``; then print a study's values at its best rates, or a run's tables."""
    spec = read_about(HessianSpec, Invocation.of(argv))
    if spec.ckpt is None:
        return _measure_hugging_face(spec)
    plan = RunPlan.of(spec.ckpt, kept="rows")
    print_notes(plan.notes)
    take_steps(_works(plan, spec))
    if plan.study is not None:
        from analysis.study.protocol import sentence

        phase = spec.curvature.phase
        phases = ("terminal", "last", "earliest") if phase == "all" else (phase,)
        protocol = f"protocol: {sentence(spec.curvature.model_dump(mode='json'))}"
        if spec.tables == "all":
            publish(plan.study, None, phases)
            print_text(protocol)
        else:
            publish_alpha(plan.study, phases)
            print_text(protocol)
            print_text(f"rows: {plan.study.results / 'curvature.parquet'}")
            print_text("every table and rate: the same command with tables=all")
            print_report_command(plan.study)
        return 0
    if plan.checkpoint is None:
        _tell_divergence(plan.directory)
    _print_table(plan.directory)
    return 0


def _works(plan: RunPlan, spec: HessianSpec) -> list[Work]:
    """Return the pending work; a run's phase is written whole or not at all, so the same command resumes."""
    from stability.probes.curvature.alpha_max import is_measured, list_missing_phases, measure, measure_checkpoint
    from stability.probes.curvature.spectra import list_missing_tables
    from stability.probes.layers.observing import say_whose_logits_are_unknown

    curvature, where = spec.curvature, {"cache_dir": plan.cache_dir, "device": spec.device}
    if "sharpness" in curvature.measure:
        say_whose_logits_are_unknown(plan.runs.values())
    if (folder := plan.checkpoint) is not None:
        steps = measure_checkpoint(folder, plan.phase, curvature, **where)
        return [Work(plan.directory, steps, _steps_of_a_phase(spec), folder.name)]
    _tell_single_checkpoints(plan.runs, curvature.phase)
    is_missing, reason = lambda directory: not is_measured(directory, curvature), "measured already under this protocol"
    tables_steps = (curvature.warmup_steps + 1) * len(curvature.state)
    pending = select_pending(plan, plan.runs, is_missing, reason)
    if lost := [directory.run_id for directory in pending if has_lost_checkpoints(directory)]:  # of a study: left out
        raise ValueError(f"{lost[0]}: its checkpoints are gone; train it again, or unpack them")
    return [
        Work(
            directory,
            measure(directory, curvature, **where),
            len(list_missing_phases(directory, curvature)) * _steps_of_a_phase(spec)
            + len(list_missing_tables(directory, curvature)) * tables_steps,
        )
        for directory in pending
    ]


def _tell_single_checkpoints(directories: Iterable[RunDirectory], phase: str) -> None:
    single = sum(len(directory.checkpoints()) == 1 for directory in directories)
    if phase == "all" and single:
        whose = (
            "run has one checkpoint only, which is measured under one name"
            if single == 1
            else "runs have one checkpoint only, measured under one name"
        )
        print_note(f"{single} {whose}: terminal where the run came to its end, else earliest")


def _tell_divergence(directory: RunDirectory) -> None:
    """Print a line if a run diverged and has no terminal checkpoint."""
    from stability.runs.phases import TERMINAL, phases, planned_steps

    status, found = directory.status(), directory.checkpoints()
    if status["state"] == "diverged" and TERMINAL not in phases(directory, "all"):
        print_text(
            f"diverged at step {status['step']} of {planned_steps(directory)}: no "
            f"{'terminal ' if found else ''}checkpoint"
        )


def _measure_hugging_face(spec: HessianSpec) -> int:
    """Measure α_max of a Hugging Face model and print the answer for each learning rate."""
    from stability.probes.pretrained.probe import HuggingFaceProbe, answer

    probe = HuggingFaceProbe(spec)
    print_text(probe.description)
    assert spec.lr is not None, "HessianSpec asks for lr beside hf"
    rates = spec.lr.rates()
    follow((probe.measure(lr) for lr in rates), [f"lr={lr:g}" for lr in rates], [_steps_of_a_phase(spec)] * len(rates))
    print_text(answer(probe.table()))
    return 0


def _steps_of_a_phase(spec: HessianSpec) -> int:
    return (spec.curvature.warmup_steps + spec.curvature.recorded_steps) * len(spec.curvature.state)


def _print_table(directory: RunDirectory) -> None:
    """Print median α_max and share of stable steps by phase and state."""
    from analysis.study.protocol import explain
    from stability.runs.results import read_steps, read_undefined

    tables, left_out = read_steps(directory)
    for line in left_out:
        print_text(f"left out: {line}")
    for table in tables:
        for phase, state in table[["phase", "state"]].drop_duplicates().itertuples(index=False):
            _print_state(table.query("phase == @phase and state == @state"), phase, state)
    for phase, state in read_undefined(directory):
        print_text(f"{phase:10} state={state:10} is not defined for this run's optimizer")
    if scales := _scales(directory):
        print_text(f"lr and α_max are the base rate: {scales}")
    for sentence in explain(text for table in tables for text in table["protocol"].dropna()):
        print_text(sentence)
    print_text(f"rows: {directory.path / 'curvature'}")


def _scales(directory: RunDirectory) -> str:
    """Return the roles with a scaled learning rate, e.g. ``"mixer at 0.5 times it"``."""
    groups = read_json(directory.spec_file)["optimizer"].get("groups", {})
    scaled = {role: settings["lr_scale"] for role, settings in groups.items() if "lr_scale" in settings}
    return ", ".join(f"{role} at {scale:g} times it" for role, scale in scaled.items())


def _print_state(rows: pd.DataFrame, phase: str, state: str) -> None:
    """Print the numbers of one phase and state; the share of stable steps is over steps with defined α_max."""
    defined = rows.query("method != 'not defined'")
    finite = defined.alpha_max[defined.alpha_max.abs() < float("inf")]
    median = f"{finite.median():.3g}" if len(finite) else "--"
    stable = f"{100 * (defined.alpha_max > defined.lr).mean():3.0f} %" if len(defined) else " --"
    error = rows.rel_error.dropna()
    print_text(
        f"{phase:10} state={state:10} lr={rows.lr.iloc[0]:g}  median α_max {median:>9}  stable {stable} of "
        f"{len(defined)} steps  {', '.join(rows.method.unique())}, checked against differences: "
        f"{error.iloc[0] if len(error) else float('nan'):.1e}"
    )
    if "rate_found" in rows and (found := rows.rate_found.dropna()).size:
        print_text(f"{'':10} rate found, lr times what the optimizer makes of it: median {found.median():.3g}")
    if len(defined) < len(rows):
        print_text(
            f"{'':10} α_max is not defined in {len(rows) - len(defined)} of {len(rows)} steps: "
            f"{rows[rows.method == 'not defined'].note.iloc[0]}"
        )
    lost = defined.dropna(subset=["note"]) if "note" in defined else defined.iloc[:0]
    if len(lost):
        print_text(f"{'':10} not finite from step {lost.step.iloc[0]} on: {lost.note.iloc[0]}")


if __name__ == "__main__":
    run_entry(main, "hessian", HELP)
