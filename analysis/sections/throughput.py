"""Report training speed: ratios from a side-by-side measurement (`benchmarks.throughput`), else each run's clock."""

from __future__ import annotations

import numpy as np

from analysis.claims.rivals import compares_schemes
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.side_by_side import FEWEST_TURNS, ratio
from analysis.numbers.spread import MEDIAN_RULE, Spread
from analysis.study import wording
from analysis.study.load import HAS_RESULT, Study
from analysis.words import plural


def throughput_table(study: Study) -> Table | None:
    """Return one row per series, the first one as reference; None without schemes to compare with a plain one."""
    if not compares_schemes(study):
        return None
    return _side_by_side(study) if study.throughput else _table_of_clocks(study)


def _side_by_side(study: Study) -> Table:
    """Return the table with ratios: every series was timed in turns with the others."""
    rows = {row["series"]: row for row in study.throughput["rows"]}
    present = [name for name in study.series if name in rows]
    body = []
    for name in present:
        per_second = rows[name]["tokens_per_step"] / np.median(rows[name]["seconds"])
        found = ratio(study, name, present[0])
        assert found is not None, "both were measured"
        interval = "" if name == present[0] or found.turns < FEWEST_TURNS else f"{found.low:.3f}–{found.high:.3f}"
        body.append((Cell(name), Cell(_round(per_second)), Cell(f"{found.median:.2f}", interval)))
    caption = (
        f"{_unit(study)} per second of training steps on one batch (forward, backward, clipping, optimizer), the "
        f"mechanisms taking turns: medians over {plural(len(rows[present[0]]['seconds']), 'turn')}. Ratio: of the same "
        f"turn, to {present[0]}; below it the 95 % interval of its median over turns (order statistics). "
        f"{study.throughput['device']}; {study.throughput['machine']}."
    )
    header = ("mechanism", "per second", "ratio")
    return Table("Throughput side by side", caption, header, tuple(body))


def _table_of_clocks(study: Study) -> Table | None:
    """Return the table without ratios: runs of one scheme followed each other, so their clocks include other load."""
    finished = study.runs[study.runs["status"].isin(HAS_RESULT) & (study.runs["wall_s"] > 0)]
    if finished.empty:
        return None
    speed = (finished["num_tokens"] / finished["wall_s"]).groupby(finished["series"])
    found = {name: Spread.of(speed.get_group(name)) for name in study.series if name in speed.groups}
    rows = tuple((Cell(name), Cell(_round(each.median), each.detail(_round))) for name, each in found.items())
    caption = (
        f"{_unit(study)} per second of a run's whole wall time, validation and checkpoints in it; median over "
        f"rates and seeds. {MEDIAN_RULE}. Measured by the runs' own clocks{_place_text(study)}: runs "
        "of one mechanism followed each other, so that what else the machine did at the time is in it, and no ratio is "
        "made of it. python -m benchmarks.throughput runs/studies/"
        f"{study.name} measures them side by side."
    )
    return Table("Throughput as trained", caption, ("mechanism", "per second"), rows)


def _unit(study: Study) -> str:
    return wording.words(study).counted.capitalize()


def _place_text(study: Study) -> str:
    hardware = study.study.get("provenance", {}).get("hardware") or {}
    cores = f"{hardware['cores']} cores" if hardware.get("cores") else None
    known = [str(part) for part in (hardware.get("gpu") or hardware.get("cpu"), cores) if part]
    return f" ({', '.join(known)})" if known else ""


def _round(value: float) -> str:
    """Return three digits, e.g. 12,300."""
    return f"{float(f'{value:.3g}'):,g}" if value < 1e6 else f"{float(f'{value:.3g}'):,.0f}"
