"""Tabulate how doubly stochastic the mixing matrices of residual streams are (`stability.probe what=streams`)."""

from __future__ import annotations

from analysis.drawing.tables import source
from analysis.drawing.typeset import Table
from analysis.measures import RATE, SERIES, Form, Measure, grid_table, phase_tables, rows_of_run
from analysis.numbers.spread import EXTREME, INTERVAL_RULES
from analysis.numbers.stream_mixing import NAME, by_run, example, iterations_of, thresholds
from analysis.study import wording
from analysis.study.load import Frame, Study
from analysis.words import listed, plural, power
from stability.runs.words import Words

FORMS: dict[str, Form] = {"largest": "{:.4g}".format, "share": lambda value: f"{100 * value:.3g} %", "error": power}


def _measure(label: str, matrix: str, quantity: str, which: str) -> Measure:
    """Return a measure of a quantity of single matrices or their product; ``which`` number of it stands for a run."""
    return Measure(label, lambda rows: by_run(rows, matrix, quantity, which), FORMS[which], EXTREME)


MEASURES = (
    _measure("ln 1/ν", "single", "log_range", "largest"),
    _measure("outliers", "single", "beyond", "share"),
    _measure("columns", "single", "column_sum", "error"),
    _measure("rows", "single", "row_sum", "error"),
    _measure("columns", "product", "column_sum", "error"),
    _measure("rows", "product", "row_sum", "error"),
    _measure("spectral", "product", "spectral_norm", "largest"),
    _measure("forward", "product", "forward_gain", "largest"),
    _measure("backward", "rest", "backward_gain", "largest"),
)
GROUPS = (("", 2), ("before Sinkhorn", 2), ("A, sums off by", 2), ("A_1 ⋯ A_L, off by", 2), ("norm", 1), ("gain", 2))
CAPTION = (
    "Of every {position} on held-out data ({count}), the worst; then the median over seeds. A: the mixing matrix of a "
    "connection, X' = AᵀX + …, over all connections; A_1 ⋯ A_L: their product through the depth. ν: the smallest "
    "over the largest entry before Sinkhorn's iterations{iterations}, ln 1/ν the logarithm of its inverse; "
    "outliers: the share of {positions} and connections where that exceeds {threshold}. Off by: largest distance of a "
    "column's or row's sum from 1. Norm: largest spectral norm of the product. Gain: by how much mixing alone may "
    "multiply the largest entry of a signal through all connections (forward, at most the column sums) or of its "
    "gradient (backward, the row sums). {precision}"
)
PRECISION = (
    "Computed in float64 from the trained weights: what is exact here is so to 1e-15. It is not in the precision of "
    "training; with coefficients in bfloat16, mHC-lite's columns sum to 0.9982 at initialisation."
)


def study_tables(study: Study) -> list[Table]:
    """Return a table for each phase; [] where no run was probed."""
    if NAME not in study.probes:
        return []
    return _tables(study.probed(NAME), wording.words(study), source(study))


def run_tables(frame: Frame, residual: str, words: Words) -> list[Table]:
    """Return the same table as `study_tables` of one run's own rows. ``words``: its objective's."""
    return _tables(rows_of_run(frame, residual), words, "One run.")


def _tables(rows: Frame, words: Words, origin: str) -> list[Table]:
    return phase_tables(rows, lambda part, phase: [_table(part, phase, words, origin)])


def _table(rows: Frame, phase: str, words: Words, origin: str) -> Table:
    """Return the table of one phase: how far the mixing matrices and their products are from doubly stochastic, a row a
    series and learning rate."""
    caption = CAPTION.format(
        position=words.position[0],
        positions=words.position[1],
        count=position_count(rows, words),
        iterations=iteration_count(rows),
        threshold=threshold_text(rows),
        precision=PRECISION,
    )
    told = f"{caption} {INTERVAL_RULES[EXTREME]}. {origin}"
    return grid_table(f"Mixing of residual streams, {phase}", told, rows, (SERIES, RATE), MEASURES, GROUPS)


def position_count(rows: Frame, words: Words) -> str:
    """Return the number of positions of a run as text, ``"64 tokens a run"``; a connection has one spectral norm a
    position."""
    counts = rows.loc[(rows["quantity"] == "spectral_norm") & rows["connection"].notna(), "num_values"]
    return f"{listed(f'{count:,.0f}' for count in sorted(set(counts)))} {words.position[1]} a run"


def iteration_count(rows: Frame) -> str:
    """Return the number of Sinkhorn's iterations as text, ``, K = 20``; "" where no run has iterations."""
    counts = [f"{number:.0f}" for number in iterations_of(rows)]
    return f", K = {listed(counts)}" if counts else ""


def threshold_text(rows: Frame) -> str:
    """Return the threshold of outliers as text, e.g. ``30``; of runs that an older probe measured what it took for
    them; "a threshold" where no run has iterations."""
    known = set(rows.loc[rows["quantity"] == "threshold", "run_id"])
    found = thresholds(rows)
    own, older = ([found[run_id] for run_id in found if (run_id in known) == is_own] for is_own in (True, False))
    parts = [f"{value:g}" for value in sorted(set(own))]
    if older:
        parts.append(
            f"{listed(f'{value:g}' for value in sorted(set(older)))} ({plural(len(older), 'run')} measured before "
            "the threshold was a setting: K)"
        )
    return listed(parts) or "a threshold"


def example_text(iterations: list[float]) -> str:
    """Return a sentence on the paper's own example for every number K of the study; "" without any."""
    said = []
    for number in iterations:
        log_range, sums = example(int(number))
        said.append(
            f"{number:.0f} iterations leave columns that sum to {listed(f'{total:.3f}' for total in sums)} (ln 1/ν = "
            f"{log_range:.1f})"
        )
    return (
        "Of the example in mHC-lite's Section 1, rows (1, d, d), (1, d, d) and (d, 1, 1) with d = 1e-13, "
        f"{listed(said)}."
        if said
        else ""
    )
