"""Show the loss from replacing a trained `sa` by another mechanism (`stability.probe what=training_free`).

Tables and figures, against the share skipped and by layer.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from analysis.drawing.marks import entry, rate_entries, rate_title
from analysis.drawing.style import DASHES, INK, MUTED, WIDTH_INCHES, fitting_legend, lr_colors
from analysis.drawing.typeset import Table
from analysis.measures import (
    RATE,
    SERIES,
    Difference,
    Form,
    Measure,
    Place,
    grid_table,
    percent,
    phase_tables,
)
from analysis.numbers.spread import MEAN_RULE, MEDIAN_RULE
from analysis.numbers.step_shares import phases_of
from analysis.sections.probed import Probed, ProbeTables
from analysis.sections.section import Figures, Section, draw_by_phase, has_probes, make_body
from analysis.study.load import Column, Frame, Study

NAME, LAYERS = "training_free", "training_free_layers"
SETTING = ["order", "series", "run_lr", "mixer", "label", "budget"]
RUN = [*SETTING, "seed"]
BUDGETS = (
    "Budget: the share that may be kept, sparge's τ and the keys of a fasa query over the positions; 1: all of sa."
)
NOT_TIMED = "Shares of products, not of time: all pairs are computed here, under a mask."


def gaps(models: Frame) -> Column:
    """Return the NLL less `sa`'s by run and budget, in nats per counted position.

    All sequences are pooled.
    """
    rows = models[models["counted"] > 0]
    rows = rows.assign(lost=rows["counted"] * (rows["nll"] - rows["sa_nll"]))
    sums = rows.groupby(RUN)[["lost", "counted"]].sum()
    return sums["lost"] / sums["counted"]


def shares(models: Frame) -> Column:
    """Return the skipped products' share by run and budget, mean over sequences and layers."""
    return models.groupby(RUN)["skipped"].mean()


def errors(layers: Frame) -> Column:
    """Return the worst layer's relative error by run and budget.

    Each layer's error is the mean over sequences.
    """
    return layers.groupby([*RUN, "layer"])["error"].mean().groupby(level=RUN).max()


def _tables(found: Probed) -> list[Table]:
    """Return three tables for each phase: NLL gap, products skipped, worst layer's error; [] without both frames."""
    if LAYERS not in found.frames:
        return []
    layers, origin = found.frames[LAYERS], found.origin
    left_out = (
        "Share of the products q·k and weight · value of sa that are left out, over heads, layers and sequences, "
        f"layers being given what they are in the trained model. {BUDGETS} {NOT_TIMED}"
    )
    off = (
        "‖y − y_sa‖ / ‖y_sa‖ of a layer's output, where it is given what it is in the trained model; the mean over "
        f"sequences, of the layer where that is largest. {BUDGETS}"
    )
    beyond = (
        f"Nats per predicted position on held-out {found.words.held_out} beyond the trained model's, where another "
        f"mechanism stands in for sa in all layers, without training. {BUDGETS}"
    )

    def of_phase(of_models: Frame, phase: str) -> list[Table]:
        of_layers = layers[layers["phase"] == of_models["phase"].iloc[0]]
        return [
            _table(f"NLL beyond that of sa, {phase}", beyond, origin, gaps(of_models), Difference),
            _table(f"Products skipped, {phase}", left_out, origin, shares(of_models), Measure, percent),
            _table(f"Relative error of the worst layer, {phase}", off, origin, errors(of_layers), Measure),
        ]

    return phase_tables(found.frames[NAME], of_phase)


TABLES = ProbeTables((NAME, LAYERS), _tables)


def _table(title: str, caption: str, origin: str, values: Column, kind: type[Measure], *form: Form) -> Table:
    """Return levels or differences over seeds: one row per series, rate and stand-in, one column per budget."""
    rows = values.rename("value").reset_index()
    budgets = sorted(set(rows["budget"]))
    measures = [
        kind(f"{budget:g}", lambda part, budget=budget: part.loc[part["budget"] == budget, "value"], *form)
        for budget in budgets
    ]
    places = (SERIES, RATE, Place("stand-in", "mixer"), Place("settings", "label"))
    told = f"{caption} {f'Mean. {MEAN_RULE}' if kind is Difference else MEDIAN_RULE}.{origin}"
    return grid_table(title, told, rows, places, measures, (("", 4), ("budget", len(budgets))))


