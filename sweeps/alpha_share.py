"""Report the share of wall time spent on α_max."""

from __future__ import annotations

from collections.abc import Sequence

from stability.runs.directory import RunDirectory, readable_rows


def alpha_share(runs: Sequence[RunDirectory], started: float, ended: float, at_a_time: int) -> str:
    """Return a line on α_max's share of wall time, or "".

    It is "" if no α_max was measured between ``started`` and ``ended``. A run's share is its α_max time divided by
    training plus α_max, whenever they ran. The sweep's share is the α_max time between the two times, divided by their
    difference and ``at_a_time``.

    Args:
        runs: the runs.
        started: start of the launch, seconds since 1970.
        ended: end of the launch, seconds since 1970.
        at_a_time: number of concurrent runs.
    """
    spent = {run: readable_rows(run.curvature_timing_file, ("wall_s", "ended")) for run in runs}
    now = [row["wall_s"] for rows in spent.values() for row in rows if started <= row["ended"] <= ended]
    if not now:  # as of a finished sweep: no need to read thousands of logs
        return ""
    shares = []
    for run, rows in spent.items():
        training = [row["wall_s"] for row in readable_rows(run.timing_file, ("wall_s",))]
        alpha_s = sum(row["wall_s"] for row in rows)
        if rows and training and alpha_s + training[-1] > 0:
            shares.append(alpha_s / (alpha_s + training[-1]))
    if not shares:
        return ""
    low, high = (f"{100 * share:.0f}" for share in (min(shares), max(shares)))
    wall_s = ended - started
    of_sweep = 100 * sum(now) / (wall_s * at_a_time)
    span = low if low == high else f"{low} to {high}"
    return f"α_max took {of_sweep:.0f} % of {wall_s:.0f} s ({span} % of a run's); hessian=false leaves it out"
