"""How fast the runs trained, by their own clocks: what a scheme costs beside the plain one."""

from __future__ import annotations

from analysis import recipe
from analysis.load import FINISHED, Study
from analysis.rivals import another_question
from analysis.spread import Spread
from analysis.tables import source
from analysis.typeset import Cell, Table


def throughput_table(study: Study) -> Table | None:
    """A row a series, the first one being what the others are measured against; None where the study compares no schemes with a plain one."""
    finished = study.runs[study.runs["status"].isin(FINISHED) & (study.runs["wall_s"] > 0)]
    if not another_question(study) or finished.empty:
        return None
    speed = (finished["num_tokens"] / finished["wall_s"]).groupby(finished["series"])
    found = {name: Spread.of(speed.get_group(name)) for name in study.series if name in speed.groups}
    plain = next(iter(found.values())).median
    rows = tuple((Cell(name), Cell(_rounded(each.median), each.detail(_rounded)), Cell(f"{each.median / plain:.2f}")) for name, each in found.items())
    caption = recipe.worded(
        study,
        "Tokens per second of a run's whole wall time, validation and checkpoints in it; median over rates and seeds. Runs of one scheme followed each other, "
        "so that what else the machine did at the time is in it: python -m benchmarks.residuals measures residual schemes side by side. ",
    )
    return Table("Throughput as trained", f"{caption}{source(study)}", ("mechanism", "per second", "ratio"), rows)


def _rounded(value: float) -> str:
    """Three digits, e.g. 12,300."""
    return f"{float(f'{value:.3g}'):,g}" if value < 1e6 else f"{float(f'{value:.3g}'):,.0f}"
