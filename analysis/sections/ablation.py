"""Tabulate ablated settings (`ablate.sc.window=[…]`) in the form of the paper's Table 9.

With a verdict on each numeric setting's direction, and a figure: NLL against each setting, seeds as points.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import NullLocator

from analysis.drawing import pieces
from analysis.drawing.marks import dots, mark
from analysis.drawing.pieces import Pieces, shown
from analysis.drawing.style import INK, WIDTH_INCHES, Look, looks, panel_grid
from analysis.drawing.tables import narrow
from analysis.drawing.typeset import Cell, Table
from analysis.measures import NLL_TITLES, nll_cell
from analysis.numbers.ablations import Ablation, Group, Value, ablations
from analysis.numbers.comparison import decide
from analysis.numbers.learning import LITTLE_SHARE
from analysis.numbers.spread import MEDIAN_RULE, Spread, interval
from analysis.numbers.windows import GENERATIVE, VALIDATION
from analysis.sections.nll_figures import CROSS
from analysis.sections.section import Captioned, Drawn, Figures, Section, has_data, make_printer, pictures
from analysis.study import wording
from analysis.study.load import Column, Study
from analysis.study.reference import unlearned
from analysis.words import join_words, lr_text, plural, short_count, value_text

MOST_COLUMNS, MOST_WIDE = 12, 6  # of a table; of one whose cells keep interval and n on one line


def ablation_tables(study: Study) -> list[Table]:
    """Return the paper's Table 9 for each base, at most twelve columns a table."""
    return [_table(study, each.base, groups) for each in ablations(study) for groups in _fitting(each.groups)]


def _fitting(groups: Sequence[Group]) -> list[tuple[Group, ...]]:
    """Group the settings so that each table fits a page's width."""
    pages: list[tuple[Group, ...]] = [()]
    for group in groups:
        room = MOST_COLUMNS - sum(len(each.columns) for each in pages[-1])
        pages = (
            [*pages[:-1], (*pages[-1], group)] if len(group.columns) <= room or not pages[-1] else [*pages, (group,)]
        )
    return pages


def _table(study: Study, base: str, groups: tuple[Group, ...]) -> Table:
    """Return one table of settings; the best value in each group is bold.

    Rows: best median NLL, its learning rate, generative NLL, model size.
    """
    columns = [column for group in groups for column in group.columns]
    best = {id(column) for group in groups for column in group.columns if column.median == group.best}
    nlls = [_fit(nll_cell(column.runs, column.lr, id(column) in best), columns) for column in columns]
    rows = [(Cell(NLL_TITLES[VALIDATION]), *nlls)]
    if study.runs["lr"].nunique() > 1:
        rates = ["--" if math.isnan(column.lr) else lr_text(column.lr) for column in columns]
        rows.append((Cell("at LR"), *map(Cell, rates)))
    if any(np.isfinite(column.runs["gen_nll"]).any() for column in columns):
        rows.append((Cell(NLL_TITLES[GENERATIVE]), *(_generative(column, columns) for column in columns)))
    rows.append((Cell("Model size"), *(_size(column) for column in columns)))
    widths = ("auto", *("1fr",) * len(columns))
    heads = (("", 1), *((group.heading, len(group.columns)) for group in groups))
    header = ("", *(column.text for column in columns))
    return Table(f"Ablation of {base}", _caption(study, base, groups), header, tuple(rows), heads, (), widths)


def _caption(study: Study, base: str, groups: tuple[Group, ...]) -> str:
    settings = join_words(f"{group.setting or group.part}={value_text(group.base_value)}" for group in groups)
    chosen = "; each column at its own best learning rate" if study.runs["lr"].nunique() > 1 else ""
    rule = MEDIAN_RULE.replace("Second line", "Below")
    return (
        f"One setting at a time, the others at the base's {settings}: the base's own runs stand under each setting. "
        f"Validation NLL, {wording.words(study).unit}: median over the seeds that finished{chosen}. {rule}. Bold: best "
        f"of its setting. Model size: true parameter counts."
    )


def _fit(cell: Cell, columns: Sequence[Value]) -> Cell:
    """Return a cell in short lines if the table has many columns."""
    return narrow(cell) if len(columns) > MOST_WIDE else cell


