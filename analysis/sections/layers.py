"""Tabulate the results of `stability.probe`: graph connectivity, layer filters, σ(W_qᵀW_k)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from analysis.claims.layers import qk_heads
from analysis.drawing.typeset import Cell, Table
from analysis.measures import (
    LAYER,
    RATE,
    SERIES,
    Measure,
    four_digits,
    grid_table,
    over_rows,
    percent,
    phase_tables,
)
from analysis.numbers.spread import MEDIAN_RULE
from analysis.sections.probed import Probed, ProbeTables, one_table
from analysis.study.load import Column, Frame, Study
from analysis.words import power

CONSENSUS, ATTENTION = "consensus", "attention"


def _median_of(column: str) -> Callable[[Frame], Column]:
    return over_rows(lambda rows: rows[column])


def _left_shares(quantity: str) -> Callable[[Frame], Column]:
    return over_rows(lambda rows: rows[f"{quantity}_after"] / rows[f"{quantity}_before"])


GAIN, VARIANCE = (
    Measure("gain", _median_of("gain"), four_digits),
    Measure("variance", _left_shares("variance"), percent),
)
CONSENSUS_MEASURES = (
    Measure("λ_max", _median_of("largest")),
    Measure("1/(2λ_max)", _median_of("step_limit")),
    Measure("1−2ηλ ≥ 0", _median_of("non_oscillating"), percent),
    Measure("Fiedler", _median_of("fiedler")),
    Measure("lower", _median_of("fiedler_low")),
    Measure("upper", _median_of("fiedler_high")),
    GAIN,
    Measure("energy", _left_shares("energy"), percent),
    VARIANCE,
)
ATTENTION_MEASURES = (GAIN, Measure("second |λ|", _median_of("second_eigenvalue"), four_digits), VARIANCE)
QK_MEASURES = tuple(
    Measure(label, over_rows(lambda rows, column=column: rows[column], how))
    for column in ("norm", "condition")
    for label, how in (("median", "median"), ("largest", "max"))
)


def _tables(found: Probed) -> list[Table]:
    """Return a table of consensus layers and one of attention for each phase."""
    ropes = ropes_of(found.study) if found.study is not None else found.ropes

    def of_phase(part: Frame, phase: str) -> list[Table]:
        kinds, held_out = np.where(part["step_size"].notna(), CONSENSUS, ATTENTION), found.words.held_out
        return [
            _consensus_table(part[kinds == CONSENSUS], phase, held_out, found.origin, ropes),
            _attention_table(part[kinds == ATTENTION], phase, held_out, found.origin),
        ]

    return phase_tables(found.frames["spectra"], of_phase)


SPECTRA_TABLES = ProbeTables(("spectra",), _tables)


def ropes_of(study: Study) -> set[str]:
    """Return the settings ``rope`` of the study's consensus layers, by the readings that its runs record."""
    return set(re.findall(r"\brope=(\w+),", " ".join(study.runs["reading"])))


def layer_and_filter(ropes: Collection[str]) -> str:
    """Describe the graph filter's relation to the layer update, by the layers' settings ``rope``.

    Sentences for a caption; every setting if ``ropes`` is empty.
    """
    said = {
        "none": "the filter is the whole update, u − 2ηL̄u",
        "gradient": "the filter is the whole update of the rotated ũ, ũ − 2ηL̄ũ, which is then turned back",
        "absolute": "the layer takes off 2ηL̄ũ, of the rotated ũ, not 2ηL̄u",
        "relative": "the layer takes disagreements between ρ(i − j)u_i and u_j, not between u_i and u_j",
    }
    known = [rope for rope in said if rope in ropes] or list(said)
    clauses = "; ".join(f"with mechanism.sc.rope={rope} {said[rope]}" for rope in known)
    rotated = (
        ""
        if {"none", "gradient"}.issuperset(known)
        else ", and factors of the filter are not the layer's: what it did itself is the measured variance"
    )
    return f"The filter is the graph's alone: {clauses}{rotated}. The sc of mix has mechanism.mix.sc.rope."


def _consensus_table(rows: Frame, phase: str, held_out: str, origin: str, ropes: Collection[str]) -> Table:
    """Return one phase's consensus layers: spectrum of L̄, filter, and energy and variance after over before."""
    caption = (
        f"L̄ = ½(D_out + D_in − W − Wᵀ) on held-out {held_out}; medians over heads and sequences, then over seeds. "
        "Filter: 1 − 2ηλ over the spectrum of L̄, over T iterations their product Π(1 − 2η_tλ); η = "
        f"{_range(rows['step_size'])} (the largest of T). No factor oscillates where η ≤ 1/(2λ_max); 1−2ηλ ≥ 0: the "
        f"share of the spectrum where none does. {layer_and_filter(ropes)} Fiedler: smallest eigenvalue beyond the "
        "constants, between λ_1 of the unweighted graph times the smallest and the largest eigenvalue of any "
        "symmetrised edge weight. Gain: the filter's largest |factor| over the interval from Fiedler to λ_max. "
        "Energy (of the layer's own disagreements), variance (‖u − ū‖²): after over before the layer's update. "
        f"{MEDIAN_RULE}.{origin}"
    )
    title = f"Learned graphs of consensus layers, {phase}"
    return grid_table(title, caption, rows, (SERIES, RATE, LAYER), CONSENSUS_MEASURES)


