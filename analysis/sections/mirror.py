"""Show held-out NLL of reversed examples beside the originals' (`stability.probe what=mirror`)."""

from __future__ import annotations

from matplotlib.figure import Figure

from analysis.drawing.marks import draw_seeds, mechanism_legend
from analysis.drawing.pieces import Pieces, heading
from analysis.drawing.style import MUTED, WIDTH_INCHES, looks, lr_axis
from analysis.drawing.typeset import Table
from analysis.measures import RATE, SERIES, Difference, Measure, grid_table, three_digits
from analysis.numbers.spread import MEAN_RULE, MEDIAN_RULE
from analysis.numbers.step_shares import phases_of
from analysis.sections.probed import Probed, one_table
from analysis.sections.section import (
    Drawn,
    Figures,
    Section,
    draw_by_phase,
    has_probes,
    make_body,
    make_printer,
    pictures,
)
from analysis.study.load import Frame, Study

TITLE, NAME = "A text and its mirror image", "mirror"
BLIND = (
    "A mechanism that is blind to order has the same NLL on both, a difference of 0, unless the next token is "
    "predicted: then a position's own token tells the direction."
)
CAPTION = (
    "NLL of the held-out examples read backwards less that of the same examples, against learning rate, {phase}. "
    f"Points: seeds; line: their median. {BLIND}"
)


MEASURES = (
    Measure("NLL", lambda rows: rows["nll"], three_digits),
    Measure("read backwards", lambda rows: rows["mirrored_nll"], three_digits),
    Difference("difference", lambda rows: rows["difference"]),
)


applies = has_probes(NAME)


def _table(rows: Frame, phase: str, found: Probed) -> Table:
    """Return one phase's table, one row per series and learning rate; medians over seeds."""
    num = sorted({int(each) for each in rows["sequences"]})
    caption = (
        f"{found.words.unit.capitalize()} on the run's {' or '.join(f'{each:,}' for each in num)} held-out examples, "
        f"and on the same examples read backwards under mirrored masks and noise. {BLIND} {MEDIAN_RULE}. Difference: "
        f"mean, paired by seed. {MEAN_RULE}.{found.origin}"
    )
    return grid_table(f"NLL of mirrored examples, {phase}", caption, rows, (SERIES, RATE), MEASURES)


TABLES = one_table(NAME, _table)


def figures(study: Study) -> Figures:
    """Draw ``mirror-<phase>-0``; nothing for a single learning rate."""
    if not applies(study) or study.runs["lr"].nunique() < 2:
        return {}
    return draw_by_phase(study, NAME, phases_of(study.probes[NAME]), phase_figures, CAPTION)


def phase_figures(study: Study, phase: str) -> list[Figure]:
    """Draw the difference against learning rate, one line per series; [] if none is finite."""
    rows = study.probed(NAME)
    rows = rows[(rows["phase"] == phase) & rows["difference"].notna()]
    if rows.empty:
        return []
    styles = {name: look for name, look in looks(study).items() if name in set(rows["series"])}
    figure = Figure(figsize=(WIDTH_INCHES, 2.7), layout="constrained")
    ax = figure.subplots()
    for name, look in styles.items():
        draw_seeds(ax, rows[rows["series"] == name], "run_lr", "difference", look)
    ax.axhline(0, color=MUTED, linewidth=0.5, zorder=1)
    lr_axis(ax, rows["run_lr"])
    ax.set_xlabel("learning rate")
    ax.set_ylabel("NLL read backwards − NLL (nats)")
    mechanism_legend(figure, styles)
    return [figure]


def brief(study: Study, drawn: Drawn) -> Pieces:
    """Return the first figure, and each series' numbers at its own best rate."""
    return heading(TITLE) + pictures(drawn)[:1] + tuple(TABLES.at_best(study)[:1])


SECTION = Section(make_body(TITLE, TABLES.of_study), applies, figures, make_printer(TABLES.of_study), brief)
