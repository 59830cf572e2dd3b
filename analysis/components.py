"""The parts that a protein's NLL is a sum of, as the consensus paper's Table 4 has them; nothing where no run has any."""

from __future__ import annotations

import numpy as np

from analysis.load import FINISHED, Frame, Study
from analysis.spread import INTERVAL_RULE, Spread, lr_text
from analysis.tables import ended_badly, source
from analysis.typeset import Cell, Table, heading

PARTS = {"Sequence": "sequence", "Structure": "structure"}
RATES = 5  # learning rates that stand side by side


def _finished(runs: Frame, column: str) -> Frame:
    return runs[runs["status"].isin(FINISHED) & np.isfinite(runs[column])]


def component_tables(study: Study) -> list[Table]:
    """Component and mechanism × learning rate: median NLL, its interval and n; total first."""
    parts = {name: f"val_nll_{column}" for name, column in PARTS.items() if len(_finished(study.runs, f"val_nll_{column}"))}
    lrs = sorted(set(study.runs["lr"]))
    return [_table(study, parts, tuple(lrs[start : start + RATES])) for start in range(0, len(lrs), RATES)] if parts else []


def _table(study: Study, parts: dict[str, str], lrs: tuple[float, ...]) -> Table:
    rows = []
    for name, column in {"Total": "val_nll", **parts}.items():
        medians = {series: _finished(study.of(series), column).groupby("lr")[column].median() for series in study.series}
        best = {series: line.idxmin() for series, line in medians.items() if len(line)}
        rows += [(Cell(name), Cell(series), *(_cell(study.of(series), column, lr, best.get(series) == lr) for lr in lrs)) for series in study.series]
    frequencies = [("Total", "unigram_nll"), *((name, column.replace("val_", "unigram_")) for name, column in parts.items())]
    known = [f"{name.lower()} {np.nanmedian(study.runs[column]):.3f}" for name, column in frequencies if np.isfinite(study.runs[column]).any()]
    caption = (
        "Validation NLL at the end of training: nats per masked residue (sequence) and per masked structure token (structure), each averaged within a protein, "
        f"then over proteins; the total is their sum. Token frequencies reach: {', '.join(known) or 'not recorded'}. Median over the seeds that finished. "
        f"{INTERVAL_RULE}; below it the runs that ended badly. Bold: the best learning rate of each row. {source(study)}"
    )
    return Table("NLL by component against learning rate", caption, ("Component", "Mechanism", *map(lr_text, lrs)), tuple(rows))


def _cell(runs: Frame, column: str, lr: float, bold: bool) -> Cell:
    runs = runs[runs["lr"] == lr]
    if runs.empty:
        return Cell("--")
    spread, troubles = Spread.of(_finished(runs, column)[column]), ended_badly(runs)
    if spread.n == 0:
        return Cell(troubles[0] if troubles else "--", "\n".join(troubles[1:]))
    return Cell(f"{spread.median:.3f}", "\n".join([spread.detail(), *troubles]), bold)


def section(study: Study) -> str:
    found = component_tables(study)
    return heading("Components") + "".join(table.typst() for table in found) if found else ""
