"""Store the answer to a finished sweep's command, for `stability.runs.answers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stability.cli.publish import unchanged_lines
from stability.registry import Registry
from stability.runs.answers import MOST_INPUTS, Answer, AnswerFile

if TYPE_CHECKING:
    from stability.plan.plan import Plan
    from sweeps.record import StudyRecord
    from sweeps.trial import Trial


def store_answer(
    file: AnswerFile, plan: Plan, trials: Sequence[Trial], record: StudyRecord, notes: Sequence[str]
) -> None:
    """Record the text that the same command prints while nothing changes.

    Nothing is recorded of an unfinished sweep, nor of one that depends on more than data, code and runs: on plugins,
    other runs' weights, samples, a trained tokenizer, or the rounds of a search.

    Args:
        file: the answer's file.
        plan: the sweep.
        trials: its runs.
        record: its record, closed.
        notes: the sentences printed first.
    """
    spec = plan.spec
    depends_on_more = spec.plugins or spec.init or spec.generate or spec.search or spec.lr.edge
    has_tokenizer = getattr(spec.objective.settings, "tokenizer", None) is not None
    if depends_on_more or has_tokenizer:
        return
    from sweeps.launch import describe_launch

    inputs = list(map(str, Registry("data").load(spec.data.name).inputs(spec.data.settings)))
    if len(inputs) > MOST_INPUTS:
        return
    if spec.report:
        inputs.append(str(Path(spec.reports_dir, f"{spec.name}.pdf").resolve()))
    skips = describe_launch(len({trial.run_id for trial in trials}))
    corpus = str(plan.pool / "cache" / plan.corpus.fingerprint)
    answer = Answer(str(record.study.path), (corpus,), tuple(inputs), tuple(notes), (skips,))
    # between two equal states nothing has changed: all that is found in between is right in this state
    before = answer.state()
    lines = _lines(plan, trials, record)
    if lines is not None and answer.state() == before:
        file.write(replace(answer, lines=(skips, *lines)), before)


def _lines(plan: Plan, trials: Sequence[Trial], record: StudyRecord) -> list[str] | None:
    """Return the tables and the report's place; None if a command would work on a run, or say more."""
    from sweeps import earlier
    from sweeps.trial import is_done

    for trial in trials:
        try:
            trial.directory.write_spec(trial.spec)
        except ValueError:  # another run's folder
            return None
        if not is_done(trial):
            return None
    if any(earlier.describe_changes(record.study, record.study.read(), trials)):
        return None
    spec = plan.spec
    return unchanged_lines(record.study, spec.reports_dir if spec.report else None, tables=spec.tables)
