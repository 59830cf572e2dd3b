"""Tabulate every mechanism of a study against its reference."""

from __future__ import annotations

from analysis.claims.claim import Claim, correction_note
from analysis.claims.judging import judge
from analysis.claims.reference import BEST, BEYOND, COMMON, COST, OWN, RATIO, STABLE, against_reference, short_verdict
from analysis.drawing.typeset import Cell, Table
from analysis.study.load import Study
from analysis.study.once import once_per_study
from analysis.study.reference import references

EXPLAINED = {
    OWN: "own window: its width in decades of learning rate",
    COMMON: "common window: the same, by the reference's limit",
    BEYOND: "NLL beyond: mean NLL over the rates above the reference's window, a diverged run counting as untrained",
    STABLE: "% stable: share of terminal steps below α_max at the highest common rates, run's own state",
    RATIO: "α_max / α: at each one's best rate",
    COST: "time of a step: over the reference's; by the runs' own clocks if without an interval",
}


@once_per_study
def reference_table(study: Study) -> Table | None:
    """Return a row for each series: its differences from the reference, with interval and verdict; or None."""
    claims, plains = judge(study), references(study)
    found = against_reference(claims)
    columns = _columns(found)
    if not columns:
        return None
    rows = tuple(_row(series, plains[series], quantities, columns) for series, quantities in found.items())
    explained = "; ".join(text for name, text in EXPLAINED.items() if name in columns)
    caption = (
        f"Paired differences over seeds, mechanism less reference: {explained}. Below: interval (95 % by Student's t, "
        "for two seeds their range), then the verdict on “better than the reference”: wider window, lower NLL, more "
        f"stable steps, larger α_max / α, less time. {correction_note(claims)}"
    )
    widths = ("1.1fr", *("1fr",) * len(columns))
    return Table("Each mechanism against the reference", caption, ("mechanism", *columns), rows, (), (), widths)


def _columns(found: dict[str, dict[str, Claim]]) -> list[str]:
    """Return the quantities of any series, in one order."""
    names = list(dict.fromkeys(name for quantities in found.values() for name in quantities if name))
    bests = [name for name in names if name.startswith(BEST)]
    return [name for name in (OWN, COMMON, *bests, BEYOND, STABLE, RATIO, COST) if name in names]


def _row(series: str, plain: str, quantities: dict[str, Claim], columns: list[str]) -> tuple[Cell, ...]:
    name = Cell(series, f"against {plain}")
    if "" in quantities:
        return (name, Cell("learned too little"), *(Cell("--"),) * (len(columns) - 1))
    return (name, *(_cell(quantities.get(column)) for column in columns))


def _cell(claim: Claim | None) -> Cell:
    """Return the difference, the interval without unit, and the verdict."""
    if claim is None:
        return Cell("--")
    interval = claim.interval.removesuffix(f" {claim.difference.rpartition(' ')[2]}")
    verdict = short_verdict(claim)
    return Cell(claim.difference or "--", f"{interval}\n{verdict}", claim.verdict in ("holds", "contradicted"))
