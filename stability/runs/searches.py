"""What a sweep that chooses its runs by itself found (`lr=edge`, `search=optuna`): rows in ``study.json`` → tables beside the runs'. No torch."""

from __future__ import annotations

from typing import Any

import pandas as pd

SEARCH_COLUMNS = {
    # A row a curve, found by one of its runs. `best_low`, `best_high`: the best rate's neighbours; `*_next_lr`: the smallest rate beyond an edge.
    "edges": [
        "run_id",
        "num_seeds",
        "best_lr",
        "best_nll",
        "best_low",
        "best_high",
        "verdict_lr",
        "verdict_next_lr",
        "verdict_exceptions",
        "nll_lr",
        "nll_next_lr",
        "nll_exceptions",
        "lowest_lr",
        "highest_lr",
        "resolution_decades",
        "nll_tolerance",
        "num_rates",
        "num_runs",
        "num_grid_runs",
        "num_rounds",
        "state",
    ],
    # A row a run and field: what it was in the point that it belongs to; `score`: the point's, None where a run failed or has not ended.
    "search": ["run_id", "number", "round", "score", "field", "value"],
}


def search_tables(record: dict[str, Any]) -> dict[str, pd.DataFrame]:
    """By name the tables that a study's record has."""
    return {name: pd.DataFrame(record[name], columns=columns) for name, columns in SEARCH_COLUMNS.items() if record.get(name)}
