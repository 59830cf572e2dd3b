"""Count every run in α_max results: recorded steps, stable steps and median α_max.

A diverged run has no terminal checkpoint. It counts as 0 % stable over the steps planned for it. Otherwise the
mechanisms with most divergences would look most stable, because only their survivors would count. At the earliest
checkpoint a run counts with its measurement, whatever its later outcome. A run diverged before its first checkpoint
counts as 0 % there too. No α_max is invented for either: medians use recorded steps.

Crashed, waiting or unmeasured runs are no results: they are not counted but reported. A step without α_max, because the
optimizer did not move, is treated alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np

from analysis.study.load import Column, Frame, Study, phase_rank
from analysis.study.once import once_per_study
from analysis.study.protocol import NOT_DEFINED, lacks_state, requested_protocol

TERMINAL, EARLIEST, LAST = "terminal", "earliest", "last"
MEASURED, DIVERGED, MISSING = "measured", "diverged", "not measured"  # the fourth is NOT_DEFINED: no α_max exists
COUNTED = (MEASURED, DIVERGED)  # outcomes included in shares
PHASES = {
    TERMINAL: "terminal checkpoint",
    EARLIEST: "earliest checkpoint",
    LAST: "last checkpoint before the end",
    "before_decay": "last checkpoint before the decay",
}
RULE = {
    TERMINAL: "A run that diverged has no terminal checkpoint and counts as 0 % over the {steps} that it would have "
    "recorded; no α_max is made up for it",
    EARLIEST: (
        "A run counts with what was measured at its earliest checkpoint, whatever became of it; one that diverged "
        "before it counts as 0 % over {steps}"
    ),
}


def stable_steps(rows: Frame) -> Column:
    """Return whether each recorded step's α_max exceeds the LR in force.

    ∞ does; 0 and NaN (a step lost to a non-finite loss) do not.
    """
    return rows["alpha_max"] > rows["lr"].fillna(rows["run_lr"])


def finite_median(values: Column) -> float:
    """Return the median over finite α_max (zeros are finite); NaN if none."""
    known = values.to_numpy(dtype=float)
    finite = known[np.isfinite(known)]
    return float(np.median(finite)) if len(finite) else math.nan


@once_per_study
def recorded_steps(study: Study, phase: str, state: str | None = None) -> Frame:
    """Return the steps recorded at a phase's checkpoints, with their runs' columns.

    Diverged runs have no terminal rows. Steps without a defined α_max are left out.

    Args:
        study: supplies the steps.
        phase: checkpoint phase.
        state: optimizer state; None for all.
    """
    rows = _steps_of(study, phase, state)
    return rows[rows["method"] != NOT_DEFINED]


@once_per_study
def steps_without_alpha(study: Study, phase: str, state: str) -> Frame:
    """Return the steps without α_max because the optimizer's step is zero, with their runs' columns.

    Args:
        study: supplies the steps.
        phase: checkpoint phase.
        state: optimizer state.
    """
    rows = _steps_of(study, phase, state)
    return rows[rows["method"] == NOT_DEFINED]


def _steps_of(study: Study, phase: str, state: str | None) -> Frame:
    rows = _steps(study)
    rows = rows[(rows["phase"] == phase) & ((rows["state"] == state) | (state is None))]
    return rows[~rows["run_id"].isin(_find_diverged(study))] if phase == TERMINAL else rows


@once_per_study
def _steps(study: Study) -> Frame:
    return study.with_run(study.curvature)


def _find_diverged(study: Study) -> set[str]:
    return set(study.runs.loc[study.runs["status"] == "diverged", "run_id"])


def phases_of(rows: Frame) -> list[str]:
    """List the phases in a probe's rows, the terminal one first."""
    return sorted(set(rows["phase"]), key=lambda phase: (phase != TERMINAL, phase))


def phases_and_states(study: Study) -> list[tuple[str, str]]:
    """Return the measured phases and states: terminal before earliest and last, paper before checkpoint.

    If runs diverged, requested terminal checkpoints are included even without any row.
    """
    pairs = set(study.curvature[["phase", "state"]].drop_duplicates().itertuples(index=False, name=None))
    if _find_diverged(study):
        pairs |= {(TERMINAL, state) for phase, state in pairs if phase == LAST} | _requested_measurements(study)
    return sorted(pairs, key=lambda pair: (phase_rank(pair[0]), pair[1] != "paper", pair[1]))


def phases_to_draw(study: Study) -> list[str]:
    """Return the phases shown in figures: all but the last checkpoints before an early end.

    These are at many different steps, and have their own table.
    """
    found = [phase for phase, _ in phases_and_states(study)]
    found += [phase for each in study.spectra.values() for phase in each["phase"]]
    return [phase for phase in dict.fromkeys(found) if phase != LAST]


def _requested_measurements(study: Study) -> set[tuple[str, str]]:
    """Return the phases and states requested in the sweep, without states undefined for every run."""
    curvature = requested_protocol(study)
    phases = (TERMINAL, EARLIEST) if curvature.get("phase") == "all" else (curvature.get("phase"),)
    states = [state for state in curvature.get("state") or () if not lacks_state(study, state).all()]
    return {(phase, state) for phase in phases if phase in RULE for state in states}


