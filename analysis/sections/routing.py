"""Show how the routing of experts depends on the learning rate: load, lost experts, entropy, beside the loss."""

from __future__ import annotations

import math

from matplotlib.figure import Figure

from analysis.claims.claim import Claim, interval_text, signed, verdict_of, word_claim
from analysis.drawing.marks import dots, mechanism_legend
from analysis.drawing.style import WIDTH_INCHES, looks, lr_axis
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.logit_growth import LATE_ROWS
from analysis.numbers.routing import LOAD, LOG, compare_collapse, read_routing
from analysis.numbers.windows import VALIDATION, median_line, outcomes, windows
from analysis.sections.section import Captioned, Figures, Section, has_logged, list_one, make_body, make_printer
from analysis.study.load import Column, Study
from analysis.words import lr_text, plural

TITLE, NAME = "Does routing collapse before the loss does?", "routing"
PANELS = {
    LOAD: "load of the busiest expert over the mean",
    "dead_experts": "experts without a position",
    "router_entropy": "router’s entropy (nats)",
}
WORST = f"in the worst layer, at the end of training (median of the last {LATE_ROWS} logged steps)"
CAPTION = (
    f"Routing {WORST} against learning rate. Points: seeds; line: their median. Dotted: the upper edge of the stable "
    "window, beyond which the loss is lost."
)


applies = has_logged(LOG, LOAD)


def list_series(study: Study) -> list[str]:
    return study.present(read_routing(study))


def table(study: Study) -> Table:
    """Return one row per series and rate: the late routing, the NLL, and the steps of collapse and of the break."""
    runs, rows = read_routing(study), []
    for series in list_series(study):
        nlls = median_line(outcomes(study, series, VALIDATION))
        for lr, own in runs[runs["series"] == series].groupby("lr"):
            late = own[list(PANELS)].median()
            nll = float(nlls.get(lr, math.nan))
            rows.append((
                Cell(series),
                Cell(lr_text(float(lr))),
                Cell("diverged" if math.isinf(nll) else f"{nll:.3f}"),
                Cell(f"{late[LOAD]:.2f}"),
                Cell(f"{late['dead_experts']:.0f}"),
                Cell(f"{late['router_entropy']:.2f}"),
                _step_cell(own["collapse"]),
                _step_cell(own["onset"]),
            ))  # fmt: skip
    caption = (
        f"Routing {WORST}; medians over seeds. Collapsed from: the first logged step from which an expert of some "
        "layer stays without a position of the logged microbatch, median over the seeds that have one; below it their "
        "number. Loss breaks at: the onset of a spike or divergence, likewise."
    )
    header = ("mechanism", "LR", "NLL", "busiest", "lost", "entropy", "collapsed from", "loss breaks at")
    return Table("Routing by learning rate", caption, header, tuple(rows))


def _step_cell(steps: Column) -> Cell:
    known = steps.dropna()
    return Cell(f"{known.median():.0f}", f"{len(known)} of {plural(len(steps), 'seed')}") if len(known) else Cell("--")


def sentences(study: Study) -> list[str]:
    """Return one verdict per series with a router, and the meaning of collapse."""
    rule = "Collapsed: an expert of some layer has no position at the end of training."
    return [*(collapse_claim(study, series).text for series in list_series(study)), rule]


def figures(study: Study) -> Figures:
    return {NAME: Captioned(_draw(study), CAPTION)}


def _draw(study: Study) -> Figure:
    figure, styles, runs = Figure(figsize=(WIDTH_INCHES, 2.6), layout="constrained"), looks(study), read_routing(study)
    axes, names = figure.subplots(1, len(PANELS)), list_series(study)
    for ax, (column, title) in zip(axes, PANELS.items(), strict=True):
        for series in names:
            look, window = styles[series], windows(study)[series].median
            own = runs[runs["series"] == series]
            line = own.groupby("lr")[column].median().dropna()
            ax.plot(line.index, line.to_numpy(), color=look.color, linestyle=look.dashes, linewidth=1.2)
            dots(ax, own["lr"], own[column], look.marker, look.color, 3)
            if window is not None and not window.open_high:
                ax.axvline(window.high.lr, color=look.color, linewidth=0.9, linestyle=":")
        lr_axis(ax, runs["lr"], most=4)
        ax.set_title(title, fontsize=7.5)
        ax.set_xlabel("learning rate")
    mechanism_legend(figure, {name: styles[name] for name in names})
    return figure


def collapse_claim(study: Study, series: str) -> Claim:
    """Return the claim on one series with a router, judged over seeds."""
    result = compare_collapse(study, series)
    return word_claim(
        Claim(
            f"routing {series}",
            verdict_of(result),
            statement=f"{series}: routing collapses before the loss does",
            n=result.n,
            effect=_effect(_from_edge(result.size)),
            interval=interval_text(_from_edge(result.interval), result.n, "decades"),
            finding=f"{series}: {_finding(_from_edge(result.size))}",
            differences=result.differences,
            more_runs=result.more_runs,
        )
    )


def _from_edge(bounds: tuple[float, float]) -> tuple[float, float]:
    """Return bounds of the rate of collapse over the window's upper edge, in decades, of those of the inverse."""
    return -bounds[1], -bounds[0]


def _effect(size: tuple[float, float]) -> str:
    low, high = size
    if low == high:
        return f"{signed(low)} decades"
    return f"{'≤ ' if math.isinf(low) else '≥ '}{signed(high if math.isinf(low) else low)} decades"


def _finding(size: tuple[float, float]) -> str:
    low, high = size
    if math.isinf(low) and math.isinf(high):
        return "neither routing nor loss has an edge among the swept rates of every seed"
    if math.isinf(high):
        return f"some seed’s routing collapses at no swept rate; the loss is lost at least {abs(low):.2f} decades below"
    if math.isinf(low):
        return f"some seed’s loss is lost at no swept rate; routing collapses at least {abs(high):.2f} decades below"
    side = "above" if low + high > 0 else "below"
    return f"routing collapses {abs(low + high) / 2:.2f} decades {side} the upper edge of the stable window"


TABLES = list_one(table)
BODY = make_body(TITLE, TABLES, sentences)
SECTION = Section(BODY, applies, figures, make_printer(TABLES, sentences), BODY)
