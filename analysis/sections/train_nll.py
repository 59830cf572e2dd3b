"""Show the NLL on training windows beside the validation NLL (`stability.probe what=train_nll`)."""

from __future__ import annotations

from analysis.drawing.pieces import Pieces, heading
from analysis.drawing.typeset import Table
from analysis.measures import RATE, SERIES, Difference, Measure, grid_table, three_digits
from analysis.numbers.spread import MEAN_RULE, MEDIAN_RULE
from analysis.sections.probed import Probed, one_table
from analysis.sections.section import Drawn, Section, has_probes, make_body, make_printer
from analysis.study.load import Frame, Study

TITLE, NAME = "The generalisation gap", "train_nll"
MEASURES = (
    Measure("training", lambda rows: rows["train_nll"], three_digits),
    Measure("validation", lambda rows: rows["nll"], three_digits),
    Difference("gap", lambda rows: rows["difference"]),
)


def _table(rows: Frame, phase: str, found: Probed) -> Table:
    """Return one phase's table, one row per series and learning rate."""
    num = " or ".join(f"{each:,.0f}" for each in sorted(set(rows["sequences"])))
    caption = (
        f"{found.words.unit.capitalize()} of one model on {num} windows of the training side and on the run's held-out "
        f"examples, evaluated alike. {MEDIAN_RULE}. Gap: validation less training, mean. {MEAN_RULE}.{found.origin}"
    )
    return grid_table(f"Generalisation gap, {phase}", caption, rows, (SERIES, RATE), MEASURES)


TABLES = one_table(NAME, _table)


def brief(study: Study, drawn: Drawn) -> Pieces:
    """Return each series' numbers at its own best rate."""
    return heading(TITLE) + tuple(TABLES.at_best(study)[:1])


SECTION = Section(
    make_body(TITLE, TABLES.of_study), has_probes(NAME), tables=make_printer(TABLES.of_study), brief=brief
)
