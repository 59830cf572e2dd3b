"""Show an objective's validated share, e.g. a classifier's accuracy, against learning rate.

A figure, a table and a table of windows; nothing for a study without the share.
"""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from analysis.drawing.marks import draw_seeds, mechanism_legend
from analysis.drawing.pieces import Pieces, heading, shown
from analysis.drawing.style import WIDTH_INCHES, looks, lr_axis
from analysis.drawing.tables import chunks, width_text
from analysis.drawing.typeset import Cell, Table
from analysis.measures import outcome_of, percent_digits, rate_table, select_finished
from analysis.numbers.learning import reasons_untrained
from analysis.numbers.recall import recalled_share
from analysis.numbers.spread import Spread
from analysis.numbers.windows import KEPT, SeriesWindows, explain_absence, share_windows, windows
from analysis.sections.nll import NLL_COLUMNS, width_cell
from analysis.sections.section import Captioned, Drawn, Figures, Section, has_data, make_printer, pictures
from analysis.study import wording
from analysis.study.load import Frame, Study
from analysis.words import lr_text
from stability.runs.words import ShareWords

CAPTION = (
    "Share {of}, at the end of training, against learning rate. Points: seeds; line: the median of those that "
    "finished. {windows}"
)


def share_words(study: Study) -> ShareWords | None:
    """Return the words of the share; None if no run ended with one."""
    share = wording.words(study).share
    return share if share is not None and len(select_finished(study.runs, share.column)) else None


def accuracy_tables(study: Study) -> list[Table]:
    """Return the share in per cent (median, interval, n), learning rate × mechanism."""
    share = share_words(study)
    if share is None:
        return []
    outcome = outcome_of(study, share.column)
    return [rate_table(study, outcome, series) for series in chunks(study.series, NLL_COLUMNS)]


def window_table(study: Study) -> Table | None:
    """Return each series' window of the share beside its stable window; None below two learning rates."""
    share = share_words(study)
    if share is None or select_finished(study.runs, share.column)["lr"].nunique() < 2:
        return None
    kept, stable = share_windows(study, share.column), windows(study)
    rows = tuple(_window_row(study, share, kept[name], stable[name]) for name in study.series)
    caption = (
        f"The range of learning rates whose {share.name} is at least {KEPT:g} times the mechanism's best, around the "
        "best one, on the median over seeds; a run that diverged keeps nothing. Edges, ≥ and a–b as of the stable "
        f"windows; beside it the own window by {wording.words(study).nll}. "
        f"Below the decades: range over single seeds."
    )
    header = ("mechanism", "best LR", "best (%)", f"window of {share.name} (decades)", "by NLL")
    return Table(f"Windows of {share.name}", caption, header, rows)


def _window_row(study: Study, share: ShareWords, kept: SeriesWindows, stable: SeriesWindows) -> tuple[Cell, ...]:
    """Return a series' row: window of its share, best rate, and width of its stable window."""
    by_nll = Cell("--") if stable.median is None else Cell(width_text(stable.median), lr_text(stable.median.best_lr))
    if not wording.words(study).in_nats and reasons_untrained(study)[kept.series]:
        by_nll = Cell("learned nothing")
    if kept.median is None:
        return (
            Cell(kept.series),
            Cell("--"),
            Cell(explain_absence(study.of(kept.series), share.column)),
            Cell("--"),
            by_nll,
        )
    runs = select_finished(study.of(kept.series), share.column)
    best = Spread.of(runs.loc[runs["lr"] == kept.median.best_lr, share.column])
    name, best_cell = Cell(kept.series), Cell(percent_digits(best.median), best.detail(percent_digits))
    return (name, Cell(lr_text(kept.median.best_lr)), best_cell, width_cell(kept), by_nll)


def figures(study: Study) -> Figures:
    """Draw the share if known at several learning rates, named like its column."""
    share = share_words(study)
    if share is None:
        return {}
    runs = select_finished(study.runs, share.column)
    nll = wording.words(study).nll
    judged = f"The stable windows are judged on the {nll}, not on this."
    if recalled_share(study):
        judged = f"The first page's windows are of this, the stable windows of the appendix of the {nll}."
    caption = CAPTION.format(of=share.of, windows=judged)
    drawn = {share.column.removeprefix("val_"): Captioned(_figure(study, runs, share), caption)}
    return drawn if runs["lr"].nunique() > 1 else {}


def _figure(study: Study, runs: Frame, share: ShareWords) -> Figure:
    """Draw the share against learning rate: medians as a line for each series, runs as points."""
    styles = looks(study)
    figure = Figure(figsize=(WIDTH_INCHES, 2.4), layout="constrained")
    ax = figure.subplots()
    for name, style in styles.items():
        draw_seeds(ax, runs[runs["series"] == name], "lr", share.column, style)
    lr_axis(ax, study.runs["lr"])
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set_xlabel("learning rate")
    ax.set_ylabel(outcome_of(study, share.column).axis)
    mechanism_legend(figure, styles)
    return figure


applies = has_data(share_words)


def _all_tables(study: Study) -> list[Table]:
    found = window_table(study)
    return [*accuracy_tables(study), *([] if found is None else [found])]


def body(study: Study, drawn: Drawn) -> Pieces:
    share = share_words(study)
    assert share is not None, "it applies"
    return heading(share.name.capitalize()) + pictures(drawn) + shown(_all_tables(study))


SECTION = Section(body, applies, figures, make_printer(_all_tables))
