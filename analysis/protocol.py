"""What a reader of an α_max table must know of how it was measured: the protocol in one line, and the methods that were used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from analysis.load import Frame
from analysis.spread import listed, plural


def sentence(protocol: Mapping[str, Any]) -> str:
    """One line from the fields of `stability.protocol.CurvatureSpec`; a null batch or clipping norm reads as the run's own."""
    decay = "included" if protocol["weight_decay"] else "left out"
    clip = f"{protocol['clip_norm']:g}" if protocol["clip_norm"] else "the run's own"
    batch = f"{protocol['batch']} sequences" if protocol["batch"] else "the run's own batch"
    parts = f", {protocol['microbatch']} at a time" if protocol["microbatch"] else ""
    counted = [f"{protocol[key]} {nouns[protocol[key] != 1]}" for key, nouns in NOUNS.items()]
    return (
        f"{', '.join(counted)} of {batch}{parts}; slope of the {protocol['gradient']} gradient; weight decay {decay} in u; clipping norm {clip}; "
        f"method {protocol['method']}"
    )


NOUNS = {
    "warmup_batches": ("warm-up batch", "warm-up batches"),
    "warmup_steps": ("warm-up step", "warm-up steps"),
    "recorded_steps": ("recorded step", "recorded steps"),
}
# Fields younger than some files, and what was done before there were these.
BEFORE = {"microbatch": None, "gradient": "true", "weight_decay": True, "clip_norm": None}


def stated(rows: Frame) -> str:
    """The protocol of recorded steps (each of them, with its runs, where they differ) and the methods that they came to, with counts."""
    known = [(_read(text), group["run_id"].nunique()) for text, group in rows.groupby("protocol") if text]
    counts: dict[str, int] = {}
    for line, runs in known:
        counts[line] = counts.get(line, 0) + runs
    missing = int(rows.loc[rows["protocol"] == "", "run_id"].nunique())
    lines = [line if len(counts) == 1 and not missing else f"{line} ({plural(runs, 'run')})" for line, runs in counts.items()]
    lines += [f"not recorded ({plural(missing, 'run')})"] if missing and counts else ["not recorded"] if missing else []
    return f"Protocol: {' / '.join(lines)}. Methods: {methods(rows)}."


def _read(text: str) -> str:
    return sentence(BEFORE | json.loads(text))


def methods(rows: Frame) -> str:
    """The methods used, with counts of steps."""
    return listed(f"{method or 'not recorded'} ({plural(count, 'step')})" for method, count in rows["method"].value_counts().items())
