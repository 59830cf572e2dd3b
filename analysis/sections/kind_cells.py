"""Write the numbers of kinds of run that are compared (`analysis.numbers.kinds`) as cells of tables."""

from __future__ import annotations

import math

import numpy as np

from analysis.claims.kinds import step_ratio
from analysis.drawing.typeset import Cell
from analysis.numbers.kinds import Bounds, Numbers
from analysis.numbers.side_by_side import mean_time, ratio
from analysis.study.load import Study


def nll_cell(each: Numbers, lowest: float) -> Cell:
    """Return the NLL at the best rate with its interval, and how many of the runs there diverged. ``lowest``: the
    lowest NLL of the table, which is set in bold."""
    at_best = each.diverged.get(each.best, (0, 0))
    lost = [f"diverged {at_best[0]}/{at_best[1]}"] if at_best[0] else []
    detail = "\n".join([each.nll.detail(), *lost])
    return Cell(f"{each.nll.median:.3f}", detail, each.nll.median == lowest) if each.nll.n else Cell("none finite")


def bounds_text(bounds: Bounds) -> str:
    """Write decades that are known by bounds: 0.50, 0.50–1.00, ≥ 0.50, none."""
    least, most = (end + 0.0 for end in bounds)
    if math.isnan(least):
        return "none"
    if math.isinf(most):
        return f"≥ {least:.2f}"
    return f"{least:.2f}" if most <= least + 0.005 else f"{least:.2f}–{most:.2f}"


def mean_time_cell(study: Study, each: Numbers, plain: Numbers) -> Cell:
    """Return the mean time of a step over the plain one's in turns side by side, and below it the median turn's; the
    plain one's own in milliseconds."""
    over, found = mean_time(study, each.series, plain.series), ratio(study, plain.series, each.series)
    if found is None:
        return Cell("--")
    if each is plain:
        seconds = next(row["seconds"] for row in study.throughput["rows"] if row["series"] == each.series)
        return Cell("1.00", f"{1e3 * float(np.mean(seconds)):.1f} ms")
    return Cell(f"{over:.2f}", f"median {found.median:.2f}")


def time_cell(each: Numbers, plain: Numbers) -> Cell:
    """Return the time of a step over the plain one's by the runs' own clocks, the plain one's in milliseconds below."""
    ratio = step_ratio(each, plain)
    if math.isnan(ratio):
        return Cell("--")
    own = [each.step_s[seed] / plain.step_s[seed] for seed in each.step_s.keys() & plain.step_s.keys()]
    known = [value for value in own if math.isfinite(value)]
    beside = f"{min(known):.2f}–{max(known):.2f}, n={len(known)}" if len(known) > 1 else f"n={len(known)}"
    return Cell(f"{ratio:.2f}", f"{1e3 * float(sorted(each.step_s.values())[0]):.1f} ms" if each is plain else beside)
