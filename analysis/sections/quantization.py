"""Show how rounding the trained weights to few bits changes the NLL, by learning rate (`what=quantization`)."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.claims import judging
from analysis.claims.quantization import PAPER
from analysis.drawing.marks import draw_seeds, entry, mechanism_legend
from analysis.drawing.pieces import Pieces, box, heading, shown
from analysis.drawing.style import MUTED, Look, looks, lr_axis, panel_grid
from analysis.drawing.typeset import Table
from analysis.measures import (
    RATE,
    SERIES,
    Difference,
    Measure,
    Text,
    grid_table,
    phase_tables,
    three_digits,
)
from analysis.numbers.quantization import BEFORE, LAYERS, LEARNED, NAME, TERMINAL, count_lost, list_bits, read_rows
from analysis.numbers.spread import MEAN_RULE, MEDIAN_RULE
from analysis.sections.probed import Probed, ProbeTables
from analysis.sections.section import (
    Captioned,
    Drawn,
    Figures,
    Section,
    has_probes,
    make_body,
    make_printer,
    pictures,
)
from analysis.study.load import Frame, Study
from analysis.words import join_words, power
from stability.runs.words import Words

TITLE = "Weights in few bits"
COLUMNS = 3
ROUNDED = (
    "The weights of the linear maps of mixers and feed-forward networks are rounded to nearest, symmetrically; "
    "activations and all other tensors stay."
)
CAPTION = (
    "ΔNLL: held-out NLL with rounded weights less that of the trained model, against learning rate, by bits of a "
    "weight, one scale a row. Points: seeds; line: their median. {before}A panel with a logarithmic axis has no run "
    "whose NLL rounding lowers. {lost}"
)
BEFORE_LINE = "Dotted: median at the last checkpoint before the rate decays. "


applies = has_probes(NAME)


def _tables(found: Probed) -> list[Table]:
    """Return ΔNLL by bits for each phase and group, and the layers' numbers."""
    layers, alpha = found.frames.get(LAYERS), {} if found.study is None else _terminal_alpha(found.study)

    def of_phase(part: Frame, phase: str) -> list[Table]:
        tables = [_gap_table(own, phase, found.words, found.origin) for _, own in part.groupby("group")]
        name = part["phase"].iloc[0]
        own = None if layers is None else layers[(layers["phase"] == name) & (layers["group"] == layers["group"].min())]
        return tables + ([] if own is None or own.empty else [_layer_table(own, phase, alpha, found.origin)])

    return phase_tables(found.frames[NAME], of_phase)


def _terminal_alpha(study: Study) -> dict[str, float]:
    rows = study.curvature[study.curvature["phase"] == TERMINAL]
    return rows.groupby("run_id")["alpha_max"].median().to_dict()


TABLES = ProbeTables((NAME, LAYERS), _tables)


def _gap_table(rows: Frame, phase: str, words: Words, origin: str) -> Table:
    """Return one row per series and rate: the trained NLL, and what rounding adds at each number of bits."""
    group, bits = int(rows["group"].iloc[0]), sorted(set(rows["bits"]), reverse=True)
    scale = f"one scale a group of {group} inputs" if group else "one scale a row"
    measures = [Measure("NLL", lambda part: part.groupby("seed")["nll"].first(), three_digits)]
    measures += [
        Difference(f"{each:.0f} bits", lambda part, each=each: part.loc[part["bits"] == each, "difference"])
        for each in bits
    ]
    share = " to ".join(dict.fromkeys(f"{100 * rows['share'].agg(end):.0f}" for end in ("min", "max")))
    caption = (
        f"{words.unit.capitalize()} on the run's {rows['sequences'].max():,.0f} held-out examples, and the change "
        f"with rounded weights, {scale}. {ROUNDED} They are {share} % of the parameters of mixers and feed-forward "
        f"networks. {MEDIAN_RULE}. Change: mean. {MEAN_RULE}.{origin}"
    )
    return grid_table(
        f"ΔNLL with rounded weights, {scale}, {phase}",
        caption,
        rows,
        (SERIES, RATE),
        measures,
        (("", 3), ("ΔNLL (nats)", len(bits))),
    )


