"""Fix the look of figures: one colour and marker per mechanism in every figure and study.

Variants have their own if a study has many of one mechanism. Sizes are for an A4 column's width.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from analysis.study.load import Frame, Study
from analysis.words import lr_text
from stability.primary import rank_mechanism

WIDTH_INCHES = 6.53
LEGEND_MARGIN, LEGEND_ROW = 0.06, 0.17  # inches: left and right margin of a legend together; height of a row
INK, MUTED, GRID = "#1d232b", "#5b6470", "#e3e6ea"

# Okabe and Ito's palette, distinct with every common colour blindness; markers differ as well.
FIXED = {"sa": ("#0072B2", "o"), "sc": ("#D55E00", "s"), "mix": ("#CC79A7", "D"), "sw": ("#009E73", "^")}
OTHERS = (
    ("#E69F00", "v"), ("#56B4E9", "P"), ("#332288", "X"), ("#999933", "<"),
    ("#882255", ">"), ("#44AA99", "p"), ("#661100", "h"), ("#6B6B6B", "d"),
)  # fmt: skip
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))

RC: dict[Any, Any] = {
    "font.family": "STIXGeneral",
    "mathtext.fontset": "stix",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "lines.linewidth": 1.4,
    "pdf.fonttype": 42,
    # Paths, and a fixed salt: the same study gives the same bytes on every machine.
    "svg.fonttype": "path",
    "svg.hashsalt": "stability",
}


@dataclass(frozen=True)
class Look:
    """The colour, marker and dashes of one series."""

    color: str
    marker: str
    dashes: Any


def mechanism_looks(mechanisms: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return each mechanism's colour and marker: fixed for sa sc mix sw, else chosen by its name's checksum.

    A taken slot is replaced by the next free one.
    """
    looks, taken = {}, set()
    for name in sorted(set(mechanisms), key=rank_mechanism):
        if name in FIXED:
            looks[name] = FIXED[name]
            continue
        slot = zlib.crc32(name.encode()) % len(OTHERS)
        # With more mechanisms than slots the colours repeat; the legend still names each line.
        free = [
            (slot + offset) % len(OTHERS) for offset in range(len(OTHERS)) if (slot + offset) % len(OTHERS) not in taken
        ]
        chosen = free[0] if free else slot
        taken.add(chosen)
        looks[name] = OTHERS[chosen]
    return looks


def panel_grid(
    number: int, columns: int, row_inches: float, more_inches: float, width: float = WIDTH_INCHES, **shared: Any
) -> tuple[Figure, Any]:
    """Return a figure and its panels, row by row, without the last row's empty places.

    Args:
        number: of panels.
        columns: of the grid.
        row_inches: height of a row.
        more_inches: height beside the rows, e.g. of the legend.
        width: of the figure, in inches.
        shared: passed to matplotlib's subplots.
    """
    lines = math.ceil(number / columns)
    figure = Figure(figsize=(width, more_inches + row_inches * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, **shared).ravel()
    for ax in axes[number:]:
        ax.remove()
    return figure, axes[:number]


def fitting_legend(
    figure: Figure, handles: Sequence[Artist], most: int, *, foreseen: int | None = None, **options: Any
) -> int:
    """Draw a legend above the panels, in rows of about one length that are read from left to right.

    Args:
        figure: the figure, which further rows than those foreseen make taller.
        handles: the entries.
        most: largest number of columns; fewer if they exceed the figure's width.
        foreseen: rows that its height has room for; by default those of ``most`` columns.
        options: passed to matplotlib's legend.

    Returns:
        The number of rows.
    """
    foreseen = math.ceil(len(handles) / most) if foreseen is None else foreseen
    for widest in range(min(most, len(handles)), 0, -1):
        rows = math.ceil(len(handles) / widest)
        columns = math.ceil(len(handles) / rows)
        # matplotlib fills columns; the first ones have the entries of the last row
        ordered = [handle for column in range(columns) for handle in handles[column::columns]]
        legend = figure.legend(handles=ordered, loc="outside upper center", ncols=columns, **options)
        if widest == 1 or legend.get_window_extent().width <= figure.bbox.width - LEGEND_MARGIN * figure.dpi:
            break
        legend.remove()
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * max(0, rows - foreseen))
    return rows