@once_per_study
def count_stable_steps(study: Study, phase: str, state: str, which: Callable[[Frame], Column] = stable_steps) -> Frame:
    """Return a table with one row per run.

    Columns: ``run_id series mechanism setting seed run_lr outcome steps hits median``.

    - ``outcome``: measured, diverged, not defined, or not measured (no result). Not defined: the run's optimizer lacks
      the state, or no step has an α_max.
    - ``steps``: recorded, or planned for a diverged run; 0 if not defined or not measured.
    - ``hits``: steps selected by ``which``.
    - ``median``: median over the run's finite α_max; NaN if none.

    Args:
        study: supplies the steps.
        phase: checkpoint phase; outside terminal and earliest, only measured or undefined runs are listed.
        state: optimizer state.
        which: selects steps; by default the stable ones.
    """
    rows = recorded_steps(study, phase, state)
    columns = ["run_id", "series", "mechanism", "setting", "seed", "lr", "status", "optimizer", "last_checkpoint_step"]
    frame = study.runs[columns].rename(columns={"lr": "run_lr"})
    by_run = rows.groupby("run_id")
    sizes, hits = by_run.size(), which(rows).groupby(rows["run_id"]).sum()
    medians = rows[np.isfinite(rows["alpha_max"])].groupby("run_id")["alpha_max"].median()
    left_nothing = (frame["status"] == "diverged") & (
        (phase == TERMINAL) | (frame["last_checkpoint_step"].isna() & (phase == EARLIEST))
    )
    measured, lacking = frame["run_id"].isin(sizes.index), lacks_state(study, state)
    without = frame["run_id"].isin(steps_without_alpha(study, phase, state)["run_id"])
    frame["outcome"] = np.select(
        [measured, lacking, left_nothing, without], [MEASURED, NOT_DEFINED, DIVERGED, NOT_DEFINED], MISSING
    )
    is_diverged = frame["outcome"] == DIVERGED
    would_be = is_diverged * (planned_count(study, rows) if is_diverged.any() else 0)
    frame["steps"] = frame["run_id"].map(sizes).fillna(would_be).astype(int)
    frame["hits"] = frame["run_id"].map(hits).fillna(0).astype(int)
    frame["median"] = frame["run_id"].map(medians).astype(float)
    return frame if phase in RULE else frame[measured | without]


def concerns_steps(study: Study) -> bool:
    """Return whether the study has an α_max, or its sweep asked for one (hessian=false: no)."""
    return len(study.curvature) > 0 or (study.spec.get("curvature") or {}).get("recorded_steps") is not None


def planned_count(study: Study, rows: Frame) -> int:
    """Return the number of steps planned for a diverged run.

    Source: the protocol in ``rows``, or without one the most frequent recorded number there. Without rows: the same for
    the whole study, then the sweep's protocol.

    Raises:
        ValueError: none of them is recorded.
    """
    for known in (rows, study.curvature):
        numbers = [
            json.loads(text)["recorded_steps"]
            for text in set(known["protocol"])
            if text and "recorded_steps" in json.loads(text)
        ]
        numbers = numbers or known.groupby(["run_id", "phase", "state"]).size().mode().tolist()
        if numbers:
            return int(max(numbers))
    planned = (study.spec.get("curvature") or {}).get("recorded_steps")
    if planned is None:
        raise ValueError(
            f"{study.name}: no α_max is measured and study.json has no curvature.recorded_steps, the number of steps "
            "that a diverged run counts for; repeat the sweep's command, which records it"
        )
    return int(planned)


def series_with_results(study: Study, count: Frame) -> tuple[str, ...]:
    """Return the series with a result, in the study's order."""
    found = set(count.loc[count["outcome"].isin(COUNTED), "series"])
    return tuple(name for name in study.series if name in found)


def series_without_alpha(study: Study, count: Frame) -> tuple[str, ...]:
    """Return the series for which no run can have a result, in the study's order.

    Their optimizer lacks the state, or their steps have no α_max.
    """
    found = set(count["series"]) - set(count.loc[count["outcome"] != NOT_DEFINED, "series"])
    return tuple(name for name in study.series if name in found)


def share(count: Frame) -> float:
    """Return the share of hits among counted steps, weighted equally; NaN without steps."""
    steps = int(count["steps"].to_numpy().sum())
    return int(count["hits"].to_numpy().sum()) / steps if steps else math.nan


def notes(count: Frame) -> list[str]:
    """Return a cell's uncounted or diverged runs, e.g. ``["diverged 2/3", "not measured 1/3"]``."""
    outcomes = count["outcome"].tolist()
    return [
        f"{outcome} {number}/{len(outcomes)}"
        for outcome in (DIVERGED, NOT_DEFINED, MISSING)
        if (number := outcomes.count(outcome))
    ]