def _range(values: Column) -> str:
    """Write a range: ``0.1`` if all agree to three digits, else ``0.08 … 0.12``, ``--`` if empty."""
    if not len(values):
        return "--"
    ends = dict.fromkeys(f"{value:.3g}" for value in (values.min(), values.max()))
    return " … ".join(ends)


def _attention_table(rows: Frame, phase: str, held_out: str, origin: str) -> Table:
    """Return one phase's attention layers; without a second eigenvalue, some mechanism is not softmax.

    Rows of weights with a sum other than 1 have no second eigenvalue.
    """
    is_softmax = bool(rows.groupby("mixer")["second_eigenvalue"].count().all())
    name, matrices = ("Softmax attention", "Softmax matrices") if is_softmax else ("Attention", "Weights")
    caption = (
        f"{matrices} A on held-out {held_out}; medians over heads and sequences, then over seeds. Gain: "
        "largest singular value on the signals without a mean; second |λ|: largest modulus of an eigenvalue beside the "
        f"1 of the constants; variance: of Av (attentionx: of v − γAv) over that of v. {MEDIAN_RULE}.{origin}"
    )
    return grid_table(f"{name} as a filter, {phase}", caption, rows, (SERIES, RATE, LAYER), ATTENTION_MEASURES)


def _qk_table(rows: Frame, phase: str, found: Probed) -> Table:
    """Return one phase's σ(W_qᵀW_k): median and largest norm and condition over heads, one row per series and LR."""
    caption = (
        "Over the layers and heads of softmax attention, then the median over seeds. Condition: largest over "
        f"smallest of the singular values that the head width allows. Consensus has no queries and keys. "
        f"{MEDIAN_RULE}.{found.origin}"
    )
    groups = (("", 2), ("spectral norm", 2), ("condition number", 2))
    return grid_table(f"σ(W_qᵀW_k), {phase}", caption, qk_heads(rows), (SERIES, RATE), QK_MEASURES, groups)


QK_TABLES = one_table("qk", _qk_table)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the exponent s of y ~ x^s by least squares in logarithms; NaN below two points.

    Only the upper half is fitted, because Θ describes large x.
    """
    start = len(x) // 2 if len(x) > 3 else 0
    if len(x) < 2:
        return float("nan")
    return float(np.polyfit(np.log(np.asarray(x[start:])), np.log(np.asarray(y[start:])), 1)[0])


def connectivity_table(frame: Frame) -> Table:
    """Return λ_1 of the window-path graph by window (rows) and length (columns).

    Bounds are below each value, fitted exponents at the ends. One more row is the complete graph's.
    """
    path = frame[frame["graph"] == "window"].sort_values(["window", "positions"])
    lengths, body = sorted(set(path["positions"])), []
    for window, part in path.groupby("window"):
        found = part.set_index("positions")
        cells = [_connectivity_cell(found.loc[length]) if length in found.index else Cell("--") for length in lengths]
        exponent = slope(list(found.index), list(found["connectivity"]))
        body.append((Cell(f"w = {window:.0f}"), *cells, Cell(f"N^{exponent:.2f}")))
    whole = frame[frame["graph"] == "complete"].set_index("positions")
    if len(whole):
        computed = whole["connectivity"].reindex(lengths)
        cells = [Cell(power(value, 3)) for value in computed]
        body.append((Cell("K_N"), *cells, Cell(f"N^{slope(list(whole.index), list(whole['connectivity'])):.2f}")))
    columns = [path[path["positions"] == length] for length in lengths]
    exponents = [slope(list(part["window"]), list(part["connectivity"])) for part in columns]
    body.append((Cell("slope"), *(Cell(f"w^{exponent:.2f}") for exponent in exponents), Cell("")))
    known = frame[frame["graph"] != "window"]
    off = float((known["connectivity"] / known["bound_low"] - 1).abs().max())
    caption = (
        "Algebraic connectivity computed; below it the bounds of Eq. 16. Slopes: least squares in logarithms over "
        "the upper half of a row or column; Θ(w³/N²) as both grow. K_N: the complete graph, computed, λ_1 = N. "
        f"Cycle (Eq. 15) and complete graphs agree with their closed forms to {off:.0e}."
    )
    header = ("", *(f"N = {length:.0f}" for length in lengths), "slope")
    return Table("λ_1 of the window-path graph", caption, header, tuple(body))


def _connectivity_cell(row: Any) -> Cell:
    return Cell(power(row["connectivity"], 3), f"{power(row['bound_low'], 3)}–{power(row['bound_high'], 3)}")