def looks(study: Study) -> dict[str, Look]:
    """Return each series' look: the mechanism's colour and marker, the setting's dashes.

    A study with one mechanism and several settings, e.g. residual schemes, has a colour and marker per setting. Each
    variant has its own if `_variant_looks` has enough; the base has the mechanism's. All looks differ while dashes are
    left.
    """
    by_mechanism = mechanism_looks(study.runs["mechanism"])
    settings = sorted(set(study.runs["setting"]))
    if len(by_mechanism) == 1 < len(settings) and not study.runs["variant"].any():
        palette = [*FIXED.values(), *OTHERS]
        return {
            name: Look(*palette[place % len(palette)], DASHES[(place + place // len(palette)) % len(DASHES)])
            for place, name in enumerate(study.series)
        }
    rows = study.runs.drop_duplicates("series").set_index("series").loc[list(study.series)]
    of_variants = _variant_looks(rows, by_mechanism)
    found: dict[str, Look] = {}
    for series, mechanism, variant, setting in zip(
        rows.index, rows["mechanism"], rows["variant"], rows["setting"], strict=True
    ):
        own, place = of_variants.get((mechanism, variant), by_mechanism[mechanism]), settings.index(setting)
        wishes = [Look(*own, DASHES[(place + shift) % len(DASHES)]) for shift in range(len(DASHES))]
        found[series] = next((wish for wish in wishes if wish not in found.values()), wishes[0])
    return found


def _variant_looks(rows: Frame, by_mechanism: Mapping[str, tuple[str, str]]) -> dict[tuple[str, str], tuple[str, str]]:
    """Return variants' colours and markers by mechanism and variant, among those unused by mechanisms.

    If there are too few, only mechanisms with more kinds than dashes get them, repeated. ``rows`` has one row per
    series.
    """
    kinds = rows[["mechanism", "variant"]].drop_duplicates()
    number = kinds.groupby("mechanism")["variant"].transform("size")
    variants = kinds[kinds["variant"] != ""]
    free = [look for look in (*OTHERS, *FIXED.values()) if look not in by_mechanism.values()] or [*OTHERS]
    chosen = variants if len(variants) <= len(free) else variants[number[variants.index] > len(DASHES)]
    return dict(zip(chosen.itertuples(index=False, name=None), itertools.cycle(free), strict=False))


def panels_width(columns: int) -> float:
    """Return a figure's width in inches for panels side by side: four fill the page."""
    return max(2.6, WIDTH_INCHES * min(1.0, 0.1 + 0.24 * columns))


def lr_colors(lrs: Iterable[float]) -> dict[float, Any]:
    """Return one colour per learning rate along one ordered ramp, dark to bright.

    The pale end is left out: it is invisible on white.
    """
    ordered = sorted(set(lrs))
    ramp = colormaps["plasma"]
    return {lr: ramp(0.02 + 0.84 * index / max(1, len(ordered) - 1)) for index, lr in enumerate(ordered)}


def _apart(lrs: Sequence[float], gap: float) -> list[float]:
    """Return the rates in order, at least ``gap`` (in ln LR) apart."""
    kept = list(lrs[:1])
    for lr in lrs[1:]:
        if math.log(lr / kept[-1]) >= gap:
            kept.append(lr)
    return kept


def _round_rates(low: float, high: float, most: int) -> list[float]:
    """Return 1 and 3 of each decade from ``low`` to ``high``; 1 alone beyond ``most`` rates."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    both = [rate for decade in decades for digit in (1, 3) if low <= (rate := float(f"{digit}e{decade}")) <= high]
    return both if len(both) <= most else [rate for rate in both if lr_text(rate).startswith("1e")]


def lr_axis(ax: Axes, lrs: Iterable[float], most: int = 8) -> None:
    """Make the x axis logarithmic, swept rates as ticks, with room at both ends.

    Many rates are thinned to every k-th without overlap. More than a grid's number, as in a search, get round numbers.

    Args:
        ax: the panel.
        lrs: the swept rates.
        most: largest number of ticks.
    """
    ordered = sorted(set(lrs))
    gap = math.log(ordered[-1] / ordered[0]) / (2 * most) if len(ordered) > most else 0.0
    rounded = _round_rates(ordered[0], ordered[-1], most) if len(ordered) > 2 * most else []
    shown = rounded if len(rounded) > 1 else _apart(ordered[:: -(-len(ordered) // most)], gap)
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(shown))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xticks(shown, [lr_text(lr) for lr in shown])
    room = (ordered[-1] / ordered[0]) ** 0.05 if len(ordered) > 1 else 2.0
    ax.set_xlim(ordered[0] / room, ordered[-1] * room)
