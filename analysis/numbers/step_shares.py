"""Count every run in an α_max table, figure or claim: its recorded steps, how many of them are stable, and its median
α_max.

A run that diverged left no terminal checkpoint to measure. It counts all the same: as 0 % stable over the steps that it
would have recorded, or the mechanisms that diverge most would look the most stable, only their survivors being left to
be counted. At the earliest checkpoint a run counts with what was measured there, whatever became of it later; one that
diverged before its first checkpoint counts as 0 % there, too. No α_max is made up for either: medians are over what was
recorded. Runs that crashed, wait or were never measured are no results: they are counted nowhere, and said. Neither is
a step that has no α_max, because the optimizer did not move there: it is left out of the recorded steps, and said.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np

from analysis.study.load import Column, Frame, Study, phase_rank
from analysis.study.once import once_per_study
from analysis.study.protocol import NOT_DEFINED, asked_protocol, lacks_state

TERMINAL, EARLIEST, LAST = "terminal", "earliest", "last"
MEASURED, DIVERGED, MISSING = "measured", "diverged", "not measured"  # beside NOT_DEFINED: it can have no α_max
COUNTED = (MEASURED, DIVERGED)  # the outcomes that shares are made of
PHASES = {TERMINAL: "terminal checkpoint", EARLIEST: "earliest checkpoint", LAST: "last checkpoint before the end"}
RULE = {
    TERMINAL: "A run that diverged has no terminal checkpoint and counts as 0 % over the {steps} that it would have "
    "recorded; no α_max is made up for it",
    EARLIEST: (
        "A run counts with what was measured at its earliest checkpoint, whatever became of it; one that diverged "
        "before it counts as 0 % over {steps}"
    ),
}


def stable_steps(rows: Frame) -> Column:
    """Return which recorded steps have α_max above the LR in force: ∞ does, 0 and NaN (a step lost to a non-finite
    loss) do not."""
    return rows["alpha_max"] > rows["lr"].fillna(rows["run_lr"])


def finite_median(values: Column) -> float:
    """Return the median over the finite α_max (zeros are finite); NaN where there is none."""
    known = values.to_numpy(dtype=float)
    finite = known[np.isfinite(known)]
    return float(np.median(finite)) if len(finite) else math.nan


@once_per_study
def recorded(study: Study, phase: str, state: str | None = None) -> Frame:
    """Return the steps recorded at a phase's checkpoints, with their runs' columns; of one optimizer state where
    ``state`` names it.

    No row of a run that diverged is a terminal one, whatever it says, and no step that has no α_max by definition is
    among them.
    """
    rows = _steps_of(study, phase, state)
    return rows[rows["method"] != NOT_DEFINED]


@once_per_study
def undefined_steps(study: Study, phase: str, state: str) -> Frame:
    """Return the steps at a phase's checkpoints that have no α_max because the optimizer's step there is zero, with
    their runs' columns."""
    rows = _steps_of(study, phase, state)
    return rows[rows["method"] == NOT_DEFINED]


def _steps_of(study: Study, phase: str, state: str | None) -> Frame:
    rows = _steps(study)
    rows = rows[(rows["phase"] == phase) & ((rows["state"] == state) | (state is None))]
    return rows[~rows["run_id"].isin(_diverged(study))] if phase == TERMINAL else rows


@once_per_study
def _steps(study: Study) -> Frame:
    return study.with_run(study.curvature)


def _diverged(study: Study) -> set[str]:
    return set(study.runs.loc[study.runs["status"] == "diverged", "run_id"])


def phases_of(rows: Frame) -> list[str]:
    """List the phases of a probe's rows, the terminal one first."""
    return sorted(set(rows["phase"]), key=lambda phase: (phase != TERMINAL, phase))


def phases_and_states(study: Study) -> list[tuple[str, str]]:
    """Return the phases and states that were measured: terminal before earliest and last, paper before checkpoint.
    Where runs diverged and the terminal checkpoints were asked for, they are among it even if no run has one."""
    pairs = set(study.curvature[["phase", "state"]].drop_duplicates().itertuples(index=False, name=None))
    if _diverged(study):
        pairs |= {(TERMINAL, state) for phase, state in pairs if phase == LAST} | _asked(study)
    return sorted(pairs, key=lambda pair: (phase_rank(pair[0]), pair[1] != "paper", pair[1]))


def drawn_phases(study: Study) -> list[str]:
    """Return the phases that figures show: all but the last checkpoints of runs that ended early, which stand at as
    many different steps, each in a row of a table of their own."""
    found = [phase for phase, _ in phases_and_states(study)]
    found += [phase for each in study.spectra.values() for phase in each["phase"]]
    return [phase for phase in dict.fromkeys(found) if phase != LAST]