def _generative(column: Value, columns: Sequence[Value]) -> Cell:
    spread = Spread.of(column.runs.loc[column.runs["lr"] == column.lr, "gen_nll"])
    detail = "\n".join(filter(None, (spread.detail() if spread.n else "", column.diverged)))
    return _fit(Cell(f"{spread.median:.3f}" if spread.n else "--", detail), columns)


def _size(column: Value) -> Cell:
    """Return a cell with the short parameter count above the exact count."""
    known = column.runs["num_params"].dropna()
    return Cell(short_count(known.iloc[0]), f"{known.iloc[0]:,.0f}") if len(known) else Cell("--")


def directions(study: Study) -> list[str]:
    """Describe each numeric setting's direction of NLL, from its smallest value to its largest.

    Seeds are paired, including diverged ones.
    """
    return [
        _direction(study, each.base, group)
        for each in ablations(study)
        for group in each.groups
        if group.numeric and len(group.columns) > 1
    ]


def _direction(study: Study, base: str, group: Group) -> str:
    """Describe the direction of one setting's NLL over paired seeds; a diverged run counts as ∞."""
    (low, high), pairs = group.ends, group.changes
    both = pairs[np.isfinite(pairs)]
    what = f"{base}, {group.setting or group.part} from {low.text} to {high.text}"
    lost = " and ".join(f"{column.text} {note}" for column in (low, high) if (note := column.diverged))
    if pairs.empty:
        return f"{what}: no seed has a result that tells the two apart{f' ({lost})' if lost else ''}."
    change = f"{what}: {_change(both, lost, wording.words(study).in_nats)}"
    start = unlearned(study, high.series)
    learned = max(unlearned(study, each.series).nll - each.median for each in (low, high))
    if not learned > 0:
        return f"{change}; neither learned more than {start.name}, nothing is claimed."
    weight = "two seeds indicate that it" if len(pairs) < 3 else "it"
    unit = " nats" if wording.words(study).in_nats else ""
    verdict = {0: "no direction can be claimed", 1: f"{weight} rises", -1: f"{weight} falls"}[_sign(list(pairs))]
    verdict += "; in the paper it falls (Table 9)" if group.in_paper else ""
    little = (
        f" Little was learned: the better of the two lies {learned:.3f}{unit} below the {start.nll_name}."
        if learned < LITTLE_SHARE * start.nll
        else ""
    )
    return f"{change}: {verdict}.{little}"


def _sign(pairs: list[float]) -> int:
    """Return the sign from `decide`, 0 for fewer than two pairs.

    If every seed diverged at the same one of the two values, the sign is theirs: the pairs have no spread to test.
    """
    if len(pairs) < 2:
        return 0
    if all(each == pairs[0] for each in pairs) and math.isinf(pairs[0]):
        return 1 if pairs[0] > 0 else -1
    return decide(pairs, pairs)[0]


def _change(both: Column, lost: str, in_nats: bool) -> str:
    """Describe the NLL's change over seeds that finished at both values, and the diverged."""
    counted = f"; {lost}, which counts as infinitely bad" if lost else ""
    if both.empty:
        return f"no seed finished at both{counted}"
    seeds = plural(len(both), "paired seed") + (" that finished at both" if lost else "")
    if len(both) > 1:
        bounds, rule = interval(both), "range" if len(both) == 2 else "95 % interval"
        seeds = f"mean of {seeds}; {rule} {bounds[0]:+.3f} to {bounds[1]:+.3f}"
    what, unit = ("NLL", " nats") if in_nats else ("loss", "")
    return f"the validation {what} changes by {np.mean(both):+.3f}{unit} ({seeds}{counted})"


PANELS_PER_ROW = 3
TURNED_DEGREES, LABEL_GAP = 35, 3  # overlapping labels are turned; gap in pixels between labels
CAPTION = (
    "Validation NLL against one setting at a time, the others at the base's, whose value has the ring. Points: "
    "seeds; line: their median{lost}."
)
LOST = "; ×: diverged runs of all runs there"


def figures(study: Study) -> Figures:
    """Draw one figure for each base with a finite NLL, "ablation-0" and on."""
    found = ablations(study)
    drawn = [_figure(each, looks(study), wording.nats(study)) for each in found]
    captions = [CAPTION.format(lost=LOST if _has_diverged(each) else "") for each in found]
    return {
        f"ablation-{index}": Captioned(figure, caption)
        for index, (figure, caption) in enumerate(zip(drawn, captions, strict=True))
        if figure is not None
    }


