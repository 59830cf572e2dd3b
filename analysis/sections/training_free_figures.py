"""Draw what is lost where a mechanism without training stands in for `sa` (`stability.probe what=training_free`)
against what it skips, and by layer; the report's part with its tables."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from analysis.drawing.marks import entry, rate_entries
from analysis.drawing.pieces import Pieces, heading, shown
from analysis.drawing.style import DASHES, INK, MUTED, WIDTH_INCHES, fitting_legend, lr_colors
from analysis.numbers.step_shares import phases_of
from analysis.sections.section import Drawn, Figures, Section, by_phase, is_of_rates, pictures
from analysis.sections.training_free import BUDGETS, LAYERS, NAME, NOT_TIMED, RUN, errors, gaps, shares, study_tables
from analysis.study.load import Column, Frame, Study

BESIDE: Any = {"marker": "o", "markersize": 2.5, "linewidth": 1.1}  # a line's colour and dashes
SHOWN_BUDGET = 0.5  # of the layers' panel, or the measured budget next to it
CAPTION = (
    "What another mechanism costs that stands in for sa in all layers of a trained model, without training, {phase}. "
    "Left: NLL on held-out data less that of the trained model, against the share of sa's products that is skipped; a "
    "point a budget. Middle: relative error ‖y − y_sa‖ / ‖y_sa‖ of the worst layer's output. Right: the same error of "
    "each layer at one budget. Medians over seeds; error and share are those of layers that are given what they are in "
    f"the trained model. {BUDGETS} {NOT_TIMED}"
)


def applies(study: Study) -> bool:
    return is_of_rates(study) and NAME in study.probes and LAYERS in study.probes


def figures(study: Study) -> Figures:
    """Draw ``training_free-<phase>-<number>``, one for each series."""
    return by_phase(study, NAME, phases_of(study.probes[NAME]), phase_figures, CAPTION) if applies(study) else {}


def body(study: Study, drawn: Drawn) -> Pieces:
    return heading("What stands in for sa without training") + pictures(drawn) + shown(study_tables(study))


def phase_figures(study: Study, phase: str) -> list[Figure]:
    """Draw one phase, a figure a series, in it a row a stand-in and a line a learning rate and its settings."""
    models, layers = (rows[rows["phase"] == phase] for rows in (study.probed(NAME), study.probed(LAYERS)))
    present = [name for name in study.series if name in set(models["series"])]
    return [
        _figure(models[models["series"] == name], layers[layers["series"] == name], name if len(present) > 1 else "")
        for name in present
    ]


def _figure(models: Frame, layers: Frame, title: str) -> Figure:
    """Draw one series: a row a stand-in; gap and error against the share skipped, and the error by layer."""
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
        _by_layer(line[2], of_layers, colors, own)
        line[0].set_ylabel(f"{mixer}\nNLL gap (nats)")
        line[1].set_ylabel("relative error")
    for ax in axes[-1][:2]:
        ax.set_xlabel("products skipped")
    axes[-1][2].set_xlabel("layer")
    if title:
        axes[0][0].set_title(textwrap.fill(title, 30), loc="left", fontweight="bold")
    handles = rate_entries(colors) + [entry(name, INK, linestyle=style) for name, style in dashes.items()]
    fitting_legend(figure, handles, 6, title="learning rate, settings", title_fontsize=8.5, handlelength=1.8)
    return figure


def over_seeds(values: Column) -> Column:
    """Return the medians over seeds, by all levels but that."""
    return values.groupby(level=[name for name in values.index.names if name != "seed"]).median()


def _against_share(
    ax: Axes, values: Column, skipped: Column, colors: Mapping[float, Any], dashes: Mapping[str, Any]
) -> None:
    """Draw a value against the share skipped, a line a learning rate and settings, a point a budget."""
    both = over_seeds(values).to_frame("value").assign(skipped=over_seeds(skipped)).reset_index()
    for (lr, label), line in both.groupby(["run_lr", "label"]):
        part = line.sort_values("budget")
        ax.plot(part["skipped"], part["value"], color=colors[lr], linestyle=dashes[label], **BESIDE)
    ax.axhline(0, color=MUTED, linewidth=0.5, zorder=1)
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _by_layer(ax: Axes, layers: Frame, colors: Mapping[float, Any], dashes: Mapping[str, Any]) -> None:
    """Draw the error of each layer at the budget next to `SHOWN_BUDGET`."""
    budget = shown_budget(sorted(set(layers["budget"])))
    rows = layers[layers["budget"] == budget]
    values = over_seeds(rows.groupby([*RUN, "layer"])["error"].mean()).rename("error").reset_index()
    for (lr, label), line in values.groupby(["run_lr", "label"]):
        ax.plot(line["layer"], line["error"], color=colors[lr], linestyle=dashes[label], **BESIDE)
    ax.set_ylim(bottom=0)
    ax.set_title(f"error at budget {budget:g}", loc="left", fontsize=8.5)
    ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))


def shown_budget(budgets: Sequence[float]) -> float:
    """Return the measured budget that is next to `SHOWN_BUDGET`, the smaller of two."""
    return min(budgets, key=lambda budget: (abs(budget - SHOWN_BUDGET), budget))


SECTION = Section(body, applies, figures)