def _asked(study: Study) -> set[tuple[str, str]]:
    """Return the phases and states that the sweep itself was to measure, without states that no run's optimizer
    defines."""
    curvature = asked_protocol(study)
    phases = (TERMINAL, EARLIEST) if curvature.get("phase") == "all" else (curvature.get("phase"),)
    states = [state for state in curvature.get("state") or () if not lacks_state(study, state).all()]
    return {(phase, state) for phase in phases if phase in RULE for state in states}


@once_per_study
def counted(study: Study, phase: str, state: str, which: Callable[[Frame], Column] = stable_steps) -> Frame:
    """Return a table with a row a run: ``run_id series mechanism setting seed run_lr outcome steps hits median``.

    ``outcome``: measured, diverged, not defined (the run's optimizer has no such state, whatever became of the run, or
    no step has an α_max), or not measured (no result); of the last two ``steps`` is 0. ``steps``: recorded, or that a
    diverged run would have recorded; ``hits``: those of them that ``which`` picks, by default the stable ones;
    ``median``: of the run's finite α_max, NaN where there is none. Of phases other than terminal and earliest only the
    runs that were measured.
    """
    rows = recorded(study, phase, state)
    columns = ["run_id", "series", "mechanism", "setting", "seed", "lr", "status", "optimizer", "last_checkpoint_step"]
    frame = study.runs[columns].rename(columns={"lr": "run_lr"})
    by_run = rows.groupby("run_id")
    sizes, hits = by_run.size(), which(rows).groupby(rows["run_id"]).sum()
    medians = rows[np.isfinite(rows["alpha_max"])].groupby("run_id")["alpha_max"].median()
    left_nothing = (frame["status"] == "diverged") & (
        (phase == TERMINAL) | (frame["last_checkpoint_step"].isna() & (phase == EARLIEST))
    )
    measured, lacking = frame["run_id"].isin(sizes.index), lacks_state(study, state)
    without = frame["run_id"].isin(undefined_steps(study, phase, state)["run_id"])
    frame["outcome"] = np.select(
        [measured, lacking, left_nothing, without], [MEASURED, NOT_DEFINED, DIVERGED, NOT_DEFINED], MISSING
    )
    would_be = frame["outcome"].map({DIVERGED: planned_count(study, rows)}).fillna(0)
    frame["steps"] = frame["run_id"].map(sizes).fillna(would_be).astype(int)
    frame["hits"] = frame["run_id"].map(hits).fillna(0).astype(int)
    frame["median"] = frame["run_id"].map(medians).astype(float)
    return frame if phase in RULE else frame[measured | without]


def planned_count(study: Study, rows: Frame) -> int:
    """Return how many steps a run that diverged would have recorded: as many as the protocol of ``rows`` says, of the
    study's other rows where there are none, or of its sweep; where no protocol was kept, as many as most runs
    recorded."""
    for known in (rows, study.curvature):
        numbers = [
            json.loads(text)["recorded_steps"]
            for text in set(known["protocol"])
            if text and "recorded_steps" in json.loads(text)
        ]
        numbers = numbers or known.groupby(["run_id", "phase", "state"]).size().mode().tolist()
        if numbers:
            return int(max(numbers))
    return int((study.spec.get("curvature") or {}).get("recorded_steps") or 1)


def shown_series(study: Study, count: Frame) -> tuple[str, ...]:
    """Return the series that have a result, in the study's order."""
    found = set(count.loc[count["outcome"].isin(COUNTED), "series"])
    return tuple(name for name in study.series if name in found)


def undefined_series(study: Study, count: Frame) -> tuple[str, ...]:
    """Return the series of which no run can have a result, since its optimizer has no such state or its steps no α_max,
    in the study's order."""
    found = set(count["series"]) - set(count.loc[count["outcome"] != NOT_DEFINED, "series"])
    return tuple(name for name in study.series if name in found)


def share(count: Frame) -> float:
    """Return the share of the counted steps that are hits, each step with the same weight; NaN where nothing counts."""
    steps = int(count["steps"].to_numpy().sum())
    return int(count["hits"].to_numpy().sum()) / steps if steps else math.nan


def notes(count: Frame) -> list[str]:
    """Return what a cell's numbers do not show, e.g. ``["diverged 2/3", "not measured 1/3"]``."""
    outcomes = count["outcome"].tolist()
    return [
        f"{outcome} {number}/{len(outcomes)}"
        for outcome in (DIVERGED, NOT_DEFINED, MISSING)
        if (number := outcomes.count(outcome))
    ]
