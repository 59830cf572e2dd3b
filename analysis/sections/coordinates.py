"""Show a coordinate check: sizes of activations and updates against width or depth, and its verdict."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from analysis.drawing.marks import entry
from analysis.drawing.style import FIXED, OTHERS, WIDTH_INCHES, fitting_legend
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.coordinates import (
    FLAT,
    LOGITS,
    MEASURES,
    PARTS,
    WITHIN,
    Slope,
    judged_slopes,
    judged_steps,
    slope,
    verdict,
)
from analysis.numbers.spread import MEAN_RULE
from analysis.sections.section import Captioned, Figures, Section, make_body
from analysis.study.load import Frame, Study
from analysis.words import join_words, lr_text, plural

NAME = "coordinates"
TITLE = "Coordinate check"
CAPTION = (
    "Mean absolute change of the activations since the start against {axis}, on log axes: a row for each "
    "parametrization, a panel for each step. Where the parametrization is right, all lines are level. {recipe}"
)
COLUMNS = 5  # panels in a row
# colours by the end of a quantity's name, in the legend's order; the first that fits
KINDS = {
    "embedding": "embedding", "norm": "norms", "mixer": "mixers", f" {LOGITS}": "attention logits", "ffn": "FFNs",
    "stream": "final stream", LOGITS: "logits", "cross": "cross mechanisms",
}  # fmt: skip
COLORS = [color for color, _ in (*FIXED.values(), *OTHERS)]


def kinds(frame: Frame) -> dict[str, Frame]:
    """Return the rows of each kind of model by its name: all parts that are not the same for all."""
    varied = [part for part in PARTS if frame[part].nunique() > 1 or part == "parametrization"]
    return {" ".join(names): rows for names, rows in frame.groupby(varied, sort=False)}


def verdict_lines(frame: Frame) -> Iterator[str]:
    """Yield a sentence on each kind of model."""
    for name, rows in kinds(frame).items():
        if not np.isfinite(rows["value"].to_numpy(dtype=float)).all():
            yield f"{name}: diverged; this check needs a smaller rate than lr={lr_text(rows['lr'].iloc[0])}"
            continue
        slopes = judged_slopes(rows)
        word, deciding = verdict(slopes)
        first = deciding[0]
        most = "{} ({}) {} ({})".format(first.quantity, MEASURES[first.measure], *first.texts)
        number = f"all {len(slopes)}" if word == "flat" else f"{len(deciding)} of {len(slopes)}"
        more = "; more seeds decide" if word == "unclear" else ""
        if word == "shrinks" and {each.quantity for each in deciding} == {LOGITS}:
            more = "; they catch up with more steps or a larger lr"
        superlative = "the widest interval" if word == "unclear" else "the steepest slope"
        yield f"{name}: {word}, {number} quantities; {most} has {superlative} against {axis(rows)}{more}"


def recipe(frame: Frame) -> str:
    """Describe the training."""
    row = frame.iloc[0]
    return (
        f"{join_words(frame['optimizer'].unique())}, lr={lr_text(row['lr'])}, one batch of {row['batch']:.0f} × "
        f"{row['positions']:.0f} tokens of {row['data']} ({row['objective']}), {frame['step'].max():.0f} steps, "
        f"{plural(frame['seed'].nunique(), 'seed')}."
    )


def axis(frame: Frame) -> str:
    return "depth" if frame["field"].iloc[0] == "layers" else "width"


def coordinates_tables(frame: Frame) -> list[Table]:
    """Return the slopes with their intervals: of activations, then of classes of tensors."""
    sizes = ", ".join(f"{size:.0f}" for size in sorted(frame["size"].unique()))
    slopes = (
        f"Slope of log2 of each number against log2 {axis(frame)} ({sizes}), mean over seeds. {MEAN_RULE}. Flat: "
        f"|slope| ≤ {FLAT} and the interval within ±{WITHIN}; bold: judged and not flat; pale: not judged."
    )
    of_activations = (
        f"{slopes} At start: mean |x|. Change: mean |x − x₀| {_span(frame)}, of logits at the last step: "
        "under mup they start as width^−½, as expected, and catch up within a few steps."
    )
    of_tensors = (
        f"{slopes} Update: RMS of θ − θ₀ {_span(frame)}; it tells whether vectors and biases have factors "
        f"that only matrices should. Gradient: RMS at the last step. {recipe(frame)}"
    )
    return [
        _table(TITLE, of_activations, frame, "size", "change"),
        _table("Gradients and updates of parameters", of_tensors, frame, "update", "gradient"),
    ]


def _table(title: str, caption: str, frame: Frame, *measures: str) -> Table:
    """Return the slopes of two measures, a row for each quantity, columns for each kind of model."""
    of_kind = kinds(frame)
    judged = {name: {(each.quantity, each.measure): each for each in judged_slopes(of_kind[name])} for name in of_kind}
    body = []
    for quantity in dict.fromkeys(frame[frame["measure"] == measures[0]]["quantity"]):
        cells = [
            _cell(judged[name].get((quantity, measure)), rows, quantity, measure)
            for name, rows in of_kind.items()
            for measure in measures
        ]
        if any(cell.text != "--" for cell in cells):
            body.append((Cell(quantity), *cells))
    header = ("", *(MEASURES.get(measure, measure) for measure in measures * len(of_kind)))
    return Table(title, caption, header, tuple(body), (("", 1), *((name, len(measures)) for name in of_kind)))


def _cell(judged: Slope | None, rows: Frame, quantity: str, measure: str) -> Cell:
    """Return the cell of one slope, judged or not."""
    steps = {"size": [0], "gradient": judged_steps(rows)[-1:]}.get(measure, judged_steps(rows, quantity))
    found = judged or slope(rows, quantity, measure, steps)
    if found is None:
        return Cell("--")
    is_moving = judged is not None and judged.verdict != "flat"
    return Cell(*found.texts, bold=is_moving, pale=judged is None)


def _span(frame: Frame) -> str:
    steps = judged_steps(frame)
    return f"over steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"at step {steps[0]}"


def coordinates_figure(frame: Frame) -> Figure:
    """Draw the changes of activations against size: rows are kinds of model, columns the last steps."""
    changes, of_kind = frame[frame["measure"] == "change"], kinds(frame)
    steps = sorted(step for step in changes["step"].unique() if step > 0)[-COLUMNS:]
    figure = Figure(figsize=(WIDTH_INCHES, 0.7 + 1.7 * len(of_kind)), layout="constrained")
    panels = figure.subplots(len(of_kind), len(steps), sharex=True, sharey=True, squeeze=False)
    for row, (name, rows) in zip(panels, kinds(changes).items(), strict=True):
        for ax, step in zip(row, steps, strict=True):
            _panel(ax, rows[rows["step"] == step])
            if ax in panels[0]:
                ax.set_title(f"step {step}")
            if ax in panels[-1]:
                ax.set_xlabel(axis(frame))
        row[0].set_ylabel(f"{name}\nmean $|x - x_0|$")
    shown = dict.fromkeys(_kind(name) for name in changes["quantity"])
    handles = [entry(label, color) for label, color in zip(KINDS.values(), COLORS, strict=False) if label in shown]
    fitting_legend(figure, handles, 7)
    return figure


def _panel(ax: Axes, rows: Frame) -> None:
    colors = dict(zip(KINDS.values(), COLORS, strict=False))
    for quantity, own in rows.groupby("quantity", sort=False):
        mean = own.groupby("size")["value"].mean()
        ax.plot(mean.index, mean, "o-", color=colors[_kind(quantity)], markersize=2.5, linewidth=0.9)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_locator(FixedLocator(sorted(rows["size"].unique())))
    ax.xaxis.set_major_formatter("{x:.0f}")
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(numticks=5))
    ax.yaxis.set_minor_locator(NullLocator())


def _kind(quantity: str) -> str:
    """Return the legend's entry of a quantity."""
    return next(label for end, label in KINDS.items() if quantity.endswith(end))


def applies(study: Study) -> bool:
    return NAME in study.probes


def figures(study: Study) -> Figures:
    frame = study.probes[NAME]
    caption = CAPTION.format(axis=axis(frame), recipe=recipe(frame))
    return {NAME: Captioned(coordinates_figure(frame), caption)}


SECTION = Section(make_body(TITLE, lambda study: coordinates_tables(study.probes[NAME])), applies, figures)
