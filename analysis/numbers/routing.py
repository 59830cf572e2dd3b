"""Find the learning rate and the step from which the routing of experts has collapsed, and compare it with the loss.

Routing has collapsed if an expert has no position of a logged microbatch: at the end of a run by the median of its last
`LATE_ROWS` logged steps, within it from the first step after which this stays so. Of several layers the worst counts.
The loss is lost at the upper edge of the stable window (`windows`), within a run at its onset
(`early_measurements.breaks`).
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from analysis.numbers.comparison import EVERYTHING, TIE_DECADES, UNRESOLVED, Comparison, decide
from analysis.numbers.early_measurements import breaks
from analysis.numbers.logit_growth import LATE_ROWS
from analysis.numbers.spread import p_of_bounds
from analysis.numbers.windows import tabulate, windows
from analysis.study.load import Frame, Study
from analysis.study.once import once_per_study

LOG, LOAD = "activations", "expert_load_max"
WORST = {LOAD: "max", "dead_experts": "max", "router_entropy": "min"}  # of the layers
Bounds = tuple[float, float]  # log10 of learning rates


@once_per_study
def read_routing(study: Study) -> Frame:
    """Return one row per run with a router: ``series lr seed``, the worst layer's late values, and two steps.

    - `WORST`'s columns: median of the last `LATE_ROWS` logged steps.
    - ``collapse``: first logged step from which an expert stays without a position; NaN without one.
    - ``onset``: step at which the loss breaks; NaN if it does not.
    """
    logged = study.signals[LOG]
    steps = logged[logged[LOAD].notna()].groupby(["run_id", "step"])[list(WORST)].agg(WORST).reset_index("step")
    runs = study.runs.set_index("run_id").loc[list(dict.fromkeys(steps.index)), ["series", "lr", "seed"]]
    onset, rows = breaks(study)["onset"], []
    for run, own in steps.groupby(level="run_id", sort=False):
        late = own.iloc[-LATE_ROWS:][list(WORST)].median()
        whole = own["step"][own["dead_experts"] == 0]  # no expert is lost
        after = own["step"][own["step"] > whole.max()] if len(whole) else own["step"]
        rows.append({"run_id": run, **late, "collapse": after.min(), "onset": onset[run]})
    return runs.join(pd.DataFrame(rows).set_index("run_id"))


def compare_collapse(study: Study, series: str) -> Comparison:
    """Compare log10 of the rate that loses the loss with that of collapse, by seed; above 0 routing collapses first.

    A rate between two swept ones is interpolated for the loss and their middle for a count of experts. Where the swept
    rates themselves allow another sign, the comparison is not resolved.
    """
    runs = read_routing(study)
    own = runs[runs["series"] == series]
    dead = tabulate(own, own["dead_experts"], "median")
    lows, highs, grid = [], [], []
    for seed, window in windows(study)[series].by_seed.items():
        if window is None or seed not in dead:
            continue
        inside, outside = bracket_collapse(dead[seed].dropna())
        middle = (inside + outside) / 2
        collapse = (middle, middle) if math.isfinite(middle) else (inside, outside)
        loss, edge = _logs(window.high.lr, window.high.furthest_lr), window.high
        swept = _logs(edge.inside_lr, edge.outside_lr)
        lows.append(loss[0] - collapse[1])
        highs.append(loss[1] - collapse[0])
        grid.append((swept[0] - outside, swept[1] - inside))
    direction, interval = decide(lows, highs, TIE_DECADES)
    bounds = (
        (float(np.mean([low for low, _ in grid])), float(np.mean([high for _, high in grid]))) if grid else EVERYTHING
    )
    # at 0 one swept rate has lost the one and not the other
    is_resolved = direction == 0 or (bounds[0] >= 0 if direction > 0 else bounds[1] <= 0)
    return Comparison(
        direction if is_resolved else 0,
        len(lows),
        "whole",
        interval,
        "" if is_resolved else UNRESOLVED,
        tuple(lows) if lows == highs else (),
        p_of_bounds(lows, highs, TIE_DECADES),
        (float(np.mean(lows)), float(np.mean(highs))) if lows else EVERYTHING,
        bounds,
    )


def bracket_collapse(dead: pd.Series) -> Bounds:
    """Return log10 of the last rate at which every expert has positions, and of the next one.

    −∞ or ∞ where one does not exist.

    Args:
        dead: experts without a position by ascending learning rate.
    """
    rates = np.log10(dead.index.to_numpy(dtype=float))
    whole = np.flatnonzero(dead.to_numpy() < 1)
    last = int(whole[-1]) if len(whole) else -1
    return (
        float(rates[last]) if last >= 0 else -math.inf,
        float(rates[last + 1]) if last + 1 < len(rates) else math.inf,
    )


def _logs(low: float, high: float) -> Bounds:
    return math.log10(low), math.log10(high) if math.isfinite(high) else math.inf
