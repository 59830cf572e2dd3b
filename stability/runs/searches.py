"""Tabulate what a sweep that chooses its runs by itself found (`lr=edge`, `search=optuna`): rows in ``study.json`` →
tables beside the runs'. No torch."""

from __future__ import annotations

from typing import Any

import pandas as pd

from stability.runs.schema import SEARCH_COLUMNS


def search_tables(record: dict[str, Any]) -> dict[str, pd.DataFrame]:
    """Return by name the tables that a study's record has."""
    return {
        name: pd.DataFrame(record[name], columns=columns)
        for name, columns in SEARCH_COLUMNS.items()
        if record.get(name)
    }
