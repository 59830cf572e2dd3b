"""Figures of studies and runs for plotly, in JSON: the report's numbers, drawn anew as files grow."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stability.runs.directory import RunDirectory, rows_before_damage
from stability.web.watching import Watched

if TYPE_CHECKING:
    from analysis.study.load import Study

HOLLOW: dict[str, Any] = {"symbol": "circle-open", "size": 10, "line": {"width": 2}}
MOST_POINTS = 2000  # of a curve; of more every n-th is drawn
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#999933")
SYMBOLS = {"o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down", "P": "cross"}


def study_figures(watched: Watched) -> dict[str, Any]:
    """Return the figures of a study by the id of their place: NLL and α_max against the learning rate."""
    study = watched.study()
    running: list[Any] = [row for row in watched.rows if not row.verdict and row.val_nll is not None]
    if study is None:
        pairs = [(row.trial.spec["lr_peak"], row.val_nll) for row in running]
        traces = [_trace("running", pairs, mode="markers", marker={**HOLLOW, "color": COLORS[0]})] if running else []
        return {"nll": _figure(traces, "learning rate", "validation NLL (nats)", x_log=True)}
    alpha = _alpha(study)
    return {"nll": _nll(study, running)} | ({"alpha": alpha} if alpha else {})


def _nll(study: Study, running: Sequence[Any]) -> dict[str, Any]:
    """Draw each series' median line, its runs, both windows, and running runs hollow."""
    from analysis.drawing.style import looks
    from analysis.numbers.common_windows import common_windows
    from analysis.numbers.learning import reasons_untrained
    from analysis.numbers.windows import median_line, outcomes, windows
    from analysis.study import wording

    common, styles, lacking = common_windows(study), looks(study), reasons_untrained(study)
    own = {name: each for name, each in windows(study).items() if not lacking[name]}
    traces: list[dict[str, Any]] = []
    by_run = dict(zip(study.runs["run_id"], study.runs["series"], strict=True))
    rates = dict(zip(study.runs["run_id"], study.runs["lr"], strict=True))
    for name in study.series:
        look, table = styles[name], outcomes(study, name)
        line = median_line(table)
        mark = {"color": look.color, "symbol": SYMBOLS.get(look.marker, "circle"), "size": 8}
        shown = html.escape(name)
        kept = [(lr, nll) for lr, nll in line.items() if math.isfinite(nll)]
        traces.append(_trace(shown, kept, mode="lines+markers", marker=mark, line={"color": look.color}))
        points = [(lr, nll) for lr, row in zip(table.index, table.to_numpy(), strict=True) for nll in row]
        seeds = [pair for pair in points if math.isfinite(pair[1])]
        quiet = {"showlegend": False, "legendgroup": shown}
        if len(seeds) > len(kept):
            traces.append(_trace(shown, seeds, mode="markers", marker={**mark, "size": 4}, opacity=0.5, **quiet))
        if diverged := sorted({lr for lr, nll in points if math.isinf(nll)}):
            cross = {"color": look.color, "symbol": "x", "size": 9}
            ends = [(lr, 1.0) for lr in diverged]
            traces.append(_trace(f"{shown}: diverged", ends, mode="markers", marker=cross, yaxis="y2", **quiet))
        for word, each, width, dash in (("own window", own, 5, "solid"), ("common window", common, 2, "dot")):
            window = each[name].median if name in each else None
            if window is not None and not window.is_empty:
                ends = [(window.low.lr, window.threshold_nll), (window.high.lr, window.threshold_nll)]
                bar = {"color": look.color, "width": width, "dash": dash}
                traces.append(_trace(f"{shown}: {word}", ends, mode="lines", line=bar, opacity=0.55, **quiet))
        mine = [row for row in running if by_run.get(row.trial.run_id) == name]
        if mine:
            pairs = [(rates[row.trial.run_id], row.val_nll) for row in mine]
            hollow = {**HOLLOW, "color": look.color}
            traces.append(_trace(f"{shown}: running", pairs, mode="markers", marker=hollow, **quiet))
    unit = "learning rate / reference rate" if study.is_in_multiples else "learning rate"
    label = "validation NLL (nats)" if wording.nats(study) else wording.words(study).nll
    found = _figure(traces, unit, label, x_log=True)
    found["layout"]["yaxis2"] = {"overlaying": "y", "range": [0, 1.04], "visible": False, "fixedrange": True}
    finite = sorted(nll for name in study.series for nll in outcomes(study, name).to_numpy().ravel() if nll < math.inf)
    if finite and finite[-1] > 3 * finite[len(finite) // 2]:  # an exploded run must not flatten all others
        found["layout"]["yaxis"] |= {"range": [finite[0] * 0.97, 3 * finite[len(finite) // 2]]}
    return found


def _alpha(study: Study) -> dict[str, Any] | None:
    """Draw the runs' medians of α_max against their rate; None without any."""
    from analysis.drawing.style import looks
    from analysis.numbers.step_shares import count_stable_steps, phases_and_states

    pairs = phases_and_states(study)
    if not pairs or study.curvature.empty:
        return None
    phase = pairs[0][0]
    state = [each for name, each in pairs if name == phase][-1]  # the run's own, where it was measured
    counts, styles, traces = count_stable_steps(study, phase, state), looks(study), []
    for name in study.series:
        own = counts[counts["series"] == name]
        medians = own.groupby("run_lr")["median"].median()
        pairs_of = [(lr, value) for lr, value in medians.items() if math.isfinite(value) and value > 0]
        mark = {"color": styles[name].color, "symbol": SYMBOLS.get(styles[name].marker, "circle"), "size": 8}
        line = {"color": mark["color"]}
        traces.append(_trace(html.escape(name), pairs_of, mode="lines+markers", marker=mark, line=line))
    rates = sorted(set(study.runs["lr"]))
    equal = [(rates[0], rates[0]), (rates[-1], rates[-1])]
    traces.append(_trace("α_max = α", equal, mode="lines", line={"color": "#5b6470", "dash": "dash", "width": 1}))
    return _figure(traces, f"learning rate α<br>({phase} checkpoint, state: {state})", "α_max", x_log=True, y_log=True)


def run_figures(runs: Sequence[tuple[str, RunDirectory]]) -> dict[str, Any]:
    """Return the curves of one or several runs by the id of their place."""
    metrics = [(label, rows_before_damage(each.metrics_file)[0]) for label, each in runs]
    found = {
        "loss": _curves(metrics, [("loss", "loss", "solid"), ("val_nll", "validation", "dash")], "loss (nats)"),
        "lr": _curves(metrics, [("lr", "lr", "solid")], "learning rate"),
        "grad_norm": _curves(metrics, [("grad_norm", "gradient norm", "solid")], "gradient norm", log=True),
    }
    top = max((max(trace["y"]) for trace in found["lr"]["data"]), default=0.0)
    found["lr"]["layout"]["yaxis"]["range"] = [0, 1.1 * top]
    for name in ("gradients", "activations", "edge"):
        logs = [(label, rows_before_damage(each.signal_files[name])[0]) for label, each in runs]
        last = (pair for _, rows in logs for row in rows[-1:] for pair in row.items())
        keys = list(dict.fromkeys(key for key, value in last if key != "step" and isinstance(value, int | float)))
        found[name] = _curves(logs, [(key, key, "solid") for key in keys], name, log=name != "edge")
    found["alpha_run"] = _alpha_run(runs)
    return {place: figure for place, figure in found.items() if figure["data"]}


def _alpha_run(runs: Sequence[tuple[str, RunDirectory]]) -> dict[str, Any]:
    """Draw α_max/α of the recorded steps of each run."""
    from stability.runs.results import read_steps

    traces = []
    for place, (label, directory) in enumerate(runs):
        for table in read_steps(directory)[0] if directory.curvature_file("").parent.is_dir() else ():
            for state, rows in table.groupby("state"):
                ratio = list(enumerate((rows["alpha_max"] / rows["lr"]).tolist()))
                pairs = [(step, value) for step, value in ratio if math.isfinite(value) and value > 0]
                name = html.escape(f"{label}{rows['phase'].iloc[0]}, {state}")
                traces.append(_trace(name, pairs, mode="markers", marker={"size": 5}, legendgroup=str(place)))
    return _figure(traces, "recorded step", "α_max / α", y_log=True)


def _curves(
    logs: Sequence[tuple[str, list[dict[str, Any]]]],
    keys: Sequence[tuple[str, str, str]],
    unit: str,
    *,
    log: bool = False,
) -> dict[str, Any]:
    """Draw numbers of logs (each a run's label and rows) against the step: key, name and dash of each curve."""
    traces = []
    for place, (label, rows) in enumerate(logs):
        for number, (key, name, dash) in enumerate(keys):
            pairs = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
            every = -(-len(pairs) // MOST_POINTS) or 1
            color = COLORS[(place if len(logs) > 1 or len(keys) == 1 else number) % len(COLORS)]
            if pairs:
                last = [] if (len(pairs) - 1) % every == 0 else pairs[-1:]
                line = {"dash": dash, "width": 1.6, "color": color}
                traces.append(_trace(html.escape(f"{label}{name}"), pairs[::every] + last, mode="lines", line=line))
    return _figure(traces, "step", unit, y_log=log)


def _trace(name: str, pairs: Sequence[tuple[float, float]], **more: Any) -> dict[str, Any]:
    heights = [y if math.isfinite(y) else None for _, y in pairs]
    return {"type": "scatter", "name": name, "x": [x for x, _ in pairs], "y": heights, **more}


def _figure(
    traces: Sequence[dict[str, Any]], x: str, y: str, *, x_log: bool = False, y_log: bool = False
) -> dict[str, Any]:
    fixed = {"gridcolor": "#e3e6ea", "zeroline": False, "automargin": True, "exponentformat": "power"}
    of_x, of_y = ({"type": "log" if log else "linear", **fixed} for log in (x_log, y_log))
    layout: dict[str, Any] = {
        "xaxis": of_x | {"title": {"text": x, "standoff": 10}} | ({"dtick": 1} if x_log else {}),
        "yaxis": of_y | {"title": {"text": y, "standoff": 26 if y_log else 14}},
        "margin": {"l": 56, "r": 12, "t": 12, "b": 44},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "hovermode": "closest",
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "plot_bgcolor": "#fff",
        "paper_bgcolor": "#fff",
        "uirevision": "kept",  # a redraw keeps zoom and hidden lines
    }
    return {"data": list(traces), "layout": layout}