def _has_diverged(ablation: Ablation) -> bool:
    return any(np.isinf(column.by_seed).any() for group in ablation.groups for column in group.columns)


applies = has_data(ablations)


def body(study: Study, drawn: Drawn) -> Pieces:
    said = pieces.box(directions(study))
    return pieces.heading("One setting at a time") + shown(ablation_tables(study)) + pictures(drawn) + said


def _figure(ablation: Ablation, styles: Mapping[str, Look], unit: str) -> Figure | None:
    """Draw a panel for each setting with two values; None without a finite NLL; ``unit``: end of the label."""
    groups = [group for group in ablation.groups if len(group.columns) > 1]
    if not any(math.isfinite(group.best) for group in groups):
        return None
    columns = min(PANELS_PER_ROW, len(groups))
    figure, axes = panel_grid(len(groups), columns, 2.3, 0, WIDTH_INCHES * (0.25 + 0.25 * columns), sharey=True)
    for index, (ax, group) in enumerate(zip(axes, groups, strict=True)):
        base = ablation.base if ablation.base in styles else group.columns[0].series
        _panel(ax, group, styles[base], styles)
        if index % columns == 0:
            ax.set_ylabel(f"validation {'NLL' if unit else 'loss'}{unit}")
    _turn_labels(figure, math.ceil(len(groups) / columns))
    return figure


def _turn_labels(figure: Figure, lines: int) -> None:
    """Turn all lower labels if some overlap, and make the figure taller for them."""
    figure.draw_without_rendering()
    if not any(map(_overlap, figure.axes)):
        return
    flat = _label_height(figure)
    for label in _labels(figure):
        label.set(rotation=TURNED_DEGREES, ha="right", rotation_mode="anchor")
    taller = (_label_height(figure) - flat) / figure.dpi
    figure.set_figheight(figure.get_figheight() + lines * taller)


def _overlap(ax: Axes) -> bool:
    """Return whether two neighbouring labels of the x axis touch."""
    boxes = [label.get_window_extent() for label in ax.get_xticklabels()]
    boxes.sort(key=lambda box: box.x0)
    return any(one.x1 + LABEL_GAP > other.x0 for one, other in itertools.pairwise(boxes))


def _labels(figure: Figure) -> list[Text]:
    return [label for ax in figure.axes for label in ax.get_xticklabels()]


def _label_height(figure: Figure) -> float:
    """Return the height in pixels of the tallest label below a panel."""
    return max(label.get_window_extent().height for label in _labels(figure))


def _panel(ax: Axes, group: Group, look: Look, styles: Mapping[str, Look]) -> None:
    """Draw one setting's NLLs: positive numbers on a log axis, other values side by side.

    Numbers have the base's ``look``, a value that is a name has its series' colour and marker.
    """
    log = group.numeric and all(column.value > 0 for column in group.columns)
    places = [float(column.value) if group.numeric else float(index) for index, column in enumerate(group.columns)]
    medians = [column.median if math.isfinite(column.median) else math.nan for column in group.columns]
    if group.numeric:
        ax.plot(places, medians, color=look.color, zorder=3)
    for place, column, median in zip(places, group.columns, medians, strict=True):
        style = look if group.numeric else styles[column.series]
        color, marker = style.color, style.marker
        if not group.numeric:
            ax.plot(place, median, "_", color=color, markersize=14, zorder=3)
        finite = column.by_seed[np.isfinite(column.by_seed)]
        dots(ax, [place] * len(finite), finite, marker, color, 4)
        if diverged := int(np.isinf(column.by_seed).sum()):
            strip = {"color": color, "transform": ax.get_xaxis_transform()}
            ax.plot(place, 0.965, zorder=5, **strip, **CROSS)
            ax.text(place, 0.92, f"{diverged}/{len(column.by_seed)}", ha="center", va="top", fontsize=6, **strip)
        if column.value == group.base_value:
            ring = {"markerfacecolor": "none", "markeredgecolor": INK, "markeredgewidth": 0.9}
            mark(ax, place, median, "o", None, 9, zorder=5, **ring)
    if log:
        ax.set_xscale("log")
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(places, [column.text for column in group.columns])
    ax.margins(x=0.12, y=0.12)
    ax.set_xlabel(group.heading)


SECTION = Section(body, applies, figures, make_printer(ablation_tables, directions))
