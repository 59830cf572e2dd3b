"""Say what α_max takes of a run's time and of a sweep's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from stability.runs.directory import RunDirectory, readable_rows


def alpha_share(runs: Sequence[RunDirectory], started: float, ended: float, at_a_time: int) -> str:
    """Return a line on the share of wall time that measuring α_max took, "" where nothing was measured in between.

    ``started``, ``ended``: of a launch of the sweep, seconds since 1970; ``at_a_time``: how many runs it had going. Of
    a run it is α_max's part of training and α_max together, whenever these were; of the sweep what was measured between
    the two times, over their difference and the runs at a time.
    """
    spent = {run: readable_rows(run.curvature_timing_file, ("wall_s", "ended")) for run in runs}
    now = [row["wall_s"] for rows in spent.values() for row in rows if started <= row["ended"] <= ended]
    shares = []
    for run, rows in spent.items():
        training = [row["wall_s"] for row in readable_rows(run.timing_file, ("wall_s",))]
        alpha_s = sum(row["wall_s"] for row in rows)
        if rows and training and alpha_s + training[-1] > 0:
            shares.append(alpha_s / (alpha_s + training[-1]))
    if not now or not shares:
        return ""
    middle, low, high = (f"{100 * share:.0f}" for share in (statistics.median(shares), min(shares), max(shares)))
    runs_text = f"median of {len(shares)} runs, {low} to {high} %" if len(shares) > 1 else "1 run"
    wall_s = ended - started
    of_sweep = 100 * sum(now) / (wall_s * at_a_time)
    return (
        f"α_max took {middle} % of a run's wall time ({runs_text}) and {of_sweep:.0f} % of this sweep's {wall_s:.0f} s"
        f"{f', {at_a_time} runs at a time' if at_a_time > 1 else ''}"
    )