def _layer_table(rows: Frame, phase: str, alpha: dict[str, float], origin: str) -> Table:
    """Return one row per series and rate: the weights' RMS and kurtosis, output errors, and α_max beside."""
    bits = sorted(set(rows["bits"]), reverse=True)
    first = rows[rows["bits"] == bits[0]]

    def median_of(column: str):
        return lambda part: part[part["bits"] == bits[0]].groupby("seed")[column].median()

    measures: list[Measure | Text] = [
        Measure("RMS", median_of("rms"), power),
        Measure("kurtosis", median_of("kurtosis"), "{:.2f}".format),
        *(
            Measure(
                f"{each:.0f} bits",
                lambda part, each=each: part[part["bits"] == each].groupby("seed")["error"].median(),
                power,
            )
            for each in bits
        ),
    ]
    if known := {run: value for run, value in alpha.items() if run in set(first["run_id"])}:
        measures.append(
            Measure(
                "α_max",
                lambda part: part.drop_duplicates("run_id").set_index("seed")["run_id"].map(known).dropna(),
                power,
            )
        )
    caption = (
        "Weights of the linear maps and relative error ‖y − y₀‖ / ‖y₀‖ of a mixer's or feed-forward network's output, "
        "given its inputs in the trained model; medians over layers and branches, one scale a row. Kurtosis of a "
        f"normal distribution: 3.{' α_max: median over recorded steps.' if known else ''}{origin}"
    )
    return grid_table(f"Weights and outputs of layers, {phase}", caption, rows, (SERIES, RATE), measures)


def figures(study: Study) -> Figures:
    """Draw ``quantization``: a panel a number of bits; {} for a single learning rate."""
    if not applies(study) or study.runs["lr"].nunique() < 2:
        return {}
    rows = read_rows(study, int(study.probes[NAME]["group"].min()))
    rows = rows[rows["status"].isin(LEARNED)]
    before = BEFORE_LINE if (rows["phase"] == BEFORE).any() else ""
    lost = [
        f"{number} {status} of {len(study.of(series))} of {series}"
        for series in study.series
        for status, number in count_lost(study, series).items()
    ]
    told = f"Runs without a point: {join_words(lost)}." if lost else "No run diverged, exploded or learned nothing."
    return {NAME: Captioned(_draw(study, rows), CAPTION.format(before=before, lost=told))}


def _draw(study: Study, rows: Frame) -> Figure:
    bits = list_bits(study)
    styles = {name: look for name, look in looks(study).items() if name in set(rows["series"])}
    figure, axes = panel_grid(len(bits), min(COLUMNS, len(bits)), 1.9, 0.5, sharex=True)
    for ax, number in zip(axes, bits, strict=True):
        _draw_bits(ax, rows[rows["bits"] == number], styles)
        lr_axis(ax, study.runs["lr"], 4)
        ax.set_title(f"{number} bits", loc="left")
    for ax in axes[-COLUMNS:]:
        ax.set_xlabel("learning rate")
        ax.tick_params(labelbottom=True)
    for ax in axes[::COLUMNS]:
        ax.set_ylabel("ΔNLL (nats)")
    extras = [entry("before the decay", MUTED, linestyle=":")] if (rows["phase"] == BEFORE).any() else []
    mechanism_legend(figure, styles, extras)
    return figure


def _draw_bits(ax: Axes, rows: Frame, styles: dict[str, Look]) -> None:
    """Draw seeds and their median at the end of training, and the median before the decay."""
    for name, look in styles.items():
        own = rows[rows["series"] == name]
        ended, before = own[own["phase"] == TERMINAL], own[own["phase"] == BEFORE]
        draw_seeds(ax, ended, "run_lr", "difference", look)
        median = before.groupby("run_lr")["difference"].median()
        ax.plot(median.index, median, color=look.color, linestyle=":", zorder=3)
    values = rows.loc[rows["phase"].isin((TERMINAL, BEFORE)), "difference"].to_numpy(dtype=float)
    if len(values) and (values[np.isfinite(values)] > 0).all():
        ax.set_yscale("log")
    else:
        ax.axhline(0, color=MUTED, linewidth=0.5, zorder=1)


def sentences(study: Study) -> list[str]:
    """Return the verdicts on both claims."""
    return [each.text for each in judging.judge(study) if each.paper == PAPER]


def brief(study: Study, drawn: Drawn) -> Pieces:
    """Return verdicts, figure and the first table."""
    return heading(TITLE) + box(sentences(study)) + pictures(drawn) + shown(TABLES.of_study(study)[:1])


SECTION = Section(
    make_body(TITLE, TABLES.of_study, sentences), applies, figures, make_printer(TABLES.of_study, sentences), brief
)
