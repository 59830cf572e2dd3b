"""``python -m stability.sweep``: train a product of mechanisms, learning rates and seeds.

It then measures α_max, prints the tables and writes the PDF.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

# all other modules are imported when they are needed: `repeat` answers sooner than they are
from stability.cli.entry import check_writable, run_entry
from stability.printable import print_note, print_notes, print_text
from stability.runs.answers import AnswerFile, pool_of

if TYPE_CHECKING:
    from stability.config.sweep import SweepSpec
    from stability.plan.plan import Plan
    from sweeps.trial import Trial

HELP = """
python -m stability.sweep [key=value …]

Train mechanisms across learning rates, measure the largest stable learning rate (α_max), print tables, write
reports/<name>.pdf. Without arguments: study=quickstart. The same command again trains only what is missing.

mechanism, residual, norm, optimizer, precision and lr take one choice or several, [a,b]; a sweep is their product:
  mechanism=[sa,sc] lr=[1e-4,1e-3] seeds=3              lr also takes rates themselves: lr=1e-3, or lr=range lr.num=9
  mechanism.sc.window=4 norm.dyt.alpha=0.7              settings of a choice; of one choice for all runs: ffn.bias=false
  ablate.sc.window=[2,4,8]                              varies one setting at a time around the base
  init=ckpt:FOLDER | hf:FOLDER                          starts every run from these weights
  search=optuna 'search.space.mechanism.sc.step_size={low:0.1,high:2,log:true}'
  plugins=[my.module]                                   adds parts of your own, which -h then lists
A preset (study=…) sets several keys; its data, objective, … apply while you choose no other.
"""


def repeat(argv: list[str]) -> int | None:
    """Print a finished sweep's text again if nothing has changed since; else return None."""
    answer = AnswerFile(pool_of(argv), argv).read()
    if answer is None:
        return None
    print_notes(answer.notes)
    for line in answer.lines:
        print_text(line)
    return 0


def main(argv: list[str]) -> int:
    from stability.cli.compose import compose_values
    from stability.cli.words import Invocation
    from stability.config.parse import parse
    from stability.config.sweep import SweepSpec

    values = compose_values(SweepSpec, Invocation.of(argv))
    if values.get("dry_run") is True:
        from stability.registry import Registry

        # a plan continues if its objective needs a part trained first; the values are not validated yet
        objective, registry = values.get("objective"), Registry("objectives")
        if isinstance(objective, dict) and objective.get("name") in registry.names():
            values["objective"] = registry.load(objective["name"]).for_plan(objective)
    with ray_begun_early(values):
        return _sweep(parse(SweepSpec, values), argv)


def ray_begun_early(values: dict[str, Any]) -> AbstractContextManager[None]:
    """Start local Ray while torch is imported, if the sweep will probably need it.

    ``values`` are a sweep's, not validated yet; the study's folder shows whether runs are left.
    """
    num_threads, settings = values.get("threads"), values.get("ray")
    is_plan = values.get("launcher") not in ("auto", "ray") or values.get("dry_run")
    if is_plan or not isinstance(num_threads, int) or not isinstance(settings, dict):
        return nullcontext()
    data = values.get("data")
    path = data.get("path") if isinstance(data, dict) else None
    is_lacking = isinstance(path, str) and not Path(path).expanduser().exists()  # the sweep will fail at once
    if settings.get("address") is not None or is_lacking:
        return nullcontext()
    from stability.runs.study import StudyFolder

    study = StudyFolder.of(str(values.get("runs_dir")), str(values.get("name")))
    runs = list(study.runs()) if study.file.exists() else []
    num_ended = sum(run.finished for run in runs)
    if 0 < num_ended == len(runs) or (values["launcher"] == "auto" and _runs_serially(values, num_ended)):
        return nullcontext()
    from sweeps.launchers.ray import head as ray_head

    return ray_head.start_early(num_threads)


