"""Read the NLL of texts longer than in training, at each series' best rate (`stability.probe what=lengths`)."""

from __future__ import annotations

from analysis.numbers.windows import windows
from analysis.study.load import HAS_RESULT, Frame, Study
from analysis.study.once import once_per_study

NAME, TERMINAL = "lengths", "terminal"


@once_per_study
def read_best(study: Study) -> Frame:
    """Return the rows of finished runs at the best learning rate of their series."""
    rows = study.probed(NAME)
    finished = study.runs.loc[study.runs["status"].isin(HAS_RESULT), "run_id"]
    best = {name: found.median.best_lr for name, found in windows(study).items() if found.median is not None}
    at_best = rows["run_lr"] == rows["series"].map(best)
    return rows[at_best & (rows["phase"] == TERMINAL) & rows["run_id"].isin(finished)]


def list_multiples(study: Study) -> list[int]:
    """Return the measured lengths, in multiples of the trained one."""
    return sorted({int(each) for each in study.probes[NAME]["multiple"]})
