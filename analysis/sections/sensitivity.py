"""Tabulate learning-rate sensitivity: what a mistuned learning rate costs on average over the sweep."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.drawing.tables import source
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.sensitivity import Sensitivity, sensitivity
from analysis.study.load import Study
from analysis.words import listed


def _without(found: Sequence[Sensitivity]) -> str:
    """Name the series that have none, with a space before it; "" where each has one."""
    absent = [each.series for each in found if not each.by_seed]
    return f" Without one, since no run finished: {listed(absent)}." if absent else ""


def sensitivity_table(study: Study) -> Table | None:
    """Return a table with a row a series; None where fewer than two rates were swept, or no run has a result."""
    found = [sensitivity(study, name) for name in study.series]
    usable = [each for each in found if each.num_rates > 1]
    if not usable:
        return None
    best = min(each.spread.median for each in usable)
    rows = tuple(
        (
            Cell(each.series),
            Cell(f"{each.spread.median:.3f}", each.spread.detail(), each.spread.median == best),
            Cell(str(each.num_rates)),
        )
        for each in usable
    )
    caption = (
        "Mean over the swept rates of min(NLL, NLL at initialisation), less the best NLL, in nats (Wortsman et al. "
        "2024): 0 where the learning rate does not matter; a diverged run counts as the NLL at initialisation. "
        "Median over seeds, below it the smallest and largest of them, and n. It depends on the range swept. Bold: "
        f"the lowest.{_without(found)} {source(study)}"
    )
    return Table("Learning-rate sensitivity", caption, ("mechanism", "sensitivity (nats)", "rates"), rows)