def _runs_serially(values: dict[str, Any], num_ended: int) -> bool:
    """Return whether auto will probably become serial (`sweeps.requirements.resolve_launcher`).

    A wrong answer costs seconds. ``num_ended`` is the number of finished runs on record.
    """
    from stability.config.base import AXES
    from stability.config.launchers import RaySpec

    settings = [values.get(key) for key in ("ray", "cpus_per_trial", "gpus_per_trial")]
    has_gpu = values.get("device") != "cpu" and any(Path("/dev").glob("nvidia[0-9]*"))
    search, lr = (each if isinstance(each := values.get(key), dict) else {} for key in ("search", "lr"))
    is_grid = search == {"name": "none"} and not (lr.get("edge") or values.get("ablate") or values.get("vary"))
    if has_gpu or not is_grid or settings != [RaySpec().model_dump(), None, "auto"]:
        return False
    axes = [lr.get("values", lr.get("num")), *(values.get(key) for key in ("seeds", "precision", *AXES))]
    sizes = [len(axis) if isinstance(axis, dict | list) else 1 if isinstance(axis, str) else axis for axis in axes]
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) - num_ended < 2


def _sweep(spec: SweepSpec, argv: list[str]) -> int:
    """Prepare the plan of a sweep typed as ``argv``, then print it or run it."""
    if not (spec.dry_run and Path(spec.runs_dir).is_dir()):  # a dry run with prepared data writes nothing
        check_writable("runs_dir", spec.runs_dir)
    if spec.report and not spec.dry_run:
        check_writable("reports_dir", spec.reports_dir)  # now, not after an hour of training
    from stability.plan.plan import Plan, data_line, objective_line
    from sweeps.requirements import resolve_launcher
    from sweeps.trial import make_trials

    plan = Plan.of(spec)
    print_notes(plan.notes)
    trials = make_trials(plan.spec, plan.points)
    plan = replace(plan, spec=resolve_launcher(plan.spec, trials))  # nothing below sees auto
    if spec.dry_run:
        from sweeps.dry_run import describe

        print_text(describe(plan, trials))
        return 0
    notes = [objective_line(spec), data_line(spec, plan.corpus)]
    print_notes(notes)
    return _run(plan, trials, argv, [*plan.notes, *notes])


def _run(plan: Plan, trials: Sequence[Trial], argv: list[str], notes: Sequence[str]) -> int:
    """Run a grid's ``trials`` at once, or a search's in rounds; record and publish the study."""
    from sweeps import earlier
    from sweeps.costs import expected_times
    from sweeps.launch import run
    from sweeps.record import StudyRecord, alpha_share
    from sweeps.requirements import slots

    spec = plan.spec
    record = StudyRecord.begin(spec, plan.corpus)
    if spec.search is None and not spec.replace:
        why = earlier.describe_refusal(record.study, record.before, trials)
        if why:
            raise ValueError(why)
    search = None
    if spec.search is not None or spec.lr.edge is not None:
        from sweeps.search.rounds import make_search, run_rounds

        search = make_search(spec, plan.corpus.fingerprint, record.before)
        assert search is not None
        outcome, trials = run_rounds(spec, search, record)
        print_notes(earlier.describe_changes(record.study, record.before, trials, replace=spec.replace))
    else:
        print_notes(earlier.describe_changes(record.study, record.before, trials, replace=spec.replace))
        outcome = run(spec, trials, record=record, expected=expected_times(plan, trials))
    has_worked = bool(outcome.num_trained or outcome.num_failed or outcome.interrupted)
    record.close(trials, search.record() if search else None, has_worked=has_worked)
    if outcome.interrupted:
        return 130
    ended = time.time()
    if outcome.num_failed and not any(trial.directory.has_rows for trial in trials):
        return 1  # no step was logged, so there are no tables: the failures remain the last printed lines
    from stability.cli.publish import publish, store_answer

    publish(record.study, spec.reports_dir if spec.report else None, unless_same=True, tables=spec.tables)
    if "wandb" in spec.logger and has_worked:
        from stability.cli.study_on_wandb import send_after_sweep

        pdf = Path(spec.reports_dir) / f"{spec.name}.pdf" if spec.report else None
        send_after_sweep(record.study, pdf, spec.wandb.model_dump(include={"project", "entity"}))
    if share := alpha_share([trial.directory for trial in trials], record.started, ended, slots(spec)):
        print_note(share)
    if not outcome.num_failed:
        store_answer(AnswerFile(plan.pool, argv), plan, trials, record, notes)
    return 1 if outcome.num_failed else 0


if __name__ == "__main__":
    run_entry(main, "sweep", HELP, repeat)
