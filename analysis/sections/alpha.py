"""Show α_max along the optimizer's step: its figures, how it was measured, its tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.drawing.pieces import Pieces, heading, paragraph, shown
from analysis.drawing.typeset import Table
from analysis.numbers.step_shares import drawn_phases, phases_and_states, recorded
from analysis.sections.alpha_figures import alpha_figures
from analysis.sections.alpha_tables import alpha_tables
from analysis.sections.differences import verification
from analysis.sections.section import Drawn, Figures, Section, by_phase, pictures
from analysis.study.load import Study
from analysis.study.protocol import base_rates, states_explained, undefined_states
from analysis.study.step_terms import step_terms, terms_in_brief
from analysis.words import plural

CAPTION = (
    "α_max of the recorded steps against learning rate, {phase}. Above the dashed line (shaded) the training's own "
    "step lowers its batch's loss to second order; the small numbers count steps. Filled crosses: runs that diverged "
    "and have no such checkpoint, of all runs there; they count as 0 % stable, and no α_max is made up for them."
)


def figures(study: Study) -> Figures:
    """Draw one figure for each phase and four series."""
    return by_phase(study, "alpha", drawn_phases(study), alpha_figures, CAPTION + terms_in_brief(study))


def tables(study: Study, phases: Sequence[str]) -> Sequence[Table | str]:
    """Return the tables of ``phases`` without their details, and which states are not defined."""
    absent = undefined_states(study)
    return [*(table.text(details=False) for table in alpha_tables(study, phases)), *([absent] if absent else [])]


def body(study: Study, drawn: Drawn) -> Pieces:
    head = heading("Maximum stable learning rate α_max along the optimizer's step")
    absent = undefined_states(study)
    if not phases_and_states(study):
        why = "α_max was not measured in this study (hessian=false, or no run left a checkpoint)."
        return head + paragraph(absent or why)
    told = states_explained(study.curvature) + state_ratio(study) + base_rates(study) + step_terms(study)
    explained = paragraph(told)
    explained += paragraph(absent) if absent else ()
    return head + explained + pictures(drawn) + paragraph(verification(study)) + shown(alpha_tables(study))


def state_ratio(study: Study) -> str:
    """Say how α_max under the paper's state compares with that under the run's own, from the runs that have finite
    medians of both; "" without any."""
    rows = recorded(study, "terminal")
    finite = rows[np.isfinite(rows["alpha_max"])]
    medians = finite.groupby(["run_id", "state"])["alpha_max"].median().unstack()
    if not {"paper", "checkpoint"} <= set(medians.columns):
        return ""
    ratios = (medians["paper"] / medians["checkpoint"]).replace(np.inf, np.nan).dropna()
    if ratios.empty:
        return ""
    return (
        f" Here a run's median α_max under “paper” is {ratios.median():.1f} times that under “checkpoint” "
        f"(median of {plural(len(ratios), 'run')}; {ratios.min():.1f} to {ratios.max():.1f})."
    )


SECTION = Section(body, figures=figures, tables=tables)
