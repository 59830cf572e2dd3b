"""Show the NLL of texts longer than in training beside that of the same texts in pieces (`what=lengths`)."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.claims import judging
from analysis.claims.lengths import NAME, list_multiples, read_best
from analysis.drawing.marks import draw_seeds, mechanism_legend
from analysis.drawing.style import WIDTH_INCHES, looks
from analysis.drawing.typeset import Cell, Table
from analysis.measures import RATE, SERIES, Difference, Measure, grid_table, three_digits
from analysis.numbers.spread import MEAN_RULE, MEDIAN_RULE
from analysis.sections.probed import Probed, one_table
from analysis.sections.section import (
    Captioned,
    Figures,
    Section,
    has_probes,
    make_body,
    make_printer,
)
from analysis.study.load import Frame, Study

TITLE = "Texts longer than in training"
CAPTION = (
    "NLL of the same held-out texts, read in pieces of the trained length (1) and of multiples of it, each series at "
    "its best learning rate. Points: seeds; line: their median. A falling line gains from the longer context; a rising "
    "one does not read positions beyond those of training. A line with one point has no such positions."
)


class _Change(Difference):
    """A column of ΔNLL, or of the reason for none."""

    def cell(self, rows: Frame) -> Cell:
        limit = rows["limit"].dropna()
        return Cell(f"cannot: {limit.iloc[0]:.0f} positions") if len(limit) else super().cell(rows)


applies = has_probes(NAME)


def _table(rows: Frame, phase: str, found: Probed) -> Table:
    """Return one row per series and rate: the NLL in pieces, and its change with each length."""
    multiples = sorted(set(rows["multiple"]))
    nll = Measure("NLL", lambda part: part.groupby("seed")["nll"].first(), three_digits)
    changes = [
        _Change(f"{each:.0f} times", lambda part, each=each: part.loc[part["multiple"] == each, "difference"])
        for each in multiples
    ]
    num = " or ".join(f"{each:,.0f}" for each in sorted(set(rows["sequences"])))
    caption = (
        f"{found.words.unit.capitalize()} on {num} held-out texts in pieces of the trained length, and its change if "
        f"they are read in pieces of so many times that length. {MEDIAN_RULE}. Change: mean. {MEAN_RULE}.{found.origin}"
    )
    groups = (("", 3), ("ΔNLL (nats)", len(changes)))
    return grid_table(f"ΔNLL of longer texts, {phase}", caption, rows, (SERIES, RATE), [nll, *changes], groups)


TABLES = one_table(NAME, _table)


def figures(study: Study) -> Figures:
    """Draw ``lengths``: the NLL against the length, at each series' best rate; {} without a finished run."""
    rows = read_best(study) if applies(study) else ()
    return {NAME: Captioned(_draw(study, rows), CAPTION)} if len(rows) else {}


def _draw(study: Study, rows: Frame) -> Figure:
    styles = {name: look for name, look in looks(study).items() if name in set(rows["series"])}
    figure = Figure(figsize=(WIDTH_INCHES, 2.7), layout="constrained")
    ax, multiples = figure.subplots(), [1, *list_multiples(study)]
    for name, look in styles.items():
        own = rows[rows["series"] == name]
        short = own.drop_duplicates("run_id").assign(multiple=1, long_nll=lambda each: each["nll"])
        draw_seeds(ax, pd.concat([short, own]), "multiple", "long_nll", look)
    ax.set_xscale("log", base=2)
    ax.set_xticks(multiples, [str(each) for each in multiples])
    ax.set_xlabel("length of a piece / trained length")
    ax.set_ylabel("NLL (nats)")
    mechanism_legend(figure, styles)
    return figure


def sentences(study: Study) -> list[str]:
    """Return the verdict on each series and length."""
    return [each.text for each in judging.judge(study) if each.subject.startswith(f"{NAME} ")]


BODY = make_body(TITLE, TABLES.of_study, sentences)
SECTION = Section(BODY, applies, figures, make_printer(TABLES.of_study, sentences), BODY)
