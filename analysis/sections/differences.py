"""Compare exact curvatures with central differences; float64 decides the inaccurate one."""

from __future__ import annotations

import numpy as np

from analysis.drawing.typeset import Cell, Table
from analysis.numbers.step_shares import count_stable_steps, finite_median, phases_and_states, recorded_steps
from analysis.sections.steps import diverged_note, drop_diverged
from analysis.study.load import Column, Frame, Study
from analysis.study.protocol import methods, state_text, terms_in_brief
from analysis.words import plural, power

HEADER = ("mechanism", "pairs", "|difference|", "other sign", "exact", "paper's", "exact", "paper's")
GROUPS = (("", 2), ("uᵀHu", 2), ("median α_max", 2), ("% stable", 2))
# relative error beyond which float64 decides the inaccurate side (`stability.probes.curvature.descent.DOUBTFUL`)
DOUBTFUL = 1e-3


def verification(study: Study) -> str:
    """Describe the curvatures' methods and their distance from central differences.

    One curvature per run and state is compared. Beyond `DOUBTFUL`, the text names the inaccurate one of the two.
    """
    rows = drop_diverged(study, study.curvature)
    if rows.empty:
        return "No step was recorded: every run that was to be measured diverged before its checkpoint."
    used = f"Methods: {methods(rows)}."
    checked = rows[rows["rel_error"].notna()]
    if checked.empty:
        return f"{used} No curvature was compared with central differences."
    worst = checked.loc[checked["rel_error"].idxmax()]
    return (
        f"{used} Verification: in {plural(len(checked), 'step')} the curvature was compared with central differences "
        f"of the gradient; relative error: median {power(float(np.median(checked['rel_error'])))}, largest "
        f"{power(float(worst['rel_error']))} (run {worst['run_id']}, {state_text(worst['state'])})."
        f"{_explain_errors(checked)}"
    )


def _explain_errors(checked: Frame) -> str:
    """Describe the errors of difference and curvature against float64 over steps beyond `DOUBTFUL`; "" for none."""
    doubtful = checked[checked["rel_error"] > DOUBTFUL]
    judged = doubtful[np.isfinite(doubtful["float64_curvature"])]
    if doubtful.empty:
        return ""
    beyond = f" Beyond {DOUBTFUL:g}: {plural(len(doubtful), 'step')}"
    if judged.empty:
        return f"{beyond}, none of them computed in float64: which of the two is off is not known there."
    off, error = _errors(judged, "difference_curvature")
    left = len(doubtful) - len(judged)
    others = f"; of the other {left} it is not known which is off" if left else ""
    return (
        f"{beyond}, {'all' if not others else len(judged)} of them computed once more in float64: there the "
        f"difference was off by up to {power(off)}, the value that is used by up to {power(error)}{others}."
    )


def _errors(judged: Frame, other: str) -> list[float]:
    """Return the largest relative errors against float64: of curvature ``other``, of the used one."""
    exact = judged["float64_curvature"]
    return [float(relative_difference(judged[name], exact).max()) for name in (other, "curvature")]


def _papers_error(rows: Frame) -> str:
    """Describe the error of the paper's difference against float64; "" without float64 values."""
    judged = rows[np.isfinite(rows["float64_curvature"])]
    if judged.empty:
        return ""
    off, error = _errors(judged, "parity_curvature")
    return (
        f" In {plural(len(judged), 'pair')} uᵀHu was computed once more in float64: there the paper's difference was "
        f"off by up to {power(off)}, the exact value by up to {power(error)}."
    )


def pairs(rows: Frame) -> Frame:
    """Return the recorded steps with both curvatures finite."""
    return rows[np.isfinite(rows["curvature"]) & np.isfinite(rows["parity_curvature"])]


def relative_difference(exact: Column, other: Column) -> Column:
    """Return |a − b| / max(|a|, |b|), row by row; 0 if both are 0."""
    larger = np.maximum(exact.abs(), other.abs())
    return ((exact - other).abs() / larger.where(larger > 0, 1.0)).rename("difference")


def find_other_sign(exact: Column, other: Column) -> Column:
    """Return a mask of rows with only one positive curvature: Eq. 18 gives a finite step for that one only."""
    return (exact > 0) != (other > 0)


def differences_table(study: Study) -> Table | None:
    """Return a table with one row per phase, state and series; None if no step has both curvatures."""
    rows = pairs(drop_diverged(study, study.with_run(study.curvature)))
    body = []
    for phase, state in phases_and_states(study):
        of_state, count = pairs(recorded_steps(study, phase, state)), count_stable_steps(study, phase, state)
        for name in study.present(of_state):
            lost = diverged_note(count[count["series"] == name])
            body.append(_row(of_state[of_state["series"] == name], name, f"{phase}, {state_text(state)}", lost))
    if not body:
        return None
    caption = (
        "The recorded steps measured both exactly and by the paper's central difference of gradients, (∇L(θ+εu) − "
        "∇L(θ−εu))/2ε with raw ε = 1e-4, at the same θ and along the same u. Difference: median of |a − b| / "
        "max(|a|, |b|), below it the largest; other sign: share of pairs in which one of the two is positive and "
        "the other is not. α_max: median of the finite ones. % stable: share of the pairs with α_max above the "
        "training LR (a run that diverged has no pairs at a terminal checkpoint and is counted under "
        f"them).{_papers_error(rows)}{SW if 'sw' in set(rows['mechanism']) else ''}{terms_in_brief(study)}"
    )
    return Table("Exact and finite differences", caption, HEADER, tuple(body), GROUPS)


# Section 5.2.1 and Eq. 20
SW = (
    " For sw the paper has differences only: its band-masked implementation gave numerically unstable "
    "Hessian-vector products. Here sw is exact as well."
)


def _row(part: Frame, name: str, where: str, lost: str) -> tuple[Cell, ...]:
    """Return one series' row: pairs, relative difference, opposite signs, and both median α_max and % stable."""
    exact, other = part["curvature"], part["parity_curvature"]
    difference, rate = relative_difference(exact, other), part["lr"].fillna(part["run_lr"])
    signs = find_other_sign(exact, other)
    medians = [finite_median(part[column]) for column in ("alpha_max", "parity_alpha_max")]
    shares = [100 * (part[column] > rate).mean() for column in ("alpha_max", "parity_alpha_max")]
    return (
        Cell(name, where),
        Cell(str(len(part)), "\n".join(filter(None, (plural(part["run_id"].nunique(), "run"), lost)))),
        Cell(power(float(difference.median())), f"≤ {power(float(difference.max()))}"),
        Cell(f"{100 * signs.mean():.0f} %", f"{int(signs.sum())} of {len(part)}"),
        *(Cell("--" if np.isnan(median) else power(median)) for median in medians),
        *(Cell(f"{share:.0f}") for share in shares),
    )


__all__ = ("differences_table", "verification", "find_other_sign", "pairs", "relative_difference")