BESIDE: Any = {"marker": "o", "markersize": 2.5, "linewidth": 1.1}  # a line's colour and dashes
SHOWN_BUDGET = 0.5  # for the layers' panel; the nearest measured budget is drawn
CAPTION = (
    "What another mechanism costs that stands in for sa in all layers of a trained model, without training, {phase}. "
    "Left: NLL on held-out data less that of the trained model, against the share of sa's products that is skipped; a "
    "point a budget. Middle: relative error ‖y − y_sa‖ / ‖y_sa‖ of the worst layer's output. Right: the same error of "
    "each layer at one budget. Medians over seeds; error and share are those of layers that are given what they are in "
    f"the trained model. {BUDGETS} {NOT_TIMED}"
)


def figures(study: Study) -> Figures:
    """Draw ``training_free-<phase>-<number>``, one for each series."""
    return draw_by_phase(study, NAME, phases_of(study.probes[NAME]), phase_figures, CAPTION)


def phase_figures(study: Study, phase: str) -> list[Figure]:
    """Draw one phase, one figure per series: one row per replacement, one line per learning rate and its settings."""
    models, layers = (rows[rows["phase"] == phase] for rows in (study.probed(NAME), study.probed(LAYERS)))
    present = study.present(models)
    return [
        _figure(models[models["series"] == name], layers[layers["series"] == name], name if len(present) > 1 else "")
        for name in present
    ]


def _figure(models: Frame, layers: Frame, title: str) -> Figure:
    """Draw one series, one row per replacement.

    Gap and error against the share skipped, and the error by layer.
    """
    mixers = list(dict.fromkeys(models["mixer"]))
    figure = Figure(figsize=(WIDTH_INCHES, 0.8 + 1.8 * len(mixers)), layout="constrained")
    axes, colors = figure.subplots(len(mixers), 3, squeeze=False), lr_colors(models["run_lr"])
    dashes = {}
    for line, mixer in zip(axes, mixers, strict=True):
        rows, of_layers = models[models["mixer"] == mixer], layers[layers["mixer"] == mixer]
        own = dict(zip(dict.fromkeys(rows["label"]), DASHES * len(rows), strict=False))
        dashes |= {f"{mixer}: {label}": style for label, style in own.items()}
        _against_share(line[0], gaps(rows), shares(rows), colors, own)
        _against_share(line[1], errors(of_layers), shares(rows), colors, own)
        _draw_layers(line[2], of_layers, colors, own)
        line[0].set_ylabel(f"{mixer}\nNLL gap (nats)")
        line[1].set_ylabel("relative error")
    for ax in axes[-1][:2]:
        ax.set_xlabel("products skipped")
    axes[-1][2].set_xlabel("layer")
    if title:
        axes[0][0].set_title(textwrap.fill(title, 30), loc="left", fontweight="bold")
    handles = rate_entries(figure, colors) + [entry(name, INK, linestyle=style) for name, style in dashes.items()]
    fitting_legend(figure, handles, 6, title=f"{rate_title(colors)}; settings", title_fontsize=8.5, handlelength=1.8)
    return figure


def over_seeds(values: Column) -> Column:
    """Return the medians over seeds, by all other levels."""
    return values.groupby(level=[name for name in values.index.names if name != "seed"]).median()


def _against_share(
    ax: Axes, values: Column, skipped: Column, colors: Mapping[float, Any], dashes: Mapping[str, Any]
) -> None:
    """Draw a value against the share skipped, one point per budget.

    A line for each learning rate and settings.
    """
    both = over_seeds(values).to_frame("value").assign(skipped=over_seeds(skipped)).reset_index()
    for (lr, label), line in both.groupby(["run_lr", "label"]):
        part = line.sort_values("budget")
        ax.plot(part["skipped"], part["value"], color=colors[lr], linestyle=dashes[label], **BESIDE)
    ax.axhline(0, color=MUTED, linewidth=0.5, zorder=1)
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _draw_layers(ax: Axes, layers: Frame, colors: Mapping[float, Any], dashes: Mapping[str, Any]) -> None:
    """Draw each layer's error at the budget nearest to `SHOWN_BUDGET`."""
    budget = choose_budget(sorted(set(layers["budget"])))
    rows = layers[layers["budget"] == budget]
    values = over_seeds(rows.groupby([*RUN, "layer"])["error"].mean()).rename("error").reset_index()
    for (lr, label), line in values.groupby(["run_lr", "label"]):
        ax.plot(line["layer"], line["error"], color=colors[lr], linestyle=dashes[label], **BESIDE)
    ax.set_ylim(bottom=0)
    ax.set_title(f"error at budget {budget:g}", loc="left", fontsize=8.5)
    ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))


def choose_budget(budgets: Sequence[float]) -> float:
    """Return the measured budget nearest to `SHOWN_BUDGET`, the smaller of two."""
    return min(budgets, key=lambda budget: (abs(budget - SHOWN_BUDGET), budget))


SECTION = Section(
    make_body("What stands in for sa without training", TABLES.of_study), has_probes(NAME, LAYERS), figures
)
